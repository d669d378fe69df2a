"""What the layer drawer says, in words, from the layer's document."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.layer_figures import slot_colour
from fp8_safeguard.dashboards.layer_precision import decision_number
from fp8_safeguard.dashboards.metrics import format_value, metric_view, short_number
from fp8_safeguard.dashboards.timeline import describe_target
from fp8_safeguard.monitor.numbers import decode_number

TABLE_COLUMNS = (
    ("underflow_ratio", "underflow"),
    ("saturation_ratio", "saturation"),
    ("rows_flushed_ratio", "flushed rows"),
    ("sqnr_db", "SQNR"),
    ("tile_sqnr_p01_db", "worst 1 %"),
    ("cosine_distortion", "1 − cosine"),
    ("relative_error", "rel. error"),
    ("kurtosis", "kurtosis"),
    ("amax", "amax"),
    ("nonfinite_count", "NaN, Inf"),
)
"""Metrics of the table of slots, with their short headings."""

DRAWER_METRICS = ("gradient_distortion", *(metric for metric, _ in TABLE_COLUMNS), "zero_ratio")
TONES = {"act": "unstable", "watch": "watch"}
ALERT_TONES = {"open": None, "held": "fallback", "resolved": "ended"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One value of the table of slots."""

    text: str
    tone: str
    title: str


@dataclass(frozen=True, kw_only=True)
class SlotRow:
    """One slot with its newest values."""

    name: str
    note: str
    step: str
    late: bool
    """Whether its newest sample is older than the layer's newest."""
    cells: list[Cell]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A button that chooses a slot."""

    name: str
    chosen: bool
    colour: str


@dataclass(frozen=True, kw_only=True)
class Action:
    """A button that changes something: where it posts to, and what it says once done."""

    label: str
    path: str
    done: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class AlertCard:
    """One alert of the layer."""

    key: str
    tone: str
    standing: str
    title: str
    value: str
    when: str
    origin: str
    people: list[str]
    first_step: int
    metric: str
    slot: str
    actions: list[Action]


@dataclass(frozen=True, kw_only=True)
class DecisionCard:
    """One decision about the layer."""

    id: str
    number: str
    state: str
    title: str
    reason: str
    when: str
    evidence: list[str]
    outcome: str
    actions: list[Action]


def slot_name(slot: Mapping[str, Any]) -> str:
    """How a slot is named beside its layer: "dgrad", "x row"."""
    return str(slot.get("gemm") or f"{slot.get('operand')} {slot.get('layout')}")


def default_metric(document: Mapping[str, Any], wanted: str) -> str:
    """The metric the drawer opens with: the page's, unless nobody judges that one and another signal is beyond its limit."""
    metric = wanted if wanted in DRAWER_METRICS else DRAWER_METRICS[0]
    worst = document["worst"]
    judged = any(metric in slot["thresholds"] for slot in document["slots"])
    return str(worst["metric"]) if worst and not judged and worst["beyond"] else metric


def default_slots(document: Mapping[str, Any], metric: str) -> list[str]:
    """The slots of a metric that somebody judges; all that have it where nobody judges any."""
    own = [slot for slot in document["slots"] if slot.get("expert") is None]
    if metric == "gradient_distortion":
        return [name for slot in own if is_gradient(name := slot_name(slot))]
    measured = [slot for slot in own if slot["metrics"].get(metric) is not None]
    judged = [slot for slot in measured if metric in slot["thresholds"]]
    return [slot_name(slot) for slot in judged or measured]


def is_gradient(slot: str) -> bool:
    """Whether gradient_distortion looks at the slot."""
    return slot in ("dgrad", "wgrad") or slot.startswith("dy ")


def slot_choices(document: Mapping[str, Any], metric: str, chosen: Sequence[str], theme: str) -> list[Choice]:
    """A button for each slot that has the metric."""
    name_of = "cosine_distortion" if metric == "gradient_distortion" else metric
    found = []
    for slot in document["slots"]:
        name = slot_name(slot)
        if slot.get("expert") is not None or slot["metrics"].get(name_of) is None:
            continue
        if metric != "gradient_distortion" or is_gradient(name):
            found.append(Choice(name=name, chosen=name in chosen, colour=slot_colour(name, theme)))
    return found


def block_slots(document: Mapping[str, Any]) -> list[str]:
    """Slots with quantisation blocks, the one with the worst hundredth first."""
    held = [slot for slot in document["slots"] if slot["tile_sqnr_hist"] and slot.get("expert") is None]
    return [slot_name(slot) for slot in sorted(held, key=_worst_hundredth)]


