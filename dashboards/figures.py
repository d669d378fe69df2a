"""The public Plotly figures: heatmap, decision timeline, loss."""

from fp8_safeguard.dashboards.heatmap import HeatmapInputError, heatmap_figure, heatmap_json
from fp8_safeguard.dashboards.loss import loss_figure
from fp8_safeguard.dashboards.timeline import describe_target, timeline_figure

__all__ = [
    "HeatmapInputError",
    "describe_target",
    "heatmap_figure",
    "heatmap_json",
    "loss_figure",
    "timeline_figure",
]
