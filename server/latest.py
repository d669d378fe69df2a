"""Newest value of every tensor, and how far over its thresholds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.metrics import DERIVED_METRICS, METRICS, worst
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import get_preset, thresholds_for
from fp8_safeguard.server.baselines import chosen
from fp8_safeguard.server.branch import last_steps, visible_rows
from fp8_safeguard.server.grid import Grid, Selection, Tensor, load_grid, tensor_of
from fp8_safeguard.server.slotlists import RunLists, in_order, of_run
from fp8_safeguard.server.tables import samples

LOOK_BACK = 32
"""Sampled steps searched for a slot's newest value: wgrads are recomputed in rotation."""


@dataclass(frozen=True)
class Reading:
    """One value, its place, and the threshold it is nearest to (or farthest over)."""

    tensor: Tensor
    metric: str
    value: float
    step: int
    threshold: float
    excess: float
    """Value over threshold (the inverse where lower is worse): 1 is at the threshold."""


@dataclass(frozen=True)
class Latest:
    """Newest values of a run's tensors."""

    grid: Grid
    slots: dict[Tensor, Slot]
    """As they were sent last."""
    preset: str
    learned: Baseline | None = None
    """The baseline that the run is judged by."""

    def values(self, metric: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """[K] the newest value of each tensor (NaN: none, or measured as NaN), and its step (-1: none)."""
        values, bad = self.grid.metric(metric)
        if not values.shape[1]:
            return np.full(len(values), np.nan), np.full(len(values), -1, dtype=np.int64)
        held = ~np.isnan(values) | bad
        newest = values.shape[1] - 1 - np.argmax(held[:, ::-1], axis=1)
        found = held.any(axis=1)
        row = np.arange(len(values))
        return np.where(found, values[row, newest], np.nan), np.where(found, self.grid.steps[newest], -1)

    def worst_by_layer(self) -> dict[str, Reading]:
        """For each layer the reading that is farthest over its threshold."""
        found: dict[str, Reading] = {}
        for metric in _judged_metrics(self.preset):
            values, steps = self.values(metric)
            for tensor, value, step in zip(self.grid.tensors, values.tolist(), steps.tolist(), strict=True):
                lines = self._levels(self.slots[tensor], metric) if step >= 0 else ()
                reading = _read(tensor, metric, value, step, lines)
                if reading and reading.excess > getattr(found.get(tensor.layer), "excess", -1.0):
                    found[tensor.layer] = reading
        return {**found, **self.nonfinite_by_layer()}

    def _levels(self, slot: Slot, metric: str) -> tuple[float, ...]:
        if self.learned is None or self.learned.healthy(slot, metric) is None:
            return _lines(self.preset, _kind(slot), metric)
        return _learned_lines(self.preset, slot, metric, self.learned)

    def nonfinite_by_layer(self) -> dict[str, Reading]:
        """For each layer that holds non-finite values the tensor to look at: nothing is worse, whatever else is over."""
        values, steps = self.values(NON_FINITE.metric)
        places = zip(self.grid.tensors, values.tolist(), steps.tolist(), strict=True)
        bad = [(tensor, value, step) for tensor, value, step in places if value > 0]
        bad.sort(key=lambda place: _downstream(place[0]), reverse=True)
        metric, limit = NON_FINITE.metric, NON_FINITE.watch or 0.0
        return {
            tensor.layer: Reading(tensor, metric, value, step, limit, np.inf) for tensor, value, step in bad
        }


def load_latest(conn: Connection, run: Row[Any], upto: int | None = None) -> Latest:
    """Read the newest samples of the live branch; `upto` leaves later steps out."""
    steps = last_steps(conn, run.id, LOOK_BACK, upto)
    # Without a step nothing is to be read; -1 is below every step.
    span = (steps[0], steps[-1]) if steps else (-1, -1)
    grid = load_grid(conn, run.id, Selection(), from_step=span[0], to_step=span[1])
    lists = of_run(conn, run.id)
    slots = {tensor_of(slot): slot for slot in in_order(lists) if slot.variant is None}
    slots.update(_as_sent_last(conn, run.id, span, lists))
    return Latest(grid, slots, run.preset, chosen(conn, run))


def _as_sent_last(
    conn: Connection, run_id: int, span: tuple[int, int], lists: RunLists
) -> dict[Tensor, Slot]:
    """Slots as their newest sample names them: whether a result is emulated, and its format, change with the plan."""
    rows = visible_rows(conn, run_id, [samples.c.slot_list_id], from_step=span[0], to_step=span[1])
    # By the last step of each list; what comes later goes over what came before.
    newest = {row.slot_list_id: row.step for row in rows}
    found: dict[Tensor, Slot] = {}
    for list_id in sorted(newest, key=newest.__getitem__):
        real = [slot for slot in lists[list_id].slots if slot.variant is None]
        # A layer's own aggregate goes over its worst expert, which is a part of it.
        real.sort(key=lambda slot: slot.expert is None)
        found.update({tensor_of(slot): slot for slot in real})
    return found


_PATH = ("x", "w", "fprop", "dy", "dgrad", "wgrad")
"""The way through a layer: what comes before a result is where its non-finite values come from."""


def _downstream(tensor: Tensor) -> tuple[int, bool]:
    return _PATH.index(tensor.gemm or tensor.operand or "x"), tensor.layout == "col"


def _kind(slot: Slot) -> tuple[str | None, ...]:
    return (slot.operand, slot.layout, slot.gemm, slot.fmt)


@lru_cache(maxsize=4096)
def _lines(preset: str, kind: tuple[str | None, ...], metric: str) -> tuple[float, ...]:
    """Threshold values of a kind of slot; they do not depend on its layer."""
    operand, layout, gemm, fmt = kind
    slot = Slot("any", operand=operand, layout=layout, gemm=gemm, fmt=fmt)
    lines = thresholds_for(get_preset(preset), slot, metric)
    return tuple(float(line["value"]) for line in lines)


@lru_cache(maxsize=65_536)
def _learned_lines(preset: str, slot: Slot, metric: str, learned: Baseline) -> tuple[float, ...]:
    """Threshold values of one slot, as a baseline moves them."""
    lines = thresholds_for(get_preset(preset), slot, metric, baseline=learned)
    return tuple(float(line["value"]) for line in lines)


@lru_cache(maxsize=16)
def _judged_metrics(preset: str) -> tuple[str, ...]:
    """Metrics for which the preset has a threshold of any kind of slot."""
    kinds: list[tuple[str | None, ...]] = [
        (o, la, None, None) for o in ("x", "w", "dy") for la in ("row", "col", "tile")
    ]
    kinds += [(None, None, gemm, None) for gemm in ("fprop", "dgrad", "wgrad")]
    ordered = dict.fromkeys((*DERIVED_METRICS, *METRICS))
    return tuple(metric for metric in ordered if any(_lines(preset, kind, metric) for kind in kinds))


def _read(tensor: Tensor, metric: str, value: float, step: int, lines: tuple[float, ...]) -> Reading | None:
    if not lines:
        return None
    lower = worst(metric) == "min"
    # The watch level is the one that is reached first.
    threshold = max(lines) if lower else min(lines)
    if np.isnan(value):
        excess = np.inf
    elif lower:
        excess = threshold / value if value > 0 else np.inf
    else:
        excess = value / threshold if threshold > 0 else (np.inf if value > 0 else 0.0)
    return Reading(tensor, metric, value, step, threshold, float(excess))
