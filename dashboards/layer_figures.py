"""A layer's metric over steps, with limits and events."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.metrics import MetricView, format_value, metric_view
from fp8_safeguard.dashboards.slices import fill_gaps
from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, escape, get_theme, step_axis

LEFT_PX = 62
RIGHT_PX = 78
METRIC_PX = 270
"""Height that the page gives the metric chart; labels are kept apart for it."""
EVENTS_SHARE = 0.11
"""Part of the chart's height below the curves that decisions and alerts stand in."""
LABEL_PX = 13
LABEL_COLUMNS = (0.004, 0.48)
"""Where labels of limits begin, as a share of the width: lines that lie close together are named side by side."""
FEW_POINTS = 60

# Hues that are not a state's: amber and red are limits, violet a fallback, cyan NaN and Inf.
SLOT_COLOURS: dict[str, dict[str, str]] = {
    "dark": {
        "x row": "#6ea8fe", "x col": "#a9cbff", "w tile": "#9bd05f", "dy row": "#f27fb6", "dy col": "#f9b9d6",
        "fprop": "#3fb6d9", "dgrad": "#ff5fa2", "wgrad": "#d9b48a",
    },
    "light": {
        "x row": "#2160c4", "x col": "#5b8fe0", "w tile": "#4a7d12", "dy row": "#b0266f", "dy col": "#d0609a",
        "fprop": "#0b6f88", "dgrad": "#9c1560", "wgrad": "#7d5a2c",
    },
}  # fmt: skip
SLOT_DASHES = {"x col": "dash", "dy col": "dash"}
DECISION_MARKS = {
    "bf16_fallback": ("diamond", "fallback"),
    "restore": ("circle", "healthy"),
    "advice": ("star", "watch"),
}
# The heatmap's marks of NaN (x) and Inf (triangle) mean nothing else anywhere.
ALERT_MARKS = {"act": ("octagon", "unstable"), "watch": ("octagon-open", "watch")}
LIMIT_TONES = {"act": "unstable", "watch": "watch"}
IN_FORCE = ("sent", "applied")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One line across the chart."""

    value: float
    severity: str
    text: str
    origin: str


def layer_layout(
    colours: Theme, steps: tuple[float, float] | None, *, top_px: int, bottom_px: int, labels: bool = True
) -> dict[str, Any]:
    """Layout of the drawer's charts: equal margins and one step range, so that steps stand under each other."""
    layout = base_layout(colours, top_px=top_px, bottom_px=bottom_px)
    layout["margin"] |= {"l": LEFT_PX, "r": RIGHT_PX}
    layout["xaxis"] = step_axis(colours, labels=labels)
    layout["xaxis"] |= {"title": None, "showspikes": False, "anchor": "free", "position": 0}
    if steps is not None:
        layout["xaxis"] |= {"range": [steps[0] - 0.5, steps[1] + 0.5], "autorange": False}
    return layout


def metric_figure(
    lines: Sequence[Mapping[str, Any]],
    *,
    metric: str,
    scale: str = "linear",
    steps: tuple[int, int] | None = None,
    decisions: Sequence[Mapping[str, Any]] = (),
    alerts: Sequence[Mapping[str, Any]] = (),
    theme: str = "light",
) -> go.Figure:
    """Curves of some slots of a layer, the limits that each is judged by, and what happened when.

    Each line has `slot`, `steps`, `values`, `nonfinite` [[place, nan, inf]] and `thresholds`. Gaps in a curve are pauses of
    its sampling. On a log scale zeros lie on the lower edge.
    """
    colours, view = get_theme(theme), metric_view(metric)
    limits = merge_limits(lines, view)
    values = [value for line in lines for value in _numbers(line["values"])]
    is_log = scale == "log" and fits_log(view, values)
    bounds = _bounds([*values, *(limit.value for limit in limits)], view, log=is_log)
    layout = layer_layout(colours, steps, top_px=10, bottom_px=26)
    layout["yaxis"] = _value_axis(colours, view, bounds, log=is_log)
    layout["yaxis2"] = {"domain": [0, EVENTS_SHARE], "range": [-1, 1], "visible": False, "fixedrange": True}
    layout["yaxis3"] = {"domain": [EVENTS_SHARE, 1], "range": [0, 1], "visible": False, "fixedrange": True}
    layout["hovermode"] = "x unified"
    traces = [_curve(line, view, bounds, colours, log=is_log) for line in lines]
    traces += [*_nonfinite_marks(lines, colours), *_event_marks(decisions, alerts, colours)]
    layout["shapes"] = [*_limit_lines(limits, colours), *_effect_lines(decisions, colours)]
    layout["annotations"] = _limit_labels(limits, bounds, colours, log=is_log)
    if not any(line["steps"] for line in lines):
        layout["annotations"].append(empty_note(colours, f"{view.label} was not sampled in these steps"))
    # Made in one go: each later addition would have Plotly copy all that is there.
    return go.Figure(data=traces, layout=layout)


