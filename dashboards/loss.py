"""The loss and gradient-norm strip above the heatmap, as a Plotly figure."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fp8_safeguard.dashboards.metrics import format_value, metric_view
from fp8_safeguard.dashboards.theme import Theme, base_layout, empty_note, get_theme, step_axis, value_axis


def loss_figure(
    steps: Sequence[int],
    losses: Sequence[Any],
    *,
    gradient_norms: Sequence[Any] = (),
    theme: str = "light",
) -> go.Figure:
    """Loss per step, gradient norm on the right axis. None is a gap; a loss or norm that is NaN or Inf is a mark on the lower edge."""
    colours = get_theme(theme)
    layout = base_layout(colours, top_px=8, bottom_px=6)
    layout["xaxis"] = step_axis(colours, labels=False)
    # An axis without a line would say 0 to 1 of something that nobody measured.
    layout["yaxis"] = value_axis(colours, "loss", colours.accent) | {"visible": _has_line(losses)}
    layout["yaxis2"] = value_axis(colours, "grad norm", colours.muted) | {
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
        "visible": _has_line(gradient_norms),
    }
    # Marks have an axis of their own: the others follow the lines that are in view.
    layout["yaxis3"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    broken = [*_broken(steps, losses, "loss"), *_broken(steps, gradient_norms, "gradient norm")]
    # Made in one go: each later addition would have Plotly copy all that is there.
    layout["shapes"] = [_broken_line(step, colours) for step in sorted({step for step, _, _ in broken})]
    figure = go.Figure(layout=layout)
    if any(norm is not None for norm in gradient_norms):
        figure.add_trace(_line(steps, gradient_norms, "gradient norm", colours.muted, width=1, axis="y2"))
    figure.add_trace(_line(steps, losses, "loss", colours.accent, width=1.75, axis="y"))
    figure.add_trace(_broken_marks(broken, colours))
    if not any(loss is not None for loss in losses):
        figure.add_annotation(empty_note(colours, "no loss reported"))
    return figure


def _has_line(values: Sequence[Any]) -> bool:
    return any(_finite(value) is not None for value in values)


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


def _broken(steps: Sequence[int], values: Sequence[Any], name: str) -> list[tuple[int, str, float]]:
    """(step, name, value) of what is no finite number."""
    known = [(step, float(value)) for step, value in zip(steps, values, strict=False) if value is not None]
    return [(step, name, value) for step, value in known if not math.isfinite(value)]


def _broken_line(step: int, colours: Theme) -> dict[str, Any]:
    return {
        "type": "line", "x0": step, "x1": step, "xref": "x", "y0": 0, "y1": 1, "yref": "paper",
        "line": {"color": colours.nonfinite, "width": 1.5},
    }  # fmt: skip


def _broken_marks(broken: Sequence[tuple[int, str, float]], colours: Theme) -> go.Scatter:
    return go.Scatter(
        x=[step for step, _, _ in broken],
        y=[0.08] * len(broken),
        yaxis="y3",
        mode="markers",
        name="non-finite",
        text=[f"{name} {format_value(value, metric_view(name))}" for _, name, value in broken],
        marker={
            "symbol": ["x" if math.isnan(value) else "triangle-up" for _, _, value in broken],
            "size": 9,
            "color": colours.nonfinite,
            "line": {"width": 1, "color": colours.surface},
        },
        hovertemplate="step %{x:,d}<br><b>%{text}</b><extra></extra>",
    )
