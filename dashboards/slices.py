"""Cuts the API's heatmap answer to what a page shows."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from fp8_safeguard.monitor.metrics import metric_needs


@dataclass(frozen=True, kw_only=True)
class HeatmapSlice:
    """Rows and columns ready for heatmap_figure."""

    values: list[list[Any]]
    layers: list[str]
    steps: list[int]
    nonfinite: list[tuple[int, int, int, int]]


def layer_matches(layer: str, text: str) -> bool:
    """Whether a layer's name contains a text, spaces and all; case is folded, the one rule of page and figures."""
    return text.casefold() in layer.casefold()


def cut_heatmap(answer: Mapping[str, Any], *, contains: str = "", worst_first: bool = False) -> HeatmapSlice:
    """The layers whose name contains a text (case ignored), with empty columns where sampling paused.

    Without those columns Plotly would stretch a cell over steps that it does not describe. `worst_first` orders the rows by
    their worst value instead of by depth.
    """
    kept = [row for row, layer in enumerate(answer["layers"]) if layer_matches(layer, contains)]
    if worst_first:
        kept.sort(key=lambda row: _badness(answer, row), reverse=True)
    steps, origin = fill_gaps(answer["steps"])
    new_row = {row: place for place, row in enumerate(kept)}
    new_column = {column: place for place, column in enumerate(origin) if column is not None}
    return HeatmapSlice(
        values=[_spread(answer["values"][row], origin) for row in kept],
        layers=[answer["layers"][row] for row in kept],
        steps=steps,
        nonfinite=[
            (new_row[row], new_column[column], nan, inf)
            for row, column, nan, inf in answer["nonfinite"]
            if row in new_row
        ],
    )


SLOTS = ("fprop", "dgrad", "wgrad", "x row", "x col", "w tile", "dy row", "dy col")
"""The slots that the run page offers beside the worst of a layer."""


class UnknownSlotError(ValueError):
    """A slot name that no layer can have."""


def slot_filter(slot: str) -> dict[str, Any]:
    """The API's filters for a slot name: {"gemm": "dgrad"}, {"operand": "dy", "layout": "row"}, or none for ""."""
    if not slot:
        return {}
    if slot not in SLOTS:
        raise UnknownSlotError(
            f"slot {slot!r} is unknown; use one of {', '.join(SLOTS)}, or none for the worst"
        )
    operand, _, layout = slot.partition(" ")
    return {"operand": operand, "layout": layout} if layout else {"gemm": operand}


GEMM_COLUMNS = frozenset({"count", "nan", "inf", "amax", "sum_sq", "sum_sq_q", "sum_sq_err"})
"""What a recomputed GEMM reports; metrics of other columns are null there."""
GRADIENT_SLOTS = ("dgrad", "wgrad", "dy row", "dy col")


def offered_slots(present: Collection[str], metrics: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The slots that exist for each metric, of those `present` in a run."""
    return {
        metric: tuple(slot for slot in SLOTS if slot in present and _has(slot, metric)) for metric in metrics
    }


def _has(slot: str, metric: str) -> bool:
    if metric == "gradient_distortion":
        return slot in GRADIENT_SLOTS
    return " " in slot or GEMM_COLUMNS.issuperset(metric_needs(metric))


def strictest(
    thresholds: Iterable[Mapping[str, Any]], *, lower_is_worse: bool = False
) -> list[Mapping[str, Any]]:
    """The threshold of each severity that is reached first: from there on somebody is being judged."""
    first: dict[str, Mapping[str, Any]] = {}
    ordered = sorted(thresholds, key=lambda threshold: float(threshold["value"]), reverse=lower_is_worse)
    for threshold in ordered:
        first.setdefault(str(threshold["severity"]), threshold)
    return list(first.values())


def fill_gaps(steps: Sequence[int]) -> tuple[list[int], list[int | None]]:
    """Steps with one added at each end of every pause, and each step's original column (None for an added one)."""
    cadence = median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 1
    filled: list[int] = list(steps[:1])
    origin: list[int | None] = [0] if len(steps) else []
    for column, (before, after) in enumerate(pairwise(steps), start=1):
        if after - before > 1.5 * cadence:
            added = sorted({int(before + cadence), int(after - cadence)} - {before, after})
            filled += added
            origin += [None] * len(added)
        filled.append(after)
        origin.append(column)
    return filled, origin


def _badness(answer: Mapping[str, Any], row: int) -> float:
    """What a row is ranked by: its worst value upwards, NaN above everything, a row without values below."""
    values = [float(value) for value in answer["values"][row] if value is not None]
    if any(math.isnan(value) for value in values):
        return math.inf
    if answer["agg"] == "min":
        values = [-value for value in values]
    return max(values, default=-math.inf)


def _spread(row: Sequence[Any], origin: Sequence[int | None]) -> list[Any]:
    return [row[column] if column is not None and column < len(row) else None for column in origin]
