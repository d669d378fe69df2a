"""The decision list in words: reason, evidence, what can be done."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.causes import CauseView, cause_of, cause_view, remedy_of
from fp8_safeguard.dashboards.metrics import format_limit, format_value, metric_view
from fp8_safeguard.dashboards.timeline import describe_target
from fp8_safeguard.dashboards.view import number, slot_words
from fp8_safeguard.monitor.diagnosis import RUN
from fp8_safeguard.monitor.plan import ACTIONS

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
_DEVIATES = {
    "bf16_fallback": "in BF16",
    "format": "in other formats",
    "gradient_smoothing": "with smoothed gradients",
}
_OTHER_SCALES = "with other scales"
PROPOSED_WORDS = {
    "observe": "proposed only: the run is observed, so nothing comes of it; set its mode to advise to approve it",
    "advise": "waits for a person’s approval",
    "enforce": "waits for a person’s approval: it was proposed before the run acted by itself",
    "ended": "proposed only: the run has ended",
}
"""What becomes of a proposal, by the mode that the run has now."""
FIXED = ("observe", "ended")
"""Where no plan changes."""
STATE_WORDS = {
    "proposed": "proposed",
    "approved": "approved, not yet sent",
    "sent": "sent to the trainer",
    "applied": "in force",
    "rejected": "rejected",
    "reverted": "reverted",
    "expired": "expired",
}
OVER_WORDS = "no longer in force: it was restored or replaced"
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
    standing: str
    """Its state in a word or two; advice is never on its way into the plan."""
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


def decision_rows(
    items: Iterable[Mapping[str, Any]],
    *,
    mode: str,
    ended: bool = False,
    plan: Collection[str] | None = None,
) -> list[DecisionRow]:
    """The decisions of a run, as the API orders them, those of one remedy beside each other.

    mode: the run's now; ended: whether its trainer is gone, so that nobody takes up what is approved or reverted. plan: ids of
    the decisions that the plan holds now; without it whatever was applied counts as in force.
    """
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for place, item in enumerate(items):
        groups.setdefault(remedy_of(item) or place, []).append(item)
    now = "ended" if ended else mode
    return [
        _decision_row(item, now, group, over=plan is not None and _is_over(item, plan))
        for group in groups.values()
        for item in group
    ]


def deviates(actions: Iterable[str]) -> str:
    """How layers with these entries of a plan run: `in BF16 and with other scales`."""
    held = {_DEVIATES.get(action, _OTHER_SCALES) for action in actions}
    return " and ".join(words for words in (*_DEVIATES.values(), _OTHER_SCALES) if words in held)


def _is_over(item: Mapping[str, Any], plan: Collection[str]) -> bool:
    """Whether a decision that was in the plan has left it since: restored, replaced or expired. Its state tells only that it was."""
    changes = str(item["action"]) in ACTIONS
    return changes and str(item["state"]) in IN_PLAN and str(item["id"]) not in plan


def _decision_row(
    item: Mapping[str, Any], mode: str, group: Sequence[Mapping[str, Any]], *, over: bool
) -> DecisionRow:
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
        standing=_standing(state, str(item["action"]), over=over),
        state_words=OVER_WORDS if over else _state_words(state, str(item["action"]), mode),
        tone="ended" if over else STATE_TONES.get(state, "ended"),
        step=step,
        when=f"{_verb(state, str(item['action']))} at step {step:,}"
        + ("" if effective is None else f", effective from step {int(effective):,}"),
        actor=str(item.get("actor") or "policy"),
        asks=_asks(item),
        acts=(acts := () if over else _acts(state, str(item["action"]), mode)),
        cause=None if cause is None else cause_view(cause),
        outcome=str(item.get("outcome") or ""),
        history=tuple(_history(item.get("history") or ())),
        waiting=len(waiting) if len(waiting) > 1 and waiting[0] is item and "approve" in acts else 0,
        remedy=_remedy_words(item, len(group)),
    )


def _standing(state: str, action: str, *, over: bool) -> str:
    if action == "advice" and state == "proposed":
        return "advice"
    return "over" if over else state


def _verb(state: str, action: str) -> str:
    """Advice is given, and what nobody has approved is no more than proposed."""
    return "given" if action == "advice" else "proposed" if state == "proposed" else "decided"


def _state_words(state: str, action: str, mode: str) -> str:
    if action == "advice" and state in ("proposed", "approved"):
        # No trainer is ever sent it.
        return "for people, no answer is needed" if state == "proposed" else "taken up"
    return PROPOSED_WORDS.get(mode, state) if state == "proposed" else STATE_WORDS.get(state, state)


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
    if mode in FIXED or action == "advice":
        return ()
    if state == "proposed":
        return ("approve", "reject")
    if state in IN_PLAN and action != "restore":
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
        more = len(signals) - SHOWN_SIGNALS
        yield f"and {more} more signal{'' if more == 1 else 's'}"
    budget = evidence.get("budget") or {}
    if budget.get("after") is not None and budget.get("limit") is not None:
        yield f"fallback budget used then {100 * budget['after']:.3g} % of GEMM FLOPs, limit {100 * budget['limit']:.3g} %"