def _worst_hundredth(slot: Mapping[str, Any]) -> float:
    value = decode_number(slot["metrics"]["tile_sqnr_p01_db"])
    return float("inf") if value is None else value


def worst_words(worst: Mapping[str, Any] | None) -> dict[str, str]:
    """The worst signal: what, how much, which limit and why."""
    if worst is None:
        return {}
    view = metric_view(str(worst["metric"]))
    value, limit = (format_value(decode_number(worst[name]), view) for name in ("value", "limit"))
    return {
        "signal": f"{view.label} {slot_name(worst)}",
        "metric": str(worst["metric"]),
        "slot": slot_name(worst),
        "value": value,
        "limit": f"{'beyond' if worst['beyond'] else 'limit'} {worst['severity']} {limit} · {worst['source']}",
        "origin": str(worst["origin"]),
        "step": f"{worst['step']:,}",
        "definition": view.definition,
    }


def slot_rows(document: Mapping[str, Any]) -> list[SlotRow]:
    """The table of slots, in model order, experts last."""
    newest = max((slot["step"] for slot in document["slots"] if slot["step"] is not None), default=None)
    return [_slot_row(slot, newest) for slot in document["slots"]]


def _slot_row(slot: Mapping[str, Any], newest: int | None) -> SlotRow:
    notes = [
        f"expert {slot['expert']}" if slot.get("expert") is not None else "",
        slot["format"].upper() if slot["format"] != "e4m3" else "",
        "emulated" if slot.get("emulated") else "",
    ]
    return SlotRow(
        name=slot_name(slot),
        note=", ".join(note for note in notes if note),
        step="–" if slot["step"] is None else f"{slot['step']:,}",
        late=slot["step"] is not None and slot["step"] != newest,
        cells=[_cell(slot, metric) for metric, _ in TABLE_COLUMNS],
    )


def _cell(slot: Mapping[str, Any], metric: str) -> Cell:
    view = metric_view(metric)
    breach = slot["breaches"].get(metric)
    limits = [limit_words(metric, limit) for limit in slot["thresholds"].get(metric, [])]
    return Cell(
        text=format_value(decode_number(slot["metrics"][metric]), view),
        tone=TONES.get(breach, "") if breach else "",
        title="; ".join([view.label, *([f"beyond {breach}"] if breach else []), *limits]),
    )


def limit_words(metric: str, limit: Mapping[str, Any]) -> str:
    """A limit with where it comes from."""
    value = format_value(float(limit["value"]), metric_view(metric))
    return f"{limit['severity']} {value} ({limit['source']}: {limit['origin']})"


def alert_cards(alerts: Iterable[Mapping[str, Any]]) -> list[AlertCard]:
    """The layer's alerts: open ones first, then what a fallback holds, then the past; the newest first."""
    order = ("open", "held", "resolved")
    known = sorted(alerts, key=lambda alert: order.index(alert["state"]) if alert["state"] in order else 3)
    return [_alert_card(alert) for alert in known]


def _alert_card(alert: Mapping[str, Any]) -> AlertCard:
    metric = str(alert.get("metric") or "")
    view = metric_view(metric)
    slot = alert.get("slot") or {}
    value, limit = (format_value(decode_number(alert.get(name)), view) for name in ("value", "threshold"))
    state, severity = str(alert["state"]), str(alert["severity"])
    where = slot_name(slot) if slot.get("gemm") or slot.get("operand") else ""
    expert = "" if slot.get("expert") is None else f", expert {slot['expert']}"
    first, last = int(alert["first_step"]), int(alert.get("last_step") or alert["first_step"])
    times = int(alert.get("occurrences") or 1)
    return AlertCard(
        key=f"alert-{alert['id']}",
        tone=ALERT_TONES.get(state) or TONES.get(severity, "watch"),
        standing=severity if state == "open" else state,
        title=f"{view.label if metric else alert['rule']} {where}{expert}".strip(),
        value=f"{value}, limit {limit}",
        when=(f"steps {first:,} to {last:,}" if state == "resolved" else f"since step {first:,}")
        + (f", raised {times} times" if times > 1 else ""),
        origin=str(alert.get("origin") or ""),
        people=_people(alert),
        first_step=first,
        metric=metric,
        slot=where,
        actions=_alert_actions(alert),
    )


def _people(alert: Mapping[str, Any]) -> list[str]:
    """What people did about an alert."""
    found = []
    if alert.get("acknowledged"):
        found.append(f"acknowledged by {alert.get('acknowledged_by') or 'somebody'}")
    if alert.get("silenced"):
        found.append(f"silenced until {str(alert.get('silenced_until'))[:16].replace('T', ' ')} UTC")
    if alert.get("resolved_by"):
        found.append(f"resolved by {alert['resolved_by']}")
    return found


