"""The gap between the losses of two runs, against what chaos alone makes.

Two runs of one recipe differ by chaos alone: a perturbation of 1e-6 moves the loss of a small model by 0.8 % a step, so no
single step says anything. What does is the mean of the signed relative gap (run - reference) / |reference| over windows of 50
steps, against the spread that such means have where nothing is wrong (the null). The alarm is at NULL_FACTOR standard
deviations of the null, and never below LEAST_GAP.

The null is learned from twins of the reference where there are any (runs that differ from it by nothing that matters): the
standard deviation of their windows. Otherwise from the pair itself: the spread of a step, by the median of the differences
of successive gaps, which a lasting gap does not widen, over the square root of the window's samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_STEPS = 50
LEAST_SAMPLES = 5
"""Samples of a window below which its mean is noise; windows grow where steps are sampled rarely."""
NULL_FACTOR = 5.0
LEAST_GAP = 0.001
"""What 50 steps of two precisions resolve; a gap below it is none."""
MAD_TO_SD = 1.4826
"""Standard deviation of a Gaussian over its median absolute deviation."""

FloatArray = NDArray[np.float64]


class CheckError(ValueError):
    """Two runs that cannot be held against each other."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The mean gap of some successive steps."""

    from_step: int
    to_step: int
    samples: int
    gap_ratio: float
    """Signed: above 0 the run's loss is higher."""
    limit: float

    @property
    def strain(self) -> float:
        """The gap in parts of its limit; infinite where the limit is 0 and there is a gap."""
        return self.gap_ratio / self.limit if self.limit else self.gap_ratio and self.gap_ratio * math.inf


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """The loss beside the reference's at the steps that both have."""

    shared_steps: int
    from_step: int
    to_step: int
    mean_gap_ratio: float
    window_sd: float | None
    """Of the null, for a window of the usual size; None where the limit was given."""
    null: str
    """Where it comes from."""
    windows: tuple[Window, ...]
    broken: tuple[int, ...] = ()
    """Steps at which the run's loss is no number and the reference's is one."""

    @property
    def over(self) -> tuple[Window, ...]:
        """The windows beyond their limit."""
        return tuple(window for window in self.windows if window.gap_ratio > window.limit)

    @property
    def worst(self) -> Window:
        """The window that is nearest to its limit, or farthest over it."""
        return max(self.windows, key=lambda window: window.strain)


def compare_losses(
    run: Mapping[int, float],
    reference: Mapping[int, float],
    *,
    twins: Sequence[Mapping[int, float]] = (),
    max_gap: float | None = None,
) -> LossReport:
    """The windows of the gap and their limits. Losses by step.

    twins: losses of runs that differ from the reference by chaos alone. max_gap: a limit that is given, as a ratio.
    Raises CheckError where fewer than LEAST_SAMPLES steps are shared.
    """
    steps = sorted(run.keys() & reference.keys())
    if len(steps) < LEAST_SAMPLES:
        raise CheckError(
            f"the two share {len(steps)} steps with a loss ({_span(run)} and {_span(reference)}) and "
            f"{LEAST_SAMPLES} are needed; compare runs of the same steps, or sample more often"
        )
    broken = [step for step in steps if not math.isfinite(run[step]) and math.isfinite(reference[step])]
    gaps, kept = _gaps(run, reference, steps)
    if len(kept) < LEAST_SAMPLES:
        if not broken:
            raise CheckError(f"of {len(steps)} shared steps only {len(kept)} have a finite loss in both")
        # Nothing is left to average, and what is broken says enough.
        kept, gaps = np.array(steps[:1], dtype=np.int64), np.zeros(1)
    parts = windows_of(kept.tolist())
    usual = float(np.median([stop - start for start, stop in parts]))
    sd, null = (None, "given") if max_gap is not None else _null(gaps, usual, reference, twins)
    windows = tuple(_window(kept, gaps, start, stop, sd, usual, max_gap) for start, stop in parts)
    return LossReport(
        shared_steps=len(steps),
        from_step=steps[0],
        to_step=steps[-1],
        mean_gap_ratio=float(gaps.mean()),
        window_sd=sd,
        null=null,
        windows=windows,
        broken=tuple(broken),
    )


def _gaps(
    run: Mapping[int, float], reference: Mapping[int, float], steps: Sequence[int]
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Signed relative gaps, and their steps, where both losses are finite."""
    ours, theirs = (np.array([side[step] for step in steps], dtype=np.float64) for side in (run, reference))
    with np.errstate(all="ignore"):
        gaps = (ours - theirs) / np.abs(theirs)
    finite = np.isfinite(gaps)
    return gaps[finite], np.array(steps, dtype=np.int64)[finite]


def windows_of(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Places [start, stop) of windows of WINDOW_STEPS, longer where fewer than LEAST_SAMPLES lie in that many.

    What is left at the end joins the last window.
    """
    parts: list[tuple[int, int]] = []
    start = 0
    for place, step in enumerate(steps):
        if step - steps[start] >= WINDOW_STEPS and place - start >= LEAST_SAMPLES:
            parts.append((start, place))
            start = place
    left = (start, len(steps))
    whole = steps[-1] - steps[start] >= WINDOW_STEPS // 2 and left[1] - left[0] >= LEAST_SAMPLES
    if not whole and parts:
        left = (parts.pop()[0], len(steps))
    return [*parts, left]


def _window(
    steps: NDArray[np.int64],
    gaps: FloatArray,
    start: int,
    stop: int,
    sd: float | None,
    usual: float,
    max_gap: float | None,
) -> Window:
    samples = stop - start
    learned = NULL_FACTOR * (sd or 0.0) * math.sqrt(usual / samples)
    return Window(
        from_step=int(steps[start]),
        to_step=int(steps[stop - 1]),
        samples=samples,
        gap_ratio=float(gaps[start:stop].mean()),
        limit=max(LEAST_GAP, learned) if max_gap is None else max_gap,
    )


def _null(
    gaps: FloatArray, usual: float, reference: Mapping[int, float], twins: Sequence[Mapping[int, float]]
) -> tuple[float, str]:
    """Standard deviation of a healthy window's mean gap, and where it comes from."""
    means: list[float] = []
    for twin in twins:
        steps = sorted(twin.keys() & reference.keys())
        twin_gaps, kept = _gaps(twin, reference, steps)
        if len(kept) >= LEAST_SAMPLES:
            means += [float(twin_gaps[a:b].mean()) for a, b in windows_of(kept.tolist())]
    if len(means) >= 2:
        # About 0, not about their mean: a twin that lies beside the reference is the null's, too.
        return float(np.sqrt(np.mean(np.square(means)))), f"from {len(means)} windows of {len(twins)} twins"
    said = "from the run's own differences from step to step"
    if twins:
        said += "; the twins share too few steps"
    return step_sd(gaps) / math.sqrt(usual), said


def step_sd(gaps: FloatArray) -> float:
    """Spread of one step's gap, robust to a shift, by the differences of successive ones."""
    if len(gaps) < 2:
        return 0.0
    return float(MAD_TO_SD * np.median(np.abs(np.diff(gaps))) / math.sqrt(2.0))


def _span(losses: Mapping[int, float]) -> str:
    return f"steps {min(losses)} to {max(losses)}" if losses else "no step"
