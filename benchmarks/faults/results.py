"""A finished arm, read back from its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADVICE = "advice"
NO_CHANGE = (ADVICE, "restore")
"""Decisions that take nothing out of its configured precision."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one arm did."""

    arm: Mapping[str, Any]
    run: str
    losses: Mapping[int, float]
    validation: float
    alerts: Sequence[Mapping[str, Any]]
    """As they opened and worsened, in order of steps."""
    decisions: Sequence[Mapping[str, Any]]
    """The oldest first."""
    ranges: Mapping[str, float]
    """How far a healthy run went, by name."""
    skipped_steps: int
    step_seconds: float
    seconds: float

    @classmethod
    def read(cls, file: Path) -> Result:
        """From the file that run_arm wrote."""
        found = json.loads(file.read_text())
        return cls(
            arm=found["arm"],
            run=found["run"],
            losses={int(step): float(loss) for step, loss in found["losses"].items()},
            validation=float(found["validation"]),
            alerts=found["alerts"],
            decisions=found["decisions"],
            ranges=found.get("ranges", {}),
            skipped_steps=found["skipped_steps"],
            step_seconds=float(found["step_seconds"]),
            seconds=float(found["seconds"]),
        )

    def detected(self, onset: int) -> int | None:
        """First step at or after the onset with an alert at the act level, or a decision; None: never."""
        acting = [alert["step"] for alert in self.alerts if alert["severity"] == "act"]
        steps = [step for step in (*acting, *(one["step"] for one in self.decisions)) if step >= onset]
        return min(steps, default=None)

    def watched(self, onset: int) -> int | None:
        """First step at or after the onset at which an alert of any level opened."""
        return min((a["step"] for a in self.alerts if a["step"] >= onset), default=None)

    def rules(self, onset: int) -> set[str]:
        """Rules of the alerts that opened at or after the onset."""
        return {alert["rule"] for alert in self.alerts if alert["step"] >= onset}

    def cause(self, onset: int) -> Mapping[str, Any] | None:
        """What the first decision from the onset on that names a cause says it is."""
        for one in self.decisions:
            if one["step"] >= onset and one.get("cause"):
                found: Mapping[str, Any] = one["cause"]
                return found
        return None

    def changes(self, since: int = 0) -> list[Mapping[str, Any]]:
        """Decisions that changed a precision, from that step on."""
        return [one for one in self.decisions if one["action"] not in NO_CHANGE and one["step"] >= since]

    def actions(self) -> str:
        """What was done, in short: `3 bf16_fallback, 24 scale_multiplier=1`."""
        counts: dict[str, int] = {}
        for one in self.changes():
            value = one.get("value")
            name = one["action"] if value is None else f"{one['action']}={_short(value)}"
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

    def by_what_if(self) -> int:
        """How many of the changes a what-if measurement chose."""
        return sum(bool(one.get("what_if")) for one in self.changes())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)
