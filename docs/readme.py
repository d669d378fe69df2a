"""Write the generated parts of README.md (figures, faults, module tree), or check that they are current."""

import argparse
import ast
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SUITE = "fault_suite"
COMPARED = ("seed", "autoswitch")
"""Threshold presets that have columns of their own."""


def modules() -> dict[str, str]:
    """Path and opening sentence of every module of the project."""
    return {
        path.relative_to(ROOT).as_posix(): first_sentence(path)
        for package in packages()
        for path in sorted((ROOT / package).glob("*.py"))
    }


def packages() -> list[str]:
    """The folders that pyproject.toml installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    return [name.removeprefix("fp8_safeguard.").replace(".", "/") for name in listed]


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring; empty where there is none."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def tree() -> Iterator[str]:
    """The module tree, indented as a code block."""
    found = modules()
    width = max(len(path) for path in found) + 2
    for path, sentence in found.items():
        yield f"    {path:<{width}}{sentence}"


def figures() -> Iterator[str]:
    """A Markdown table of the figures in benchmarks/results/ that have a goal, or a control of their own; the files have all."""
    yield "| Benchmark | Case | Result | Interval | Goal | Control (A against A) |"
    yield "|---|---|---|---|---|---|"
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text())
        if report["benchmark"] == SUITE:
            continue
        for row in report["rows"]:
            if row["goal"] is None and "control" not in row:
                continue
            control = report["controls"][row["control"]] if "control" in row else report["control"]
            noise = f"{control['ratio']:.3f} [{control['low']:.3f}, {control['high']:.3f}]"
            figure = (
                f"{row['ratio']:.3f}x" if row["ratio"] is not None else f"{row['value']:.4g} {row['unit']}"
            )
            interval = "" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
            goal = "" if row["goal"] is None else f"{row['goal']:g}"
            yield f"| `{report['benchmark']}` | `{row['case']}` | {figure} | {interval} | {goal} | {noise} |"


def faults() -> Iterator[str]:
    """A Markdown table of the fault suite, a line a fault."""
    file = RESULTS / f"{SUITE}.json"
    if not file.exists():
        return
    rows = {row["case"]: row for row in json.loads(file.read_text())["rows"]}
    yield "| Fault | Found | Samples to it | Lead | Cause right | Loss with it | without | `seed` | `autoswitch` | Precision changes |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in (case.removesuffix("/detection") for case in rows if case.endswith("/detection")):
        found, cause, loss = (rows[f"{name}/{what}"] for what in ("detection", "cause", "ratio"))
        lead, alone = rows.get(f"{name}/lead"), rows.get(f"{name}/ratio/none")
        cells = (
            f"`{name}`",
            f"{found['detected']} of {found['of']}",
            _steps(found["value"]),
            "" if lead is None else _steps(lead["value"]),
            f"{cause['value']:.0%}",
            _interval(loss),
            "" if alone is None else _interval(alone),
            *(_ratio(rows.get(f"{name}/ratio/{preset}")) for preset in COMPARED),
            "; ".join(dict.fromkeys(cause["actions"])),
        )
        yield f"| {' | '.join(cells)} |"


def _ratio(row: Mapping[str, Any] | None) -> str:
    """A ratio of losses at one seed, and how often a precision was changed."""
    if row is None:
        return ""
    ratio = "NaN" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return f"{ratio} ({sum(row['changes'])})"


def _steps(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _interval(row: Mapping[str, Any]) -> str:
    """A ratio of losses with its bounds; what is no number has diverged."""
    if row["ratio"] is None:
        return "NaN"
    return f"{row['ratio']:.4f} [{row['low']:.3f}, {row['high']:.3f}]"


def current(readme: str) -> str:
    """The README with its generated parts as they should be."""
    for name, lines in (("figures", figures()), ("faults", faults()), ("modules", tree())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = readme.split(begin)
        readme = before + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
    return readme


def main() -> int:
    """Exit code 1 with --check where README.md is not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    stands, wanted = path.read_text(), current(path.read_text())
    if check:
        return int(stands != wanted)
    path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
