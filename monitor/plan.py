"""The plan, its entries, and the decisions that change it.

A plan is desired state: it lists only deviations from the configured precision, is sent whole, and applying it twice
changes nothing. A decision is one audited change of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from fp8_safeguard.monitor.numbers import encode_number
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import GEMMS, INT64_MAX, LAYOUTS, OPERANDS, is_count

ACTIONS = (
    "bf16_fallback",
    "scale_multiplier",
    "scale_rounding",
    "format",
    "amax_history",
    "margin",
    "gradient_smoothing",
)
"""What an entry of a plan may ask for."""

DECISION_ACTIONS = (*ACTIONS, "restore", "advice")
"""A decision may also undo an entry, or only speak to people."""

DECISION_STATES = ("proposed", "approved", "rejected", "sent", "applied", "reverted", "expired")


class PlanError(ValueError):
    """A target, entry, plan or decision that is not one."""


@dataclass(frozen=True)
class Target:
    """What an action is applied to: one gemm of a layer, one operand in one layout, or the whole layer."""

    gemm: str | None = None
    operand: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        named = (self.gemm is not None, self.operand is not None, self.layout is not None)
        if named not in ((True, False, False), (False, True, True), (False, False, False)):
            raise PlanError(f"a target is a gemm, an operand with its layout, or neither, not {quoted(self)}")
        for value, choices in ((self.gemm, GEMMS), (self.operand, OPERANDS), (self.layout, LAYOUTS)):
            if value is not None and value not in choices:
                raise PlanError(f"target {quoted(value)} is not one of {', '.join(choices)}")

    @property
    def key(self) -> str:
        """Text that identifies the target within its layer."""
        return self.gemm or (f"{self.operand} {self.layout}" if self.operand else "layer")

    def to_wire(self) -> dict[str, Any]:
        """`{"gemm": ...}`, `{"operand": ..., "layout": ...}` or `{"layer": true}`."""
        if self.gemm:
            return {"gemm": self.gemm}
        return {"operand": self.operand, "layout": self.layout} if self.operand else {"layer": True}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The inverse of to_wire. Raises PlanError."""
        if not isinstance(wire, Mapping) or not ({"gemm", "operand", "layer"} & set(wire)):
            raise PlanError(f"a target names a gemm, an operand or layer: true, not {quoted(wire)}")
        return cls(wire.get("gemm"), wire.get("operand"), wire.get("layout"))


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """One deviation from the configured precision."""

    layer: str
    target: Target
    action: str
    value: float | str | None = None
    """The action's argument: a multiplier, a format name; None where it needs none."""
    decision_id: str
    not_before_step: int
    expires_step: int | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise PlanError(f"action {quoted(self.action)} is not one of {', '.join(ACTIONS)}")
        for name in ("layer", "decision_id"):
            if not isinstance(getattr(self, name), str):
                raise PlanError(f"{name} is text, not {quoted(getattr(self, name))}")
        if not (self.value is None or isinstance(self.value, str) or is_finite_number(self.value)):
            raise PlanError(f"value {quoted(self.value)} is neither a finite number, a name nor null")
        if not is_count(self.not_before_step):
            raise PlanError(f"not_before_step is a step, 0 or above, not {quoted(self.not_before_step)}")
        if self.expires_step is not None and not is_count(self.expires_step):
            raise PlanError(f"expires_step is a step, 0 or above, or null, not {quoted(self.expires_step)}")

    @cached_property
    def place(self) -> tuple[str, str, str]:
        """What this entry decides; a plan holds one entry for each place."""
        return (self.layer, self.target.key, self.action)

    def to_wire(self) -> dict[str, Any]:
        """JSON object of the contract."""
        return {
            "layer": self.layer,
            "target": self.target.to_wire(),
            "action": self.action,
            "value": self.value,
            "decision_id": self.decision_id,
            "not_before_step": self.not_before_step,
            "expires_step": self.expires_step,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The inverse of to_wire. Raises PlanError."""
        _require(wire, "entry", ("layer", "target", "action", "decision_id", "not_before_step"))
        return cls(
            layer=wire["layer"],
            target=Target.from_wire(wire["target"]),
            action=wire["action"],
            value=wire.get("value"),
            decision_id=wire["decision_id"],
            not_before_step=wire["not_before_step"],
            expires_step=wire.get("expires_step"),
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One audited change of the plan, or a word to people, with the evidence that led to it."""

    id: str
    run: str
    step: int
    """Step of the evidence."""
    layer: str
    target: Target
    action: str
    value: float | str | None = None
    rule: str
    """Stable name of the rule that fired."""
    reason: str
    """One sentence for people, with the numbers."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Metric values, thresholds, and the first step that breached them."""
    mode: str
    state: str
    actor: str = "policy"
    not_before_step: int
    effective_step: int | None = None
    outcome: str | None = None

    def __post_init__(self) -> None:
        if self.action not in DECISION_ACTIONS:
            raise PlanError(f"action {quoted(self.action)} is not one of {', '.join(DECISION_ACTIONS)}")
        if self.state not in DECISION_STATES:
            raise PlanError(f"state {quoted(self.state)} is not one of {', '.join(DECISION_STATES)}")

    def to_wire(self) -> dict[str, Any]:
        """JSON object of the contract; non-finite evidence as words."""
        return {
            "id": self.id,
            "run": self.run,
            "step": self.step,
            "layer": self.layer,
            "target": self.target.to_wire(),
            "action": self.action,
            "value": self.value,
            "rule": self.rule,
            "reason": self.reason,
            "evidence": json_ready(self.evidence),
            "mode": self.mode,
            "state": self.state,
            "actor": self.actor,
            "not_before_step": self.not_before_step,
            "effective_step": self.effective_step,
            "outcome": self.outcome,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The inverse of to_wire. Raises PlanError."""
        _require(wire, "decision", ("id", "run", "step", "layer", "target", "action", "rule", "reason"))
        _require(wire, "decision", ("mode", "state", "not_before_step"))
        fields = {name: wire[name] for name in cls.__dataclass_fields__ if name in wire}
        return cls(**{**fields, "target": Target.from_wire(wire["target"])})

    def entry(self, step: int | None = None) -> PlanEntry:
        """The plan entry that this decision asks for. Raises PlanError on restore and advice.

        step: from which an entry with a time to live (`ttl_steps` in the evidence) is counted; that of the decision if None.
        """
        ttl = self.evidence.get("ttl_steps")
        return PlanEntry(
            layer=self.layer,
            target=self.target,
            action=self.action,
            value=self.value,
            decision_id=self.id,
            not_before_step=self.not_before_step,
            expires_step=None if ttl is None else step_after(self.step if step is None else step, int(ttl)),
        )


@dataclass(frozen=True)
class Plan:
    """All deviations from the configured precision, under one version."""

    version: int = 0
    entries: tuple[PlanEntry, ...] = ()

    def with_decision(self, decision: Decision, step: int | None = None) -> "Plan":
        """The plan after that decision; the same plan where it changes nothing. step: as in `Decision.entry`.

        An action replaces the entry at its place, and those of decisions that the evidence says it `replaces`. `restore`
        drops every entry of its target. `advice` changes nothing.
        """
        if decision.action == "advice":
            return self
        if decision.action == "restore":
            spot = (decision.layer, decision.target.key)
            kept = tuple(entry for entry in self.entries if entry.place[:2] != spot)
            return self._replaced(kept)
        entry = decision.entry(step)
        gone = decision.evidence.get("replaces", ())
        others = tuple(
            other for other in self.entries if other.place != entry.place and other.decision_id not in gone
        )
        present = any(other == entry for other in self.entries)
        return self if present else self._replaced((*others, entry))

    def renewed(self, place: tuple[str, str, str], expires_step: int) -> "Plan":
        """The plan with a later end of the entry at that place."""
        kept = (
            replace(entry, expires_step=expires_step) if entry.place == place else entry
            for entry in self.entries
        )
        return self._replaced(tuple(kept))

    def without_decision(self, decision_id: str) -> "Plan":
        """The plan with that decision undone; the same plan where it holds no entry of it."""
        return self._replaced(tuple(entry for entry in self.entries if entry.decision_id != decision_id))

    def emptied(self) -> "Plan":
        """No deviation at all: the kill switch."""
        return self._replaced(())

    def find(self, layer: str, target: Target, action: str) -> PlanEntry | None:
        """The entry at that place, if any."""
        return self._by_place.get((layer, target.key, action))

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str, str], PlanEntry]:
        return {entry.place: entry for entry in self.entries}

    @cached_property
    def fallen(self) -> frozenset[tuple[str, str]]:
        """(layer, gemm) of everything that the plan runs in BF16."""
        return frozenset(
            (entry.layer, gemm)
            for entry in self.entries
            if entry.action == "bf16_fallback"
            for gemm in ((entry.target.gemm,) if entry.target.gemm else GEMMS)
        )

    def _replaced(self, entries: tuple[PlanEntry, ...]) -> "Plan":
        if entries == self.entries:
            return self
        ordered = tuple(sorted(entries, key=lambda entry: entry.place))
        return replace(self, version=self.version + 1, entries=ordered)

    def to_wire(self) -> dict[str, Any]:
        """JSON object of the contract."""
        return {"version": self.version, "entries": [entry.to_wire() for entry in self.entries]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The inverse of to_wire. Raises PlanError."""
        _require(wire, "plan", ("version", "entries"))
        if not is_count(wire["version"]):
            raise PlanError(f"version is a whole number, 0 or above, not {quoted(wire['version'])}")
        if not isinstance(wire["entries"], (list, tuple)):
            raise PlanError(f"entries is a list, not {quoted(wire['entries'])}")
        return cls(wire["version"], tuple(PlanEntry.from_wire(entry) for entry in wire["entries"]))


def step_after(step: int, steps: int = 1) -> int:
    """The step that many later; at most 2^63 - 1, the last that a sample may have and a database keeps."""
    return min(step + steps, INT64_MAX)


def is_finite_number(value: Any) -> bool:
    """Whether a value is a number that an action can take; a bool is not, nor is an integer beyond float64."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def json_ready(value: Any) -> Any:
    """A copy that JSON can hold: numpy numbers as plain ones, non-finite ones as words."""
    if isinstance(value, Mapping):
        return {str(name): json_ready(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value if isinstance(value, bool) else encode_number(value)


def _require(wire: Any, what: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in wire] if isinstance(wire, Mapping) else list(names)
    if missing:
        raise PlanError(f"{what} {quoted(wire)} lacks {', '.join(missing)}")
