"""One named cause of what a step shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fp8_safeguard.monitor.plan import json_ready
from fp8_safeguard.monitor.slots import Slot

RUN = "(run)"
"""Stands for the layer of what is about the whole run."""

Kind = Literal["fp8", "not-fp8", "hardware"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause."""

    cause: str
    """Stable name, such as outlier-channels."""
    kind: Kind
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
    reaches: frozenset[str] = frozenset()
    """Every layer in which it shows at this step; not on the wire."""

    def to_wire(self) -> dict[str, Any]:
        """JSON object, as the evidence of decisions carries it."""
        return {
            "name": self.cause,
            "kind": self.kind,
            "layer": self.layer,
            "slot": None if self.slot is None else self.slot.to_wire(),
            "summary": self.summary,
            "evidence": json_ready(self.evidence),
            "advice": self.advice,
            "value": self.value,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The inverse of to_wire."""
        rest = {name: wire[name] for name in ("kind", "layer", "summary", "evidence", "advice", "value")}
        slot = None if wire["slot"] is None else Slot.from_wire(wire["slot"])
        return cls(cause=wire["name"], slot=slot, **rest)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one sample speaks for; it is a diagnosis once enough samples in a row have."""

    said: Diagnosis
    group: str
    """Of findings of one group at most one is told at a time: the same fault seen elsewhere is no other one."""
    samples: int
    """Samples in a row that it takes."""
    module: str | None = None
    """Whose scalar says so, where one does."""


def numbers(**values: float) -> dict[str, float]:
    """As evidence: what is not known is left out."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def percent(ratio: float) -> str:
    """`0.45 %`, three significant digits."""
    return f"{100.0 * ratio:.3g} %"
