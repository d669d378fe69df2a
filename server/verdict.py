"""What a run's state means: why, and what to do next."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8_safeguard.dashboards.causes import CAUSES, cause_view, cause_words
from fp8_safeguard.dashboards.decisions import deviates
from fp8_safeguard.dashboards.metrics import format_value, metric_view
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.nonfinite import place_of, way_out, when
from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.monitor.runwatch import LOSS
from fp8_safeguard.monitor.slots import Slot


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that a verdict is made of."""

    state: str
    """One of the run's states."""
    health: str
    """What alerts and plan say, whether or not the run still reports."""
    mode: str
    worst_alert: Mapping[str, Any] | None
    """The open alert to look at first."""
    what_if: Mapping[str, Any] | None
    """An alert of a layer that runs in high precision."""
    plan: Sequence[Mapping[str, Any]]
    silent_seconds: float
    """Since the newest sample."""
    last_step: int | None
    conflicts: int
    """Samples of the newest attempt that were refused because others are stored in their place."""
    last_conflict_step: int | None
    ended_groups: int
    groups: int
    waiting: Sequence[Mapping[str, Any]] = ()
    """Alerts of which nothing was seen since a remedy took effect, each with `waits_since`."""
    first_step: int | None = None
    """That of the run's first sample."""
    measured: bool = True
    """Whether any sample holds a layer: a run of which nothing is measured is not healthy by anything seen."""
    loss: Any = None
    """The newest, as the API shows it."""
    loss_alert: Mapping[str, Any] | None = None
    """The open alert on a loss that is no number."""
    advice: str | None = None
    """What the policy advises about the worst alert where it has nothing to switch."""
    causes: Sequence[Mapping[str, Any]] = ()
    """The causes that stand, the one to look at first before the others."""
    explained: Mapping[Any, int] = field(default_factory=dict)
    """By the id of an alert the place, among the causes, of the one that it follows from."""


def verdict_of(now: Situation) -> dict[str, str]:
    """`why` and `next`, one sentence each."""
    why, then = _verdict(now)
    if now.state not in ("stale", "ended"):
        why, then = _with_cause(now, why, then)
    if now.conflicts:
        why += f"; {_refused(now)}: this run id and attempt are used twice"
        then = "give each trainer its own run id, and a resumed one a new attempt id; then: " + then
    return {"why": why, "next": then}


def _with_cause(now: Situation, why: str, then: str) -> tuple[str, str]:
    """With the cause that stands: in front where it is not FP8's, so that nobody looks for a precision that helps."""
    cause = next((cause for cause in now.causes if _speaks_of(now, cause)), None)
    if cause is None or cause["name"] == "nonfinite-origin":
        # Where non-finite values begin is what the alert says already, and whether a precision helps.
        return why, then
    view = cause_view(cause)
    others = len(now.causes) - 1
    more = f" (and {others} more cause{'' if others == 1 else 's'})" if others else ""
    if view.kind == "fp8":
        about = _alert_told(now)
        elsewhere = about is not None and cause.get("layer") not in (None, about.get("layer"))
        where = f" of layer {cause['layer']!r}" if elsewhere else ""
        return f"{why}; cause: {cause_words(cause)}{where}{more}", then
    # What nothing is wrong with in FP8 is no reassurance where something else is.
    told = f"{view.kind_words}: {view.summary or view.title}{more}; {'in FP8 ' if now.state == 'healthy' else ''}{why}"
    what = view.advice or (CAUSES[view.name].helps if view.name in CAUSES else then)
    return told, f"{what}; no precision helps" if view.kind == "not-fp8" else what


def _speaks_of(now: Situation, cause: Mapping[str, Any]) -> bool:
    """Whether a cause belongs to what the verdict tells: an alert that follows from it, or what the plan holds.

    What is not FP8's goes before any verdict on FP8, so it always does.
    """
    if cause.get("kind") != "fp8":
        return True
    about = _alert_told(now)
    if about is None:
        return bool(_held_by(now.plan) & set(cause["decisions"]))
    place = now.explained.get(about.get("id"))
    return place is not None and now.causes[place] is cause


def _alert_told(now: Situation) -> Mapping[str, Any] | None:
    """The alert that the sentence of an unstable or watched run is about."""
    if now.state not in ("unstable", "watch"):
        return None
    return now.worst_alert if now.worst_alert is not None else now.what_if


def _held_by(plan: Sequence[Mapping[str, Any]]) -> set[Any]:
    return {entry.get("decision_id") for entry in plan}


def _refused(now: Situation) -> str:
    samples = "1 sample was" if now.conflicts == 1 else f"{now.conflicts} samples were"
    return f"{samples} refused (the last at step {now.last_conflict_step})"


