"""Statistics of a run as arrays: one merged TensorStats a (tensor, step)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.metrics import HISTOGRAM, HISTOGRAM_BINS, derive, metric_needs, undefined
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.server import slotlists
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.packing import Packed
from fp8_safeguard.server.tables import samples

# Legend: K tensors (layer, operand, layout, gemm), T steps, S slots of one list, B rows of one bundle.
GRADIENT_DISTORTION = "gradient_distortion"
COSINE_DISTORTION = "cosine_distortion"


class Tensor(NamedTuple):
    """What is measured, apart from which expert or group measured it."""

    layer: str
    operand: str | None
    layout: str | None
    gemm: str | None


def tensor_of(slot: Slot) -> Tensor:
    """The tensor that a slot is a part of."""
    return Tensor(slot.layer, slot.operand, slot.layout, slot.gemm)


def is_gradient(tensor: Tensor) -> bool:
    """True for the slots that gradient_distortion is the worst of."""
    return tensor.operand == "dy" or tensor.gemm in ("dgrad", "wgrad")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which slots a query is about; None does not restrict."""

    layer: str | None = None
    operand: str | None = None
    layout: str | None = None
    gemm: str | None = None
    expert: int | None = None
    variant: str | None = None
    gradients: bool = False
    operands: bool = False
    """Leaves recomputed GEMMs out: they have no blocks, so what is made of histograms is null there."""

    def has(self, slot: Slot) -> bool:
        """True where the slot belongs to the query; a what-if only where it is asked for by name."""
        tensor = tensor_of(slot)
        return (
            self.layer in (None, slot.layer)
            and self.operand in (None, slot.operand)
            and self.layout in (None, slot.layout)
            and self.gemm in (None, slot.gemm)
            and self.expert in (None, slot.expert)
            and slot.variant == self.variant
            and (not self.gradients or is_gradient(tensor))
            and not (self.operands and slot.gemm)
        )


_Places = tuple[NDArray[np.intp], NDArray[np.intp]]
"""(slots, tensors): which slot of a list is part of which tensor."""


@dataclass(frozen=True)
class _Bundle:
    """Rows of one group and one slot list, with the places of the selected slots."""

    rows: list[Row[Any]]
    steps_B: NDArray[np.intp]
    slots: int
    aggregate: _Places
    experts: _Places

    def packed(self) -> Packed:
        return Packed([row.columns for row in self.rows], [row.histograms for row in self.rows], self.slots)


