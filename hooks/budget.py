"""Tunes what a sample measures so that it stays within the overhead budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.hooks.costs import Costs, median
from fp8_safeguard.hooks.meter import LayerSeconds

TILE_STRIDE = 17
"""One tile in so many is read of a layer that is not measured in full: rates above 1e-3 come out within 10 % rms."""
ROTATION_SAMPLES = 8
"""In so many samples every layer has its turn, if need be at the price of a longer interval."""
JUDGED_MULTIPLE = 16
"""The GEMMs of all layers are judged in every sample until that would take an interval so many times the asked one."""
MOST_MULTIPLE = 2**16
LEARNING_SAMPLES = 2
"""The first samples are whole, whatever they cost: the first one is cold, and only with the second is the cost known."""
TARGET_RATIO = 0.9
"""Of the budget, what a new schedule is made for."""
ROOM_RATIO = 0.7
"""A richer schedule has to fit into this much of the budget, so that it does not come and go with the noise."""
PLENTY_RATIO = 0.35
"""A schedule that fits into this much need not wait."""
TIGHT_RATIO = 0.97
"""Beyond this much of the budget a poorer schedule takes over."""
OVERDRAFT_RATIO = 0.5
"""Part of a sample that may be paid later, so that a large layer's turn is not put off."""
REPAID_RATIO = 0.5
"""Of the budget, what repays the first samples; the rest goes on buying samples."""
_PATIENCE_STEPS = 100
_MOST_ROUNDS = 64
_COLD_STEPS = 3
_STEPS_KEPT = 64
_STEPS_NEEDED = 5
_STALL_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What is measured of one layer in the sample in progress."""

    full: bool = True
    """Every operand whole."""
    judged: bool = True
    """Sampled rows of its GEMMs are recomputed."""
    stride: int = 1
    """Where not full: one tile in so many is read."""
    turn: int = 0
    """Where not full: which tiles; the next turn reads others."""


WHOLE = Scope()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every sample measures."""

    multiple: int = 1
    """A power of two: one due step in so many is sampled, and those of several groups fall together."""
    layers: int = 0
    """Layers measured in full in each sample."""
    judged: bool = True
    """Whether the GEMMs of the other layers are judged too."""


class Pace:
    """How long a step takes without us.

    Medians: the first steps compile, and an evaluation or a stalled loader between two steps is not training. A step
    counts for at most three times the median.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Training time so far."""
        self.median: float | None = None
        """Of the latest steps; None until there are enough of them."""
        self._cold = _COLD_STEPS
        self._latest: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._since = 0

    def add(self, seconds: float) -> float:
        """One more step; the training time that it adds."""
        if self._cold:
            self._cold -= 1
            return 0.0
        self._latest.append(seconds)
        self._since += 1
        if self.median is None:
            if len(self._latest) < _STEPS_NEEDED:
                return 0.0
            self.median = median(self._latest)
            added = sum(self._counted(each) for each in self._latest)
        else:
            if self._since % _STEPS_NEEDED == 0:
                self.median = median(self._latest)
            added = self._counted(seconds)
        self.seconds += added
        return added

    def _counted(self, seconds: float) -> float:
        return min(seconds, _STALL_RATIO * (self.median or 0.0))