def _verdict(now: Situation) -> tuple[str, str]:
    if now.state == "ended":
        return _ended(now)
    if now.state == "stale":
        return _stale(now)
    if now.state in ("unstable", "watch") and now.worst_alert is not None:
        waits = f"; {why_waiting(now.waiting)}" if now.state == "watch" and now.waiting else ""
        return why_alert(now.worst_alert) + waits, _next_step(now)
    if now.state == "watch" and now.waiting:
        return why_waiting(now.waiting), _UNTIL_MEASURED
    if now.state == "watch" and now.what_if is not None:
        would_act = now.what_if["severity"] == "act"
        return (
            f"in FP8 this would be {'trouble' if would_act else 'worth watching'}, but the layer runs in high precision: "
            f"{why_alert(now.what_if)}",
            "keep that layer in high precision when the others go to FP8"
            if would_act
            else "watch that layer when it goes to FP8 with the others",
        )
    if now.state == "fallback":
        return (
            f"the plan holds a fault: {_deviations(now.plan)}; the map goes on showing what FP8 would do",
            f"{_where_cause(now)}; a gemm returns to FP8 once its numbers are healthy again",
        )
    held = f"; the plan holds {_deviations(now.plan)}" if now.plan else ""
    if not now.measured:
        return f"nothing was measured: no sample holds a layer{held}", _SEE_COVERAGE
    return f"every judged slot is within its thresholds{held}", "nothing to do"


def _where_cause(now: Situation) -> str:
    """What to look at behind a fault that the plan holds: its cause, where one is named."""
    held = _held_by(now.plan)
    cause = next((cause for cause in now.causes if held & set(cause["decisions"])), None)
    if cause is None:
        return "find the cause in the decisions"
    view = cause_view(cause)
    return f"look at the cause: {view.summary or cause_words(cause)} ({', '.join(cause['decisions'])})"


def _ended(now: Situation) -> tuple[str, str]:
    how, then = _ending(now)
    return f"ended {how}; last sample at step {now.last_step}", then


def _ending(now: Situation) -> tuple[str, str]:
    """How a run ended, the word that matters first, and what to do."""
    done = "compare it, or export it"
    if now.health == "unstable":
        return f"unstable: {'; '.join(_endings(now))}", _remedy(now) or _LOOK
    waits = _numbered(now.waiting[0], why_waiting(now.waiting, ended=True)) if now.waiting else ""
    if now.health == "watch" and now.worst_alert is not None:
        watched = _numbered(now.worst_alert, why_alert(now.worst_alert))
        return f"with an alert worth watching: {watched}{'; ' if waits else ''}{waits}", done
    if now.health == "watch" and waits:
        return f"healthy as far as it was measured: {waits}", done
    if now.health == "watch":
        would_act = now.what_if is not None and now.what_if["severity"] == "act"
        would = "in trouble" if would_act else "worth watching, no more,"
        return f"healthy, but layers that ran in high precision would have been {would} in FP8", done
    if now.health == "fallback":
        return f"with its faults held by the plan: {_deviations(now.plan)}", done
    held = f": the plan holds {_deviations(now.plan)}" if now.plan else ""
    if not now.measured:
        return f"with nothing measured: no sample holds a layer{held}", _SEE_COVERAGE
    return f"healthy{held}", done


_SEE_COVERAGE = (
    "look at which layers the hooks observe, and why not the others: Guard.coverage(), or the run's page"
)
_LOOK = "look at its earliest alert before using what it has learnt"


def _endings(now: Situation) -> list[str]:
    said = []
    if now.loss_alert is not None:
        said.append(_numbered(now.loss_alert, f"non-finite loss{_since(now.loss_alert)}"))
    elif is_broken(now.loss):
        said.append(f"its loss is {now.loss}")
    if now.worst_alert is not None and now.worst_alert.get("rule") != LOSS.rule:
        said.append(_numbered(now.worst_alert, why_alert(now.worst_alert)))
    return said


def is_broken(value: Any) -> bool:
    """Whether a number of the API was sent, and is none."""
    number = decode_number(value)
    return number is not None and not math.isfinite(number)


def _numbered(alert: Mapping[str, Any], text: str) -> str:
    return f"{text}, alert {alert['id']}" if "id" in alert else text


def _stale(now: Situation) -> tuple[str, str]:
    minutes = f"no sample for {now.silent_seconds / 60:.1f} min"
    if now.ended_groups:
        quiet = now.groups - now.ended_groups
        return (
            f"{minutes}: {now.ended_groups} of {now.groups} groups {'has' if now.ended_groups == 1 else 'have'} ended, "
            f"{quiet} stopped without a word",
            "look at the log of the groups that did not end",
        )
    before = "" if now.health == "healthy" else f"; before that it was {now.health}"
    if now.health == "unstable":
        before += f": {'; '.join(_endings(now))}"
    return (
        f"{minutes}: the trainer stopped, or the network is down{before}",
        "look at the trainer's log, then at the address its client reports to; what it measured meanwhile is in its "
        "spool and arrives when it reports again. If it is over, mark the run as ended",
    )


