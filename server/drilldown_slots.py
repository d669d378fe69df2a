"""The slots of one layer: newest values, limits, block histograms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.metrics import (
    ALL_COLUMNS,
    COLUMNS,
    COUNT_COLUMNS,
    DERIVED_METRICS,
    HISTOGRAM,
    derive,
    undefined,
)
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.server.answers import Number, encode_float
from fp8_safeguard.server.branch import last_steps, live_branch, segment_rows
from fp8_safeguard.server.grid import Tensor, tensor_of
from fp8_safeguard.server.latest import LOOK_BACK
from fp8_safeguard.server.packing import Packed
from fp8_safeguard.server.slotlists import RunLists, SlotList, in_order, layers_of, of_run
from fp8_safeguard.server.tables import samples

# Legend: L slots of a list that are the layer's, C columns without the histogram, B histogram bins.
SHOWN_METRICS = (*DERIVED_METRICS, *COLUMNS)
FAR_LOOK_BACK = 512
"""Sampled steps searched for a slot that the newest ones lack: wgrads are recomputed in rotation over all layers."""
_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the newest samples and the slot lists of a run tell of its layers."""

    lists: RunLists
    """Their slot lists, which also know the model's order."""
    steps: list[int]
    """The newest sampled steps, ascending."""
    rows: list[Row[Any]]
    """Their packed rows."""

    @property
    def names(self) -> Sequence[str]:
        """Layers in model order."""
        return layers_of(self.lists)

    def slots(self, layer: str) -> dict[Tensor, Slot]:
        """The layer's tensors in model order, each as the slot of the whole layer, as it was sent last."""
        sent_last = dict.fromkeys(row.slot_list_id for row in self.rows)
        sent = (slot for list_id in sent_last for slot in self.lists[list_id].slots)
        found: dict[Tensor, Slot] = {}
        for slot in (*in_order(self.lists), *sent):
            if slot.layer == layer and slot.variant is None:
                found[tensor_of(slot)] = replace(slot, expert=None)
        return found


@dataclass(frozen=True)
class Part:
    """Merged statistics of one tensor at one step."""

    values: NDArray[np.float64]
    """[C] in COLUMNS order."""
    null: NDArray[np.bool_]
    """[C + 1], the histogram last."""
    bins: NDArray[np.int64]
    """[B]"""

    def merged(self, other: "Part") -> "Part":
        """Sums, and the maximum of amax; a null takes no part."""
        mine, theirs = self._neutral(), other._neutral()
        values = np.where(_IS_MAXIMUM, np.maximum(mine, theirs), mine + theirs)
        return Part(values, self.null & other.null, self.bins + other.bins)

    def _neutral(self) -> NDArray[np.float64]:
        return np.where(self.null[:-1], np.where(_IS_MAXIMUM, -np.inf, 0.0), self.values)

    def metrics(self) -> dict[str, Number]:
        """Every shown metric, as JSON holds it."""
        values = np.where(self.null[:-1], np.nan, self.values)
        bins = np.where(self.null[-1], np.nan, self.bins.astype(np.float64))
        columns: dict[str, NDArray[Any]] = {name: values[[at]] for at, name in enumerate(COLUMNS)}
        columns[HISTOGRAM] = bins[None, :]
        nulls = {name: self.null[[at]] for at, name in enumerate(ALL_COLUMNS)}
        found: dict[str, Number] = {}
        for name in SHOWN_METRICS:
            value = float(derive(name, columns)[0])
            measured_nan = np.isnan(value) and not undefined(name, columns, nulls)[0]
            found[name] = "NaN" if measured_nan else _encode(name, value)
        return found

    @property
    def histogram(self) -> list[int] | None:
        """Blocks by SQNR bin."""
        return None if self.null[-1] else self.bins.tolist()


_IS_MAXIMUM = np.array([name == "amax" for name in COLUMNS])


def _encode(name: str, value: float) -> Number:
    if np.isnan(value):
        return None
    whole = name in COUNT_COLUMNS or name == "nonfinite_count"
    return int(value) if whole else encode_float(value)


def load_known(conn: Connection, run_id: int) -> Known:
    """Read the newest samples and the slot lists of a run."""
    steps = last_steps(conn, run_id, LOOK_BACK)
    rows = rows_at(conn, run_id, steps)
    return Known(lists=of_run(conn, run_id), steps=steps, rows=rows)


