"""Alerts: breaches that lasted, one alert for each rule of a layer.

A watch breach opens an alert with its second consecutive sample, an act breach at once. Every slot of the layer that breaks
the same rule is a signal of the same alert; the worst one speaks for it. A signal is over once its slot was seen clear for
some samples (a sample without the slot says nothing either way), and the alert is resolved once all its signals are over.
What speaks of the whole run, such as its loss, belongs to no layer.

An alert is `held` while every one of its signals is covered: the GEMMs that it is about run in BF16, by the plan or as the
layer is configured, so that the numbers say what FP8 would do, not what it does.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.runwatch import GRADIENT_NORM, LOSS, RunBreach
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import Slot, gemms_of

COOL_DOWN_STEPS = 50
"""A breach that comes back within so many steps of its resolution re-opens its alert instead of raising another."""

CURED_STEPS = 4
"""A fallback takes effect two steps after its evidence; non-finite values seen later than two more were not FP8's."""


NO_NUMBERS = ("non-finite", LOSS.rule, GRADIENT_NORM.rule)
"""Rules on NaN and Inf, which may have begun in any step since the last clean sample."""

AnyBreach = Breach | RunBreach


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
class Signal:
    """One slot's breach of an alert's rule."""

    key: str
    """Of its evidence."""
    severity: str
    """watch or act."""
    slot: Slot | None
    """None for what speaks of the whole run."""
    metric: str
    value: float
    """The latest value in breach."""
    threshold: float | None
    """None where any number would do, and the value is none."""
    origin: str
    """Where the threshold comes from."""
    excess: float
    """How far over the threshold, as a ratio."""
    first_step: int
    """First step of the breach, before hysteresis."""
    last_step: int
    """The latest step in breach."""
    clean_step: int | None = None
    """Of what is NaN or Inf the latest sample before `first_step` in which nothing of the run was."""
    what_if: bool = False
    """Whether it says what FP8 would do: the GEMMs concerned ran in a higher precision as they are configured."""
    over: bool = False
    """Whether it has cleared while the alert's other signals have not."""

    def to_dict(self) -> dict[str, Any]:
        """JSON object; the slot as on the wire."""
        numbers = {name: encode_number(getattr(self, name)) for name in ("value", "threshold", "excess")}
        return {**vars(self), **numbers, "slot": None if self.slot is None else self.slot.to_wire()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        numbers = {name: decode_number(stored[name]) for name in ("value", "threshold", "excess")}
        slot = None if stored["slot"] is None else Slot.from_wire(stored["slot"])
        return cls(**{**fields, **numbers, "slot": slot})


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One open alert."""

    rule: str
    layer: str | None
    """None: of the whole run."""
    step: int
    """The step whose sample opened it."""
    signals: tuple[Signal, ...]
    """The worst first; those that are over last."""

    @property
    def key(self) -> str:
        """What stays the same from sample to sample."""
        return alert_key(self.rule, self.layer)

    @property
    def worst(self) -> Signal:
        """The signal that speaks for the alert."""
        return self.signals[0]

    @property
    def severity(self) -> str:
        """watch or act: that of the worst signal."""
        return self.worst.severity

    @property
    def first_step(self) -> int:
        """First step of the first breach."""
        return min(signal.first_step for signal in self.signals)

    @property
    def clean_step(self) -> int | None:
        """The last clean sample before the first breach."""
        return min(self.signals, key=lambda signal: signal.first_step).clean_step

    @property
    def last_step(self) -> int:
        """The latest step in breach."""
        return max(signal.last_step for signal in self.signals)

    @property
    def live(self) -> tuple[Signal, ...]:
        """The signals that are not over."""
        return tuple(signal for signal in self.signals if not signal.over)

    def to_wire(self) -> dict[str, Any]:
        """As the API shows it: the worst signal's fields, and all signals in `slots`."""
        listed = [signal.to_dict() for signal in self.signals]
        for item in listed:
            del item["key"], item["excess"], item["clean_step"]
        shown = {name: listed[0][name] for name in ("slot", "metric", "value", "threshold", "origin")}
        return {
            "rule": self.rule,
            "severity": self.severity,
            "scope": "run" if self.layer is None else "layer",
            "layer": self.layer,
            **shown,
            "first_step": self.first_step,
            "clean_step": self.clean_step,
            "step": self.step,
            "last_step": self.last_step,
            "what_if": all(signal.what_if for signal in self.live),
            "slots": listed,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal alert."""
        return {**vars(self), "signals": [signal.to_dict() for signal in self.signals]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; also reads an alert of version 0.1, which had one slot."""
        if "signals" in stored:
            signals = tuple(Signal.from_dict(item) for item in stored["signals"])
            return cls(rule=stored["rule"], layer=stored["layer"], step=stored["step"], signals=signals)
        slot = Slot.from_wire(stored["slot"])
        only = Signal.from_dict({**stored, "key": f"{stored['rule']}|{slot.family}", "excess": 1.0})
        return cls(rule=stored["rule"], layer=slot.layer, step=stored["step"], signals=(only,))


def alert_key(rule: str, layer: str | None) -> str:
    """Key of the alert of one rule and layer. A rule's name holds no bar."""
    return f"{rule}|{layer or ''}"


def join_alerts(alerts: Iterable[Alert]) -> dict[str, Alert]:
    """Alerts by key; those of one key as one."""
    joined: dict[str, Alert] = {}
    for alert in alerts:
        other = joined.get(alert.key)
        if other is not None:
            signals = _ranked([*other.signals, *alert.signals])
            alert = replace(alert, step=min(alert.step, other.step), signals=signals)
        joined[alert.key] = alert
    return joined


def is_held(signals: Iterable[Signal], rule: str, plan: Plan) -> bool:
    """Whether every signal that is not over is covered by what runs in BF16."""
    fallen = fallbacks(plan)
    live = [signal for signal in signals if not signal.over]
    if rule == "non-finite":
        if any(signal.slot is not None and signal.slot.operand == "w" for signal in live):
            # No precision helps a weight that holds them.
            return False
        # The origin, which speaks for the others: what holds it holds what follows from it.
        live = live[:1]
    return bool(live) and all(signal.what_if or _covered(signal, rule, fallen, plan) for signal in live)


def _covered(signal: Signal, rule: str, fallen: Collection[tuple[str, str]], plan: Plan) -> bool:
    slot = signal.slot
    if slot is None:
        return False
    concerned = gemms_of(slot)
    if rule == "non-finite":
        # It names one place in one direction; what begins there and goes on in BF16 is no fault of FP8.
        named = [gemm for gemm in concerned if (slot.layer, gemm) in fallen]
        since = [entry.not_before_step for entry in plan.entries if entry.layer == slot.layer]
        return bool(named) and signal.last_step < max(since) + CURED_STEPS
    return bool(concerned) and all((slot.layer, gemm) in fallen for gemm in concerned)


def follow_evidence(
    evidence: Mapping[str, Evidence],
    breaches: Mapping[str, AnyBreach],
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


def _extended(old: Evidence | None, breach: AnyBreach, step: int) -> Evidence:
    act = 1 if breach.severity == "act" else 0
    if old is None or old.clear > 0:
        return Evidence(step, 1, act)
    return Evidence(old.first_step, old.watch + 1, old.act + 1 if act else 0)


def follow_alerts(
    alerts: Mapping[str, Alert],
    evidence: Mapping[str, Evidence],
    breaches: Mapping[str, AnyBreach],
    step: int,
    hysteresis: int,
    what_if: Callable[[AnyBreach], bool] = lambda breach: False,
    clean_step: int | None = None,
) -> dict[str, Alert]:
    """Open alerts after this step: those with a signal whose evidence is not yet gone, and the new ones.

    clean_step: the latest step before this one in which nothing was NaN or Inf.
    """
    signals = {key: _faded(alert.signals, evidence) for key, alert in alerts.items()}
    layers = {key: (alert.rule, alert.layer) for key, alert in alerts.items()}
    for key, breach in breaches.items():
        at = alert_key(breach.rule.rule, breach.layer)
        known = signals.get(at, {}).get(key)
        lasted = evidence[key].watch >= hysteresis or breach.severity == "act" or breach.instant
        if lasted or (known is not None and not known.over):
            began = evidence[key].first_step, clean_step if breach.rule.rule in NO_NUMBERS else None
            if known is not None and not known.over:
                began = known.first_step, known.clean_step
            signals.setdefault(at, {})[key] = _signal(key, breach, *began, step, what_if(breach))
            layers[at] = (breach.rule.rule, breach.layer)
    after = {}
    for key, held in signals.items():
        if not all(signal.over for signal in held.values()):
            rule, layer = layers[key]
            opened = alerts[key].step if key in alerts else step
            after[key] = Alert(rule=rule, layer=layer, step=opened, signals=_ranked(held.values()))
    return after


def _faded(signals: Iterable[Signal], evidence: Mapping[str, Evidence]) -> dict[str, Signal]:
    return {
        signal.key: signal if signal.over or signal.key in evidence else replace(signal, over=True)
        for signal in signals
    }


def _signal(
    key: str, breach: AnyBreach, first_step: int, clean_step: int | None, step: int, what_if: bool
) -> Signal:
    return Signal(
        key=key,
        severity=breach.severity,
        slot=breach.place,
        metric=breach.rule.metric,
        value=breach.value,
        threshold=breach.limit if math.isfinite(breach.limit) else None,
        origin=breach.rule.origin,
        excess=breach.excess,
        first_step=first_step,
        last_step=step,
        clean_step=clean_step,
        what_if=what_if,
    )


def _ranked(signals: Iterable[Signal]) -> tuple[Signal, ...]:
    def badness(signal: Signal) -> tuple[Any, ...]:
        return (signal.over, signal.severity != "act", -signal.excess, signal.key)

    return tuple(sorted(signals, key=badness))
