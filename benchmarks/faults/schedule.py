"""Which arms there are, and two of them at a time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from faults.arms import AUTOSWITCH, NONE, SAFEGUARD, SEED, TWIN, Arm, Place, make_checkpoint, run_arm
from faults.catalogue import (
    BRANCH,
    CASES,
    FORK_STEP,
    QUICK,
    SEEDS,
    SHIFT,
    WARM_UP,
    WARM_UP_SEEDS,
    Case,
    end_step,
)

PARALLEL = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of the suite is run."""

    cases: tuple[str, ...]
    seeds: tuple[int, ...]
    compared_seeds: tuple[int, ...]
    """Seeds at which the seed's and autoswitch's presets run too."""
    fork: int = FORK_STEP
    after: int = 0
    """Steps of an arm from its fork on; 0: all."""
    healthy: bool = True
    """Whether the healthy runs beside the branch that is the control are there."""

    @property
    def until(self) -> int:
        """Steps of an arm, its checkpoint's included."""
        return self.fork + (self.after or end_step() - FORK_STEP)

    def fault(self, case: Case, seed: int) -> dict[str, Any]:
        """The case's fault, its onset moved with the checkpoint."""
        fault = case.fault(seed)
        return fault | {"start_step": fault["start_step"] + self.fork - FORK_STEP}


def full() -> Size:
    """Everything."""
    return Size(cases=tuple(CASES), seeds=SEEDS, compared_seeds=SEEDS[:1])


def quick() -> Size:
    """Five faults, safeguard and none, one seed, from a younger checkpoint."""
    return Size(
        cases=(*QUICK, BRANCH.name), seeds=SEEDS[:1], compared_seeds=(), fork=250, after=90, healthy=False
    )


def arms_of(case: Case, seed: int, size: Size) -> Iterator[Arm]:
    """Every arm of one case at one seed, twins included."""
    if case is WARM_UP:
        yield Arm(case=case.name, seed=seed, name=SAFEGUARD, fault=None, until=AFTER_WARM_UP, fork=0)
        return
    fault = None if case is BRANCH else size.fault(case, seed)
    common: dict[str, Any] = {
        "case": case.name,
        "seed": seed,
        "fault": fault,
        "until": size.until,
        "fork": size.fork,
    }
    watched = common | {"ranks": case.ranks}
    yield Arm(name=SAFEGUARD, **watched)
    if case is SHIFT:
        return
    yield twin_of(case, seed, size)
    if case.kind != "control":
        yield Arm(name=NONE, config=_parts(case), **common)
    if seed in size.compared_seeds and case is not BRANCH:
        yield Arm(name=SEED, **watched)
        yield Arm(name=AUTOSWITCH, **watched)


def _parts(case: Case) -> dict[str, Any]:
    """Micro-batches in the place of ranks: the same gradients, summed in one process."""
    return {} if case.ranks == 1 else {"micro_batches": case.ranks}


AFTER_WARM_UP = 120
"""Steps of a run from its first one on: the warm-up takes 50."""


def twin_of(case: Case, seed: int, size: Size) -> Arm:
    """The same in BF16. A fault of FP8 alone leaves it every bit (tests/trainer), so that such cases share one."""
    shared = case.kind != "control"
    name = "bf16" if case.ranks == 1 else f"bf16-{case.ranks}"
    return Arm(
        case=name if shared else case.name, seed=seed, name=TWIN, fault=None if shared else size.fault(case, seed),
        until=size.until, fork=size.fork, config=_parts(case),
    )  # fmt: skip


def all_arms(size: Size) -> list[Arm]:
    """Each arm once; those of one case and seed together."""
    found: dict[str, Arm] = {}
    for name in size.cases:
        case = CASES[name]
        seeds = WARM_UP_SEEDS if case is WARM_UP else size.seeds
        for seed in seeds if size.healthy or case not in (SHIFT, WARM_UP) else ():
            for arm in arms_of(case, seed, size):
                found.setdefault(arm.key, arm)
    return list(found.values())


class ArmError(Exception):
    """An arm's process ended without its file."""


def run_all(arms: Sequence[Arm], place: Place, say: Callable[[str], None]) -> list[str]:
    """Run what has no file yet, two processes at a time; keys of arms that failed."""
    starts = {place.checkpoint(arm): arm for arm in arms if arm.fork}
    missing = [arm for arm in starts.values() if not place.checkpoint(arm).exists()]
    failed = _pool(
        [(f"checkpoint {arm.seed}", make_checkpoint, arm, place.checkpoint(arm)) for arm in missing],
        place,
        say,
    )
    if failed:
        raise ArmError(f"no checkpoint to start from: {', '.join(failed)}")
    waiting = [arm for arm in arms if not place.result(arm).exists()]
    say(f"{len(arms)} arms, {len(arms) - len(waiting)} of them finished before")
    return _pool([(arm.key, run_arm, arm, place.result(arm)) for arm in waiting], place, say)


_Job = tuple[str, Callable[[Arm, Place], None], Arm, Path]


def _pool(jobs: Sequence[_Job], place: Place, say: Callable[[str], None]) -> list[str]:
    """Run each in a process of its own; names of those that left no file."""
    waiting, active, failed, done = list(jobs), [], [], 0
    begun = time.monotonic()
    try:
        while waiting or active:
            while waiting and len(active) < PARALLEL:
                active.append(_start(waiting.pop(0), place))
            time.sleep(0.1)
            for entry in [one for one in active if not one[1].is_alive()]:
                active.remove(entry)
                (name, _, _, file), process = entry
                process.join()
                done += 1
                if not file.exists():
                    failed.append(name)
                spent = time.monotonic() - begun
                outcome = "done" if file.exists() else f"FAILED with exit code {process.exitcode}"
                say(f"[{done}/{len(jobs)}, {spent / 60:.1f} min] {name} {outcome}")
    finally:
        for _, process in active:
            process.terminate()
            process.join()
    return failed


def _start(job: _Job, place: Place) -> tuple[_Job, SpawnProcess]:
    _, function, arm, _ = job
    process = multiprocessing.get_context("spawn").Process(target=function, args=(arm, place))
    process.start()
    return job, process
