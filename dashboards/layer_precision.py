"""What each gemm of a layer was computed in, over steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.layer_figures import layer_layout
from fp8_safeguard.dashboards.theme import Theme, empty_note, escape, get_theme
from fp8_safeguard.dashboards.timeline import describe_target
from fp8_safeguard.dashboards.view import precision_name, precision_standing

LANE_PX = 26


def precision_figure(
    history: Sequence[Mapping[str, Any]],
    *,
    adjustments: Sequence[Mapping[str, Any]] = (),
    decisions: Sequence[Mapping[str, Any]] = (),
    steps: tuple[int, int] | None = None,
    theme: str = "light",
) -> go.Figure:
    """A lane for each gemm, a bar for each period: FP8 and unknown quiet, BF16 in the fallback's colour, named by its decision.

    `history` as in the layer's document; `adjustments` of scale or format get a lane for each target. `customdata` of a bar
    is its decision's id.
    """
    colours = get_theme(theme)
    reasons = {made["id"]: (made["reason"], made.get("actor", "")) for made in decisions}
    last = steps[1] if steps else max((int(period["from_step"]) for period in history), default=0)
    bars = [_gemm_bar(period, last, colours) for period in history]
    bars += [_adjustment_bar(span, last, colours) for span in adjustments]
    lanes = list(dict.fromkeys(bar["lane"] for bar in bars))
    if steps:
        bars = [cut for bar in bars if (cut := _cut(bar, steps)) is not None]
    layout = layer_layout(colours, steps, top_px=4, bottom_px=24)
    layout["yaxis"] = {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": lanes,
        "range": [max(len(lanes), 1) - 0.5, -0.5],
        "showgrid": False,
        "fixedrange": True,
        "automargin": False,
        "ticklabelstandoff": 4,
    }
    layout |= {"barmode": "overlay", "bargap": 0.3}
    layout["annotations"] = [] if bars else [empty_note(colours, "no step was sampled")]
    return go.Figure(data=[_trace(bar, reasons) for bar in bars], layout=layout)


def precision_height(history: Sequence[Mapping[str, Any]], adjustments: Sequence[Mapping[str, Any]]) -> int:
    """Pixels that the lanes need."""
    lanes = {period["gemm"] for period in history} | {_adjusted(span) for span in adjustments}
    return 34 + LANE_PX * max(len(lanes), 1)


def decision_number(decision_id: str) -> str:
    """The end of a decision's id, which is what tells it from the others of its run."""
    return "#" + decision_id.rpartition("-")[2]


def _gemm_bar(period: Mapping[str, Any], last: int, colours: Theme) -> dict[str, Any]:
    is_quiet = precision_standing(period["precision"]) != "left"
    decision = period["decision_id"]
    return {
        **_span(period, last),
        "lane": str(period["gemm"]),
        "text": precision_name(period["precision"]) + (f" {decision_number(decision)}" if decision else ""),
        "colour": colours.border if is_quiet else colours.fallback,
        "text_colour": colours.text if is_quiet else colours.surface,
        "decision": decision,
    }


def _adjusted(span: Mapping[str, Any]) -> str:
    return describe_target(span["target"])


def _adjustment_bar(span: Mapping[str, Any], last: int, colours: Theme) -> dict[str, Any]:
    value = "" if span["value"] is None else f" {span['value']}"
    return {
        **_span(span, last),
        "lane": _adjusted(span),
        "text": f"{str(span['action']).replace('_', ' ')}{value} {decision_number(span['decision_id'])}",
        "colour": colours.accent,
        "text_colour": colours.surface,
        "decision": span["decision_id"],
    }


def _span(period: Mapping[str, Any], last: int) -> dict[str, Any]:
    start = int(period["from_step"])
    end = last if period["to_step"] is None else int(period["to_step"])
    when = f"from step {start:,}" + ("" if period["to_step"] is None else f" to {end:,}")
    return {"start": start - 0.5, "length": max(end, start) - start + 1, "when": when}


def _cut(bar: Mapping[str, Any], steps: tuple[int, int]) -> dict[str, Any] | None:
    """The part of a bar that is in the picture, so that its words are too; None where none of it is."""
    start = max(bar["start"], steps[0] - 0.5)
    length = min(bar["start"] + bar["length"], steps[1] + 0.5) - start
    return {**bar, "start": start, "length": length} if length > 0 else None


def _trace(bar: Mapping[str, Any], reasons: Mapping[str, tuple[str, str]]) -> go.Bar:
    reason, actor = reasons.get(bar["decision"], ("", ""))
    story = f"{bar['lane']}: <b>{escape(bar['text'])}</b><br>{bar['when']}"
    if bar["decision"]:
        story += f"<br>{escape(actor)}: {escape(reason)}" if reason else ""
    return go.Bar(
        orientation="h",
        base=[bar["start"]],
        x=[bar["length"]],
        y=[bar["lane"]],
        name=bar["text"],
        text=[escape(bar["text"])],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        constraintext="none",
        textfont={"color": bar["text_colour"], "size": 10.5},
        marker={"color": bar["colour"], "line": {"width": 0}},
        customdata=[bar["decision"]],
        hovertext=[story],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )
