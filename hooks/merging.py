"""Packs and merges the statistics of several ranks, and finds the worst slots."""

# Shapes: W ranks, S slots of the model, R rows of a frame (one an expert of a slot), P rows packed, V = 29 TensorStats
# entries, E experts of a slot.

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp8_safeguard.hooks.buffer import AMAX, Snapshot, VariantRows
from fp8_safeguard.hooks.layers import GEMM_PARTS, GRADIENT_PARTS, ObservedLayer, Part, rows_of
from fp8_safeguard.hooks.sample import StepRecord, unscaled
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

Values = NDArray[np.float64]

WORST = 4
"""Slots that each rank names, and that a sample carries."""
WORST_FIELDS = 4
ERROR_FLOOR = 0.025
"""Relative error of a healthy FP8 GEMM (E4M3 in [1, 128] blocks on Gaussian data): a rank is held against no less."""
_PRESENT, _WHOLE, _E5M2, _EMULATED = 1, 2, 4, 8
_ROWS = COLUMNS.index("rows")
_NAN, _INF = COLUMNS.index("nan"), COLUMNS.index("inf")
_SUM_SQ, _SUM_SQ_ERR = COLUMNS.index("sum_sq"), COLUMNS.index("sum_sq_err")
_COLUMNS_OF = frozenset({Part.X_COL, Part.DY_COL})
_NONFINITE, _ERROR = 0.0, 1.0
_METRICS = {_NONFINITE: "nonfinite_count", _ERROR: "relative_error"}
_ABOVE_ANY_ERROR = 1e9


@dataclass(frozen=True, slots=True)
class Place:
    """One slot in the rows of a frame."""

    slot: Slot
    part: Part
    first_row: int
    experts: int

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.first_row, self.first_row + self.experts)


class Layout:
    """All slots of the model in a fixed order, the same on every rank."""

    def __init__(self, layers: list[ObservedLayer]) -> None:
        self.places = [
            Place(layer.slots[part], part, layer.rows[part], layer.all_experts)
            for layer in layers
            for part in Part
        ]
        self.layers = [layer.name for layer in layers]
        self._shapes = [_features(layer) for layer in layers]
        self.rows = rows_of(layers)
        self.index = {place.first_row: index for index, place in enumerate(self.places)}
        """Place by first row."""
        self.weights_S = np.array([place.part is Part.W_TILE for place in self.places], dtype=bool)

    def digest(self, *more: Any) -> bytes:
        """32 bytes that tell this layout, and whatever else has to be equal on all ranks, from others."""
        named = [[place.slot.key, place.experts] for place in self.places]
        return hashlib.sha256(json.dumps([named, self._shapes, *more]).encode()).digest()


def _features(layer: ObservedLayer) -> list[int | None]:
    """Input and output features, which sharding leaves as they are; stages of a pipeline may bear one name."""
    module = layer.module()
    return [getattr(module, name, None) for name in ("in_features", "out_features")]


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank has measured in a step, its gradients divided by the loss scale."""

    values: Values
    """[R, V], the variants' rows last."""
    masks_S: NDArray[np.uint8]
    """What there is of each slot."""
    variants: tuple[VariantRows, ...]

    @property
    def variant_names(self) -> bytes:
        """Which variants there are, as they travel."""
        named = [[rows.slot_row, rows.name, rows.fmt, rows.experts] for rows in self.variants]
        return json.dumps(named).encode() if named else b""


def local_of(layout: Layout, record: StepRecord, loss_scale: float) -> Local:
    """This rank's part of a round; waits for the device."""
    values = record.snapshot.numpy()
    if loss_scale != 1.0:
        values = values.copy()
        for place in layout.places:
            if place.part in GRADIENT_PARTS:
                values[place.rows] = unscaled(values[place.rows], loss_scale)
        for rows in record.snapshot.variants:
            if layout.places[layout.index[rows.slot_row]].part in GRADIENT_PARTS:
                own = slice(rows.first_row, rows.first_row + rows.experts)
                values[own] = unscaled(values[own], loss_scale)
    masks = [_mask(place, record, values) for place in layout.places]
    return Local(values, np.array(masks, dtype=np.uint8), record.snapshot.variants)