def rows_at(conn: Connection, run_id: int, steps: Sequence[int]) -> list[Row[Any]]:
    """Packed rows of the live branch at some steps, ascending; one attempt a step, the newest that has it."""
    chosen: list[Row[Any]] = []
    claimed: set[int] = set()
    names = ("step", "group", "part", "slot_list_id", "columns", "histograms")
    wanted: list[Any] = [samples.c[name] for name in names]
    for segment in live_branch(conn, run_id) if len(steps) else ():
        query = select(*wanted).where(
            *segment_rows(segment, None, None), samples.c.step.in_([int(step) for step in steps])
        )
        fresh = [found for found in conn.execute(query).all() if found.step not in claimed]
        chosen.extend(fresh)
        claimed.update(found.step for found in fresh)
    return sorted(chosen, key=lambda found: (found.step, found.group, found.part))


def newest_parts(conn: Connection, run_id: int, known: Known, layer: str) -> dict[Tensor, tuple[int, Part]]:
    """The newest sampled step of each tensor of the layer, and its merged statistics."""
    wanted = known.slots(layer).keys()
    found = _newest(known.rows, known.lists, layer)
    older = last_steps(conn, run_id, FAR_LOOK_BACK)[: -len(known.steps)] if wanted - found.keys() else []
    while older and wanted - found.keys():
        older, chunk = older[:-_CHUNK], older[-_CHUNK:]
        found = {**_newest(rows_at(conn, run_id, chunk), known.lists, layer), **found}
    return found


def _newest(rows: Sequence[Row[Any]], lists: RunLists, layer: str) -> dict[Tensor, tuple[int, Part]]:
    found: dict[Tensor, tuple[int, Part]] = {}
    for (tensor, step), part in merged_parts(rows, lists, layer).items():
        if not part.null[0] and step >= found.get(tensor, (-1, None))[0]:
            found[tensor] = (step, part)
    return found


def merged_parts(rows: Iterable[Row[Any]], lists: RunLists, layer: str) -> dict[tuple[Tensor, int], Part]:
    """Statistics of each tensor and step, merged over groups.

    In each group the layer's own slot counts, and its experts only without one: the own already holds them.
    """
    groups: dict[tuple[Tensor, int], dict[str, dict[bool, Part]]] = {}
    for row in rows:
        for slot, part in _parts(row, lists[row.slot_list_id], layer):
            kinds = groups.setdefault((tensor_of(slot), row.step), {}).setdefault(row.group, {})
            own = slot.expert is None
            kinds[own] = kinds[own].merged(part) if own in kinds else part
    merged = {}
    for key, by_group in groups.items():
        first, *others = [kinds[True] if True in kinds else kinds[False] for kinds in by_group.values()]
        for other in others:
            first = first.merged(other)
        merged[key] = first
    return merged


def _parts(row: Row[Any], held: SlotList, layer: str) -> list[tuple[Slot, Part]]:
    """The layer's slots in one row; what-ifs take no part."""
    places = [at for at, slot in enumerate(held.slots) if slot.layer == layer and slot.variant is None]
    if not places:
        return []
    packed = Packed([row.columns], [row.histograms], len(held.slots))
    values_LC = np.stack([packed.column(name)[0][places] for name in COLUMNS], axis=1).astype(np.float64)
    null_LC = np.stack([packed.null(name)[0][places] for name in ALL_COLUMNS], axis=1)
    bins_LB = packed.histogram()[0][places]
    listed = zip(places, values_LC, null_LC, bins_LB, strict=True)
    return [(held.slots[at], Part(values, null, bins)) for at, values, null, bins in listed]


def worst_experts(known: Known, layer: str) -> dict[Tensor, tuple[Slot, int, Part]]:
    """The newest expert slot of each tensor: of several groups' experts the one that lost most."""
    found: dict[Tensor, tuple[Slot, int, Part]] = {}
    for row in reversed(known.rows):
        for slot, part in _parts(row, known.lists[row.slot_list_id], layer):
            if slot.expert is None or part.null[0]:
                continue
            best = found.get(tensor_of(slot))
            if best is None or (row.step == best[1] and _loss(part) > _loss(best[2])):
                found[tensor_of(slot)] = (slot, row.step, part)
    return found


def _loss(part: Part) -> float:
    """sum_sq_err over sum_sq; NaN, the worst of all, as infinite."""
    total, error = (part.values[COLUMNS.index(name)] for name in ("sum_sq", "sum_sq_err"))
    if np.isnan(error):
        return np.inf
    return float(error / total) if total else 0.0
