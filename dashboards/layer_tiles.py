"""SQNR of a slot's quantisation blocks: over steps, and compared."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.layer_figures import layer_layout, limit_tone
from fp8_safeguard.dashboards.metrics import short_number
from fp8_safeguard.dashboards.slices import fill_gaps
from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, get_theme
from fp8_safeguard.monitor.metrics import TILE_SQNR_EDGES_DB

LOWEST_SHARE = 1e-4
"""Share of the blocks that the colour scale starts with: a bin that holds any is never blank."""


def bin_labels() -> list[str]:
    """The 16 bins in words, from the worst up: "below 0", "0 to 4", ..., "from 38" (dB)."""
    edges = [float(edge) for edge in TILE_SQNR_EDGES_DB]
    middle = [f"{low:.0f} to {high:.0f}" for low, high in pairwise(edges[1:-1])]
    return [f"below {edges[1]:.0f}", *middle, f"from {edges[-2]:.0f}"]


def tiles_figure(
    history: Mapping[str, Any] | None,
    *,
    steps: tuple[int, int] | None = None,
    limits: Sequence[Mapping[str, Any]] = (),
    theme: str = "light",
) -> go.Figure:
    """Share of the blocks in each SQNR bin by step, with the worst hundredth marked.

    `history` has `steps`, `bins` [steps][16] and `p01_db`, the lower edge of the bin that holds the worst hundredth.
    """
    colours = get_theme(theme)
    layout = layer_layout(colours, steps, top_px=8, bottom_px=24)
    labels = bin_labels()
    layout["yaxis"] = {
        "range": [-0.5, len(labels) - 0.5],
        "tickvals": [edge + 0.5 for edge in range(0, len(labels) - 1, 2)],
        "ticktext": [
            f"{float(TILE_SQNR_EDGES_DB[edge + 1]):.0f} dB" for edge in range(0, len(labels) - 1, 2)
        ],
        "showgrid": False,
        "zeroline": False,
        "fixedrange": True,
        "automargin": False,
        "ticklabelstandoff": 4,
    }
    if history is None or not history["steps"]:
        layout["annotations"] = [empty_note(colours, "no block was measured in these steps")]
        return go.Figure(layout=layout)
    columns, origin = fill_gaps(history["steps"])
    layout["shapes"] = [_limit_line(limit, colours) for limit in limits]
    layout["annotations"] = [_limit_label(limit, colours) for limit in limits]
    traces = [
        _share_map(history, columns, origin, colours),
        _worst_hundredth(history, columns, origin, colours),
    ]
    return go.Figure(data=traces, layout=layout)


def _share_map(
    history: Mapping[str, Any], columns: Sequence[int], origin: Sequence[int | None], colours: Theme
) -> go.Heatmap:
    shares = [None if at is None else _shares(history["bins"][at]) for at in origin]
    labels = bin_labels()
    z = [[None if row is None else _log_share(row[level]) for row in shares] for level in range(len(labels))]
    text = [
        ["" if row is None else f"{short_number(row[level] * 100)} %" for row in shares]
        for level in range(len(labels))
    ]
    return go.Heatmap(
        x=list(columns),
        y=list(range(len(labels))),
        z=z,
        zmin=math.log10(LOWEST_SHARE),
        zmax=0,
        colorscale=[list(stop) for stop in colours.colorscale],
        name="share of blocks",
        text=text,
        customdata=[[label] * len(columns) for label in labels],
        hovertemplate="step %{x:,d}<br>%{customdata} dB: <b>%{text}</b> of the blocks<extra></extra>",
        hoverongaps=False,
        colorbar={
            "x": 1, "xpad": 8, "thickness": 8, "outlinewidth": 0, "len": 1, "y": 0.5,
            "tickvals": [-4, -2, 0], "ticktext": ["0.01 %", "1 %", "100 %"],
        },
    )  # fmt: skip


def _shares(bins: Sequence[int]) -> list[float]:
    total = sum(bins)
    return [count / total if total else 0.0 for count in bins]


def _log_share(share: float) -> float | None:
    return None if share == 0 else math.log10(max(share, LOWEST_SHARE))


def _worst_hundredth(
    history: Mapping[str, Any], columns: Sequence[int], origin: Sequence[int | None], colours: Theme
) -> go.Scatter:
    levels = [None if at is None else _edge_place(history["p01_db"][at]) for at in origin]
    return go.Scatter(
        x=list(columns),
        y=levels,
        mode="lines",
        line={"color": colours.text, "width": 1.5, "shape": "hvh"},
        name="worst 1 %",
        connectgaps=False,
        hovertemplate="worst 1 % of blocks from <b>%{customdata}</b><extra></extra>",
        customdata=[None if at is None else _edge_words(history["p01_db"][at]) for at in origin],
    )


def _edge_place(db: float | None) -> float | None:
    """Height of a bin's lower edge: bins are as high as each other, whatever they span."""
    if db is None:
        return None
    edges = [float(edge) for edge in TILE_SQNR_EDGES_DB]
    return next((place - 0.5 for place in range(len(edges) - 1, 0, -1) if db >= edges[place]), -0.5)