def _mask(place: Place, record: StepRecord, values: Values) -> int:
    if place.first_row not in record.filled:
        return 0
    mark = record.marks.get(place.first_row, {})
    # Of a slot that was sampled by tiles the sums are NaN, and so is this count, which is NaN nowhere else.
    whole = not np.isnan(values[place.rows, _ROWS]).any()
    coarse, emulated = mark.get("fmt") == "e5m2", bool(mark.get("emulated"))
    return _PRESENT | _WHOLE * whole | _E5M2 * coarse | _EMULATED * emulated


class Merge:
    """One round's statistics: who contributes what is known to all before anything is added."""

    def __init__(self, layout: Layout, masks_WS: NDArray[np.uint8], names: Sequence[bytes] = ()) -> None:
        self._layout, self._masks_WS = layout, masks_WS
        self.chosen_WS = _chosen(layout, masks_WS)
        """Whose statistics of a slot count."""
        self._slots = np.flatnonzero(self.chosen_WS.any(axis=0)).tolist()
        self._variants = self._common(names)

    def _common(self, names: Sequence[bytes]) -> list[tuple[int, str, str, int]]:
        """Variants that every rank has which has the slot."""
        listed = [{tuple(item) for item in json.loads(text)} if text else set() for text in names]
        common = []
        for item in sorted(set().union(*listed)):
            slot = self._layout.index[item[0]]
            if all(item in listed[rank] for rank in np.flatnonzero(self.chosen_WS[:, slot])):
                common.append(item)
        return common

    def packed(self, rank: int, local: Local | None) -> tuple[Values, Values]:
        """This rank's addends [P V], and what goes into the maxima [2 P]: amax, and whether it is NaN."""
        parts = [self._own_rows(rank, local, index) for index in self._slots]
        parts += [self._own_variant(rank, local, item) for item in self._variants]
        rows_PV = np.concatenate(parts) if parts else np.zeros((0, VECTOR_LENGTH))
        amax_P = rows_PV[:, AMAX].copy()
        broken_P = np.isnan(amax_P)
        rows_PV[:, AMAX] = 0.0
        # A maximum over ranks may or may not keep a NaN: it depends on their order.
        amax_P[broken_P] = 0.0
        return rows_PV.ravel(), np.concatenate([amax_P, broken_P.astype(np.float64)])

    def _own_rows(self, rank: int, local: Local | None, index: int) -> Values:
        place = self._layout.places[index]
        if local is None or not self.chosen_WS[rank, index]:
            return np.zeros((place.experts, VECTOR_LENGTH))
        return local.values[place.rows].copy()

    def _own_variant(self, rank: int, local: Local | None, item: tuple[int, str, str, int]) -> Values:
        slot_row, name, _, experts = item
        mine = local is not None and self.chosen_WS[rank, self._layout.index[slot_row]]
        rows = next((r for r in local.variants if (r.slot_row, r.name) == (slot_row, name)), None) if (
            local is not None and mine
        ) else None  # fmt: skip
        if local is None or rows is None:
            return np.zeros((experts, VECTOR_LENGTH))
        return local.values[rows.first_row : rows.first_row + experts].copy()

    def unpacked(self, sums: Values, maxima: Values) -> tuple[Values, tuple[VariantRows, ...]]:
        """All ranks' statistics as the rows of a frame [R, V], variants last, and where those are."""
        rows_PV = sums.reshape(-1, VECTOR_LENGTH).copy()
        amax_P, broken_P = maxima.reshape(2, -1)
        rows_PV[:, AMAX] = np.where(broken_P > 0, np.nan, amax_P)
        values = np.zeros((self._layout.rows + sum(item[3] for item in self._variants), VECTOR_LENGTH))
        at = 0
        for index in self._slots:
            place = self._layout.places[index]
            values[place.rows] = rows_PV[at : at + place.experts]
            at += place.experts
        first_row, found = self._layout.rows, []
        for slot_row, name, fmt, experts in self._variants:
            values[first_row : first_row + experts] = rows_PV[at : at + experts]
            found.append(VariantRows(slot_row, name, fmt, first_row, experts))
            at, first_row = at + experts, first_row + experts
        return values, tuple(found)

    def record(self, base: StepRecord, values: Values, variants: tuple[VariantRows, ...]) -> StepRecord:
        """The merged sample, with everything else as in `base`."""
        places = [self._layout.places[index] for index in self._slots]
        firsts = self.chosen_WS[:, self._slots].argmax(axis=0)
        marks: dict[int, dict[str, Any]] = {}
        for place, index, first in zip(places, self._slots, firsts, strict=True):
            mask = int(self._masks_WS[first, index])
            mark: dict[str, Any] = {"fmt": "e5m2"} if mask & _E5M2 else {}
            if mask & _EMULATED:
                mark["emulated"] = True
            if mark:
                marks[place.first_row] = mark
        return replace(
            base,
            snapshot=Snapshot(torch.from_numpy(values), None, variants),
            filled=frozenset(place.first_row for place in places),
            marks=marks,
            divided=True,
            sample=None,
        )