class Grid:
    """Merged columns of the selected tensors, computed when a metric asks for them.

    Sums are taken over groups; within a group a layer's own aggregate counts, and the experts only without one
    (the aggregate already holds them).
    """

    def __init__(self, tensors: Sequence[Tensor], steps: NDArray[np.int64], bundles: list[_Bundle]) -> None:
        self.tensors = tuple(tensors)
        self.steps = steps
        self._by_group: dict[str, list[tuple[_Bundle, Packed]]] = {}
        for bundle in bundles:
            self._by_group.setdefault(bundle.rows[0].group, []).append((bundle, bundle.packed()))
        self._columns: dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]] = {}

    @classmethod
    def of_rows(cls, conn: Connection, run_id: int, selection: Selection, rows: Sequence[Row[Any]]) -> "Grid":
        """The selected tensors of some rows of a run, one attempt a step; tensors come in slot order."""
        lists = slotlists.of_run(conn, run_id)
        tensors = _in_order(lists.order, selection)
        steps = np.array(sorted({row.step for row in rows}), dtype=np.int64)
        number = {tensor: place for place, tensor in enumerate(tensors)}
        return cls(tensors, steps, _bundles(rows, steps, lists, number, selection))

    @property
    def shape(self) -> tuple[int, int]:
        """(K, T)."""
        return len(self.tensors), len(self.steps)

    def metric(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """[K, T] values, NaN where null, and a mask of the NaN that were measured.

        Raises UnknownMetricError.
        """
        formula = COSINE_DISTORTION if name == GRADIENT_DISTORTION else name
        needed = {column: self._column(column) for column in metric_needs(formula)}
        columns = {column: values for column, (values, _) in needed.items()}
        nulls = {column: null for column, (_, null) in needed.items()}
        if not self.tensors or not len(self.steps):
            return np.zeros(self.shape), np.zeros(self.shape, dtype=np.bool_)
        values = derive(formula, columns)
        measured = np.isnan(values) & ~undefined(formula, columns, nulls)
        return values.reshape(self.shape), measured.reshape(self.shape)

    def nonfinite(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[K, T] counts of NaN and of infinite elements."""
        nan, inf = (
            np.nan_to_num(self._column(name)[0]).reshape(self.shape).astype(np.int64)
            for name in ("nan", "inf")
        )
        return nan, inf

    def _column(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """[K*T] merged values (histogram [K*T, bins]) and where they are null."""
        if name not in self._columns:
            self._columns[name] = self._merge(name)
        return self._columns[name]

    def _merge(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        shape = (*self.shape, HISTOGRAM_BINS) if name == HISTOGRAM else self.shape
        merged: tuple[NDArray[np.float64], NDArray[np.bool_]] | None = None
        for bundles in self._by_group.values():
            values, known = self._merge_group(name, bundles, shape)
            if merged is None:
                merged = values, known
                continue
            total, present = merged
            merged = (np.maximum(total, values) if name == "amax" else total + values), present | known
        total, present = merged or (np.zeros(shape), np.zeros(self.shape, dtype=np.bool_))
        total[~present] = np.nan
        return total.reshape(-1, *shape[2:]), ~present.reshape(-1)

    def _merge_group(
        self, name: str, bundles: list[tuple[_Bundle, Packed]], shape: tuple[int, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        own = self._sum_of(name, [(bundle, packed, bundle.aggregate) for bundle, packed in bundles], shape)
        # Most runs have no experts: an array of histograms less to fill and to choose from.
        if not any(len(bundle.experts[0]) for bundle, _ in bundles):
            return own
        experts = self._sum_of(name, [(bundle, packed, bundle.experts) for bundle, packed in bundles], shape)
        has_own = np.zeros(self.shape, dtype=np.bool_)
        for bundle, _ in bundles:
            has_own[np.ix_(bundle.aggregate[1], bundle.steps_B)] = True
        chosen = has_own.reshape(has_own.shape + (1,) * (len(shape) - 2))
        return np.where(chosen, own[0], experts[0]), np.where(has_own, own[1], experts[1])

    def _sum_of(
        self, name: str, parts: list[tuple[_Bundle, Packed, _Places]], shape: tuple[int, ...]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        target = np.full(shape, _neutral(name)), np.zeros(self.shape, dtype=np.bool_)
        for bundle, packed, places in parts:
            if len(places[0]):
                values_BS = packed.histogram() if name == HISTOGRAM else packed.column(name)
                _add(name, target, values_BS, packed.null(name), bundle.steps_B, places)
        return target


def _neutral(name: str) -> float:
    """What merging leaves as it is: a null takes no part."""
    return -np.inf if name == "amax" else 0.0


def _add(
    name: str,
    target: tuple[NDArray[np.float64], NDArray[np.bool_]],
    values_BS: NDArray[Any],
    null_BS: NDArray[np.bool_],
    steps_B: NDArray[np.intp],
    places: _Places,
) -> None:
    """Merge the slots at `places` into `target` = (values, known)."""
    slots, tensors = places
    total, known = target
    where = (tensors[:, None], steps_B[None, :])
    merge = np.maximum if name == "amax" else np.add
    values = np.swapaxes(values_BS[:, slots], 0, 1).astype(np.float64)
    null = null_BS[:, slots].T
    values[null] = _neutral(name)
    if len(np.unique(tensors)) == len(tensors):
        total[where] = merge(total[where], values)
        known[where] |= ~null
    else:
        # Several experts of one tensor: `at` counts each of them, plain indexing only the last.
        merge.at(total, where, values)
        np.logical_or.at(known, where, ~null)


def load_grid(
    conn: Connection,
    run_id: int,
    selection: Selection,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> Grid:
    """Read the selected slots of the live branch between two steps (inclusive).

    Tensors come in slot order; steps are all sampled ones of the range, ascending.
    """
    rows = visible_rows(conn, run_id, _wanted(), from_step=from_step, to_step=to_step)
    return Grid.of_rows(conn, run_id, selection, rows)


def load_rows(conn: Connection, attempt_id: int, steps: Sequence[int]) -> list[Row[Any]]:
    """What a grid is made of, at some steps of one attempt."""
    query = select(samples.c.step, samples.c.group, samples.c.part, *_wanted())
    mine = samples.c.attempt_id == attempt_id, samples.c.step.in_(steps)
    return list(conn.execute(query.where(*mine).order_by(samples.c.step, samples.c.group, samples.c.part)))


def _wanted() -> list[Any]:
    return [samples.c.slot_list_id, samples.c.columns, samples.c.histograms]


def layer_order(lists: slotlists.RunLists) -> list[str]:
    """Layer names by slot index."""
    return list(dict.fromkeys(tensor.layer for tensor in _in_order(lists.order, None)))


class _Chosen(NamedTuple):
    """One selected slot of a list."""

    place: int
    tensor: Tensor
    own: bool
    """The layer's own aggregate, not one of its experts."""


class _Same:
    """A slot list as a cache's key: equal only to itself, which spares hashing every slot of it."""

    __slots__ = ("slots",)

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots

    def __hash__(self) -> int:
        return id(self.slots)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.slots is self.slots


# A run whose recomputed GEMMs rotate has hundreds of lists; asking each of their slots again takes most of a query's time.
@lru_cache(maxsize=4096)
def _chosen(listed: _Same, selection: Selection | None) -> tuple[_Chosen, ...]:
    """The slots of a list that belong to a query; all, what-ifs too, without one."""
    return tuple(
        _Chosen(place, tensor_of(slot), slot.expert is None)
        for place, slot in enumerate(listed.slots)
        if selection is None or selection.has(slot)
    )


@lru_cache(maxsize=256)
def _in_order(order: slotlists.SlotOrder, selection: Selection | None) -> tuple[Tensor, ...]:
    """The selected tensors by their index in the model; of equal indices the first seen comes first."""
    first: dict[Tensor, int] = {}
    for slot, index, *_ in order.places.values():
        if selection is None or selection.has(slot):
            tensor = tensor_of(slot)
            if index < first.get(tensor, index + 1):
                first[tensor] = index
    # Sorting is stable, but a tensor that came late with a lower index stands where it came first.
    return tuple(sorted(first, key=first.__getitem__))


def _bundles(
    rows: Sequence[Row[Any]],
    steps: NDArray[np.int64],
    lists: slotlists.RunLists,
    number: dict[Tensor, int],
    selection: Selection,
) -> list[_Bundle]:
    together: dict[tuple[str, int], list[Row[Any]]] = {}
    for row in rows:
        together.setdefault((row.group, row.slot_list_id), []).append(row)
    bundles = []
    for (_, list_id), members in together.items():
        slots = lists[list_id].slots
        chosen = _chosen(_Same(slots), selection)
        if not chosen:
            continue
        places = [
            _pairs([(each.place, number[each.tensor]) for each in chosen if each.own is own])
            for own in (True, False)
        ]
        at = np.searchsorted(steps, np.array([row.step for row in members], dtype=np.int64))
        bundles.append(_Bundle(members, at, len(slots), places[0], places[1]))
    return bundles


def _pairs(pairs: list[tuple[int, int]]) -> _Places:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]