def step_line(step: int, theme: str) -> dict[str, Any]:
    """The line of a step that somebody holds."""
    line: dict[str, Any] = {"color": get_theme(theme).text, "width": 1, "dash": "dash"}
    return {
        "type": "line",
        "xref": "x",
        "x0": step,
        "x1": step,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": line,
    }


def slot_colour(slot: str, theme: str) -> str:
    """The colour of a slot's curve, the same in every chart and on its button."""
    return SLOT_COLOURS[theme].get(slot, get_theme(theme).muted)


def fits_log(view: MetricView, values: Iterable[float]) -> bool:
    """Whether a log scale can show a metric: decibels are logarithms already, and nothing may be negative."""
    return view.unit != "dB" and not view.worse_when_low and all(value >= 0 for value in values)


def merge_limits(lines: Iterable[Mapping[str, Any]], view: MetricView) -> list[Limit]:
    """Limits of several slots, each once with the slots that it holds for, from the lowest up."""
    together: dict[tuple[float, str, str, str], list[str]] = {}
    for line in lines:
        for found in line["thresholds"]:
            key = (float(found["value"]), str(found["severity"]), str(found["source"]), str(found["origin"]))
            together.setdefault(key, []).append(str(line["slot"]))
    return [
        Limit(
            value=value,
            severity=severity,
            text=f"{severity} {format_value(value, view)} · {source}, {', '.join(slots)}",
            origin=origin,
        )
        for (value, severity, source, origin), slots in sorted(together.items())
    ]


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if value is not None and math.isfinite(float(value))]


def _bounds(values: Sequence[float], view: MetricView, *, log: bool) -> tuple[float, float]:
    """Lowest and highest value of the axis, all limits in sight; on a log scale their exponents."""
    if log:
        positive = [value for value in values if value > 0]
        floor = [view.log_bounds[0]] if view.log_bounds else []
        low = min([*positive, *floor], default=1e-6)
        high = max(positive, default=low * 10)
        low, high = math.log10(low), math.log10(high)
        padding = 0.06 * max(high - low, 1.0)
        return low - padding, high + padding * 1.6
    low, high = min(values, default=0.0), max(values, default=1.0)
    padding = 0.08 * (high - low or abs(high) or 1.0)
    return (low if low == 0 else low - padding), high + padding


def _value_axis(
    colours: Theme, view: MetricView, bounds: tuple[float, float], *, log: bool
) -> dict[str, Any]:
    return {
        "domain": [EVENTS_SHARE, 1],
        "type": "log" if log else "linear",
        "range": list(bounds),
        "title": {"text": "" if view.percent else view.unit, "standoff": 4, "font": {"color": colours.muted}},
        "tickformat": ".3~p" if view.percent else "~g",
        "nticks": 6,
        "dtick": 1 if log and bounds[1] - bounds[0] > 2 else None,
        "exponentformat": "power",
        "gridcolor": colours.border,
        "zeroline": False,
        "automargin": False,
        "fixedrange": True,
        "ticklabelstandoff": 4,
    }


def _curve(
    line: Mapping[str, Any], view: MetricView, bounds: tuple[float, float], colours: Theme, *, log: bool
) -> dict[str, Any]:
    slot = str(line["slot"])
    steps, origin = fill_gaps(line["steps"])
    values = [None if at is None else line["values"][at] for at in origin]
    floor = 10 ** bounds[0] if log else -math.inf
    shown = [_finite(value) for value in values]
    dash = SLOT_DASHES.get(slot, "solid")
    return {
        "type": "scatter",
        "x": steps,
        "y": [None if value is None else max(value, floor) for value in shown],
        "mode": "lines+markers" if len(line["steps"]) <= FEW_POINTS else "lines",
        "name": slot,
        "line": {"color": slot_colour(slot, colours.name), "width": 1.75, "dash": dash},
        "marker": {"size": 4},
        "connectgaps": False,
        "customdata": [None if value is None else format_value(float(value), view) for value in values],
        "hovertemplate": f"{escape(slot)} <b>%{{customdata}}</b><extra></extra>",
    }


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _limit_lines(limits: Sequence[Limit], colours: Theme) -> list[dict[str, Any]]:
    return [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": limit.value, "y1": limit.value,
            "line": {
                "color": limit_tone(limit.severity, colours), "width": 1.1,
                "dash": "solid" if limit.severity == "act" else "6px,4px",
            },
        }
        for limit in limits
    ]  # fmt: skip


def limit_tone(severity: str, colours: Theme) -> str:
    """The colour of a limit's line and label."""
    return str(getattr(colours, LIMIT_TONES.get(severity, "muted")))


def _limit_labels(
    limits: Sequence[Limit], bounds: tuple[float, float], colours: Theme, *, log: bool
) -> list[dict[str, Any]]:
    """Value and origin written on each line, moved up where it would cover the label below it."""
    places = [math.log10(limit.value) if log else limit.value for limit in limits]
    height_px = METRIC_PX * (1 - EVENTS_SHARE)
    spots = label_spots([(place - bounds[0]) / (bounds[1] - bounds[0]) * height_px for place in places])
    return [
        {
            "xref": "paper", "x": LABEL_COLUMNS[column], "xanchor": "left", "yref": "y", "y": place, "yanchor": "bottom",
            "yshift": lift, "text": escape(limit.text), "hovertext": escape(limit.origin), "showarrow": False,
            "font": {"size": 10.5, "color": limit_tone(limit.severity, colours)},
            "bgcolor": colours.surface, "opacity": 0.92, "borderpad": 1,
        }
        for limit, place, (column, lift) in zip(limits, places, spots, strict=True)
    ]  # fmt: skip


