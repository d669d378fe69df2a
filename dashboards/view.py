"""What the pages say, in words, from the API's dictionaries."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.metrics import format_value, metric_view, short_number
from fp8_safeguard.dashboards.timeline import describe_target

STATES = ("healthy", "watch", "unstable", "fallback", "stale", "ended", "unknown")
ALERT_CONTEXT_STEPS = 40
"""Steps shown before the first bad one when an alert is opened: enough to see what healthy looked like."""


@dataclass(frozen=True, kw_only=True)
class Stat:
    """One number of the status header."""

    label: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One line of the worst-layers table."""

    layer: str
    state: str
    signal: str
    value: str
    threshold: str
    excess: str
    step: str
    precision: str
    metric: str


@dataclass(frozen=True, kw_only=True)
class AlertRow:
    """One entry of the alert list; `from_step` is where opening it zooms to."""

    layer: str
    severity: str
    title: str
    detail: str
    first_step: int
    from_step: int
    metric: str
    slot: str
    active: bool


def number(value: Any) -> float | None:
    """A number of the API: null stays None, "NaN" and "Infinity" become floats."""
    return None if value is None else float(value)


def state_of(detail: Mapping[str, Any]) -> str:
    """The run's state, "unknown" for one this page has no words for."""
    state = str(detail.get("state") or "unknown")
    return state if state in STATES else "unknown"


def run_stats(detail: Mapping[str, Any]) -> list[Stat]:
    """The numbers of the status header, in reading order."""
    step, overhead = detail.get("last_step"), number(detail.get("overhead_ratio"))
    return [
        Stat(
            label="step", value="–" if step is None else f"{step:,}", meaning="last optimizer step reported"
        ),
        Stat(
            label="loss", value=_plain(detail.get("loss")), meaning="training loss of the last reported step"
        ),
        Stat(
            label="grad norm",
            value=_plain(detail.get("gradient_norm")),
            meaning="gradient norm of the last reported step",
        ),
        Stat(
            label="budget used",
            value=_percent(number(detail.get("fallback_budget_used_ratio"))),
            meaning="share of the BF16 fallback budget in use, counted in GEMM FLOPs",
        ),
        Stat(label="mode", value=str(detail.get("mode") or "–"), meaning="observe, advise or enforce"),
        Stat(
            label="overhead",
            value=_percent(overhead),
            meaning="time the monitor adds to a training step, as the trainer reports it",
        ),
    ]


def layer_rows(items: Iterable[Mapping[str, Any]]) -> list[LayerRow]:
    """The worst-layers table: each layer's worst signal against the threshold it is judged by."""
    return [_layer_row(item) for item in items]


def _layer_row(item: Mapping[str, Any]) -> LayerRow:
    worst = item.get("worst") or {}
    metric = str(worst.get("metric") or "")
    view = metric_view(metric)
    value, threshold = number(worst.get("value")), number(worst.get("threshold"))
    step = worst.get("step")
    return LayerRow(
        layer=str(item["layer"]),
        state=str(item.get("state") or "unknown"),
        signal=f"{view.label} {slot_words(worst)}".strip() if metric else "–",
        value=format_value(value, view),
        threshold=format_value(threshold, view),
        excess=_excess(value, threshold),
        step="–" if step is None else f"{step:,}",
        precision=precision_words(item.get("precision") or {}),
        metric=metric,
    )


def slot_words(place: Mapping[str, Any]) -> str:
    """Where a value was measured: "dgrad", "x row" or nothing for a whole layer."""
    if place.get("gemm"):
        return str(place["gemm"])
    return " ".join(str(place[part]) for part in ("operand", "layout") if place.get(part))


def precision_words(precision: Mapping[str, Any]) -> str:
    """Which GEMMs left FP8: "bf16: fprop, dgrad", or "fp8" when none did."""
    moved: dict[str, list[str]] = {}
    for gemm, kind in precision.items():
        if kind != "fp8":
            moved.setdefault(str(kind), []).append(str(gemm))
    return "; ".join(f"{kind}: {', '.join(gemms)}" for kind, gemms in moved.items()) or "fp8"


def alert_rows(items: Iterable[Mapping[str, Any]]) -> list[AlertRow]:
    """The alert list, active ones and acting ones first, each with its earliest bad step."""
    rows = [_alert_row(item) for item in items]
    return sorted(rows, key=lambda row: (not row.active, row.severity != "act", row.first_step))


def _alert_row(item: Mapping[str, Any]) -> AlertRow:
    slot = item.get("slot") or {}
    metric = str(item.get("metric") or "")
    view = metric_view(metric)
    first, last = int(item.get("first_step") or 0), item.get("last_step")
    value, threshold = number(item.get("value")), number(item.get("threshold"))
    active = str(item.get("state") or "open") not in ("closed", "resolved")
    seen = f"since step {first:,}" if active else f"steps {first:,} to {last or first:,}"
    limit = f" (limit {format_value(threshold, view)})" if threshold is not None else ""
    return AlertRow(
        layer=str(item.get("layer") or slot.get("layer") or ""),
        severity=str(item.get("severity") or "watch"),
        title=f"{view.label} {slot_words(slot)}".strip() if metric else str(item.get("rule") or "alert"),
        detail=f"{format_value(value, view)}{limit} {seen}",
        first_step=first,
        from_step=max(0, first - ALERT_CONTEXT_STEPS),
        metric=metric,
        slot=slot_words(slot),
        active=active,
    )


def decision_words(decision: Mapping[str, Any]) -> str:
    """One decision as a sentence fragment: action, layer, target."""
    target = describe_target(decision.get("target") or {})
    return f"{str(decision['action']).replace('_', ' ')} · {decision.get('layer', '')} · {target}"


def _plain(value: Any) -> str:
    return format_value(number(value), metric_view(""))


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{short_number(round(ratio * 100, 2))} %"


def _excess(value: float | None, threshold: float | None) -> str:
    if value is None or threshold is None or not threshold > 0:
        return ""
    return f"{short_number(value / threshold, 2)}×"
