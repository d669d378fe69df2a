"""Amax of a layer's operands against the range of their format."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.layer_figures import layer_layout, slot_colour
from fp8_safeguard.dashboards.metrics import short_number
from fp8_safeguard.dashboards.slices import fill_gaps
from fp8_safeguard.dashboards.theme import Theme, empty_note, get_theme
from fp8_safeguard.monitor.formats import Format, get_format

ROW_PX = 118
ROW_GAP_PX = 18
LABEL_PX = 12
"""Labels nearer than this to each other would overlap."""
NEAR_BINADES = 7.0
"""How far from the values the format's largest number may lie and still be drawn; beyond that it is told in words."""


def amax_figure(
    spreads: Sequence[Mapping[str, Any]],
    *,
    steps: tuple[int, int] | None = None,
    multipliers: Sequence[Mapping[str, Any]] = (),
    theme: str = "light",
) -> go.Figure:
    """Rows of operands, in binades: amax, root mean square, and the range of the block that holds the amax.

    With block scales amax itself never overflows: the scale of its block maps it onto the format's largest value. What
    counts is how far the other values lie below it, because that block's smallest normal and smallest non-zero value follow
    its amax. Each spread has `operand`, `format`, `steps`, `amax` and `rms` in real units; `multipliers` are scale
    multipliers in force: `operand`, `from_step`, `to_step`, `value`.
    """
    colours = get_theme(theme)
    layout = layer_layout(colours, steps, top_px=16, bottom_px=24)
    layout["showlegend"] = False
    layout["hovermode"] = "x unified"
    height = amax_height(len(spreads)) - 40
    layout |= {"shapes": [], "annotations": []}
    traces: list[dict[str, Any]] = []
    for place, spread in enumerate(spreads):
        top = 1 - place * (ROW_PX + ROW_GAP_PX) / height
        axis = "y" if place == 0 else f"y{place + 1}"
        domain = (max(0.0, top - ROW_PX / height), top)
        traces += _add_row(layout, spread, multipliers, axis, domain, colours)
    if not spreads:
        layout["annotations"].append(empty_note(colours, "no operand was sampled in these steps"))
    return go.Figure(data=traces, layout=layout)


def amax_height(rows: int) -> int:
    """Pixels that the rows need."""
    return 40 + max(rows, 1) * ROW_PX + max(rows - 1, 0) * ROW_GAP_PX


def headroom(amax: float, rms: float, fmt: Format) -> dict[str, float]:
    """What an operand's spread means for the format, in binades (factors of two).

    `to_max`: format maximum over amax, before scaling. `peak`: amax over root mean square. `above_normal` and
    `above_flush`: how far the root mean square lies above the smallest normal and above half the smallest subnormal (below
    which all goes to zero) of the block that holds the amax.
    """
    peak = math.log2(amax / rms)
    return {
        "to_max": math.log2(fmt.max / amax),
        "peak": peak,
        "above_normal": math.log2(fmt.max / fmt.min_normal) - peak,
        "above_flush": math.log2(2 * fmt.max / fmt.min_subnormal) - peak,
    }


def _log2(values: Sequence[float | None]) -> list[float | None]:
    return [math.log2(value) if value is not None and value > 0 else None for value in values]


def _shifted(values: Sequence[float | None], shifts: Sequence[float]) -> list[float | None]:
    return [None if value is None else value + by for value, by in zip(values, shifts, strict=True)]


def _multiplier_exponents(
    operand: str, steps: Sequence[int], multipliers: Sequence[Mapping[str, Any]]
) -> list[float]:
    """log2 of the scale multiplier in force at each step."""
    mine = [held for held in multipliers if held["operand"] in (operand, None)]
    found = []
    for step in steps:
        values = [
            float(held["value"])
            for held in mine
            if held["from_step"] <= step and (held["to_step"] is None or step <= held["to_step"])
        ]
        found.append(sum(math.log2(value) for value in values if value > 0))
    return found


def _add_row(
    layout: dict[str, Any],
    spread: Mapping[str, Any],
    multipliers: Sequence[Mapping[str, Any]],
    axis: str,
    domain: tuple[float, float],
    colours: Theme,
) -> list[dict[str, Any]]:
    """One operand: its traces; axis, lines and labels go into the layout."""
    operand, fmt = str(spread["operand"]), get_format(str(spread["format"]))
    steps, origin = fill_gaps(spread["steps"])
    amax, rms = (
        _log2([None if at is None else spread[name][at] for at in origin]) for name in ("amax", "rms")
    )
    ceiling = _shifted(amax, _multiplier_exponents(operand, steps, multipliers))
    normal = _shifted(ceiling, [math.log2(fmt.min_normal / fmt.max)] * len(steps))
    flush = _shifted(ceiling, [math.log2(fmt.min_subnormal / 2 / fmt.max)] * len(steps))
    bounds, near = _bounds_of([*amax, *rms, *flush], math.log2(fmt.max))
    layout["yaxis" + axis[1:]] = _axis(domain, bounds, colours)
    colour = slot_colour({"x": "x row", "w": "w tile", "dy": "dy row"}[operand], colours.name)
    _add_maximum(layout, axis, fmt, bounds, colours, near=near)
    ends = {"amax": amax, "rms": rms, "min normal": normal, "to zero": flush}
    layout["annotations"] += _end_labels(axis, ends, bounds, colours)
    layout["annotations"].append(
        {
            "xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": domain[1], "yanchor": "bottom",
            "showarrow": False, "text": f"<b>{operand}</b>", "font": {"size": 11.5, "color": colour},
        }
    )  # fmt: skip
    common = {"type": "scatter", "x": steps, "yaxis": axis, "mode": "lines", "connectgaps": False}
    bands = _bands(common, (ceiling, normal, flush), colour, colours)
    lines = []
    for name, values, width in (("amax", amax, 2.0), ("rms", rms, 1.25)):
        raw = spread[name]
        shown = [None if at is None or raw[at] is None else short_number(raw[at]) for at in origin]
        lines.append(
            {
                **common, "y": values, "name": f"{operand} {name}", "customdata": shown,
                "line": {"color": colour, "width": width, "dash": "solid" if name == "amax" else "dot"},
                "hovertemplate": f"{operand} {name} <b>%{{customdata}}</b><extra></extra>",
            }
        )  # fmt: skip
    return [*bands, *lines]


