"""Times contenders in turn with a cold cache, on CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu.case import Bench, Row
from gpu.floors import H200, Work
from harness import interval

Call = Callable[[], object]

CACHE_BYTES = 256 << 20
"""Written before each call, five times an H200's L2: no call finds its operands there."""
HEAD_START_SECONDS = 0.01
"""The device idles so long first, so that calls are queued before it gets to them."""
CLOCK = 1.755e9
"""Cycles a second of a busy H200, for the head start only."""
ROUNDS, QUICK_ROUNDS, WARM_UP = 20, 7, 3
LONG_SECONDS = 0.5
"""What one case's rounds may take; a slow contender gets fewer of them."""


@dataclass(frozen=True)
class Timed:
    """Seconds of every round of every contender that runs, and why the others do not."""

    seconds: dict[str, list[float]]
    errors: dict[str, str]
    real: bool
    """Whether a GPU was timed: the interpreter's numbers get no throughput and no goal."""

    def median(self, name: str) -> float:
        """Median seconds of a contender."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> tuple[float, float, float]:
        """Median of the rounds' ratios, and its 95 % interval."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
        return statistics.median(ratios), *interval(ratios)


def race(bench: Bench, contenders: dict[str, Call]) -> Timed:
    """Time every contender once a round, each round in another order; one that raises is left out."""
    errors = {}
    for name, call in contenders.items():
        try:
            for _ in range(WARM_UP if bench.device == "cuda" else 1):
                call()
            _wait(bench)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            _require_alive(bench, error)
    running = {name: call for name, call in contenders.items() if name not in errors}
    if bench.device == "meta":
        return Timed({name: [1.0] for name in running}, errors, real=False)
    measure = _on_events if bench.device == "cuda" else _on_clock
    return Timed(measure(running, _rounds(bench, running)), errors, real=bench.device == "cuda")


def _rounds(bench: Bench, running: dict[str, Call]) -> int:
    if bench.device != "cuda":
        return 1
    once = sum(seconds[0] for seconds in _on_events(running, 1).values())
    most = QUICK_ROUNDS if bench.quick else ROUNDS
    return max(3, min(most, int(LONG_SECONDS / max(once, 1e-6))))


def _wait(bench: Bench) -> None:
    if bench.device == "cuda":
        torch.cuda.synchronize()


def _require_alive(bench: Bench, error: Exception) -> None:
    """Raise where the error has broken the device's context: nothing after it would tell the truth."""
    try:
        _wait(bench)
    except Exception:
        raise error from None


def _on_events(running: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in running}
    for turn in range(rounds):
        torch.cuda._sleep(int(HEAD_START_SECONDS * CLOCK))  # type: ignore[no-untyped-call]
        for name in _order(list(running), turn):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            cache.zero_()
            start.record()
            running[name]()
            end.record()
            marks[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [1e-3 * start.elapsed_time(end) for start, end in events] for name, events in marks.items()}


def _on_clock(running: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Under the interpreter: the path is run, the number means nothing."""
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in _order(list(running), turn):
            start = time.perf_counter()
            running[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _order(names: list[str], turn: int) -> Sequence[str]:
    first = turn % max(len(names), 1)
    return names[first:] + names[:first]


def rows_of(
    case: str,
    timed: Timed,
    *,
    ours: str,
    baseline: str,
    work: Work | None = None,
    works: dict[str, Work] | None = None,
    goal: float | None = None,
    **more: Any,
) -> list[Row]:
    """One row a contender, `ratio` its time over the baseline's; ours has the goal."""
    rows = []
    for name in timed.seconds:
        ratio, low, high = timed.ratio(name, baseline) if baseline in timed.seconds else (None, None, None)
        seconds = timed.median(name)
        row = {
            "case": f"{case} {name}",
            "value": 1e3 * seconds,
            "unit": "ms",
            "ratio": ratio,
            "low": low,
            "high": high,
        }
        row |= {
            "goal": goal if name == ours and timed.real else None,
            "kind": "timing",
            "baseline": baseline,
        } | more
        done = work if works is None else works[name]
        if done is not None and timed.real:
            row |= achieved(done, seconds)
        rows.append(row)
    rows += [
        failed_contender(f"{case} {name}", error, name.startswith(ours))
        for name, error in timed.errors.items()
    ]
    return rows


def achieved(work: Work, seconds: float) -> Row:
    """What the time means: throughput, and how far from the floor."""
    return {
        "tflops": work.tensor / seconds / 1e12,
        "terabytes_per_second": work.bytes / seconds / 1e12,
        "floor_ms": 1e3 * work.seconds(H200),
        "bound_by": work.bound(H200),
        "of_floor": work.seconds(H200) / seconds,
    }


def failed_contender(case: str, error: str, ours: bool) -> Row:
    """A contender that does not run here: no number, its error instead. Ours ought to."""
    row: Row = dict.fromkeys(("value", "ratio", "low", "high", "goal"))
    return {"case": case, **row, "unit": "ms", "kind": "timing", "error": error, "ours": ours}
