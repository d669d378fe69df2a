"""The decision list in words: reason, evidence, what can be done."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.causes import CauseView, cause_of, cause_view, remedy_of
from fp8_safeguard.dashboards.metrics import format_limit, format_value, metric_view
from fp8_safeguard.dashboards.timeline import describe_target
from fp8_safeguard.dashboards.view import number, slot_words
from fp8_safeguard.monitor.diagnosis import RUN

ACTION_WORDS = {
    "bf16_fallback": "to BF16",
    "scale_multiplier": "scale multiplier",
    "scale_rounding": "scale rounding",
    "format": "format",
    "amax_history": "amax history",
    "margin": "scale margin",
    "gradient_smoothing": "gradient smoothing",
    "restore": "back to FP8",
    "advice": "advice",
}
STATE_WORDS = {
    "proposed": "proposed",
    "approved": "approved, not yet sent",
    "sent": "sent to the trainer",
    "applied": "in force",
    "rejected": "rejected",
    "reverted": "reverted",
    "expired": "expired",
}
STATE_TONES = {"proposed": "watch", "approved": "fallback", "sent": "fallback", "applied": "fallback"}
IN_PLAN = ("approved", "sent", "applied")
SHOWN_SIGNALS = 3


@dataclass(frozen=True, kw_only=True)
class DecisionRow:
    """One decision with what led to it and what a person may still do."""

    id: str
    layer: str
    what: str
    """Target and action: "dgrad to BF16"."""
    reason: str
    evidence: tuple[str, ...]
    state: str
    state_words: str
    tone: str
    step: int
    when: str
    actor: str
    asks: bool
    """Whether it waits for a person's answer; advice waits for none."""
    acts: tuple[str, ...]
    """Of approve, reject, revert: those that its state and the run's mode allow."""
    cause: CauseView | None
    outcome: str
    """What came of it, once it has been graded."""
    history: tuple[str, ...]
    """Who did what when, the oldest first."""
    waiting: int
    """Proposals of the same remedy, itself included, that wait together; said by the first of them only, else 0."""
    remedy: str
    """Which remedy it is a part of, in words; empty for one that stands alone."""


def decision_rows(items: Iterable[Mapping[str, Any]], *, mode: str) -> list[DecisionRow]:
    """The decisions of a run, as the API orders them, those of one remedy beside each other."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for place, item in enumerate(items):
        groups.setdefault(remedy_of(item) or place, []).append(item)
    return [_decision_row(item, mode, group) for group in groups.values() for item in group]


def _decision_row(item: Mapping[str, Any], mode: str, group: Sequence[Mapping[str, Any]]) -> DecisionRow:
    state, step, layer = str(item["state"]), int(item["step"]), layer_of(item)
    effective = item.get("effective_step")
    value = "" if item.get("value") is None else f" {item['value']}"
    action = ACTION_WORDS.get(str(item["action"]), str(item["action"]).replace("_", " "))
    reason = str(item.get("reason") or "")
    cause = cause_of(item)
    waiting = [one for one in group if _asks(one)]
    return DecisionRow(
        id=str(item["id"]),
        layer=layer,
        what=f"{describe_target(item.get('target') or {})} {action}{value}",
        # The layer stands above it already.
        reason=reason.removeprefix(f"{layer!r}: ").removeprefix(f"{layer}: ").replace(" %", "\u00a0%"),
        evidence=tuple(_evidence(item.get("evidence") or {})),
        state=state,
        state_words=_state_words(state, str(item["action"])),
        tone=STATE_TONES.get(state, "ended"),
        step=step,
        when=f"decided at step {step:,}"
        + ("" if effective is None else f", effective from step {int(effective):,}"),
        actor=str(item.get("actor") or "policy"),
        asks=_asks(item),
        acts=(acts := _acts(state, str(item["action"]), mode)),
        cause=None if cause is None else cause_view(cause),
        outcome=str(item.get("outcome") or ""),
        history=tuple(_history(item.get("history") or ())),
        waiting=len(waiting) if len(waiting) > 1 and waiting[0] is item and "approve" in acts else 0,
        remedy=_remedy_words(item, len(group)),
    )


def _state_words(state: str, action: str) -> str:
    if action == "advice" and state in ("proposed", "approved"):
        # No trainer is ever sent it.
        return "for people, no answer is needed" if state == "proposed" else "taken up"
    return STATE_WORDS.get(state, state)


def _remedy_words(item: Mapping[str, Any], shown: int) -> str:
    remedy = (item.get("evidence") or {}).get("remedy")
    named = remedy if isinstance(remedy, Mapping) else {"name": remedy}
    entries = named.get("entries", shown)
    if remedy is None or not isinstance(entries, int) or entries < 2:
        return ""
    return f"one of {entries} parts of the remedy {named.get('name')}"


def layer_of(item: Mapping[str, Any]) -> str:
    """The layer that a decision is about; empty for one on the whole run."""
    layer = str(item.get("layer") or "")
    return "" if layer == RUN else layer


def _history(acts: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for act in acts:
        at = str(act.get("at") or "")[:19].replace("T", " ")
        step = "" if act.get("step") is None else f" at step {int(act['step']):,}"
        outcome = (act.get("facts") or {}).get("outcome")
        said = f": {outcome}" if outcome else ""
        yield f"{at} UTC: {act.get('what')}{step} by {act.get('actor')}{said}"


def _asks(item: Mapping[str, Any]) -> bool:
    return str(item["state"]) == "proposed" and str(item["action"]) != "advice"


def _acts(state: str, action: str, mode: str) -> tuple[str, ...]:
    if state == "proposed" and action != "advice" and mode != "observe":
        return ("approve", "reject")
    if state in IN_PLAN and action not in ("advice", "restore") and mode != "observe":
        return ("revert",)
    return ()


def _evidence(evidence: Mapping[str, Any]) -> Iterable[str]:
    signals: Sequence[Mapping[str, Any]] = evidence.get("signals") or ()
    for signal in signals[:SHOWN_SIGNALS]:
        view = metric_view(str(signal.get("metric") or ""))
        where = slot_words(signal.get("slot") or {})
        text = f"{view.label} {where} {format_value(number(signal.get('value')), view)}"
        limit = format_limit(number(signal.get("threshold")), view)
        since = signal.get("first_step")
        yield f"{text}, limit {limit}" + ("" if since is None else f", since step {int(since):,}")
    if len(signals) > SHOWN_SIGNALS:
        yield f"and {len(signals) - SHOWN_SIGNALS} more signals"
    budget = evidence.get("budget") or {}
    if budget.get("after") is not None and budget.get("limit") is not None:
        yield f"fallback budget used then {100 * budget['after']:.3g} % of GEMM FLOPs, limit {100 * budget['limit']:.3g} %"
