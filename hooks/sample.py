"""Turns a step's buffers into the sample that travels."""

# Shapes: S slots of a sample, V = 29 TensorStats entries, E experts of a layer.

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.hooks.buffer import AMAX, Snapshot
from fp8_safeguard.hooks.layers import GEMM_PARTS, GRADIENT_PARTS, ObservedLayer, Part
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.recompute import GEMM_COLUMNS
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.values import Number
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import COLUMNS, COUNT_COLUMNS, HISTOGRAM
from fp8_safeguard.monitor.wire import Attempt, Sample

logger = logging.getLogger("fp8_safeguard")

Vector = NDArray[np.float64]

_SCALE_POWER = {"amax": 1, "sum_sq": 2, "sum_sq_q": 2, "sum_sq_err": 2, "sum_4th": 4}
"""How each column grows with a loss scale; block metrics do not depend on it."""


@dataclass(slots=True)
class Notes:
    """What the trainer said about one step; tensors are copies on their own device, read later."""

    values: dict[str, Number] = field(default_factory=dict)
    """`loss`, `gradient_norm`, `learning_rate`, `tokens`, `loss_scale`."""
    scalars: list[tuple[str, str, Number]] = field(default_factory=list)
    """(layer, name, value)."""
    found_scale: Tensor | None = None
    """Loss scale of a GradScaler that was seen at work; `loss_scale` as logged comes first."""


@dataclass(slots=True)
class StepRecord:
    """One sample on its way from the training thread to the sender."""

    step: int
    snapshot: Snapshot
    filled: frozenset[int]
    """First rows of the slots that were measured: the others are absent."""
    marks: Mapping[int, Mapping[str, Any]]
    """Fields of the slot by first row, where the step's precision adds some."""
    notes: Notes
    plan_version: int
    effective_step: int | None
    overhead_ratio: float
    sample: Sample | None = None
    """The finished sample, once somebody has asked for it."""


class SampleBuilder:
    """Knows the fixed part of every sample of one guard."""

    def __init__(self, layers: list[ObservedLayer], options: Options, once: OnceLog) -> None:
        self.options = options
        self._once = once
        self.attempt = Attempt(id=options.attempt)
        self.dropped = 0
        """Samples lost since attach()."""
        self._rows = list(_rows(layers))

    def build(self, record: StepRecord) -> Sample:
        """The sample of a step; the same object each time. Waits for the device, so the sender calls it."""
        if record.sample is None:
            record.sample = self._build(record)
        return record.sample

    def _build(self, record: StepRecord) -> Sample:
        run = {name: _as_float(value) for name, value in record.notes.values.items()}
        if record.notes.found_scale is not None:
            run.setdefault("loss_scale", _as_float(record.notes.found_scale))
        self._leave_out_nonfinite(run)
        loss_scale = run.get("loss_scale", 1.0)
        usable = math.isfinite(loss_scale) and loss_scale > 0
        listed = list(self._slots(record, loss_scale if usable else 1.0))
        columns, nulls = _columns([vector for _, _, vector in listed], [slot for slot, _, _ in listed])
        scalars = [
            {"layer": layer, "name": name, "value": _as_float(value)}
            for layer, name, value in record.notes.scalars
        ]
        return Sample(
            batch_id=f"{self.options.attempt}-{self.options.group}-{record.step}",
            attempt=self.attempt,
            group=self.options.group,
            groups=self.options.groups,
            step=record.step,
            mode=self.options.mode,
            thresholds=self.options.thresholds,
            plan_version=record.plan_version,
            effective_step=record.effective_step,
            overhead_ratio=record.overhead_ratio,
            dropped=self.dropped,
            slots=tuple(slot for slot, _, _ in listed),
            indices=tuple(index for _, index, _ in listed),
            columns=columns,
            nulls=nulls,
            run=run,
            scalars=tuple(scalars),
        )

    def _leave_out_nonfinite(self, run: dict[str, float]) -> None:
        """A value that the trainer chooses is never non-finite on the wire: the whole sample would be refused."""
        for name in ("learning_rate", "tokens"):
            if not math.isfinite(run.get(name, 0.0)):
                value = run.pop(name)
                self._once.warning(
                    f"non-finite {name}",
                    "%s is %s: it is left out of the samples where it is not finite",
                    name,
                    value,
                )

    def _slots(self, record: StepRecord, loss_scale: float) -> Iterator[tuple[Slot, int, Vector]]:
        """Measured slots in the model's order: the layer's own, and its worst expert behind it."""
        values = record.snapshot.numpy()
        for index, (slot, part, first_row, experts) in enumerate(self._rows):
            if first_row not in record.filled:
                continue
            mark = record.marks.get(first_row)
            named = slot if mark is None else replace(slot, **mark)
            vectors_EV = values[first_row : first_row + experts]
            if part in GRADIENT_PARTS and loss_scale != 1.0:
                vectors_EV = _unscaled(vectors_EV, loss_scale)
            yield named, index, _merged(vectors_EV)
            if experts > 1:
                worst = _worst_expert(vectors_EV, gemm=part in GEMM_PARTS)
                yield replace(named, expert=worst), index, vectors_EV[worst]


