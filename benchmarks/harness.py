"""Runs a benchmark's cases as interleaved pairs and writes the common JSON."""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOTSTRAP_SAMPLES = 500
"""Resamples behind low and high, the 95 % interval of the median ratio."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row: ours against the baseline that the name says."""

    name: str
    ours: Callable[[], object]
    baseline: Callable[[], object]
    goal: float | None = None
    """Largest ratio that counts as reached."""
    repeats: int = 1
    """Calls a timing, for cases too short for the clock."""
    most_pairs: int | None = None
    """At most so many pairs, for cases that take seconds."""


@dataclass(frozen=True)
class Ratio:
    """Ours over baseline: the median of pairs and its interval, and ours in milliseconds."""

    ratio: float
    low: float
    high: float
    milliseconds: float


def main(
    benchmark: str, cases: Callable[[bool], Sequence[Case]], arguments: Sequence[str] | None = None
) -> None:
    """Parse `--json FILE` and `--quick`, run the cases, print a table and write the file."""
    parser = argparse.ArgumentParser(description=f"Benchmark {benchmark}.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="fewer pairs and small cases")
    options = parser.parse_args(arguments)
    require_writable(parser, options.json)
    report = run(benchmark, cases(options.quick), pairs=15 if options.quick else 60)
    print_table(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def require_writable(parser: argparse.ArgumentParser, file: Path | None) -> None:
    """Make the folder of a result, or end with status 2: now, not after minutes of measuring."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.exists():
            file.open("a").close()
    except OSError as error:
        parser.error(f"--json {file} cannot be written ({error.strerror}): name a file in a folder of yours")


def run(benchmark: str, cases: Sequence[Case], *, pairs: int) -> dict[str, Any]:
    """The report as its JSON's dict. The control times the first case's baseline against itself."""
    first = cases[0]
    control = measure(first.baseline, first.baseline, pairs=pairs, repeats=first.repeats)
    rows = []
    for case in cases:
        enough = pairs if case.most_pairs is None else min(pairs, case.most_pairs)
        result = measure(case.ours, case.baseline, pairs=enough, repeats=case.repeats)
        row = {"case": case.name, "value": result.milliseconds, "unit": "ms", "ratio": result.ratio}
        rows.append(row | {"low": result.low, "high": result.high, "goal": case.goal})
    return {
        "benchmark": benchmark,
        "commit": commit(),
        "machine": machine(),
        "control": {"ratio": control.ratio, "low": control.low, "high": control.high},
        "rows": rows,
    }


def measure(ours: Callable[[], object], baseline: Callable[[], object], *, pairs: int, repeats: int) -> Ratio:
    """Time both `pairs` times, back to back and in alternating order, in CPU time of this process."""
    for function in (ours, baseline):
        function()
        function()
    timings = []
    for pair in range(pairs):
        if pair % 2:
            theirs, mine = cpu_seconds(baseline, repeats), cpu_seconds(ours, repeats)
        else:
            mine, theirs = cpu_seconds(ours, repeats), cpu_seconds(baseline, repeats)
        timings.append((mine, theirs))
    ratios = [mine / theirs for mine, theirs in timings]
    low, high = interval(ratios)
    milliseconds = 1e3 * statistics.median(mine for mine, _ in timings)
    return Ratio(statistics.median(ratios), low, high, milliseconds)


def cpu_seconds(function: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one call. Wall time would count whatever else the machine does."""
    start = time.process_time_ns()
    for _ in range(repeats):
        function()
    return max(time.process_time_ns() - start, 1) / 1e9 / repeats


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAP_SAMPLES))
    return medians[int(0.025 * BOOTSTRAP_SAMPLES)], medians[int(0.975 * BOOTSTRAP_SAMPLES)]


def commit() -> str:
    """The checked-out commit, or `unknown` outside a repository."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def machine() -> str:
    """Processor, cores and Python, in words."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        model = f"{names[0].split(':')[1].strip()}, {len(names)} cores" if names else model
    return f"{model}, {platform.system()}, Python {platform.python_version()}"


def print_table(report: dict[str, Any]) -> None:
    """The rows as text."""
    control = report["control"]
    print(
        f"{report['benchmark']}: control {control['ratio']:.3f} ({control['low']:.3f} to {control['high']:.3f})"
    )
    for row in report["rows"]:
        goal = "" if row["goal"] is None else f"  goal {row['goal']:g}"
        spread = f"({row['low']:.2f} to {row['high']:.2f})"
        print(f"  {row['case']:<48} {row['value']:9.3f} ms  {row['ratio']:7.2f} x {spread}{goal}")