class Budget:
    """Decides which steps are sampled and what of each layer, from the time that it took so far.

    Income is the budgeted share of the training time; every second of ours is paid from it. A sample waits until there
    is enough for it. What the first samples cost is lent, and repaid by half of the income.
    """

    def __init__(self, layers: Sequence[str], every: int, limit: float | None) -> None:
        self.names = list(layers)
        self.every = every
        self.limit = limit
        self.pace = Pace()
        self.costs = Costs(self.names)
        self.schedule = Schedule(layers=len(self.names))
        self.samples = 0
        self.purse = 0.0
        """Seconds that may be spent."""
        self.loan = 0.0
        """Seconds still to be repaid."""
        self._idle: deque[float] = deque(maxlen=_STEPS_KEPT)
        self.spent = 0.0
        self._queue = list(self.names)
        """The layer whose turn was longest ago first."""
        self._turn: frozenset[str] = frozenset(self.names)
        self._others = WHOLE
        self._picked: tuple[str, ...] = ()
        self._usual_idle = 0.0
        self._chosen = False
        self._rounds = 1
        self._last_chosen = 0
        self._elapsed = 0.0
        self._waited = 0
        self._urgent = 0
        self._predicted = 0.0

    def scope(self, layer: str) -> Scope:
        """What the sample in progress measures of this layer."""
        return WHOLE if layer in self._turn else self._others

    def due(self, step: int) -> bool:
        """Whether this step is one to sample, if there is enough for it."""
        return step % (self.every * self.schedule.multiple) == 0

    def admits(self, urgent: Collection[str] = ()) -> bool:
        """Whether a due step may be sampled now; if so, `scope` says what of it. `urgent` layers come first."""
        if self.limit is None or self.samples == 0:
            return True
        if self.samples < LEARNING_SAMPLES or self.pace.median is None:
            return self.pace.median is not None or self.spent <= self.limit * self._elapsed
        if not self._chosen:
            self._reconsider(0)
        if self.purse < OVERDRAFT_RATIO * self._predict(self.schedule):
            return False
        self._turn = frozenset(self._next_turn(urgent))
        self._others = Scope(full=False, judged=self.schedule.judged, stride=TILE_STRIDE, turn=self.samples)
        return True

    def begin(self, picked: Collection[str]) -> None:
        """The sample begins; picked: layers whose weight gradient it recomputes."""
        self._picked = tuple(picked)
        if self.limit is not None and self.samples >= LEARNING_SAMPLES:
            judged = self.schedule.judged
            self._predicted = self.costs.of_sample(self._turn, judged=judged, picked=self._picked)

    def end_step(
        self,
        seconds: float,
        spent: float,
        layers: Mapping[str, LayerSeconds] | None = None,
        *,
        late: float = 0.0,
    ) -> None:
        """A step of that many seconds has ended, `spent` of them in our code; layers: of a sample, where it was one.

        late: seconds among them that an earlier sample took.
        """
        self.spent += spent
        self._elapsed += seconds
        self._earn(self.pace.add(max(0.0, seconds - spent)))
        if late:
            self.costs.late(late)
        if self.limit is None:
            self.samples += layers is not None
        elif layers is None:
            self._end_without_sample(spent, late)
        else:
            self._end_sample(spent, layers)

    def _end_without_sample(self, spent: float, late: float) -> None:
        self.purse -= spent
        self._idle.append(spent - late)
        self._waited += 1
        if self._waited % _PATIENCE_STEPS == 0 and self.samples >= LEARNING_SAMPLES:
            # Nothing was affordable for long: steps may take longer by now. Only a sample can show that it takes more.
            self._look_for_richer(self._free_income(), self._waited)

    def _end_sample(self, spent: float, layers: Mapping[str, LayerSeconds]) -> None:
        if self.samples < LEARNING_SAMPLES:
            self.loan += spent
        else:
            self.purse -= spent
        self._learn(spent, layers)
        self.samples += 1
        self._waited = 0
        if self.samples >= LEARNING_SAMPLES:
            self._reconsider(self.samples - self._last_chosen)

    @property
    def idle(self) -> float:
        """Seconds of ours in a step without a sample: the median of the latest."""
        return median(self._idle) if self._idle else 0.0

    def amend(self, layers: Mapping[str, LayerSeconds]) -> None:
        """The last sample took so long on its device, if longer than on the host that is what it cost."""
        if self.limit is not None and layers:
            more = self.costs.amend(layers)
            self.purse -= more
            self.spent += more
            if more and self.samples >= LEARNING_SAMPLES:
                self._reconsider(0)

    def report(self) -> dict[str, Any]:
        """What is measured now, and what coverage that buys."""
        layers, schedule = len(self.names), self.schedule
        every = self.every * schedule.multiple
        partial = schedule.layers < layers
        free = schedule.layers - self._reserved(self._urgent)
        rounds = math.ceil(layers / free) if free else 2 * layers
        return {
            "budget": self.limit,
            "every": every,
            "overhead_ratio": None if self.ratio is None else self.ratio / (1.0 + self.ratio),
            "layers_per_sample": schedule.layers,
            "layers": layers,
            "tile_stride": TILE_STRIDE if partial else 1,
            "full_coverage_steps": every * rounds,
        }

    @property
    def ratio(self) -> float | None:
        """Time in our code over the training time; None before the first steps have shown how long one takes."""
        return self.spent / self.pace.seconds if self.pace.seconds else None

    def _earn(self, seconds: float) -> None:
        income = (self.limit or 0.0) * seconds
        # Hooks that are idle are paid first: what is lent must not end the sampling.
        repaid = min(self.loan, REPAID_RATIO * max(0.0, income - self._usual_idle)) if income else 0.0
        self.loan -= repaid
        self.purse += income - repaid

    def _free_income(self) -> float:
        """Seconds that a step leaves for samples."""
        self._usual_idle = self.idle
        income = (self.limit or 0.0) * (self.pace.median or 0.0) - self._usual_idle
        return income * (1.0 - REPAID_RATIO if self.loan else 1.0)

    def _learn(self, spent: float, layers: Mapping[str, LayerSeconds]) -> None:
        self.costs.learn(
            spent, layers, full=self._turn, judged=self._others.judged, picked=self._picked,
            predicted=self._predicted,
        )  # fmt: skip
        self._move_back(self._turn)
        self._turn, self._others, self._predicted = frozenset(self.names), WHOLE, 0.0

    def _reconsider(self, patience: int) -> None:
        """Another schedule where this one takes too much, or where after a whole round there is room for a richer one."""
        if self.pace.median is None:
            return
        income = self._free_income()
        allowed = income * self.every * self.schedule.multiple
        if not self._chosen or self._predict(self.schedule) > TIGHT_RATIO * allowed:
            # What was too much once more, so soon after it had seemed to fit, is tried again only after twice as long.
            self._rounds = min(_MOST_ROUNDS, 2 * self._rounds) if self._chosen else 1
            self._adopt(self._best(TARGET_RATIO * income))
        else:
            self._look_for_richer(income, patience)

    def _look_for_richer(self, income: float, patience: int) -> None:
        round_samples = max(3, math.ceil(len(self.names) / max(1, self.schedule.layers)))
        if patience < round_samples:
            return
        ratio = ROOM_RATIO if patience >= self._rounds * round_samples else PLENTY_RATIO
        richer = self._best(ratio * income)
        if _rate(richer) > _rate(self.schedule):
            self._adopt(richer)

    def _adopt(self, schedule: Schedule) -> None:
        self.schedule, self._last_chosen, self._chosen = schedule, self.samples, True

    def _predict(self, schedule: Schedule) -> float:
        base, extra = self.costs.base_and_extra(judged=schedule.judged)
        return base + schedule.layers * extra

    def _best(self, income: float) -> Schedule:
        """The shortest interval in which every layer is judged and has its turn soon; without judging where it must be."""
        layers = len(self.names)
        least = math.ceil(layers / ROTATION_SAMPLES)
        for judged, most in ((True, JUDGED_MULTIPLE), (False, MOST_MULTIPLE)):
            base, extra = self.costs.base_and_extra(judged=judged)
            multiple = 1
            while multiple <= most:
                left = income * self.every * multiple - base
                fit = layers if extra <= 0 else math.floor(min(layers, left / extra))
                if left >= 0 and fit >= least:
                    return Schedule(multiple, fit, judged)
                multiple *= 2
        return Schedule(MOST_MULTIPLE, least, judged=False)

    def _next_turn(self, urgent: Collection[str]) -> list[str]:
        """The layers that were measured in full the longest time ago; urgent ones have half of the places."""
        hasty = [name for name in self._queue if name in urgent]
        self._urgent = len(hasty)
        first = hasty[: self._reserved(len(hasty))]
        if self.schedule.layers == 1 and hasty and self.samples % 2:
            first = hasty[:1]
        rest = [name for name in self._queue if name not in first]
        return [*first, *rest][: self.schedule.layers]

    def _move_back(self, done: Collection[str]) -> None:
        rest = [name for name in self._queue if name not in done]
        self._queue = [*rest, *(name for name in self._queue if name in done)]

    def _reserved(self, urgent: int) -> int:
        return min(urgent, self.schedule.layers // 2)


def _rate(schedule: Schedule) -> tuple[bool, float, float]:
    """How much a schedule measures: whether all are judged, layers in full a step, samples a step."""
    return (schedule.judged, schedule.layers / schedule.multiple, 1.0 / schedule.multiple)
