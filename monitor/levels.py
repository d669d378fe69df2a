"""Levels that a learned baseline moves, and how far it may.

All is said in *badness*, which grows as a metric gets worse: the value itself where high is bad, the amplitude of the error
for dB, the distance from 1 for a cosine. With h the healthy maximum of a slot's badness and p its 99 % quantile:

    watch   max(margin h, min(fixed, max(20 p, floor)))    a slot that is always above the preset's level is no news, and one
                                                           far below it warns earlier; only underflow has such a floor, 0.1 %
    factor  max(factor, margin h / median)                 for levels relative to the slot's own median
    act     min(max(fixed, margin h), 2 fixed)             never below the preset's level, never beyond MEDIAN_CAP times it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8_safeguard.monitor.thresholds import Threshold

SAMPLES_FOR_LEVELS = 20
"""Samples of a slot from which a healthy maximum says something."""
QUIET_FACTOR = 20.0
"""A level falls to this multiple of the healthy 99 % quantile: healthy underflow swings up to 41 times its own median."""
QUIET_FLOORS = {"underflow_ratio": 0.001}
"""Levels of these metrics may fall, and not below this."""
MARGINS = {"relative_error": 1.2, "sqnr_db": 1.2, "tile_sqnr_p01_db": 1.2}
"""The steadiest metrics need the least room: healthy errors of fprop and dgrad swing up to 1.14 times their own median, and
a format's noise floor is the same everywhere."""
MARGIN = 1.5
RATIOS = ("underflow_ratio", "saturation_ratio", "rows_flushed_ratio", "zero_ratio")


@dataclass(frozen=True)
class Healthy:
    """One metric of one slot family over a healthy window."""

    samples: int
    median: float
    high: float
    """The 99 % quantile on the bad side."""
    extremum: float
    """The worst value."""


def badness(metric: str, value: float) -> float:
    """The value, turned so that more is worse."""
    if metric.endswith("_db"):
        return float(10.0 ** (-value / 20.0))
    return 1.0 - value if metric == "cosine" else value


def value_at(metric: str, bad: float) -> float:
    """The inverse of badness."""
    if metric.endswith("_db"):
        return -20.0 * math.log10(bad)
    return 1.0 - bad if metric == "cosine" else bad


def above_healthy(metric: str, healthy: Healthy) -> float:
    """The badness that is a margin above the healthy maximum; of a ratio at most half-way to 1."""
    worst = badness(metric, healthy.extremum)
    room = MARGINS.get(metric, MARGIN) * worst
    return min(room, (1.0 + worst) / 2.0) if metric in RATIOS else room


def learned_watch(rule: Threshold, fixed: float | None, healthy: Healthy | None) -> float | None:
    """The absolute watch level with what was learned; as it was without enough samples."""
    if fixed is None or healthy is None or healthy.samples < SAMPLES_FOR_LEVELS:
        return fixed
    level = badness(rule.metric, fixed)
    if rule.metric in QUIET_FLOORS:
        level = min(level, max(QUIET_FACTOR * healthy.high, QUIET_FLOORS[rule.metric]))
    learned = max(level, above_healthy(rule.metric, healthy))
    return fixed if learned == badness(rule.metric, fixed) else value_at(rule.metric, learned)


def learned_factor(rule: Threshold, healthy: Healthy | None) -> float | None:
    """The multiple of the slot's own median that is worth watching, with what was learned."""
    factor = rule.watch_over_median
    if factor is None or healthy is None or healthy.samples < SAMPLES_FOR_LEVELS or healthy.median <= 0:
        return factor
    return max(factor, above_healthy(rule.metric, healthy) / healthy.median)


def learned_act(rule: Threshold, fixed: float | None, healthy: Healthy | None, cap: float) -> float | None:
    """The act level with what was learned, at most `cap` times the fixed one."""
    if fixed is None or healthy is None or healthy.samples < SAMPLES_FOR_LEVELS:
        return fixed
    level = badness(rule.metric, fixed)
    learned = min(max(level, above_healthy(rule.metric, healthy)), cap * level)
    return fixed if learned == level else value_at(rule.metric, learned)