def _rows(layers: list[ObservedLayer]) -> Iterator[tuple[Slot, Part, int, int]]:
    for layer in layers:
        for part in Part:
            yield layer.slots[part], part, layer.row(part), layer.experts


def _merged(vectors_EV: Vector) -> Vector:
    merged: Vector = vectors_EV.sum(axis=0)
    merged[AMAX] = vectors_EV[:, AMAX].max()
    return merged


def _unscaled(vectors_EV: Vector, loss_scale: float) -> Vector:
    divided = vectors_EV.copy()
    for name, power in _SCALE_POWER.items():
        divided[:, COLUMNS.index(name)] /= loss_scale**power
    return divided


def _worst_expert(vectors_EV: Vector, *, gemm: bool) -> int:
    """The expert with the most non-finite values, then the highest underflow (operands) or error (GEMMs)."""
    column = {name: vectors_EV[:, COLUMNS.index(name)] for name in COLUMNS}
    part, whole = ("sum_sq_err", "sum_sq") if gemm else ("underflow", "count")
    ratio = np.divide(column[part], column[whole], out=np.zeros(len(vectors_EV)), where=column[whole] > 0)
    return int(np.lexsort((-np.nan_to_num(ratio), -(column["nan"] + column["inf"])))[0])


def _columns(
    vectors: list[Vector], slots: list[Slot]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """Wire columns and their null masks; a recomputed GEMM has few columns, an operand all of them."""
    table_SV = np.array(vectors).reshape(len(slots), -1)
    recomputed_S = np.array([slot.gemm is not None for slot in slots], dtype=bool)
    never_S = np.zeros(len(slots), dtype=bool)
    columns: dict[str, NDArray[Any]] = {}
    nulls: dict[str, NDArray[np.bool_]] = {}
    for position, name in enumerate(COLUMNS):
        nulls[name] = never_S if name in GEMM_COLUMNS else recomputed_S
        values_S = table_SV[:, position]
        if name in COUNT_COLUMNS:
            columns[name] = np.where(nulls[name], 0, np.nan_to_num(values_S)).astype(np.int64)
        else:
            columns[name] = np.where(nulls[name], np.nan, values_S)
    nulls[HISTOGRAM] = recomputed_S
    bins = np.nan_to_num(table_SV[:, len(COLUMNS) :]).astype(np.int64)
    columns[HISTOGRAM] = np.where(recomputed_S[:, None], 0, bins)
    return columns, nulls


def _as_float(value: Number) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def log_sample(run: str, sample: Sample) -> None:
    """One line at INFO with the worst underflow and the worst cosine of the sample, and with NaN and Inf if there are any."""
    if not logger.isEnabledFor(logging.INFO) or not sample.slots:
        return
    underflow, cosine = _extreme(sample, "underflow_ratio", -1.0), _extreme(sample, "cosine", 1.0)
    nonfinite = _extreme(sample, "nonfinite_count", -1.0)
    logger.info(
        "%s step %d: worst underflow %s, worst cosine %s, %d slots%s",
        run,
        sample.step,
        "none" if underflow is None else f"{100 * underflow[0]:.3g} % ({underflow[1]})",
        "none" if cosine is None else f"{cosine[0]:.5f} ({cosine[1]})",
        len(sample.slots),
        f", {nonfinite[0]:.0f} NaN or Inf ({nonfinite[1]})" if nonfinite and nonfinite[0] > 0 else "",
    )


def _extreme(sample: Sample, metric: str, sign: float) -> tuple[float, str] | None:
    """Worst value of a metric and its slot; `sign` -1 where higher is worse. NaN is worst of all."""
    values = sample.table.derive(metric)
    known = ~sample.table.undefined(metric)
    if not known.any():
        return None
    ranked = np.where(known, np.where(np.isnan(values), -np.inf, sign * values), np.inf)
    worst = int(np.argmin(ranked))
    return float(values[worst]), sample.slots[worst].label