def _bounds_of(values: Sequence[float | None], maximum: float) -> tuple[tuple[float, float], bool]:
    """Ends of a row's axis, and whether the format's maximum lies within."""
    known = [value for value in values if value is not None]
    low, high = (min(known) - 1.5, max(known) + 2.0) if known else (-1.0, 1.0)
    near = low - NEAR_BINADES <= maximum <= high + NEAR_BINADES
    return ((min(low, maximum - 1.5), max(high, maximum + 3.5)) if near else (low, high)), near


def _axis(domain: tuple[float, float], bounds: tuple[float, float], colours: Theme) -> dict[str, Any]:
    spacing = max(1, math.ceil((bounds[1] - bounds[0]) / 5))
    exponents = range(math.ceil(bounds[0]), math.floor(bounds[1]) + 1)
    ticks = [exponent for exponent in exponents if exponent % spacing == 0]
    return {
        "domain": list(domain),
        "range": list(bounds),
        "tickvals": ticks,
        "ticktext": [f"2<sup>{exponent}</sup>".replace("-", "−") for exponent in ticks],
        "gridcolor": colours.border,
        "zeroline": False,
        "fixedrange": True,
        "automargin": False,
        "ticklabelstandoff": 4,
    }


def _bands(
    common: Mapping[str, Any],
    edges: tuple[Sequence[float | None], Sequence[float | None], Sequence[float | None]],
    colour: str,
    colours: Theme,
) -> list[dict[str, Any]]:
    """The block's normal numbers as a band, its subnormal ones as a fainter one under it."""
    names = ("largest value", "min normal", "to zero")
    tones = (None, _faint(colour, 0.20), _faint(colour, 0.08))
    return [
        {
            **common, "y": values, "name": name, "hoverinfo": "skip",
            "line": {"width": 0.75 if tone else 0, "color": colours.muted},
            **({"fill": "tonexty", "fillcolor": tone} if tone else {}),
        }
        for name, values, tone in zip(names, edges, tones, strict=True)
    ]  # fmt: skip


def _faint(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def _add_maximum(
    layout: dict[str, Any], axis: str, fmt: Format, bounds: tuple[float, float], colours: Theme, *, near: bool
) -> None:
    """The format's largest value: a line where it is in sight, words and an arrow where it is not."""
    maximum, text = math.log2(fmt.max), f"{fmt.name.upper()} max {fmt.max:g} at scale 1"
    above = maximum > bounds[1]
    if near:
        layout["shapes"].append(
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": maximum, "y1": maximum,
                "line": {"color": colours.unstable, "width": 1.1, "dash": "6px,4px"},
            }
        )  # fmt: skip
    else:
        far = abs(maximum - (bounds[1] if above else bounds[0]))
        text = f"{'↑' if above else '↓'} {text}, {far:.0f} binade{'' if round(far) == 1 else 's'} away"
    layout["annotations"].append(
        {
            "xref": "paper", "x": 0.03, "xanchor": "left", "yref": axis, "showarrow": False,
            "y": maximum if near else bounds[1 if above else 0],
            "yanchor": "bottom" if near or not above else "top",
            "text": text, "font": {"size": 10.5, "color": colours.unstable},
            "bgcolor": colours.surface, "opacity": 0.92, "borderpad": 1,
        }
    )  # fmt: skip


def _end_labels(
    axis: str, ends: Mapping[str, Sequence[float | None]], bounds: tuple[float, float], colours: Theme
) -> list[dict[str, Any]]:
    """Names of the lines at their right ends, moved apart where two end close together."""
    last = {name: next((v for v in reversed(row) if v is not None), None) for name, row in ends.items()}
    placed = sorted((value, name) for name, value in last.items() if value is not None)
    apart = LABEL_PX / ROW_PX * (bounds[1] - bounds[0])
    labels = []
    at = -math.inf
    for value, name in placed:
        at = max(value, at + apart)
        labels.append(
            {
                "xref": "paper", "x": 1, "xanchor": "left", "xshift": 5, "yref": axis, "y": at,
                "yanchor": "middle", "showarrow": False, "text": name,
                "font": {"size": 10.5, "color": colours.muted},
            }
        )  # fmt: skip
    return labels
