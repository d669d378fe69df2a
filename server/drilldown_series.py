"""One layer over steps: each slot's metric, amax, block histograms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.metrics import HISTOGRAM, HISTOGRAM_BINS, derive
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.server.answers import encode_array
from fp8_safeguard.server.baselines import chosen
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.drilldown_limits import limits_of, own_medians
from fp8_safeguard.server.drilldown_slots import merged_parts, rows_at
from fp8_safeguard.server.grid import (
    GRADIENT_DISTORTION,
    Grid,
    Selection,
    Tensor,
    is_gradient,
    load_grid,
    tensor_of,
)
from fp8_safeguard.server.heatmap import metric_name
from fp8_safeguard.server.slotlists import in_order, of_run
from fp8_safeguard.server.worst import Measured, reduce_columns

MOST_POINTS = 600
MOST_HISTOGRAMS = 120


@dataclass(frozen=True, kw_only=True)
class LayerSeries:
    """A layer's statistics between two steps, read once for all its charts."""

    grid: Grid
    slots: dict[Tensor, Slot]
    medians: dict[str, Any]
    preset: str
    learned: Baseline | None = None
    """The baseline that the run is judged by."""

    def metric(self, metric: str, most: int = MOST_POINTS) -> list[dict[str, Any]]:
        """One entry a slot that has the metric: steps, values, non-finite counts and limits.

        A point of several steps stands at its first and shows the worst, so that a spike survives.
        Raises Problem 422 for an unknown metric.
        """
        name = metric_name(metric)
        values, bad = self.grid.metric(name)
        nan, inf = self.grid.nonfinite()
        lines = []
        for place, tensor in enumerate(self.grid.tensors):
            if metric == GRADIENT_DISTORTION and not is_gradient(tensor):
                continue
            row = Measured(values[[place]], bad[[place]], nan[[place]], inf[[place]])
            points = _points(name, row, self.grid.steps, most)
            if points["steps"]:
                slot = self.slots[tensor]
                median = self.medians.get(slot.key, {}).get(metric)
                limits = limits_of(self.preset, slot, metric, median, self.learned)
                lines.append({"slot": slot_label(tensor), **points, "thresholds": limits})
        return lines

    def spread(self, operand: str, most: int = MOST_POINTS) -> dict[str, Any] | None:
        """Largest and root-mean-square magnitude of an operand by step; None where it was never measured.

        Every layout of an operand holds the same elements: the first one speaks.
        """
        place = next((at for at, tensor in enumerate(self.grid.tensors) if tensor.operand == operand), None)
        if place is None:
            return None
        amax, bad = (table[place] for table in self.grid.metric("amax"))
        finite = self._column("count", place) - self._column("nan", place) - self._column("inf", place)
        with np.errstate(all="ignore"):
            rms = np.sqrt(self._column("sum_sq", place) / finite)
        held = ~np.isnan(amax) | bad
        steps, rms, amax = self.grid.steps[held], rms[held], amax[held]
        if not len(steps):
            return None
        first = _first_of_buckets(steps, most)
        return {
            "operand": operand,
            "format": self.slots[self.grid.tensors[place]].fmt or "e4m3",
            "steps": steps[first].tolist(),
            "amax": _finite(np.fmax.reduceat(amax, first)),
            # The smallest of a point's steps: where most falls below the format's range.
            "rms": _finite(np.fmin.reduceat(rms, first)),
        }

    def _column(self, name: str, place: int) -> NDArray[np.float64]:
        column: NDArray[np.float64] = self.grid.metric(name)[0][place]
        return column


def load_series(
    conn: Connection, row: Row[Any], layer: str, *, from_step: int | None = None, to_step: int | None = None
) -> LayerSeries:
    """Read the layer's slots between two steps, both included."""
    grid = load_grid(conn, row.id, Selection(layer=layer), from_step=from_step, to_step=to_step)
    slots = slots_of_grid(conn, row, grid)
    medians = own_medians(conn, row, list(slots.values()))
    learned = chosen(conn, row)
    return LayerSeries(grid=grid, slots=slots, medians=medians, preset=row.preset, learned=learned)