def _chosen(layout: Layout, masks_WS: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whose part of a slot counts: of a replicated weight one rank's; what is whole before what tiles say."""
    present, whole = (masks_WS & _PRESENT) > 0, (masks_WS & _WHOLE) > 0
    chosen_WS = np.where(whole.any(axis=0), whole, present)
    first_WS = np.cumsum(chosen_WS, axis=0) == 1
    return np.asarray(np.where(layout.weights_S, chosen_WS & first_WS, chosen_WS))


def worst_of(layout: Layout, merge: Merge, rank: int, local: Local | None, merged: Values) -> Values:
    """This rank's worst slots [4, 4]: slot, metric, value, score; a score of 0 is none.

    Non-finite values come first, by the share of all that are this rank's; then recomputed GEMMs by their error over the
    other ranks' (no less than a healthy one's), so that one bad rank of many stands out.
    """
    found: list[tuple[float, float, float, float]] = []
    for index in np.flatnonzero(local.masks_S).tolist() if local is not None else ():
        assert local is not None
        place = layout.places[index]
        mine_V, all_V = local.values[place.rows].sum(axis=0), merged[place.rows].sum(axis=0)
        nonfinite = mine_V[_NAN] + mine_V[_INF]
        if nonfinite > 0 and place.part in _COLUMNS_OF and local.masks_S[index - 1]:
            continue  # the same elements as in rows, which stand before them
        if nonfinite > 0:
            share = nonfinite / max(nonfinite, all_V[_NAN] + all_V[_INF])
            found.append((float(index), _NONFINITE, float(nonfinite), _ABOVE_ANY_ERROR * (1.0 + share)))
        elif place.part in GEMM_PARTS and mine_V[_SUM_SQ] > 0:
            error = _error(mine_V)
            rest_V = all_V - mine_V if merge.chosen_WS[:, index].sum() > 1 else all_V
            score = error / max(ERROR_FLOOR, _error(rest_V))
            found.append((float(index), _ERROR, error, min(score, _ABOVE_ANY_ERROR)))
    # What is equally bad: the earliest in the model.
    found.sort(key=lambda one: (-one[3], one[0]))
    table = np.zeros((WORST, WORST_FIELDS))
    for row, one in enumerate(found[:WORST]):
        table[row] = one
    return table


def _error(vector_V: Values) -> float:
    """Relative error of a GEMM; infinite where nothing of it is a number."""
    if not vector_V[_SUM_SQ] > 0:
        return 0.0
    ratio = vector_V[_SUM_SQ_ERR] / vector_V[_SUM_SQ]
    return math.sqrt(max(0.0, ratio)) if math.isfinite(ratio) else math.inf


def worst_of_all(layout: Layout, tables_WNF: Values, hosts: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """The worst four slots of all ranks, as a sample carries them."""
    listed = [
        (rank, slot, metric, value, score)
        for rank, table in enumerate(tables_WNF)
        for slot, metric, value, score in table.tolist()
        if score > 0
    ]
    listed.sort(key=lambda one: (-one[4], one[1], one[0]))
    return tuple(_named(layout, hosts, *one[:4]) for one in listed[:WORST])


def _named(
    layout: Layout, hosts: Sequence[str], rank: int, slot: float, metric: float, value: float
) -> dict[str, Any]:
    named = layout.places[int(slot)].slot
    kind = {"operand": named.operand} if named.gemm is None else {"gemm": named.gemm}
    return {
        "rank": rank, "host": hosts[rank], "layer": named.layer, **kind,
        "metric": _METRICS[metric], "value": value,
    }  # fmt: skip


def flagged_bytes(layout: Layout, orders: Iterable[dict[str, int]]) -> NDArray[np.uint8]:
    """How much each layer deserves a closer look [layers]: the most that anybody says."""
    listed = list(orders)
    return np.array([max(order.get(name, 0) for order in listed) for name in layout.layers], dtype=np.uint8)
