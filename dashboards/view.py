"""What the pages say, in words, from the API's dictionaries."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.metrics import MetricView, format_value, metric_view, short_number

STATES = ("healthy", "watch", "unstable", "fallback", "stale", "ended", "unknown")
STANDINGS = ("open", "held", "over")
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
    """One entry of the alert list: a rule's alerts of one layer; opening it zooms to `from_step`."""

    layer: str
    severity: str
    standing: str
    """"open", "held" (the layer's fallback keeps the damage away) or "over"."""
    title: str
    detail: str
    when: str
    first_step: int
    from_step: int
    metric: str
    slot: str


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
        excess=_excess(value, threshold, view),
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


def alert_rows(items: Iterable[Mapping[str, Any]], *, held: Collection[str] = ()) -> list[AlertRow]:
    """The alert list, grouped by layer and rule: what needs somebody first, then what a fallback holds, then the past.

    `held` are the layers that run in BF16.
    """
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for item in items:
        standing = _standing(item, held)
        key = (str(item.get("layer") or ""), str(item["rule"]), str(item["severity"]), standing)
        groups.setdefault(key, []).append(item)
    rows = [_alert_row(*key, group) for key, group in groups.items()]
    return sorted(
        rows, key=lambda row: (STANDINGS.index(row.standing), row.severity != "act", row.first_step)
    )


def _standing(item: Mapping[str, Any], held: Collection[str]) -> str:
    if item["state"] != "open":
        return "over"
    return "held" if item.get("layer") in held else "open"


def _alert_row(
    layer: str, rule: str, severity: str, standing: str, group: Sequence[Mapping[str, Any]]
) -> AlertRow:
    worst = max(group, key=_alert_excess)
    metric = str(worst.get("metric") or "")
    view = metric_view(metric)
    first = min(int(item["first_step"]) for item in group)
    last = max(int(item["last_step"]) for item in group)
    slots = sorted({slot_words(item.get("slot") or {}) for item in group})
    limit = number(worst.get("threshold"))
    return AlertRow(
        layer=layer,
        severity=severity,
        standing=standing,
        title=f"{view.label if metric else rule} {', '.join(slots)}".strip(),
        detail=format_value(number(worst.get("value")), view)
        + ("" if limit is None else f" (limit {format_value(limit, view)})"),
        when=f"steps {first:,} to {last:,}" if standing == "over" else f"since step {first:,}",
        first_step=first,
        from_step=max(0, first - ALERT_CONTEXT_STEPS),
        metric=metric,
        slot=slots[0] if len(slots) == 1 else "",
    )


def _alert_excess(item: Mapping[str, Any]) -> float:
    value, threshold = number(item.get("value")), number(item.get("threshold"))
    ratio = _excess_ratio(value, threshold, metric_view(str(item.get("metric") or "")))
    return math.inf if ratio is None else ratio


def _plain(value: Any) -> str:
    return format_value(number(value), metric_view(""))


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{short_number(round(ratio * 100, 2))} %"


def _excess_ratio(value: float | None, threshold: float | None, view: MetricView) -> float | None:
    """How far over its threshold a value is: 1 is at it, more is worse; None where nothing can be said."""
    if value is None or threshold is None or math.isnan(value):
        return None
    above, below = (threshold, value) if view.worse_when_low else (value, threshold)
    return above / below if below > 0 else None


def _excess(value: float | None, threshold: float | None, view: MetricView) -> str:
    ratio = _excess_ratio(value, threshold, view)
    return "" if ratio is None else f"{short_number(ratio, 2)}×"
