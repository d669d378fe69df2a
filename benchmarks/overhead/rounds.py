"""Runs arms in turns, round by round of a sampling cycle each, and compares their totals."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import harness


class Arm(Protocol):
    """One way to train: with or without something that watches."""

    name: str
    steps: int
    """Training steps of a cycle."""
    turns: int
    """How many turns those take."""

    def begin(self) -> None:
        """Build the model and attach what watches it."""

    def turn(self, index: int) -> None:
        """So much of a cycle, with whatever its samples cause later."""

    def end(self) -> None:
        """Take everything off again."""


@dataclass(frozen=True)
class Spent:
    """What one cycle of an arm took, in seconds a step."""

    cpu_seconds: float
    """Of all threads of this process."""
    wall_seconds: float


Turns = dict[str, list[Spent]]
"""By arm, its cycles in the order of the rounds."""


def run(arms: Sequence[Arm], rounds: int, started: Callable[[], object] = lambda: None) -> Turns:
    """Every arm's cycle once a round, turn by turn among all, each in its own place of the order; one before, not counted.

    What else runs on the machine changes in seconds: arms that change places as fast share it. `started` is called once
    the arms are warm.
    """
    for arm in arms:
        arm.begin()
        for index in range(arm.turns):
            arm.turn(index)
    started()
    turns: Turns = {arm.name: [] for arm in arms}
    for number in range(rounds):
        spent = {arm.name: Spent(0.0, 0.0) for arm in arms}
        for index in range(max(arm.turns for arm in arms)):
            for arm in _ordered(arms, number + index):
                if index < arm.turns:
                    spent[arm.name] = timed(arm, index, spent[arm.name])
        for name, total in spent.items():
            turns[name].append(total)
    return turns


def _ordered(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Turned by one place each time, and every other time backwards: nobody always follows the same one."""
    first = (number // 2) % len(arms)
    turned = [*arms[first:], *arms[:first]]
    return turned[::-1] if number % 2 else turned


def timed(arm: Arm, index: int, before: Spent) -> Spent:
    """One turn, added to those before."""
    wall, cpu = time.perf_counter(), time.process_time()
    arm.turn(index)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Spent(before.cpu_seconds + max(cpu, 1e-9) / arm.steps, before.wall_seconds + wall / arm.steps)


def ratio_of_totals(mine: Sequence[float], theirs: Sequence[float]) -> harness.Ratio:
    """The sum of one over the sum of the other, and its 95 % interval from resampled rounds.

    A median over rounds would leave out the round in which something rare and expensive happened.
    """
    draw, ratios = random.Random(0), []
    for _ in range(harness.BOOTSTRAP_SAMPLES):
        drawn = draw.choices(range(len(mine)), k=len(mine))
        ratios.append(sum(mine[i] for i in drawn) / sum(theirs[i] for i in drawn))
    ratios.sort()
    low, high = (ratios[int(share * harness.BOOTSTRAP_SAMPLES)] for share in (0.025, 0.975))
    return harness.Ratio(sum(mine) / sum(theirs), low, high, 1e3 * sum(mine) / len(mine))


def cpu(turns: Sequence[Spent]) -> list[float]:
    """CPU seconds a step."""
    return [spent.cpu_seconds for spent in turns]


def wall(turns: Sequence[Spent]) -> list[float]:
    """Wall seconds a step."""
    return [spent.wall_seconds for spent in turns]