def _edge_words(db: float | None) -> str:
    return "–" if db is None else f"{db:.0f} dB" if db >= 0 else "below 0 dB"


def _limit_line(limit: Mapping[str, Any], colours: Theme) -> dict[str, Any]:
    place = _edge_place(float(limit["value"]))
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": place, "y1": place,
        "line": {"color": limit_tone(limit["severity"], colours), "width": 1.1, "dash": "6px,4px"},
    }  # fmt: skip


def _limit_label(limit: Mapping[str, Any], colours: Theme) -> dict[str, Any]:
    return {
        "xref": "paper", "x": 0.004, "xanchor": "left", "yref": "y", "y": _edge_place(float(limit["value"])),
        "yanchor": "bottom", "showarrow": False,
        "text": f"{limit['severity']} {float(limit['value']):g} dB for the worst 1 % · {limit['source']}",
        "font": {"size": 10.5, "color": limit_tone(limit["severity"], colours)},
        "bgcolor": colours.surface, "opacity": 0.92, "borderpad": 1,
    }  # fmt: skip


def histogram_figure(
    now: Mapping[str, Any] | None,
    before: Mapping[str, Any] | None,
    *,
    theme: str = "light",
) -> go.Figure:
    """Share of the blocks in each SQNR bin at one step, over that of an earlier one.

    Each has `step`, `bins` and `p01_db`. The worst hundredth of `now` is marked.
    """
    colours = get_theme(theme)
    layout = base_layout(colours, top_px=22, bottom_px=40)
    layout["margin"] |= {"l": 46, "r": 10}
    layout |= {"barmode": "overlay", "bargap": 0.12, "hovermode": "x unified"}
    layout["xaxis"] = {
        "tickvals": [edge + 0.5 for edge in range(0, 15)],
        "ticktext": [f"{float(edge):.0f}" for edge in TILE_SQNR_EDGES_DB[1:-1]],
        "title": {"text": "SQNR of a block, dB", "standoff": 6},
        "range": [-0.6, 15.6],
        "showgrid": False,
        "fixedrange": True,
        "linecolor": colours.border,
    }
    layout["yaxis"] = {
        "tickformat": ".0%",
        "gridcolor": colours.border,
        "zeroline": False,
        "rangemode": "tozero",
        "fixedrange": True,
        "nticks": 4,
    }
    figure = go.Figure(layout=layout)
    if now is None:
        figure.add_annotation(empty_note(colours, "no block was measured"))
        return figure
    figure.add_trace(_bars(now, colours.accent, 0.85, f"step {now['step']:,}"))
    if before is not None and before["step"] != now["step"]:
        figure.add_trace(_outline(before, colours, f"step {before['step']:,}"))
    _mark_worst_hundredth(figure, now, colours)
    return figure


def _bars(held: Mapping[str, Any], colour: str, opacity: float, name: str) -> go.Bar:
    shares = _shares(held["bins"])
    return go.Bar(
        x=list(range(len(shares))),
        y=shares,
        name=name,
        marker={"color": colour, "opacity": opacity, "line": {"width": 0}},
        customdata=bin_labels(),
        hovertemplate=f"{name}, %{{customdata}} dB: <b>%{{y:.3~p}}</b><extra></extra>",
    )


def _outline(held: Mapping[str, Any], colours: Theme, name: str) -> go.Scatter:
    shares = _shares(held["bins"])
    return go.Scatter(
        x=list(range(len(shares))),
        y=shares,
        mode="lines",
        name=name,
        line={"color": colours.muted, "width": 1.75, "shape": "hvh", "dash": "dot"},
        hovertemplate=f"{name}: <b>%{{y:.3~p}}</b><extra></extra>",
    )


def _mark_worst_hundredth(figure: go.Figure, now: Mapping[str, Any], colours: Theme) -> None:
    place = _edge_place(now["p01_db"])
    if place is None:
        return
    figure.add_shape(
        type="line", xref="x", x0=place, x1=place, yref="paper", y0=0, y1=1,
        line={"color": colours.text, "width": 1.5},
    )  # fmt: skip
    figure.add_annotation(
        xref="x", x=place, yref="paper", y=1, yanchor="bottom", showarrow=False,
        text=f"worst 1 % from {_edge_words(now['p01_db'])}", font={"size": 10.5, "color": colours.text},
    )  # fmt: skip
