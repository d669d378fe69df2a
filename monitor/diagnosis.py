"""Names the cause of what a step shows, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.trends import Trends

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

RUN = "(run)"
"""Stands for the layer of what is about the whole run."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause."""

    cause: str
    """Stable name, such as outlier-channels."""
    kind: Literal["fp8", "not-fp8", "hardware"]
    """Whether precision can help."""
    layer: str | None = None
    """The earliest layer concerned; None: the whole run."""
    slot: Slot | None = None
    """Where it shows first."""
    summary: str
    """One sentence for people, with the numbers."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: str | None = None
    """What people can do about it."""
    value: float | None = None
    """A proposed value, such as that of a norm's gain."""

    def to_wire(self) -> dict[str, Any]:
        """JSON object, as the evidence of decisions carries it."""
        return {
            "name": self.cause,
            "kind": self.kind,
            "layer": self.layer,
            "slot": None if self.slot is None else self.slot.to_wire(),
            "summary": self.summary,
            "evidence": dict(self.evidence),
            "advice": self.advice,
            "value": self.value,
        }


def diagnose(view: StepView, trends: Trends) -> tuple[Diagnosis, ...]:
    """The causes of what a step shows, the most certain first."""
    return ()
