"""Watches the run's own values: a loss or norm that is no number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from fp8_safeguard.monitor.thresholds import Threshold

LOSS = Threshold(
    rule="nonfinite-loss",
    metric="loss",
    watch=0.0,
    origin="a loss is a number; one isolated sample alerts, two in a row are serious",
)
GRADIENT_NORM = Threshold(
    rule="nonfinite-gradient-norm",
    metric="gradient_norm",
    watch=0.0,
    origin="a gradient scaler overflows now and then to find its scale; two samples in a row without it are news",
)
LOSS_JUMP = Threshold(
    rule="loss-jump",
    metric="loss",
    watch_over_median=3.0,
    origin="three times the median of the run's recent losses, in two samples in a row",
)
JUMP_SAMPLES = 8
"""Positive losses that the median is made of; with fewer there is none."""
LOSS_SERIOUS_SAMPLES = 2
"""Consecutive samples after which a loss that is no number is serious."""
NORM_SERIOUS_SAMPLES = 5
"""Consecutive samples after which it is serious: a trainer that skips such steps has not learnt anything in them."""


@dataclass(frozen=True)
class RunBreach:
    """A value of the run that is no number, or too large."""

    rule: Threshold
    value: float
    severity: Literal["watch", "act"]
    instant: bool
    """Whether one sample is enough for an alert."""
    limit: float = math.inf
    excess: float = math.inf
    place: None = None
    layer: None = None

    @property
    def key(self) -> str:
        """Of its evidence."""
        return self.rule.rule


def run_breaches(
    values: Mapping[str, float | None], lasted: Mapping[str, int], *, scale_falls: bool
) -> dict[str, RunBreach]:
    """Breaches by key. lasted: samples in a row, before this one, in which a key was in breach.

    scale_falls: the loss scale went down since the last sample, so the scaler expects such a gradient norm.
    """
    found: dict[str, RunBreach] = {}
    for rule, serious in ((LOSS, LOSS_SERIOUS_SAMPLES), (GRADIENT_NORM, NORM_SERIOUS_SAMPLES)):
        value = values.get(rule.metric)
        if value is None or math.isfinite(value) or (rule is GRADIENT_NORM and scale_falls):
            continue
        act = lasted.get(rule.rule, 0) + 1 >= serious
        found[rule.rule] = RunBreach(rule, value, "act" if act else "watch", instant=rule is LOSS)
    return found


def loss_jump(loss: float | None, recent: Sequence[float]) -> RunBreach | None:
    """The breach of a loss far above the recent ones. It waits for a second sample, and never asks for a remedy."""
    ratio = LOSS_JUMP.watch_over_median
    if loss is None or not math.isfinite(loss) or len(recent) < JUMP_SAMPLES or ratio is None:
        return None
    limit = ratio * median(recent)
    if loss <= limit:
        return None
    return RunBreach(LOSS_JUMP, loss, "watch", False, limit, loss / limit)


def with_loss(recent: tuple[float, ...], loss: float | None, *, jumped: bool) -> tuple[float, ...]:
    """The recent losses with one more, if it is positive and no jump: a fault is not a new normal."""
    if loss is None or not math.isfinite(loss) or loss <= 0 or jumped:
        return recent
    return (*recent, loss)[-JUMP_SAMPLES:]


def says_something(key: str, values: Mapping[str, float | None], *, scale_falls: bool) -> bool | None:
    """Whether a step speaks about a key; None for a key that is not the run's."""
    for rule in (LOSS, LOSS_JUMP, GRADIENT_NORM):
        if key == rule.rule:
            return values.get(rule.metric) is not None and not (rule is GRADIENT_NORM and scale_falls)
    return None
