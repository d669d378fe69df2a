"""All rules on all the slots that they speak about, side by side.

One comparison over every pair of a rule and a slot takes the time of one rule's; what a step has to be compared with is put
together once for a slot list.

Shapes: S slots of a list, P pairs of a rule and a slot that it speaks about, rule after rule; M pairs of a _Following.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.thresholds import Threshold

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class RuleOnSlots:
    """One rule and the slots that it speaks about, with its levels at each."""

    rule: Threshold
    positions: NDArray[np.intp]
    watch: FloatArray
    act: FloatArray
    instant: FloatArray
    min_count: FloatArray
    history_column: int
    factor: FloatArray | float | None
    """Watch level over the slot's own median."""
    cap: FloatArray
    """What the own median may raise the act level to."""
    learned: NDArray[np.bool_] | None = None
    """Where a baseline moved a level."""
    learned_rule: Threshold | None = None
    """The rule that says so."""


@dataclass(frozen=True)
class _Following:
    """Levels that follow the slot's own median; arrays [M]."""

    pair: NDArray[np.intp]
    median: NDArray[np.intp]
    """Place among the medians [S, 2], flattened."""
    factor: FloatArray
    cap: FloatArray
    """What the median may raise an act level to."""

    def of(self, medians: FloatArray) -> FloatArray:
        """The multiples of the medians [S, 2], NaN where there is none."""
        relative: FloatArray = self.factor * medians.ravel()[self.median]
        return relative


@dataclass(frozen=True)
class Pairs:
    """Pairs of a rule and a slot; arrays [P] where nothing else is said."""

    metrics: tuple[str, ...]
    """Those of the rules, each once."""
    metric: NDArray[np.intp]
    """Place among them."""
    rule: NDArray[np.intp]
    """Place among the rules."""
    first: NDArray[np.intp]
    """First pair of each rule."""
    position: NDArray[np.intp]
    """Of the slot."""
    sign: FloatArray
    """-1 where values below the level are bad, else 1."""
    watch: FloatArray
    act: FloatArray
    """Fixed levels, NaN where there is none."""
    min_count: FloatArray
    min_underflow: FloatArray
    watch_follows: _Following
    act_follows: _Following
    least: FloatArray
    """Whatever the medians: no breach unless `sign` times the value is above it; NaN where there is never one."""

    def values(self, measures: Mapping[str, NDArray[Any]], at: NDArray[np.intp]) -> FloatArray:
        """What each rule judges. at [P]: where `measures` has the slot, one behind its end: nowhere, and NaN."""
        table = np.full((len(self.metrics), len(measures["count"]) + 1), np.nan)
        for row, metric in enumerate(self.metrics):
            table[row, :-1] = measures[metric]
        found: FloatArray = table[self.metric, at]
        return found

    def levels(self, medians: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Watch and act level in force (`watch_level` and `act_level` of thresholds). medians [S, 2]: NaN for none."""
        watch, act = self.watch.copy(), self.act.copy()
        # NaN where there is no median yet: no level. A rule without a fixed level has NaN there.
        on, relative = self.watch_follows.pair, self.watch_follows.of(medians)
        watch[on] = np.where(np.isnan(relative), np.nan, np.fmax(watch[on], relative))
        on, relative = self.act_follows.pair, self.act_follows.of(medians)
        act[on] = np.minimum(np.fmax(act[on], relative), self.act_follows.cap)
        return watch, act


def pair_up(rules: Sequence[RuleOnSlots]) -> Pairs:
    """The pairs of at least one rule."""
    sizes = [len(on.positions) for on in rules]
    first = np.cumsum([0, *sizes[:-1]], dtype=np.intp)
    metrics = tuple(dict.fromkeys(on.rule.metric for on in rules))

    def each(values: Sequence[float]) -> FloatArray:
        return np.repeat(np.array(values, dtype=np.float64), sizes)

    sign = each([1.0 if on.rule.above else -1.0 for on in rules])
    watch = np.concatenate([on.watch for on in rules])
    act = np.concatenate([on.act for on in rules])
    watch_follows = _following(rules, first, [on.factor for on in rules])
    act_follows = _following(rules, first, [on.rule.act_over_median for on in rules])
    return Pairs(
        metrics=metrics,
        metric=np.repeat([metrics.index(on.rule.metric) for on in rules], sizes),
        rule=np.repeat(np.arange(len(rules)), sizes),
        first=first,
        position=np.concatenate([on.positions for on in rules]),
        sign=sign,
        watch=watch,
        act=act,
        min_count=np.concatenate([on.min_count for on in rules]),
        min_underflow=each([on.rule.min_underflow for on in rules]),
        watch_follows=watch_follows,
        act_follows=act_follows,
        least=_least(sign, watch, act, (watch_follows, act_follows)),
    )


def _following(
    rules: Sequence[RuleOnSlots], first: NDArray[np.intp], factors: Sequence[FloatArray | float | None]
) -> _Following:
    """factors: of each rule, None where its level stays as it is."""
    moved = [
        (on, start, factor)
        for on, start, factor in zip(rules, first.tolist(), factors, strict=True)
        if factor is not None
    ]
    no_pair, no_level = np.empty(0, dtype=np.intp), np.empty(0)
    sized = [np.broadcast_to(factor, on.positions.shape) for on, _, factor in moved]
    return _Following(
        pair=np.concatenate([no_pair, *(start + np.arange(len(on.positions)) for on, start, _ in moved)]),
        median=np.concatenate([no_pair, *(2 * on.positions + on.history_column for on, _, _ in moved)]),
        factor=np.concatenate([no_level, *sized]),
        cap=np.concatenate([no_level, *(on.cap for on, _, _ in moved)]),
    )


def _least(
    sign: FloatArray, watch: FloatArray, act: FloatArray, following: Sequence[_Following]
) -> FloatArray:
    least = np.fmin(sign * watch, sign * act)
    for follows in following:
        on = follows.pair
        # Where high is bad a median raises a fixed level, an act level to its cap: nothing below both of them is a breach.
        # Otherwise only the median can say: any value may be one.
        lowest = np.where(sign[on] > 0, np.minimum(least[on], follows.cap), np.nan)
        least[on] = np.where(np.isnan(lowest), -np.inf, lowest)
    return least