def _alert_actions(alert: Mapping[str, Any]) -> list[Action]:
    if alert["state"] == "resolved":
        return []
    path = f"/api/v1/alerts/{alert['id']}"
    acknowledge = Action(
        label="Acknowledge", path=f"{path}:ack", done="Alert acknowledged.", meaning="say that you know of it"
    )
    return [
        *([] if alert.get("acknowledged") else [acknowledge]),
        Action(
            label="Silence 1 h",
            path=f"{path}:silence",
            done="Alert silenced for one hour.",
            meaning="keep quiet about it for an hour; it stays open",
        ),
        Action(
            label="Resolve",
            path=f"{path}:resolve",
            done="Alert resolved.",
            meaning="close it; it opens again if the breach comes back",
        ),
    ]


def decision_cards(decisions: Iterable[Mapping[str, Any]], mode: str) -> list[DecisionCard]:
    """The layer's decisions, the newest first."""
    return [_decision_card(decision, mode) for decision in decisions]


def _decision_card(decision: Mapping[str, Any], mode: str) -> DecisionCard:
    value = "" if decision.get("value") is None else f" {decision['value']}"
    effective = decision.get("effective_step")
    when = f"decided on step {int(decision['step']):,}"
    if effective is not None:
        when += f", in force from step {int(effective):,}"
    return DecisionCard(
        id=str(decision["id"]),
        number=decision_number(str(decision["id"])),
        state=str(decision["state"]),
        title=f"{action_words(str(decision['action']))}{value}: {describe_target(decision['target'])}",
        reason=str(decision["reason"]),
        when=f"{when}, by {decision.get('actor') or 'policy'} ({decision['mode']})",
        evidence=evidence_lines(decision.get("evidence") or {}),
        outcome=str(decision.get("outcome") or ""),
        actions=_decision_actions(decision, mode),
    )


def action_words(action: str) -> str:
    """An action in words: "BF16 fallback"."""
    return action.replace("_", " ").replace("bf16", "BF16")


def _decision_actions(decision: Mapping[str, Any], mode: str) -> list[Action]:
    """Proposals are approved or rejected, unless the run is only observed; what is in the plan can be reverted."""
    path, state = f"/api/v1/decisions/{decision['id']}", decision["state"]
    if decision["action"] in ("advice", "restore"):
        return []
    if state == "proposed" and mode != "observe":
        return [
            Action(
                label="Approve", path=f"{path}:approve", done="Approved: it is in the plan.",
                meaning="put it into the plan; the trainer applies it a few steps later",
            ),
            Action(
                label="Reject", path=f"{path}:reject", done="Rejected.",
                meaning="refuse it; it is not proposed again for a while",
            ),
        ]  # fmt: skip
    if state in ("approved", "sent", "applied"):
        return [
            Action(
                label="Revert", path=f"{path}:revert", done="Reverted: it is out of the plan.",
                meaning="take it out of the plan; the trainer goes back a few steps later",
            )
        ]  # fmt: skip
    return []


def evidence_lines(evidence: Mapping[str, Any]) -> list[str]:
    """The signals behind a decision, one a line, and the budget it took."""
    lines = [_signal_line(signal) for signal in evidence.get("signals") or () if isinstance(signal, Mapping)]
    budget = evidence.get("budget")
    if isinstance(budget, Mapping) and {"before", "after", "limit"} <= budget.keys():
        shares = [short_number(float(budget[name]) * 100) for name in ("before", "after", "limit")]
        lines.append("BF16 budget {} % → {} % of the GEMM FLOPs, limit {} %".format(*shares))
    return lines


def _signal_line(signal: Mapping[str, Any]) -> str:
    view = metric_view(str(signal.get("metric") or ""))
    slot = signal.get("slot") or {}
    value, limit = (format_value(decode_number(signal.get(name)), view) for name in ("value", "threshold"))
    expert = "" if slot.get("expert") is None else f", expert {slot['expert']}"
    since = "" if signal.get("first_step") is None else f", since step {int(signal['first_step']):,}"
    return f"{view.label} {slot_name(slot)}{expert}: {value} ({signal.get('severity')} limit {limit}){since}"


def precision_chips(precision: Mapping[str, str]) -> list[tuple[str, str, bool]]:
    """(gemm, format in words, whether it left FP8) for each gemm."""
    return [(gemm, kind.upper(), kind != "fp8") for gemm, kind in precision.items()]
