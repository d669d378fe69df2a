"""What the pages say, in words, from the API's dictionaries."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.metrics import (
    MetricView,
    format_limit,
    format_value,
    metric_view,
    short_number,
)

STATES = ("healthy", "watch", "unstable", "fallback", "stale", "ended", "unknown")


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
    """The limit with its good side: "≥ 28.5 dB"."""
    excess: str
    """How far beyond the limit: "2.5× over", "3 dB under", "within"; empty where nothing can be said."""
    over: bool
    step: str
    precision: str
    metric: str
    note: str
    """Which layer its trouble follows from; empty where that is not known, or is this one."""


def number(value: Any) -> float | None:
    """A number of the API: null stays None, "NaN" and "Infinity" become floats."""
    return None if value is None else float(value)


def state_of(detail: Mapping[str, Any]) -> str:
    """The run's state, "unknown" for one this page has no words for."""
    state = str(detail.get("state") or "unknown")
    return state if state in STATES else "unknown"


def ending_of(detail: Mapping[str, Any]) -> str:
    """The health that a run ended with; empty for one that has not ended."""
    health = str(detail.get("health") or "")
    return health if state_of(detail) == "ended" and health in STATES else ""


def run_stats(detail: Mapping[str, Any]) -> list[Stat]:
    """The numbers of the status header, in reading order."""
    step = detail.get("last_step")
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
            label="fallback budget used",
            value=_percent(number(detail.get("fallback_budget_used_ratio"))),
            meaning="share of the BF16 fallback budget in use, counted in GEMM FLOPs",
        ),
        Stat(label="mode", value=str(detail.get("mode") or "–"), meaning="observe, advise or enforce"),
        _overhead(detail),
    ]


def _overhead(detail: Mapping[str, Any]) -> Stat:
    """The run's figure, which the budget is about and the section on coverage repeats; else the newest sample's."""
    of_run = number((detail.get("sampling") or {}).get("overhead_ratio"))
    since = "so far" if of_run is not None else "since the sample before the last"
    return Stat(
        label="overhead",
        value=_percent(number(detail.get("overhead_ratio")) if of_run is None else of_run),
        meaning=f"share of the training time {since} that the monitor takes, as the trainer reports it",
    )


def alert_words(counts: Mapping[str, int]) -> str:
    """How many alerts wait for somebody, are held by a fallback or are silenced: "2 open, 3 held"."""
    known = ((name, counts.get(name, 0)) for name in ("open", "held", "silenced"))
    return ", ".join(f"{count:,} {name}" for name, count in known if count) or "none"


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One of the worst ranks of the newest sample."""

    rank: str
    host: str
    layer: str
    signal: str
    value: str


def rank_rows(records: Iterable[Mapping[str, Any]]) -> list[RankRow]:
    """The worst ranks in words, as the client ordered them; a field that it did not send is a dash."""
    rows = []
    for record in records:
        shown = metric_view(str(record.get("metric") or ""))
        signal = f"{shown.label} {slot_words(record)}" if record.get("metric") else slot_words(record)
        rows.append(
            RankRow(
                rank="–" if record.get("rank") is None else str(record["rank"]),
                host=str(record.get("host") or "–"),
                layer=str(record.get("layer") or ""),
                signal=signal.strip() or "–",
                value=format_value(number(record.get("value")), shown),
            )
        )
    return rows


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
        threshold=format_limit(threshold, view),
        excess=excess_words(value, threshold, view),
        over=_is_over(value, threshold, view),
        step="–" if step is None else f"{step:,}",
        precision=precision_words(item.get("precision") or {}),
        metric=metric,
        note=follows_words(item),
    )


def follows_words(item: Mapping[str, Any]) -> str:
    """Where the non-finite values of a layer come from: "follows from 'blocks.3.up'"; empty where nothing is known."""
    origin = item.get("follows_from")
    return "" if origin is None else f"follows from {str(origin)!r}"


def slot_words(place: Mapping[str, Any]) -> str:
    """Where a value was measured: "dgrad", "x row" or nothing for a whole layer."""
    if place.get("gemm"):
        return str(place["gemm"])
    return " ".join(str(place[part]) for part in ("operand", "layout") if place.get(part))


PRECISION_NAMES = {"fp8": "FP8", "bf16": "BF16", "high": "high precision"}
"""Words for what a GEMM is computed in; samples do not always tell it."""


def precision_name(kind: str | None) -> str:
    """What a GEMM is computed in, "unknown" where nobody knows."""
    return PRECISION_NAMES.get(kind or "", kind or "unknown")


def precision_standing(kind: str | None) -> str:
    """ "fp8", "left" for a GEMM known to run in anything else, "unknown" where nobody knows."""
    return "unknown" if kind in (None, "unknown") else "fp8" if kind == "fp8" else "left"


def precision_words(precision: Mapping[str, str | None]) -> str:
    """Which GEMMs are known to have left FP8: "BF16: fprop, dgrad"; empty when none is."""
    moved: dict[str, list[str]] = {}
    for gemm, kind in precision.items():
        if precision_standing(kind) == "left":
            moved.setdefault(precision_name(kind), []).append(gemm)
    return "; ".join(f"{kind}: {', '.join(gemms)}" for kind, gemms in moved.items())


def _plain(value: Any) -> str:
    return format_value(number(value), metric_view(""))


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{short_number(round(ratio * 100, 2))} %"


def excess_ratio(value: float | None, threshold: float | None, view: MetricView) -> float | None:
    """How far over its threshold a value is: 1 is at it, more is worse; None where nothing can be said."""
    if value is None or threshold is None or math.isnan(value):
        return None
    above, below = (threshold, value) if view.worse_when_low else (value, threshold)
    return above / below if below > 0 else None


def excess_words(value: float | None, threshold: float | None, view: MetricView) -> str:
    """How a value stands to its limit, with the direction in words."""
    if value is None or threshold is None:
        return ""
    if not _is_over(value, threshold, view):
        return "within"
    if view.unit == "dB" and math.isfinite(value):
        return f"{short_number(threshold - value, 2)} dB under"
    if math.isnan(value):
        return "NaN"
    side = "under" if view.worse_when_low else "over"
    ratio = excess_ratio(value, threshold, view)
    return side if ratio is None or math.isinf(ratio) else f"{short_number(ratio, 2)}× {side}"


def _is_over(value: float | None, threshold: float | None, view: MetricView) -> bool:
    """Beyond the limit; a NaN is beyond any."""
    if value is None or threshold is None:
        return False
    return not (value >= threshold if view.worse_when_low else value <= threshold)