def label_spots(heights_px: Sequence[float]) -> list[tuple[int, float]]:
    """For each line from the lowest up the column of its label, and how far it is lifted so that it covers no other."""
    spots: list[tuple[int, float]] = []
    tops = [-math.inf] * len(LABEL_COLUMNS)
    for height in heights_px:
        column = min(range(len(tops)), key=lambda at: max(height, tops[at]))
        bottom = max(height, tops[column])
        spots.append((column, bottom - height))
        tops[column] = bottom + LABEL_PX
    return spots


def _nonfinite_marks(lines: Iterable[Mapping[str, Any]], colours: Theme) -> list[dict[str, Any]]:
    """NaN and Inf elements as marks on the upper edge, in the heatmap's shapes."""
    marks: dict[str, list[tuple[int, str]]] = {"NaN": [], "Inf": []}
    for line in lines:
        for place, nan, inf in line["nonfinite"]:
            for kind, count in (("NaN", nan), ("Inf", inf)):
                if count:
                    elements = f"{count:,} {kind} element{'' if count == 1 else 's'}"
                    marks[kind].append((line["steps"][place], f"{line['slot']}: {elements}"))
    return [
        {
            "type": "scatter",
            "x": [step for step, _ in marks[kind]],
            "y": [0.97] * len(marks[kind]),
            "yaxis": "y3",
            "mode": "markers",
            "name": kind,
            "marker": {"symbol": symbol, "size": 8, "color": colours.nonfinite},
            "customdata": [text for _, text in marks[kind]],
            "hovertemplate": "%{customdata}<extra></extra>",
            "cliponaxis": False,
        }
        for kind, symbol in (("NaN", "x"), ("Inf", "triangle-up"))
        if marks[kind]
    ]


def _event_marks(
    decisions: Iterable[Mapping[str, Any]], alerts: Iterable[Mapping[str, Any]], colours: Theme
) -> list[dict[str, Any]]:
    """Alerts at their first bad step, decisions at the step of their evidence, below the curves."""
    marks = {
        "alert": [_alert_mark(alert, colours) for alert in alerts],
        "decision": [_decision_mark(decision, colours) for decision in decisions],
    }
    return [
        {
            "type": "scatter",
            "x": [mark["step"] for mark in held],
            "y": [mark["height"] for mark in held],
            "yaxis": "y2",
            "mode": "markers",
            "name": name,
            "marker": {
                "symbol": [mark["symbol"] for mark in held],
                "size": 9,
                "color": [mark["tone"] for mark in held],
                "line": {"width": 2, "color": [mark["tone"] for mark in held]},
            },
            "customdata": [mark["text"] for mark in held],
            "hovertemplate": "%{customdata}<extra></extra>",
            "cliponaxis": False,
        }
        for name, held in marks.items()
        if held
    ]


def _effect_lines(decisions: Iterable[Mapping[str, Any]], colours: Theme) -> list[dict[str, Any]]:
    """A dotted line where decisions took effect."""
    steps = {
        (int(made["effective_step"]), _decision_style(made)[1])
        for made in decisions
        if made.get("effective_step") is not None and made["action"] != "advice"
    }
    return [
        {
            "type": "line", "xref": "x", "x0": step - 0.5, "x1": step - 0.5, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": str(getattr(colours, tone)), "width": 1.2, "dash": "dot"}, "layer": "below",
        }
        for step, tone in sorted(steps)
    ]  # fmt: skip


def _alert_mark(alert: Mapping[str, Any], colours: Theme) -> dict[str, Any]:
    severity = str(alert.get("severity"))
    symbol, tone = ALERT_MARKS.get(severity, ALERT_MARKS["watch"])
    text = f"{severity} alert: {escape(alert.get('rule') or '')}"
    place = {"step": int(alert["first_step"]), "height": 0.45, "symbol": symbol}
    return {"name": "alert", **place, "tone": getattr(colours, tone), "text": text}


def _decision_mark(decision: Mapping[str, Any], colours: Theme) -> dict[str, Any]:
    symbol, tone = _decision_style(decision)
    hollow = "" if decision.get("state") in IN_FORCE else "-open"
    text = f"{escape(decision['action'])}, {escape(decision.get('state', ''))}: {escape(decision['id'])}"
    place = {"step": int(decision["step"]), "height": -0.5, "symbol": symbol + hollow}
    return {"name": "decision", **place, "tone": getattr(colours, tone), "text": text}


def _decision_style(decision: Mapping[str, Any]) -> tuple[str, str]:
    return DECISION_MARKS.get(str(decision["action"]), ("bowtie", "accent"))
