"""What an outage costs a training step: a slow server, none, a full disk."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
from overhead import servers, worker
from overhead.table import print_row
from overhead.worker import Outcome, Scenario, Turn

REPLY_SECONDS = 10.0
NOBODY = "http://127.0.0.1:9"
"""Nothing listens on the discard port."""
STEPS = 10
"""Of a turn."""
HEALTHY, AGAIN = "healthy", "healthy_again"


class Training:
    """A training process and the way to it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.turns: list[Turn] = []
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=worker.train, args=(theirs, scenario), daemon=True
        )
        self._process.start()

    def turn(self) -> Turn:
        """So many steps of it, while the others stand still."""
        self._connection.send(STEPS)
        found: Turn = self._connection.recv()
        return found

    def end(self) -> Outcome:
        """Stop it."""
        self._connection.send(0)
        found: Outcome = self._connection.recv()
        self._process.join(60)
        return found


@contextmanager
def server(delay_seconds: float) -> Iterator[str]:
    """The address of a server process that answers after that time."""
    ready: tuple[Connection, Connection] = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=servers.serve, args=(ready[1], delay_seconds), daemon=True
    )
    process.start()
    try:
        yield ready[0].recv()
    finally:
        process.kill()
        process.join()


def scenarios(healthy: str, slow: str, folder: Path) -> list[Scenario]:
    """The baseline, its control, and what can go wrong."""

    def one(name: str, address: str, *, disk_full: bool = False) -> Scenario:
        return Scenario(name=name, server=address, spool=str(folder / name), disk_full=disk_full)

    return [
        one(HEALTHY, healthy),
        one(AGAIN, healthy),
        one("slow_server", slow),
        one("server_down", NOBODY),
        one("disk_full", healthy, disk_full=True),
        one("disk_full_server_down", NOBODY, disk_full=True),
    ]


def take_turns(trainings: Sequence[Training], rounds: int) -> None:
    """Every process once a round, each time in another order; two turns before, not counted."""
    for training in trainings:
        training.turn()
        training.turn()
    for number in range(rounds):
        first = number % len(trainings)
        for training in [*trainings[first:], *trainings[:first]]:
            training.turns.append(training.turn())


Figure = Callable[[Turn], float]
FIGURES: dict[str, Figure] = {
    "wall": lambda turn: statistics.median(turn.step_seconds),
    "cpu": lambda turn: turn.cpu_seconds / len(turn.step_seconds),
}
"""Seconds of a turn: its median step, and CPU time a step of the whole process."""


def row(case: str, figure: Figure, training: Training, baseline: Training) -> dict[str, Any]:
    """The median of the turns, each over the baseline's turn of the same round."""
    mine, theirs = [figure(turn) for turn in training.turns], [figure(turn) for turn in baseline.turns]
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, high = harness.interval(ratios)
    slowest = max(seconds for turn in training.turns for seconds in turn.step_seconds)
    return {
        "case": case, "value": 1e3 * statistics.median(mine), "unit": "ms", "ratio": statistics.median(ratios),
        "low": low, "high": high, "goal": 1.0, "baseline": HEALTHY, "steps": STEPS * len(mine),
        "slowest_step_ms": 1e3 * slowest,
    }  # fmt: skip


def rows(trainings: Sequence[Training], outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Wall and CPU of every scenario; the control's, which comes first, says what noise is."""
    baseline, others, found = trainings[0], trainings[1:], []
    noise: dict[str, float] = {}
    for training in others:
        for kind, figure in FIGURES.items():
            name = training.scenario.name
            one = row(f"{name}_{kind}", figure, training, baseline)
            noise.setdefault(kind, one["high"])
            one |= {
                "goal_is_for": "low, against the control's high",
                "reached": one["low"] <= max(1.0, noise[kind]),
            }
            found.append(one | vars(outcomes[name]))
    return found


def check_outcomes(outcomes: dict[str, Outcome]) -> None:
    """Whether what was to happen has happened; a comparison of healthy runs would say nothing."""
    for name, outcome in outcomes.items():
        if name in (HEALTHY, AGAIN):
            meant = outcome.delivered == outcome.steps
        elif name == "disk_full":
            meant = outcome.delivered > 0
        else:
            meant = outcome.delivered < outcome.steps
        if not meant:
            raise SystemExit(f"{name} was not what it is meant to be: {outcome}")


def measure(rounds: int) -> dict[str, Any]:
    """The report as its JSON's dict."""
    with ExitStack() as stack:
        healthy, slow = stack.enter_context(server(0.0)), stack.enter_context(server(REPLY_SECONDS))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainings = [Training(scenario) for scenario in scenarios(healthy, slow, folder)]
        take_turns(trainings, rounds)
        outcomes = {training.scenario.name: training.end() for training in trainings}
    check_outcomes(outcomes)
    found = rows(trainings, outcomes)
    control = {name: found[0][name] for name in ("ratio", "low", "high")}
    return {
        "benchmark": "outage_overhead", "commit": harness.commit(), "machine": harness.machine(), "control": control,
        "rows": found,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every scenario, print the table, write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="sixty steps instead of five hundred")
    options = parser.parse_args(arguments)
    harness.require_writable(parser, options.json)
    report = measure(rounds=6 if options.quick else 50)
    for found in report["rows"]:
        print_row(found)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
