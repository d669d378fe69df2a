"""The decision lane under the heatmap, as a Plotly figure."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.causes import cause_of, cause_words
from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, escape, get_theme, step_axis

HOVER_ENTRIES = 8
HOVER_COLUMNS = 76

# Row of the lane, marker symbol, theme colour. Shape and row carry the meaning too: colour never alone.
LANES: dict[str, tuple[str, str, str]] = {
    "bf16_fallback": ("BF16 fallback", "diamond", "fallback"),
    "scale_multiplier": ("scale, format", "bowtie", "accent"),
    "scale_rounding": ("scale, format", "bowtie", "accent"),
    "format": ("scale, format", "bowtie", "accent"),
    "amax_history": ("scale, format", "bowtie", "accent"),
    "margin": ("scale, format", "bowtie", "accent"),
    "gradient_smoothing": ("smoothing", "square", "accent"),
    "restore": ("restore", "circle", "healthy"),
    "advice": ("advice", "star", "watch"),
}
LANE_ORDER = ("alerts", *dict.fromkeys(lane for lane, _, _ in LANES.values()), "other")
SEVERITY_COLOURS = {"act": "unstable", "watch": "watch"}
IN_FORCE = ("sent", "applied")


def timeline_figure(
    decisions: Sequence[Mapping[str, Any]],
    *,
    alerts: Sequence[Mapping[str, Any]] = (),
    last_step: int | None = None,
    ended: bool = False,
    theme: str = "light",
) -> go.Figure:
    """One marker per decision at the step that caused it, on the same step axis as the heatmap.

    Hover tells action, target and reason. A filled marker is in force, a hollow one is only proposed, rejected or
    over. A bar runs from the effective step of a fallback to the restore that ended it, or to `last_step`.
    `alerts` become octagons at their first step, filled for "act". `ended` tells a run that needed no decision from one that may still.
    """
    colours = get_theme(theme)
    lanes = _lanes_in_use(decisions, alerts)
    layout = base_layout(colours, top_px=4, bottom_px=38)
    layout["xaxis"] = step_axis(colours, labels=True)
    layout["yaxis"] = {
        "type": "category",
        "range": [max(len(lanes), 1) - 0.5, -0.5],
        "categoryorder": "array",
        "categoryarray": lanes,
        "fixedrange": True,
        "showgrid": bool(lanes),
        "gridcolor": colours.border,
        "showticklabels": bool(lanes),
        "automargin": False,
        "ticklabelstandoff": 6,
    }
    figure = go.Figure(layout=layout)
    _add_periods(figure, decisions, last_step, colours)
    if alerts:
        _add_alerts(figure, alerts, colours)
    for lane in lanes:
        _add_lane(figure, lane, [d for d in decisions if _lane(d)[0] == lane], decisions, colours)
    if not lanes:
        text = "the run ended without a decision" if ended else "no decisions yet"
        figure.add_annotation(empty_note(colours, text))
    return figure


def describe_target(target: Mapping[str, Any]) -> str:
    """A plan target in words: "dgrad", "dy row" or "whole layer"."""
    if "gemm" in target:
        return str(target["gemm"])
    if "operand" in target:
        return f"{target['operand']} {target.get('layout', '')}".strip()
    return "whole layer"


def _lane(decision: Mapping[str, Any]) -> tuple[str, str, str]:
    return _lane_of(str(decision["action"]))


def _lane_of(action: str) -> tuple[str, str, str]:
    return LANES.get(action, ("other", "circle", "muted"))


def _lanes_in_use(decisions: Iterable[Mapping[str, Any]], alerts: Sequence[Mapping[str, Any]]) -> list[str]:
    used = {_lane(decision)[0] for decision in decisions} | ({"alerts"} if alerts else set())
    return [lane for lane in LANE_ORDER if lane in used]


def _add_lane(
    figure: go.Figure,
    lane: str,
    decisions: Sequence[Mapping[str, Any]],
    everything: Sequence[Mapping[str, Any]],
    colours: Theme,
) -> None:
    """One trace a lane; decisions of one step share a place, so each marker's hover lists them all."""
    if not decisions:
        return
    together: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for decision in decisions:
        together[int(decision["step"])].append(decision)
    _, symbol, colour = _lane(decisions[0])
    figure.add_trace(
        go.Scatter(
            x=[int(decision["step"]) for decision in decisions],
            y=[lane] * len(decisions),
            mode="markers+text",
            name=lane,
            text=[_count(together[int(d["step"])], d) for d in decisions],
            textposition="top center",
            textfont={"color": colours.text, "size": 10},
            hovertext=[_hover(_story(together[int(decision["step"])])) for decision in decisions],
            customdata=[_story(together[int(decision["step"])]) for decision in decisions],
            hovertemplate="%{hovertext}<extra></extra>",
            marker={
                "symbol": [symbol + ("" if _is_in_force(d, everything) else "-open") for d in decisions],
                "size": 11,
                "color": getattr(colours, colour),
                "line": {"width": 1.5, "color": getattr(colours, colour)},
            },
            cliponaxis=False,
        )
    )


