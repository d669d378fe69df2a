"""Names the causes of what a step shows, with their evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fp8_safeguard.monitor.attribution import FLUCTUATING
from fp8_safeguard.monitor.cause import RUN, Diagnosis
from fp8_safeguard.monitor.trends import Trends

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

__all__ = ["RUN", "Diagnosis", "cause_of", "diagnose"]

_ORDER = {"hardware": 0, "fp8": 1, "not-fp8": 2}


def diagnose(view: StepView, trends: Trends) -> tuple[Diagnosis, ...]:
    """The causes of what a step shows, the most certain first: each as it was told first, for as long as it lasts.

    trends: with this step already in it.
    """
    told = [(group, lasting) for group, lasting in trends.causes.items() if lasting.told]
    found = [
        replace(Diagnosis.from_wire(lasting.said), reaches=trends.reaches.get(group, frozenset()))
        for group, lasting in told
    ]
    return tuple(sorted(found, key=lambda cause: (_ORDER[cause.kind], cause.layer or "", cause.cause)))


def cause_of(causes: Sequence[Diagnosis], layer: str, rule: str = "") -> Diagnosis | None:
    """The cause of what a layer shows: the one that the rule names, its own, or one that reaches it from elsewhere.

    That its gradients fluctuate is a sign rather than a cause: any other goes first.
    """
    own = [cause for cause in causes if (cause.layer or RUN) == layer]
    named = [cause for cause in own if cause.cause == rule]
    near = [*own, *(cause for cause in causes if layer in cause.reaches)]
    return next(iter([*named, *(cause for cause in near if cause.cause != FLUCTUATING), *near]), None)
