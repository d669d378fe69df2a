"""Which heatmap shows what an alert is about."""

from collections.abc import Sequence
from dataclasses import dataclass

from fp8_safeguard.dashboards.alerts import AlertRow
from fp8_safeguard.dashboards.metrics import PAGE_METRICS
from fp8_safeguard.dashboards.slices import GRADIENT_SLOTS

_SHOWN = ("relative_error", "cosine", "cosine_distortion", "nonfinite_count")
"""Signals that gradient distortion moves with, or has marks for, where they are of a gradient."""
_IN_EVERY_SAMPLE = [slot for slot in GRADIENT_SLOTS if slot != "wgrad"]
"""A wgrad is measured in turn only: between its turns the picture is that of the others."""


@dataclass(frozen=True, kw_only=True)
class OutOfSight:
    """Act alerts that the picture in view does not show."""

    row: AlertRow
    """The one to look at first."""
    others: int


def opening_metric(rows: Sequence[AlertRow]) -> str:
    """The metric that a page opens with, where its address names none.

    rows: the run's alerts, the most urgent first. Gradient distortion says nothing of a fault in fprop or of underflow: where
    no act alert is about what it shows, that of the first one is taken.
    """
    pictured = [row for row in rows if row.severity == "act" and row.metric in PAGE_METRICS]
    if not pictured or any(_of_gradient(row) for row in pictured):
        return PAGE_METRICS[0]
    return pictured[0].metric


def out_of_sight(rows: Sequence[AlertRow], metric: str, slot: str) -> OutOfSight | None:
    """Of the alerts that are at the act level now those that no picture of the metric and slot shows; None: it shows all."""
    unseen = [row for row in rows if row.standing == "act" and not _is_seen(row, metric, slot)]
    pictured = [row for row in unseen if row.metric in PAGE_METRICS]
    return OutOfSight(row=pictured[0], others=len(unseen) - 1) if pictured else None


def _is_seen(row: AlertRow, metric: str, slot: str) -> bool:
    if metric == PAGE_METRICS[0] and _of_gradient(row):
        return slot in ("", row.slot, *row.also)
    return row.metric == metric and slot in ("", row.slot)


def _of_gradient(row: AlertRow) -> bool:
    return row.metric in _SHOWN and not {row.slot, *row.also}.isdisjoint(_IN_EVERY_SAMPLE)