def _is_in_force(decision: Mapping[str, Any], decisions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a decision holds still: its state goes on saying that it was applied once it has been restored."""
    if decision.get("state") not in IN_FORCE:
        return False
    return decision.get("effective_step") is None or _restored_at(decision, decisions) is None


def _count(group: Sequence[Mapping[str, Any]], decision: Mapping[str, Any]) -> str:
    """How many decisions share a marker, written once, beside the first of them."""
    return f"×{len(group)}" if len(group) > 1 and decision is group[0] else ""


def _story(group: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Paragraphs of plain text on the decisions of one step; the first line of each is its heading.

    It travels as customdata for pages that draw a card of their own: Plotly clips a tall label to the low lane.
    """
    story = [
        [f"step {int(group[0]['step']):,}"],
        *(_describe(decision) for decision in group[:HOVER_ENTRIES]),
    ]
    if len(group) > HOVER_ENTRIES:
        story.append([f"and {len(group) - HOVER_ENTRIES} more"])
    return story


def _describe(decision: Mapping[str, Any]) -> list[str]:
    target = describe_target(decision.get("target") or {})
    value = f" = {decision['value']}" if decision.get("value") is not None else ""
    effective = decision.get("effective_step")
    state = str(decision.get("state", ""))
    cause = cause_of(decision)
    # A layer may be called "0": without quotes it reads as a number.
    layer = f" “{decision['layer']}”" if decision.get("layer") else ""
    return [
        f"{decision['action']}{value}{layer} · {target}",
        str(decision.get("reason", "")),
        state if effective is None else f"{state}, effective from step {effective:,}",
        *([f"cause: {cause_words(cause)}"] if cause is not None else []),
        *([f"outcome: {decision['outcome']}"] if decision.get("outcome") else []),
    ]


def _hover(story: Sequence[Sequence[str]]) -> str:
    """The story in Plotly's markup."""
    lines = []
    for heading, *others in story:
        lines.append(f"<b>{escape(heading)}</b>")
        lines += [escape(line) for text in others for line in textwrap.wrap(text, HOVER_COLUMNS)]
    return "<br>".join(lines)


@dataclass(frozen=True, kw_only=True, order=True)
class Period:
    """Steps that a target spent under one action."""

    action: str
    layer: str
    start: int
    end: int


def periods(decisions: Sequence[Mapping[str, Any]], last_step: int | None) -> list[Period]:
    """When each decision was in force: from its effective step to the restore of its target, or to `last_step`."""
    found = set()
    for decision in decisions:
        start, action = decision.get("effective_step"), str(decision["action"])
        if start is None or action in ("restore", "advice"):
            continue
        end = _restored_at(decision, decisions) or last_step
        if end is not None and end > start:
            layer = str(decision.get("layer", ""))
            found.add(Period(action=action, layer=layer, start=int(start), end=int(end)))
    return sorted(found)


def _add_periods(
    figure: go.Figure, decisions: Sequence[Mapping[str, Any]], last_step: int | None, colours: Theme
) -> None:
    """Bars for the steps that at least one target of a lane spent under a decision."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for period in periods(decisions, last_step):
        lane, _, tone = _lane_of(period.action)
        spans[lane, getattr(colours, tone)].append((period.start, period.end))
    bars = [(lane, colour, *bar) for (lane, colour), spanned in spans.items() for bar in _union(spanned)]
    for lane, colour, start, end in bars:
        figure.add_trace(
            go.Scatter(
                x=[start, end],
                y=[lane, lane],
                mode="lines",
                line={"width": 7, "color": colour},
                opacity=0.32,
                hoverinfo="skip",
                name=f"{lane} in force",
            )
        )


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping spans joined, so that the bar's colour does not depend on how many there are."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _restored_at(decision: Mapping[str, Any], decisions: Iterable[Mapping[str, Any]]) -> int | None:
    same = (
        int(other["effective_step"])
        for other in decisions
        if other["action"] == "restore"
        and other.get("effective_step") is not None
        and other["effective_step"] > decision["effective_step"]
        and (other.get("layer"), other.get("target")) == (decision.get("layer"), decision.get("target"))
    )
    return min(same, default=None)


def _add_alerts(figure: go.Figure, alerts: Sequence[Mapping[str, Any]], colours: Theme) -> None:
    tones = [getattr(colours, SEVERITY_COLOURS.get(str(alert.get("severity")), "watch")) for alert in alerts]
    figure.add_trace(
        go.Scatter(
            x=[int(alert["first_step"]) for alert in alerts],
            y=["alerts"] * len(alerts),
            mode="markers",
            name="alerts",
            hovertext=[_hover(_alert_story(alert)) for alert in alerts],
            customdata=[_alert_story(alert) for alert in alerts],
            hovertemplate="%{hovertext}<extra></extra>",
            marker={
                # The heatmap's marks of NaN (x) and Inf (triangle) mean nothing else anywhere.
                "symbol": [
                    "octagon" if alert.get("severity") == "act" else "octagon-open" for alert in alerts
                ],
                "size": 9,
                "color": tones,
                "line": {"width": 2, "color": tones},
            },
            cliponaxis=False,
        )
    )


def _alert_story(alert: Mapping[str, Any]) -> list[list[str]]:
    heading = f"step {int(alert['first_step']):,} · {alert.get('severity', '')} alert"
    place = f"layer “{alert['layer']}”" if alert.get("layer") else "whole run"
    return [[heading, place, str(alert.get("rule") or "")]]
