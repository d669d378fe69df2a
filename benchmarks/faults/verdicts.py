"""What the arms of one fault say together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from faults import measures
from faults.arms import AUTOSWITCH, NONE, SAFEGUARD, SEED, Arm, Place
from faults.catalogue import BRANCH, Case
from faults.measures import Interval
from faults.results import Result
from faults.schedule import Size, arms_of, twin_of

OTHERS = (NONE, SEED, AUTOSWITCH)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One fault at one seed."""

    case: Case
    seed: int
    onset: int
    fault: Mapping[str, Any] | None
    safeguard: Result
    twin: Result
    others: Mapping[str, Result]
    """Arms besides, by name."""
    separated: int | None
    """Step at which the arm without a safeguard parts from the twin; None: never, or no such arm."""

    @property
    def detected_after(self) -> int | None:
        """Samples from the onset to the first act alert or decision, or where the case says so to the first alert."""
        if self.case.first_alert:
            return self.watched_after
        step = self.safeguard.detected(self.onset)
        return None if step is None else step - self.onset

    @property
    def watched_after(self) -> int | None:
        """The same for the first alert of any level."""
        step = self.safeguard.watched(self.onset)
        return None if step is None else step - self.onset

    @property
    def lead(self) -> int | None:
        """Steps from detection to separation."""
        return measures.lead(self.safeguard.detected(self.onset), self.separated)

    @property
    def cause(self) -> str | None:
        """Name of the cause that was told first; where nothing is decided, an alert names where NaN begins."""
        found = self.safeguard.cause(self.onset)
        if (
            found is None
            and self.case.kind == "isolated"
            and "non-finite" in self.safeguard.rules(self.onset)
        ):
            return "nonfinite-origin"
        return None if found is None else str(found.get("name"))

    @property
    def cause_right(self) -> bool:
        """Whether that is a right name."""
        return self.cause in self.case.causes

    @property
    def cause_layer(self) -> str | None:
        """Where that cause is said to be; None where it is the run's, or nothing was said."""
        found = self.safeguard.cause(self.onset)
        return None if found is None else found.get("layer")

    def loss_ratio(self, arm: str = SAFEGUARD) -> float | None:
        """20-step mean loss at the end over the twin's; None without such an arm."""
        result = self._arm(arm)
        return None if result is None else measures.tail_ratio(result.losses, self.twin.losses)

    def validation_ratio(self, arm: str = SAFEGUARD) -> float | None:
        """Validation loss of the weights at the end, in BF16, over the twin's."""
        result = self._arm(arm)
        return None if result is None else result.validation / self.twin.validation

    def _arm(self, name: str) -> Result | None:
        return self.safeguard if name == SAFEGUARD else self.others.get(name)


def verdicts(case: Case, size: Size, place: Place) -> Iterator[Verdict]:
    """One for each seed whose safeguard and twin have finished."""
    for seed in size.seeds:
        read = {arm.name: _read(arm, place) for arm in arms_of(case, seed, size)}
        twin, safeguard = _read(twin_of(case, seed, size), place), read.get(SAFEGUARD)
        if twin is None or safeguard is None:
            continue
        fault = None if case is BRANCH else size.fault(case, seed)
        onset = size.fork if fault is None else fault["start_step"]
        others = {name: result for name in OTHERS if (result := read.get(name)) is not None}
        yield Verdict(
            case=case, seed=seed, onset=onset, fault=fault, safeguard=safeguard, twin=twin, others=others,
            separated=_separated(others.get(NONE), twin, onset, _sigma(seed, size, place)),
        )  # fmt: skip


def healthy_results(case: Case, seeds: tuple[int, ...], size: Size, place: Place) -> dict[int, Result]:
    """Finished runs with nothing wrong, by seed."""
    arms = {seed: next(iter(arms_of(case, seed, size))) for seed in seeds}
    return {seed: result for seed, arm in arms.items() if (result := _read(arm, place)) is not None}


def _read(arm: Arm, place: Place) -> Result | None:
    file = place.result(arm)
    return Result.read(file) if file.exists() else None


def _sigma(seed: int, size: Size, place: Place) -> float:
    """Of the healthy pair of that seed; the research's 0.31 % while it has not run."""
    branch, twin = (arm for arm in arms_of(BRANCH, seed, size) if arm.name != NONE)
    healthy, bf16 = _read(branch, place), _read(twin, place)
    return 0.0031 if healthy is None or bf16 is None else measures.sigma(healthy.losses, bf16.losses)


def _separated(result: Result | None, twin: Result, onset: int, sigma: float) -> int | None:
    return None if result is None else measures.separation(result.losses, twin.losses, onset, sigma)


def interval(ratios: list[float | None]) -> Interval | None:
    """Over seeds."""
    return measures.mean_ratio([ratio for ratio in ratios if ratio is not None])


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