def slots_of_grid(conn: Connection, row: Row[Any], grid: Grid) -> dict[Tensor, Slot]:
    """A slot for each tensor of the grid, with the format that the run's first samples name."""
    formats = {tensor_of(slot): slot.fmt for slot in reversed(in_order(of_run(conn, row.id)))}
    return {
        tensor: Slot(
            tensor.layer,
            operand=tensor.operand,
            layout=tensor.layout,
            gemm=tensor.gemm,
            fmt=formats.get(tensor),
        )
        for tensor in grid.tensors
    }


def slot_label(tensor: Tensor) -> str:
    """How a slot of the layer is named beside the layer's name: "dgrad", "x row"."""
    return tensor.gemm or f"{tensor.operand} {tensor.layout}"


def _points(name: str, row: Measured, steps: NDArray[np.int64], most: int) -> dict[str, Any]:
    held = ~np.isnan(row.values[0]) | row.bad[0] | (row.nan[0] > 0) | (row.inf[0] > 0)
    row = Measured(row.values[:, held], row.bad[:, held], row.nan[:, held], row.inf[:, held])
    row, shown, width = reduce_columns(name, row, steps[held], most)
    places = np.flatnonzero((row.nan[0] > 0) | (row.inf[0] > 0)).tolist()
    return {
        "steps": shown.tolist(),
        "step_width": width,
        "values": encode_array(row.values[0], row.bad[0]),
        "nonfinite": [[place, int(row.nan[0, place]), int(row.inf[0, place])] for place in places],
    }


def _first_of_buckets(steps: NDArray[np.int64], most: int) -> NDArray[np.intp]:
    """Where each of at most `most` equal stretches of steps begins."""
    width = max(1, -(-(int(steps[-1]) - int(steps[0]) + 1) // most)) if len(steps) > most else 1
    _, first = np.unique((steps - steps[0]) // width, return_index=True)
    return first.astype(np.intp)


def _finite(values: NDArray[np.float64]) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def block_history(
    conn: Connection,
    row: Row[Any],
    layer: str,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    at: int | None = None,
    most: int = MOST_HISTOGRAMS,
) -> dict[str, dict[str, Any]]:
    """By slot with blocks: `steps`, `bins` [steps][16] and `p01_db`. Of many samples an even choice, and those around `at`.

    Histograms are large, so these are single samples, never merged ones: `every` says how many samples one stands for.
    """
    sampled = sorted(
        {found.step for found in visible_rows(conn, row.id, [], from_step=from_step, to_step=to_step)}
    )
    chosen = _even_choice(sampled, most, at)
    rows = rows_at(conn, row.id, chosen)
    lists = of_run(conn, row.id)
    found: dict[str, dict[str, Any]] = {}
    for (tensor, step), part in merged_parts(rows, lists, layer).items():
        if part.histogram is None or tensor.operand is None:
            continue
        kept = found.setdefault(slot_label(tensor), {"steps": [], "bins": []})
        kept["steps"].append(step)
        kept["bins"].append(part.histogram)
    every = max(1, round(len(sampled) / len(chosen))) if chosen else 1
    return {slot: {**kept, "p01_db": p01_of(kept["bins"]), "every": every} for slot, kept in found.items()}


def p01_of(bins: Sequence[Sequence[int]]) -> list[float | None]:
    """The SQNR in dB that all but the worst hundredth of the blocks reach, for each histogram; None without blocks."""
    table = np.array(bins, dtype=np.float64).reshape(-1, HISTOGRAM_BINS)
    values = derive("tile_sqnr_p01_db", {HISTOGRAM: table}).tolist()
    # Blocks below 0 dB lie in the bin that is open downwards.
    return [None if value != value else max(value, -1e9) for value in values]


def _even_choice(steps: Sequence[int], most: int, at: int | None) -> list[int]:
    """Every n-th step back from the last, at most `most` of them, and the nearest to `at`."""
    chosen = set(steps[:: -max(1, -(-len(steps) // most))])
    if at is not None and steps:
        chosen.add(min(steps, key=lambda step: abs(step - at)))
    return sorted(chosen)
