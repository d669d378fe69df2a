"""Grades decisions: whether what they were made for recovered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.plan import Decision, Plan
from fp8_safeguard.monitor.slots import Slot

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

GRADE_SAMPLES = 8
"""Samples with a decision in force after which it is graded: a loss needs as many to tell its median from its noise."""
FAILED_SAMPLES = 3
"""Samples in a row in which the signal is no better: enough to call it a failure, and to try something else."""
GRADE_WITHIN = 32
"""Samples after which a decision is graded by what was seen, however little that is."""
LOSSES_NEEDED = 4
"""Losses without which nothing is said of whether the loss has recovered."""
LOSSES_BEFORE = 8
"""Losses before a fault that say what the loss was: their median and their highest."""
LOSSES_KEPT = 64
"""Latest losses that are remembered for it."""
MOST_PENDING = 256
"""Decisions that wait for their grade; of more the oldest go ungraded, and say so."""
FAILURES_KEPT = 256

BETTER, WORSE = 0.7, 1.3
"""Of what the signal was: below the one it is better, above the other worse."""

_NAMES = {
    "relative_error": "GEMM error",
    "underflow_ratio": "underflow",
    "saturation_ratio": "saturation",
    "rows_flushed_ratio": "rows flushed",
    "nonfinite_count": "non-finite values",
    "sqnr_db": "SQNR",
}


@dataclass(frozen=True)
class Signal:
    """The reading that a decision was made for."""

    rule: str
    slot: Slot
    metric: str
    value: float

    def to_list(self) -> list[Any]:
        """JSON form."""
        return [self.rule, self.slot.to_wire(), self.metric, encode_number(self.value)]

    @classmethod
    def from_list(cls, stored: Sequence[Any]) -> Self:
        """The inverse of to_list."""
        value = decode_number(stored[3])
        return cls(stored[0], Slot.from_wire(stored[1]), stored[2], math.nan if value is None else value)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A decision in the plan that has no grade yet."""

    decision_id: str
    layer: str
    action: str
    gemm: str | None
    remedy: str | None
    """Name of the measured remedy that it belongs to."""
    version: int
    """The first plan that holds it."""
    signal: Signal | None
    """The worst reading; None for a restore."""
    loss: float | None
    """Median of the losses before the fault."""
    highest: float | None
    """The largest of them."""
    samples: int = 0
    """Samples since it is in force."""
    seen: int = 0
    """Those that showed the signal."""
    failing: int = 0
    """Samples in a row in which it was no better."""
    latest: float | None = None
    """The signal's latest value; None where the GEMM runs in BF16."""
    status: str = "unknown"
    losses: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        numbers = {name: encode_number(getattr(self, name)) for name in ("loss", "highest", "latest")}
        signal = None if self.signal is None else self.signal.to_list()
        return {**vars(self), **numbers, "signal": signal, "losses": list(self.losses)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        numbers = {name: decode_number(stored[name]) for name in ("loss", "highest", "latest")}
        signal = None if stored["signal"] is None else Signal.from_list(stored["signal"])
        return cls(**{**stored, **numbers, "signal": signal, "losses": tuple(stored["losses"])})

    @property
    def is_failure(self) -> bool:
        """Whether it did not help."""
        return self.status in ("unchanged", "worse") and self.failing >= FAILED_SAMPLES

    @property
    def is_due(self) -> bool:
        """Whether it has had its time."""
        return self.seen >= GRADE_SAMPLES or self.samples >= GRADE_WITHIN or self.is_failure

    @property
    def grade(self) -> str:
        """`signal recovered (GEMM error 74 % -> 3.1 %); loss recovered`."""
        return f"signal {self.status}{self._change()}; loss {self._loss()}"

    @property
    def left(self) -> str:
        """Why there is no grade: `not graded: its entry left the plan after 3 samples in force`."""
        samples = f"{self.samples or 'no'} {'sample' if self.samples == 1 else 'samples'}"
        return f"not graded: its entry left the plan after {samples} in force"

    def _change(self) -> str:
        if self.signal is None or self.status == "unknown":
            return ""
        name = _NAMES.get(self.signal.metric, self.signal.metric)
        after = "BF16" if self.latest is None else _number(self.signal.metric, self.latest)
        return f" ({name} {_number(self.signal.metric, self.signal.value)} -> {after})"

    def _loss(self) -> str:
        if self.highest is None or len(self.losses) < LOSSES_NEEDED:
            return "unknown"
        # As noisy as it was before: within what it had reached then.
        return "recovered" if median(self.losses) <= self.highest else "not recovered"


@dataclass(frozen=True)
class Outcomes:
    """What is remembered to grade decisions, and which remedies failed. Immutable."""

    pending: Mapping[str, Pending] = field(default_factory=dict)
    """By decision id."""
    losses: tuple[tuple[int, float], ...] = ()
    """The latest finite losses with their steps."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """The step at which a remedy was seen to fail, by `failure_key`."""

    def noted(self, decisions: Iterable[Decision], plan: Plan) -> Outcomes:
        """With decisions that the plan has taken up."""
        added = {made.id: self._pending(made, plan.version) for made in decisions if _is_change(made)}
        if not added:
            return self
        kept = list({**self.pending, **added}.items())[-MOST_PENDING:]
        return replace(self, pending=dict(kept))

    def crowded_out(self, before: Outcomes, decisions: Iterable[Decision]) -> dict[str, str]:
        """What is told of those that `noted` could not keep, by decision id. before: what it was called on."""
        waited = {**before.pending, **{made.id: made for made in decisions if _is_change(made)}}
        why = f"not graded: more than {MOST_PENDING} later decisions wait for a grade"
        return {name: why for name in waited if name not in self.pending}

    def approved(self, decision: Decision, plan: Plan) -> Outcomes:
        """With one that a person approved."""
        return self.noted([replace(decision, state="approved")], plan)

    def has_failed(self, layer: str, remedy: str) -> bool:
        """Whether that remedy was tried on that layer and did not help."""
        return failure_key(layer, remedy) in self.failed

    def _pending(self, made: Decision, version: int) -> Pending:
        first = made.evidence.get("first_step", made.step)
        before = [loss for step, loss in self.losses if step < first][-LOSSES_BEFORE:]
        known = len(before) >= LOSSES_NEEDED
        remedy = made.evidence.get("remedy")
        return Pending(
            decision_id=made.id,
            layer=made.layer,
            action=made.action,
            gemm=made.target.gemm,
            remedy=remedy["name"] if isinstance(remedy, Mapping) else None,
            version=version,
            signal=_signal(made.evidence.get("signals", ())),
            loss=median(before) if known else None,
            highest=max(before) if known else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal one."""
        return {
            "pending": [each.to_dict() for each in self.pending.values()],
            "losses": [list(pair) for pair in self.losses],
            "failed": dict(self.failed),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        pending = [Pending.from_dict(each) for each in stored.get("pending", ())]
        losses = tuple((step, loss) for step, loss in stored.get("losses", ()))
        return cls({each.decision_id: each for each in pending}, losses, dict(stored.get("failed", {})))


def _is_change(made: Decision) -> bool:
    """Whether the plan has taken it up."""
    return made.action != "advice" and made.state != "proposed"


def failure_key(layer: str, remedy: str) -> str:
    """Key of one remedy at one layer."""
    return f"{layer}|{remedy}"


def grade(outcomes: Outcomes, plan: Plan, view: StepView) -> tuple[Outcomes, dict[str, str]]:
    """After one more step: what is remembered, and by decision id the grades given, or why there is none."""
    loss = view.seen.run.get("loss")
    losses = outcomes.losses
    if loss is not None and math.isfinite(loss):
        losses = (*losses, (view.seen.step, loss))[-LOSSES_KEPT:]
    if not outcomes.pending:
        return replace(outcomes, losses=losses), {}
    held = {entry.decision_id for entry in plan.entries}
    readings = _Readings(view)
    pending, grades, failed = {}, {}, dict(outcomes.failed)
    for name, each in outcomes.pending.items():
        if each.action != "restore" and name not in held:
            grades[name] = each.left
            continue
        if view.seen.plan_version >= each.version:
            each = _followed(each, readings, loss)
        if not each.is_due:
            pending[name] = each
            continue
        grades[name] = each.grade
        if each.remedy is not None and each.is_failure:
            failed[failure_key(each.layer, each.remedy)] = view.seen.step
    kept = dict(list(failed.items())[-FAILURES_KEPT:])
    return Outcomes(pending, losses, kept), grades


def _followed(each: Pending, readings: _Readings, loss: float | None) -> Pending:
    losses = each.losses
    if loss is not None and math.isfinite(loss):
        losses = (*losses, loss)[-GRADE_SAMPLES:]
    each = replace(each, samples=each.samples + 1, losses=losses)
    shown = readings.status(each)
    if shown is None:
        return each
    status, value = shown
    failing = each.failing + 1 if status in ("unchanged", "worse") else 0
    return replace(each, seen=each.seen + 1, status=status, latest=value, failing=failing)


class _Readings:
    """One step's readings, where a decision waits for them."""

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._places: dict[str, list[int]] = {}
        for at, slot in enumerate(view.compiled.slots):
            if slot.variant is None:
                self._places.setdefault(slot.family, []).append(at)
        self._ill = {breach.layer for breach in view.breaches.values() if breach.severity == "act"}

    def status(self, each: Pending) -> tuple[str, float | None] | None:
        """The signal in a word and its value; None where the sample does not show it."""
        view, signal = self._view, each.signal
        if signal is None:
            if not view.sight.shows_layer(each.layer):
                return None
            return ("back" if each.layer in self._ill else "stayed healthy"), None
        if signal.rule == "non-finite":
            origin = view.origin
            still = origin is not None and origin.slot.layer == each.layer
            return ("unchanged", origin.count) if still and origin is not None else ("recovered", 0.0)
        if each.action == "bf16_fallback":
            # What it reads, and what FP8 would give, are as they were: the GEMM no longer shows it.
            return "recovered", None
        value = self._value(signal)
        if value is None:
            return None
        if f"{signal.rule}|{signal.slot.family}" not in view.breaches and self._is_clear(signal):
            return "recovered", value
        ratio = _ratio(signal.metric, signal.value, value)
        return ("better" if ratio <= BETTER else "worse" if ratio >= WORSE else "unchanged"), value

    def _is_clear(self, signal: Signal) -> bool:
        """Whether no rule on the same reading is broken: a decision's rule may name two readings together."""
        family = signal.slot.family
        return not any(
            breach.rule.metric == signal.metric and breach.slot.family == family
            for breach in self._view.breaches.values()
        )

    def _value(self, signal: Signal) -> float | None:
        places = self._places.get(signal.slot.family, ())
        values = [float(self._view.measures[signal.metric][at]) for at in places]
        known = [value for value in values if not math.isnan(value)]
        if not known:
            return None
        return min(known) if _falls(signal.metric) else max(known)


def _signal(listed: Iterable[Mapping[str, Any]]) -> Signal | None:
    """The reading that weighs most: a GEMM's result before what it reads, then the first."""
    found = sorted(listed, key=lambda item: "gemm" not in item["slot"])
    if not found:
        return None
    value = decode_number(found[0]["value"])
    slot = Slot.from_wire(found[0]["slot"])
    return Signal(found[0]["rule"], slot, found[0]["metric"], math.nan if value is None else value)


def _falls(metric: str) -> bool:
    """Whether low values are bad."""
    return metric.endswith("_db") or metric == "cosine"


def _ratio(metric: str, before: float, after: float) -> float:
    """How bad it is, as a multiple of how bad it was; infinite where it is no number."""
    if metric.endswith("_db"):
        return float(10.0 ** ((before - after) / 20.0))
    if metric == "cosine":
        before, after = 1.0 - before, 1.0 - after
    if not math.isfinite(after):
        return 1.0 if not math.isfinite(before) else math.inf
    return 0.0 if not math.isfinite(before) else after / before if before else math.inf


def _number(metric: str, value: float) -> str:
    if metric.endswith("_db"):
        return f"{value:.3g} dB"
    if metric.endswith("_ratio") or metric == "relative_error":
        return f"{100.0 * value:.3g} %"
    return f"{value:.4g}"
