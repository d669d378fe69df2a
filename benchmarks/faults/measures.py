"""Separation, lead, detection and ratio: the suite's arithmetic, on plain series."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Losses = Mapping[int, float]
"""Loss by step."""

WINDOW = 5
"""Steps of the trailing mean that separation is judged by."""
LEAST_GAP = 0.005
TAIL_STEPS = 20
"""Steps of the mean loss that is compared: one step of this size has a deviation of about 1 %."""

# Student's t, 97.5 %, by degrees of freedom; beyond, the normal's is near enough.
_T = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bounds."""

    value: float
    low: float
    high: float


def gaps(losses: Losses, twin: Losses) -> dict[int, float]:
    """(loss - twin's) / twin's of every step that both have; a loss that is no number is infinitely worse."""
    found = {}
    for step in sorted(losses.keys() & twin.keys()):
        gap = (losses[step] - twin[step]) / twin[step]
        found[step] = gap if math.isfinite(gap) else math.inf
    return found


def sigma(healthy: Losses, twin: Losses) -> float:
    """Standard deviation of a step's gap where nothing is wrong."""
    return statistics.pstdev(gaps(healthy, twin).values())


def separation(losses: Losses, twin: Losses, onset: int, sigma: float) -> int | None:
    """First step from the onset on whose trailing 5-step mean gap exceeds max(0.5 %, 5 sigma / sqrt 5); None: never."""
    gap = gaps(losses, twin)
    level = max(LEAST_GAP, 5.0 * sigma / math.sqrt(WINDOW))
    for step in gap:
        window = [gap[s] for s in range(step - WINDOW + 1, step + 1) if s in gap]
        if step >= onset and len(window) == WINDOW and statistics.fmean(window) > level:
            return step
    return None


def lead(detected: int | None, separated: int | None) -> int | None:
    """Steps from detection to separation; None where there is no detection, or nothing to be ahead of."""
    return None if detected is None or separated is None else separated - detected


def tail_mean(losses: Losses) -> float:
    """Mean of the last 20 steps; infinite where one of them is no number."""
    last = [losses[step] for step in sorted(losses)[-TAIL_STEPS:]]
    return statistics.fmean(last) if all(map(math.isfinite, last)) else math.inf


def tail_ratio(losses: Losses, twin: Losses) -> float:
    """20-step mean loss over the twin's, of the same steps."""
    shared = losses.keys() & twin.keys()
    return tail_mean({s: losses[s] for s in shared}) / tail_mean({s: twin[s] for s in shared})


def mean_ratio(ratios: Sequence[float]) -> Interval | None:
    """Geometric mean of paired ratios, one a seed, with its t interval; no bounds from one seed, None from none."""
    if not ratios:
        return None
    if not all(0.0 < ratio < math.inf for ratio in ratios):
        return Interval(math.inf, math.inf, math.inf)
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(middle), 0.0, math.inf)
    degrees = len(logs) - 1
    t = _T[degrees] if degrees < len(_T) else 1.96
    width = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(middle), math.exp(middle - width), math.exp(middle + width))


def share(hits: int, of: int) -> Interval:
    """A share with its 95 % Wilson bounds, which make sense at 0 and 1 too."""
    if of == 0:
        return Interval(math.nan, 0.0, 1.0)
    z, p = 1.96, hits / of
    centre = (p + z * z / (2 * of)) / (1 + z * z / of)
    width = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return Interval(p, max(0.0, centre - width), min(1.0, centre + width))