def _deviations(plan: Sequence[Mapping[str, Any]]) -> str:
    """What the plan changes, the first two layers by name."""
    names = [repr(layer) for layer in sorted({entry["layer"] for entry in plan})]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2])}{more} {deviates(entry['action'] for entry in plan)}"


def why_alert(alert: Mapping[str, Any]) -> str:
    """An alert in one sentence."""
    slot = alert.get("slot") or {}
    others = len(alert.get("slots") or ()) - 1
    more = f", and {others} more of its tensors" if others > 0 else ""
    if alert.get("rule") == NON_FINITE.rule and slot:
        begin = f"non-finite values begin in {place_of(Slot.from_wire(slot))}"
        return f"{begin} {_when(alert)}{more}"
    return f"{_place(alert)}: {_value(alert)}{_since(alert)}{more}"


def _when(alert: Mapping[str, Any]) -> str:
    return when(int(alert["first_step"]), alert.get("clean_step"))


def _since(alert: Mapping[str, Any]) -> str:
    """` since step 40`; of what is NaN or Inf the last clean sample, too, where steps without a sample lie between."""
    began = _when(alert)
    return f" since {began.removeprefix('at ')}" if began.startswith("at ") else f", begun {began}"


def _place(alert: Mapping[str, Any]) -> str:
    slot = alert.get("slot") or {}
    where = slot.get("gemm") or " ".join(part for part in (slot.get("operand"), slot.get("layout")) if part)
    return f"{alert['layer']!r} {where}".strip() if alert.get("layer") else "the whole run"


def _value(alert: Mapping[str, Any]) -> str:
    """What was measured, and the limit that it is beyond."""
    view = metric_view(str(alert.get("metric")))
    value, limit = (decode_number(alert.get(name)) for name in ("value", "threshold"))
    beyond = "" if limit is None else f" (limit {format_value(limit, view)})"
    return f"{view.label} {format_value(value, view)}{beyond}"


_UNTIL_MEASURED = "nothing to do: a few clear measurements resolve it, a breach makes the run unstable again"


def why_waiting(alerts: Sequence[Mapping[str, Any]], *, ended: bool = False) -> str:
    """Alerts of which nothing was seen since a remedy, in one sentence: the first by name, and how many more."""
    first, since = alerts[0], alerts[0]["waits_since"]
    others = len(alerts) - 1
    more = f"; {others} more alert{' waits' if others == 1 else 's wait'} likewise" if others else ""
    waits = "was not measured enough to tell" if ended else "waits for its next measurement"
    return (
        f"{_place(first)} {waits}: no breach of it since decision {since['decision']} took effect at step {since['step']} "
        f"(the last: {_value(first)} at step {first['last_step']}){more}"
    )


# A level that fits most models: a small one may lie beyond it in health.
_FROM_THE_START = (
    "nothing is decided on this alone. It was so from the first sample on: how this model measures, and no change. If it trains "
    "well, let a baseline learn it (fp8-safeguard baseline learn)"
)


def _next_step(now: Situation) -> str:
    remedy = _remedy(now)
    if remedy is not None:
        return remedy
    if now.state == "watch":
        if now.plan:
            return f"watch it; what is decided and in force, {_deviations(now.plan)}, stays so meanwhile"
        if _was_always_so(now):
            return _FROM_THE_START
        return "watch it: nothing is decided on this alone"
    if now.mode == "enforce":
        return "the policy acts by itself; look at the decisions"
    if now.mode == "advise":
        return "approve or reject the proposed decision"
    return "the run is only observed; change its mode to advise or enforce to let a remedy take effect"


def _was_always_so(now: Situation) -> bool:
    """Whether the first sample was beyond a level already that health may lie beyond; NaN and Inf are never health."""
    alert = now.worst_alert
    if alert is None or now.first_step is None or alert.get("rule") == NON_FINITE.rule:
        return False
    return alert.get("threshold") is not None and int(alert["first_step"]) <= now.first_step


def _remedy(now: Situation) -> str | None:
    """What people can do where no change of precision helps; None where one may, or nothing is known to help."""
    alert = now.worst_alert
    if alert is None:
        return None
    if alert.get("rule") == NON_FINITE.rule and alert.get("slot"):
        live = [item["slot"] for item in alert.get("slots") or () if not item.get("over")]
        weights = any(slot.get("operand") == "w" for slot in live)
        slot, first_step = Slot.from_wire(alert["slot"]), int(alert["first_step"])
        helps = way_out(slot, first_step, alert.get("clean_step"), weights=weights)
        if helps:
            return f"no precision helps: {helps}"
    if alert.get("layer") is None:
        return "look at the loss and the learning rate, and at the earliest alert of a layer"
    return None if now.advice is None else f"nothing to switch here: {now.advice}"
