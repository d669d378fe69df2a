"""The layer by step heatmap, as a Plotly figure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fp8_safeguard.dashboards.metrics import MetricView, format_value, metric_view
from fp8_safeguard.dashboards.row_labels import row_labels
from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, escape, get_theme, step_axis
from fp8_safeguard.dashboards.timeline import periods

MAX_CELLS = 1_000_000
"""Chromium needs seconds to paint more; the server downsamples to about 1000 x 400."""

Cells = list[list[float | None]]
Bounds = tuple[float, float]


class HeatmapInputError(ValueError):
    """Values, layers and steps that do not fit together, or more cells than a browser can draw."""


def heatmap_figure(
    values: Sequence[Sequence[Any]] | np.ndarray[Any, Any],
    layers: Sequence[str],
    steps: Sequence[int],
    *,
    metric: str,
    nonfinite: Iterable[Sequence[int]] = (),
    scale: str = "linear",
    thresholds: Iterable[Mapping[str, Any] | float] = (),
    **more: Any,
) -> go.Figure:
    """`heatmap_json`, which takes the same, as a Plotly figure."""
    plain = heatmap_json(
        values,
        layers,
        steps,
        metric=metric,
        nonfinite=nonfinite,
        scale=scale,
        thresholds=thresholds,
        **more,
    )
    return go.Figure(plain)


def heatmap_json(
    values: Sequence[Sequence[Any]] | np.ndarray[Any, Any],
    layers: Sequence[str],
    steps: Sequence[int],
    *,
    metric: str,
    nonfinite: Iterable[Sequence[int]] = (),
    scale: str = "linear",
    thresholds: Iterable[Mapping[str, Any] | float] = (),
    step_width: int = 1,
    decisions: Sequence[Mapping[str, Any]] = (),
    alerts: Mapping[str, str] | None = None,
    theme: str = "light",
    empty: str | None = None,
) -> dict[str, Any]:
    """Plotly's JSON of the heatmap of `values[layer][step]`.

    None is "not sampled" and stays a gap; NaN and Inf (floats, or the wire's strings) become marks of their own,
    never colours; rows may be ragged and are padded with None. `nonfinite` holds (row, column, NaN count, Inf count).
    On the log scale `z` is log10 of the value and `customdata` the value itself. `step_width` is the number of
    steps that a column stands for. `decisions` mark where a row went to BF16, `alerts` ("act" or "watch" by layer) the names of rows, whatever the
    metric shows of them. `thresholds` are {"value", "severity", "origin"} or plain numbers. `empty` is said where there is nothing to draw.

    The cells are put in last: Plotly's own classes copy and check each of them several times, a second for 100,000.
    Raises HeatmapInputError when the shapes disagree or there are more than MAX_CELLS cells.
    """
    if scale not in ("linear", "log"):
        raise HeatmapInputError(f"scale {scale!r} is unknown; use 'linear' or 'log'")
    colours, view = get_theme(theme), metric_view(metric)
    cells, marks = _clean(values, layers, steps, nonfinite)
    bounds = _colour_range(cells, view, scale)
    figure = go.Figure(layout=_layout(layers, steps, colours, alerts or {}))
    figure.add_trace(_heatmap_trace(layers, steps, view, scale, bounds, step_width, colours))
    _add_marks(figure, marks, layers, steps, colours)
    _add_fallbacks(figure, decisions, layers, steps, colours)
    _add_thresholds(figure, thresholds, view, scale, bounds, colours)
    if not any(value is not None for row in cells for value in row) and not marks:
        text = f"{view.label}: not sampled in this range" if len(steps) and len(layers) else "no samples yet"
        figure.add_annotation(empty_note(colours, escape(empty or text)))
    plain: dict[str, Any] = figure.to_plotly_json()
    is_log = scale == "log"
    plain["data"][0]["z"] = _log10(cells, bounds[0]) if is_log and bounds else cells
    if is_log:
        plain["data"][0]["customdata"] = cells
    plain["data"] += _measured(cells, marks, layers, steps, colours)
    return plain


def _measured(
    cells: Cells,
    marks: Mapping[tuple[int, int], tuple[int, int]],
    layers: Sequence[str],
    steps: Sequence[int],
    colours: Theme,
) -> list[dict[str, Any]]:
    """A plain ground under cells that hold no finite value but were measured: only what was not sampled is hatched."""
    found = {place for place in marks if cells[place[0]][place[1]] is None}
    if not found:
        return []
    # Plotly sorts rows by the axis's categories, and fails where some are missing.
    z: list[list[int | None]] = [[None] * len(steps) for _ in layers]
    for row, column in found:
        z[row][column] = 1
    y = [escape(layer) for layer in layers]
    ground = {
        **{"type": "heatmap", "name": "measured, not finite", "x": list(steps), "y": y},
        "z": z,
        "colorscale": [[0, colours.surface], [1, colours.surface]],
        "showscale": False,
        "hoverinfo": "skip",
    }
    return [ground]


def _clean(
    values: Sequence[Sequence[Any]] | np.ndarray[Any, Any],
    layers: Sequence[str],
    steps: Sequence[int],
    nonfinite: Iterable[Sequence[int]],
) -> tuple[Cells, dict[tuple[int, int], tuple[int, int]]]:
    """Cells with None wherever there is no finite value, and (NaN, Inf) counts by (row, column)."""
    _check_shape(values, layers, steps)
    marks = {(row, column): (nan, inf) for row, column, nan, inf in nonfinite if nan or inf}
    for row, column in marks:
        if not (0 <= row < len(layers) and 0 <= column < len(steps)):
            raise HeatmapInputError(
                f"nonfinite names cell ({row}, {column}) of a heatmap of {len(layers)} layers x {len(steps)} steps"
            )
    cells: Cells = []
    for row in range(len(layers)):
        given = values[row] if row < len(values) else ()
        line = [None if value is None else float(value) for value in given]
        line += [None] * (len(steps) - len(line))
        for column, value in enumerate(line):
            if value is not None and not math.isfinite(value):
                marks.setdefault((row, column), (1, 0) if math.isnan(value) else (0, 1))
        cells.append([value if value is not None and math.isfinite(value) else None for value in line])
    return cells, marks


def _check_shape(
    values: Sequence[Sequence[Any]] | np.ndarray[Any, Any], layers: Sequence[str], steps: Sequence[int]
) -> None:
    count = len(layers) * len(steps)
    if count > MAX_CELLS:
        raise HeatmapInputError(
            f"{len(layers)} layers x {len(steps)} steps = {count:,} cells; at most {MAX_CELLS:,} can be drawn: "
            "ask for fewer columns (max_cols) or a narrower step range"
        )
    if len(values) > len(layers):
        raise HeatmapInputError(
            f"more rows of values ({len(values)}) than layers ({len(layers)}): name every row"
        )
    longest = max((len(row) for row in values), default=0)
    if longest > len(steps):
        raise HeatmapInputError(
            f"a row has more values ({longest}) than there are steps ({len(steps)}): give one step per column"
        )
    if len(set(layers)) < len(layers):
        twice = next(layer for index, layer in enumerate(layers) if layer in layers[:index])
        raise HeatmapInputError(f"layer {twice!r} names two rows: layer names must be unique")
    if any(after <= before for before, after in pairwise(steps)):
        raise HeatmapInputError("steps must increase from column to column: sort them and drop repeats")


def _colour_range(cells: Cells, view: MetricView, scale: str) -> Bounds | None:
    """The fixed range of the metric, else the data's, widened when it is a single value; None when empty."""
    fixed = view.log_bounds if scale == "log" else view.bounds
    finite = [value for row in cells for value in row if value is not None]
    if scale == "log":
        finite = [value for value in finite if value > 0]
    if fixed is not None:
        return fixed
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if scale == "log":
        # 10^308 is the last power of ten in a float; one decade is left for the widening below.
        low, high = (10.0 ** max(-307, min(307, power)) for power in _decades(low, high))
        return (low, high) if low < high else (low / 10, high * 10)
    margin = 0.0 if low < high else max(abs(low), 1.0) / 2
    return low - margin, high + margin


def _decades(low: float, high: float) -> tuple[int, int]:
    return math.floor(math.log10(low)), math.ceil(math.log10(high))


def _heatmap_trace(
    layers: Sequence[str],
    steps: Sequence[int],
    view: MetricView,
    scale: str,
    bounds: Bounds | None,
    step_width: int,
    colours: Theme,
) -> go.Heatmap:
    log = scale == "log"
    zmin, zmax = map(math.log10, bounds) if log and bounds else bounds or (None, None)
    shown = f"%{{{'customdata' if log else 'z'}:{view.hover_format}}}"
    window = f", worst within {step_width} steps" if step_width > 1 else ""
    return go.Heatmap(
        x=list(steps),
        y=[escape(layer) for layer in layers],
        zauto=zmin is None,
        zmin=zmin,
        zmax=zmax,
        colorscale=_colorscale(colours, view),
        hoverongaps=False,
        hovertemplate=f"<b>%{{y}}</b><br>step %{{x:,d}}{window}<br>{view.label} <b>{shown}</b> {view.unit}<extra></extra>",
        colorbar=_colorbar(view, log, bounds, colours),
        name=view.label,
    )


def _log10(cells: Cells, low: float) -> Cells:
    """log10 of each cell, zero and rounding noise below zero taken as the lowest colour."""
    if not cells:
        return []
    array = np.array(cells, dtype=np.float64)
    logs = np.round(np.log10(np.maximum(array, low * 1e-3)), 5).astype(object)
    logs[np.isnan(array)] = None
    rows: Cells = logs.tolist()
    return rows


def _colorscale(colours: Theme, view: MetricView) -> list[list[Any]]:
    if not view.worse_when_low:
        return [[position, colour] for position, colour in colours.colorscale]
    return [[1 - position, colour] for position, colour in reversed(colours.colorscale)]


def _colorbar(view: MetricView, log: bool, bounds: Bounds | None, colours: Theme) -> dict[str, Any]:
    bar: dict[str, Any] = {
        "x": 1,
        "xpad": 8,
        "ypad": 0,
        "len": 1,
        "thickness": 12,
        "outlinewidth": 0,
        "ticks": "",
        "tickfont": {"color": colours.muted, "size": 10},
        "xanchor": "left",
    }
    if log and bounds:
        low, high = map(math.log10, bounds)
        decades = range(math.ceil(low), math.floor(high) + 1)
        bar |= {
            "tickvals": list(decades),
            "ticktext": [format_value(10.0**decade, view) for decade in decades],
        }
    elif view.percent:
        bar |= {"tickformat": "~p"}
    return bar


def _layout(
    layers: Sequence[str], steps: Sequence[int], colours: Theme, alerts: Mapping[str, str]
) -> dict[str, Any]:
    labels = row_labels(layers, alerts)
    layout = base_layout(colours, top_px=6, bottom_px=8)
    layout["xaxis"] = step_axis(colours, labels=False)
    if len(steps):
        first, last = (steps[1] - steps[0], steps[-1] - steps[-2]) if len(steps) > 1 else (1, 1)
        layout["xaxis"]["range"] = [steps[0] - first / 2, steps[-1] + last / 2]
    layout["yaxis"] = {
        "type": "category",
        "range": [max(len(layers), 1) - 0.5, -0.5],
        "tickvals": [escape(layer) for layer in labels],
        "ticktext": [escape(label) for label in labels.values()],
        "showgrid": False,
        "fixedrange": True,
        "ticks": "",
        "ticklabelstandoff": 6,
        "automargin": False,
    }
    return layout


def _add_marks(
    figure: go.Figure,
    marks: Mapping[tuple[int, int], tuple[int, int]],
    layers: Sequence[str],
    steps: Sequence[int],
    colours: Theme,
) -> None:
    for name, symbol in (("NaN", "x"), ("Inf", "triangle-up")):
        places = [place for place in sorted(marks) if (marks[place][0] > 0) == (name == "NaN")]
        figure.add_trace(
            go.Scatter(
                x=[steps[column] for _, column in places],
                y=[escape(layers[row]) for row, _ in places],
                mode="markers",
                name=name,
                text=[_counts(*marks[place]) for place in places],
                marker={
                    "symbol": symbol,
                    "size": 8,
                    "color": colours.nonfinite,
                    "line": {"width": 1, "color": colours.surface},
                },
                hovertemplate="<b>%{y}</b><br>step %{x:,d}<br>%{text}<extra></extra>",
            )
        )


def _counts(nan: int, inf: int) -> str:
    """How many elements of the tensor are no numbers: "3 NaN, 1 Inf"."""
    return ", ".join(f"{count:,} {kind}" for kind, count in (("NaN", nan), ("Inf", inf)) if count)


def _add_fallbacks(
    figure: go.Figure,
    decisions: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    steps: Sequence[int],
    colours: Theme,
) -> None:
    """A mark in each row where it went to BF16: from there on its cells tell what FP8 would do."""
    known = set(layers)
    starts = sorted(
        {
            (period.start, period.layer)
            for period in periods(decisions, steps[-1] if len(steps) else None)
            if period.action == "bf16_fallback" and period.layer in known
        }
    )
    figure.add_trace(
        go.Scatter(
            x=[start for start, _ in starts],
            y=[escape(layer) for _, layer in starts],
            mode="markers",
            name="BF16 fallback",
            marker={
                "symbol": "diamond",
                "size": 9,
                "color": colours.fallback,
                "line": {"width": 1.5, "color": colours.surface},
            },
            hovertemplate="<b>%{y}</b><br>GEMMs in BF16 from step %{x:,d}; values tell what FP8 would do<extra></extra>",
        )
    )


def _add_thresholds(
    figure: go.Figure,
    thresholds: Iterable[Mapping[str, Any] | float],
    view: MetricView,
    scale: str,
    bounds: Bounds | None,
    colours: Theme,
) -> None:
    """A line across the colour bar at each threshold inside its range, labelled with severity and origin."""
    if bounds is None:
        return
    low, high = bounds
    for threshold in thresholds:
        entry = threshold if isinstance(threshold, Mapping) else {"value": threshold}
        value, severity = float(entry["value"]), str(entry.get("severity", ""))
        if not low <= value <= high:
            continue
        position = (value - low) / (high - low)
        if scale == "log":
            position = math.log(value / low) / math.log(high / low)
        colour = colours.unstable if severity == "act" else colours.watch
        figure.add_shape(
            type="line", xref="paper", yref="paper", xsizemode="pixel", xanchor=1, x0=6, x1=58,
            y0=position, y1=position, line={"color": colour, "width": 1.5},
        )  # fmt: skip
        figure.add_annotation(
            xref="paper", yref="paper", x=1, y=position, xshift=62, xanchor="left", yanchor="middle", showarrow=False,
            text=escape(severity or format_value(value, view)), font={"size": 10, "color": colour},
            hovertext=escape(f"{severity or 'threshold'} at {format_value(value, view)} {entry.get('origin', '')}".strip()),
        )  # fmt: skip
