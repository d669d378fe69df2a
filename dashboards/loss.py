"""The loss and gradient-norm strip above the heatmap, as a Plotly figure."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, get_theme, step_axis, value_axis


def loss_figure(
    steps: Sequence[int],
    losses: Sequence[Any],
    *,
    gradient_norms: Sequence[Any] = (),
    theme: str = "light",
) -> go.Figure:
    """Loss per step, gradient norm on the right axis. None is a gap; a NaN or Inf loss is a mark on the lower edge."""
    colours = get_theme(theme)
    layout = base_layout(colours, top_px=8, bottom_px=6)
    layout["xaxis"] = step_axis(colours, labels=False)
    layout["yaxis"] = value_axis(colours, "loss", colours.accent)
    layout["yaxis2"] = value_axis(colours, "grad norm", colours.muted) | {
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
    }
    figure = go.Figure(layout=layout)
    if any(norm is not None for norm in gradient_norms):
        figure.add_trace(_line(steps, gradient_norms, "gradient norm", colours.muted, width=1, axis="y2"))
    figure.add_trace(_line(steps, losses, "loss", colours.accent, width=1.75, axis="y"))
    _add_broken(figure, steps, losses, colours)
    if not any(loss is not None for loss in losses):
        figure.add_annotation(empty_note(colours, "no loss reported"))
    return figure


def _line(
    steps: Sequence[int], values: Sequence[Any], name: str, colour: str, *, width: float, axis: str
) -> go.Scatter:
    return go.Scatter(
        x=list(steps),
        y=[_finite(value) for value in values],
        mode="lines",
        name=name,
        yaxis=axis,
        line={"color": colour, "width": width},
        opacity=0.65 if axis == "y2" else 1,
        connectgaps=False,
        hovertemplate=f"step %{{x:,d}}<br>{name} <b>%{{y:.4~g}}</b><extra></extra>",
    )


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _add_broken(figure: go.Figure, steps: Sequence[int], losses: Sequence[Any], colours: Theme) -> None:
    broken = [
        (step, loss)
        for step, loss in zip(steps, losses, strict=True)
        if loss is not None and not math.isfinite(float(loss))
    ]
    for step, _ in broken:
        figure.add_shape(
            type="line", x0=step, x1=step, xref="x", y0=0, y1=1, yref="paper",
            line={"color": colours.nonfinite, "width": 2},
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=[step for step, _ in broken],
            y=[0.0] * len(broken),
            yaxis="y2",
            mode="markers",
            name="non-finite loss",
            text=[f"loss {float(loss)}" for _, loss in broken],
            marker={
                "symbol": ["x" if math.isnan(float(loss)) else "triangle-up" for _, loss in broken],
                "size": 9,
                "color": colours.nonfinite,
            },
            hovertemplate="step %{x:,d}<br><b>%{text}</b><extra></extra>",
        )
    )
