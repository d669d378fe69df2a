"""What the layer drawer says, in words, from the layer's document."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.alerts import AlertRow, alert_rows, urgency
from fp8_safeguard.dashboards.causes import CauseView
from fp8_safeguard.dashboards.decisions import DecisionRow, decision_rows
from fp8_safeguard.dashboards.layer_figures import slot_colour
from fp8_safeguard.dashboards.layer_precision import decision_number
from fp8_safeguard.dashboards.metrics import format_limit, format_value, metric_view
from fp8_safeguard.dashboards.view import precision_name, precision_standing
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
    is_expert: bool
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
    also: tuple[str, ...]
    when: str
    opened: str
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
    words: str
    """What becomes of it."""
    title: str
    reason: str
    when: str
    evidence: list[str]
    outcome: str
    cause: CauseView | None
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
    value = format_value(decode_number(worst["value"]), view)
    limit = format_limit(decode_number(worst["limit"]), view)
    return {
        "signal": f"{view.label} {slot_name(worst)}",
        "metric": str(worst["metric"]),
        "slot": slot_name(worst),
        "value": value,
        "limit": f"{'beyond' if worst['beyond'] else 'within'} {worst['severity']} {limit} · {worst['source']}",
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
        is_expert=slot.get("expert") is not None,
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
    """The layer's alerts in the list's words and order, one card each: open ones first, then held, then the past."""
    pairs = [(alert_rows([alert])[0], alert) for alert in alerts]
    return [_alert_card(row, alert) for row, alert in sorted(pairs, key=lambda pair: urgency(pair[0]))]


def _alert_card(row: AlertRow, alert: Mapping[str, Any]) -> AlertCard:
    return AlertCard(
        key=f"alert-{row.ids[0]}",
        tone=row.tone,
        standing=row.standing,
        title=row.title,
        value=row.detail,
        also=row.also,
        when=row.when + (f", raised {row.count} times" if row.count > 1 else ""),
        opened=row.opened,
        origin=str(alert.get("origin") or ""),
        people=list(row.remarks),
        first_step=row.first_step,
        metric=row.metric,
        slot=row.slot,
        actions=_alert_actions(alert),
    )


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
            meaning="close it until its breach clears and comes again, worsens, or another tensor joins",
        ),
    ]


def decision_cards(
    decisions: Iterable[Mapping[str, Any]],
    mode: str,
    *,
    ended: bool = False,
    plan: Collection[str] | None = None,
) -> list[DecisionCard]:
    """The layer's decisions in the list's words, the newest first; plan: ids of those that it holds now."""
    known = list(decisions)
    modes = {str(made["id"]): str(made["mode"]) for made in known}
    return [
        _decision_card(row, modes[row.id]) for row in decision_rows(known, mode=mode, ended=ended, plan=plan)
    ]


def _decision_card(row: DecisionRow, mode: str) -> DecisionCard:
    return DecisionCard(
        id=row.id,
        number=decision_number(row.id),
        state=row.standing,
        words=row.state_words,
        title=row.what,
        reason=row.reason,
        when=f"{row.when}, by {row.actor} ({mode})",
        evidence=list(row.evidence),
        outcome=row.outcome,
        cause=row.cause,
        actions=[DECISION_ACTIONS[act](f"/api/v1/decisions/{row.id}") for act in row.acts],
    )


def _decision_action(label: str, done: str, meaning: str) -> Callable[[str], Action]:
    return lambda path: Action(label=label, path=f"{path}:{label.lower()}", done=done, meaning=meaning)


DECISION_ACTIONS = {
    "approve": _decision_action(
        "Approve",
        "Approved: it is in the plan.",
        "put it into the plan; the trainer applies it a few steps later",
    ),
    "reject": _decision_action("Reject", "Rejected.", "refuse it; it is not proposed again for a while"),
    "revert": _decision_action(
        "Revert",
        "Reverted: it is out of the plan.",
        "take it out of the plan; the trainer goes back a few steps later",
    ),
}


def precision_chips(precision: Mapping[str, str | None]) -> list[tuple[str, str, str]]:
    """(gemm, precision in words, how it stands: "fp8", "left" or "unknown") for each gemm."""
    return [(gemm, precision_name(kind), precision_standing(kind)) for gemm, kind in precision.items()]
