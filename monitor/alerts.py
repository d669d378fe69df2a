"""Alerts: breaches that lasted, opened and resolved with hysteresis.

A watch breach opens an alert with its second consecutive sample, an act breach at once. An alert is resolved once its slot
was seen clear for some samples; a sample without the slot says nothing either way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import Slot


@dataclass(frozen=True)
class Evidence:
    """How long one rule has been breached at one slot."""

    first_step: int
    """First step of the current row of consecutive breaches."""
    watch: int = 1
    """Consecutive samples in breach."""
    act: int = 0
    """Consecutive samples at the act level."""
    clear: int = 0
    """Samples seen clear since the last breach."""

    def to_list(self) -> list[int]:
        """JSON form."""
        return [self.first_step, self.watch, self.act, self.clear]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One open alert."""

    rule: str
    severity: str
    """watch or act."""
    slot: Slot
    metric: str
    value: float
    """The latest value in breach."""
    threshold: float
    origin: str
    """Where the threshold comes from."""
    first_step: int
    """First step of the breach, before hysteresis."""
    step: int
    """The step whose sample opened the alert."""
    last_step: int
    """The latest step in breach."""

    @property
    def layer(self) -> str:
        """The layer's name."""
        return self.slot.layer

    def to_dict(self) -> dict[str, Any]:
        """JSON object; the slot as on the wire."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **fields,
            "layer": self.layer,
            "slot": self.slot.to_wire(),
            "value": encode_number(self.value),
            "threshold": encode_number(self.threshold),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        fields = {name: stored[name] for name in cls.__dataclass_fields__}
        numbers = {name: decode_number(stored[name]) for name in ("value", "threshold")}
        return cls(**{**fields, **numbers, "slot": Slot.from_wire(stored["slot"])})


def follow_evidence(
    evidence: Mapping[str, Evidence],
    breaches: Mapping[str, Breach],
    observed: Callable[[str], bool],
    step: int,
    clear_samples: int,
) -> dict[str, Evidence]:
    """Evidence after this step. `observed` says whether the sample can speak about a key that is not in breach."""
    after = {key: _extended(evidence.get(key), breach, step) for key, breach in breaches.items()}
    for key, old in evidence.items():
        if key in breaches:
            continue
        clear = old.clear + 1 if observed(key) else old.clear
        if clear < clear_samples:
            after[key] = Evidence(old.first_step, old.watch, old.act, clear)
    return after


def _extended(old: Evidence | None, breach: Breach, step: int) -> Evidence:
    act = 1 if breach.severity == "act" else 0
    if old is None or old.clear > 0:
        return Evidence(step, 1, act)
    return Evidence(old.first_step, old.watch + 1, old.act + 1 if act else 0)


def follow_alerts(
    alerts: Mapping[str, Alert],
    evidence: Mapping[str, Evidence],
    breaches: Mapping[str, Breach],
    step: int,
    hysteresis: int,
) -> dict[str, Alert]:
    """Open alerts after this step: those whose evidence is not yet gone, and the new ones."""
    after = {key: alert for key, alert in alerts.items() if key in evidence}
    for key, breach in breaches.items():
        lasted = evidence[key].watch >= hysteresis or breach.severity == "act" or breach.instant
        if key in after or lasted:
            opened = after.get(key)
            after[key] = Alert(
                rule=breach.rule.rule,
                severity=breach.severity,
                slot=breach.slot,
                metric=breach.rule.metric,
                value=breach.value,
                threshold=breach.limit,
                origin=breach.rule.origin,
                first_step=opened.first_step if opened else evidence[key].first_step,
                step=opened.step if opened else step,
                last_step=step,
            )
    return after
