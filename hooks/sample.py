"""Turns a step's buffers into the sample that travels."""

# Shapes: S slots of a sample, V = 29 TensorStats entries, E experts of a layer.

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.hooks.buffer import AMAX, Snapshot
from fp8_safeguard.hooks.layers import GEMM_PARTS, GRADIENT_PARTS, ObservedLayer, Part
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.operands import SAMPLED_COLUMNS
from fp8_safeguard.hooks.recompute import GEMM_COLUMNS
from fp8_safeguard.hooks.scaling import SCALE_POWER
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.values import Number
from fp8_safeguard.monitor.nonfinite import WGRAD_NORM
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import COLUMNS, COUNT_COLUMNS, HISTOGRAM, VECTOR_LENGTH
from fp8_safeguard.monitor.wire import Attempt, Sample

logger = logging.getLogger("fp8_safeguard")

Vector = NDArray[np.float64]


MOST_SCALARS = 2**16
"""Scalars of one step, the latest ones: where nobody ends a step they must not grow for ever."""


@dataclass(slots=True)
class Notes:
    """What the trainer said about one step; tensors are copies on their own device, read later."""

    values: dict[str, Number] = field(default_factory=dict)
    """`loss`, `gradient_norm`, `learning_rate`, `tokens`, `loss_scale`."""
    scalars: deque[tuple[str, str, Number]] = field(default_factory=lambda: deque(maxlen=MOST_SCALARS))
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
    coverage: tuple[dict[str, Any], ...] | None = None
    """Rows of Guard.coverage(), where they have changed since the last sample that carried them."""
    sampling: Mapping[str, Any] | None = None
    """What the overhead budget makes of the sampling now."""
    divided: bool = False
    """Whether the statistics of gradients are divided by the loss scale already."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """The worst slots of single ranks, where several are merged."""
    dropped_elsewhere: int = 0
    """Samples that other ranks have lost."""
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
        # With the rules that it judges by, it is a sixth of what the hooks would load when they are imported.
        from fp8_safeguard.hooks.flags import Flags

        self.flags: Flags = Flags(layers, options.thresholds)
        """Layers that the finished samples, or the server, found in breach."""
        self._rows = list(_rows(layers))
        self._index = {first_row: index for index, (_, _, first_row, _) in enumerate(self._rows)}
        """Place in the model's order by first row."""

    def build(self, record: StepRecord) -> Sample:
        """The sample of a step; the same object each time. Waits for the device, so the sender calls it."""
        if record.sample is None:
            sample = self._build(record)
            try:
                self.flags.look(sample)
            except Exception as error:
                self._once.failure("looking for breaches", error)
            # Only now: whoever finds it finds the flags that it led to.
            record.sample = record.sample or sample
        return record.sample

    def part(self, record: StepRecord) -> Sample:
        """What this rank alone has measured in a step that it merges with others; nobody looks at it but the caller."""
        return self._build(record)

    def loss_scale(self, record: StepRecord) -> float:
        """What the gradients of the step are to be divided by: 1 where nothing usable is known."""
        if record.divided:
            return 1.0
        scale = record.notes.values.get("loss_scale", record.notes.found_scale)
        number = 1.0 if scale is None else _as_float(scale)
        return number if math.isfinite(number) and number > 0 else 1.0

    def _build(self, record: StepRecord) -> Sample:
        run = {name: _as_float(value) for name, value in record.notes.values.items()}
        if record.notes.found_scale is not None:
            run.setdefault("loss_scale", _as_float(record.notes.found_scale))
        self._leave_out_nonfinite(run)
        listed = list(self._slots(record, self.loss_scale(record)))
        columns, nulls = _columns([vector for _, _, vector in listed], [slot for slot, _, _ in listed])
        noted = ((layer, name, _as_float(value)) for layer, name, value in record.notes.scalars)
        scalars = [
            {"layer": layer, "name": name, "value": value}
            for layer, name, value in noted
            if name != WGRAD_NORM or not math.isfinite(value)
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
            dropped=self.dropped + record.dropped_elsewhere,
            slots=tuple(slot for slot, _, _ in listed),
            indices=tuple(index for _, index, _ in listed),
            columns=columns,
            nulls=nulls,
            run=run,
            scalars=tuple(scalars),
            ranks=record.ranks,
            coverage=record.coverage,
            sampling=record.sampling,
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
        """Measured slots in the model's order, the layer's own and its worst expert behind it; then the variants."""
        values = record.snapshot.numpy()
        for index, (slot, part, first_row, experts) in enumerate(self._rows):
            if first_row in record.filled:
                mark = record.marks.get(first_row)
                named = slot if mark is None else replace(slot, **mark)
                vectors_EV = values[first_row : first_row + experts]
                yield from _with_worst_expert(named, part, index, vectors_EV, loss_scale)
        for rows in record.snapshot.variants:
            index = self._index[rows.slot_row]
            slot, part, _, _ = self._rows[index]
            fmt = None if rows.fmt == "e4m3" else rows.fmt
            named = replace(slot, variant=rows.name, emulated=True, fmt=fmt)
            vectors_EV = values[rows.first_row : rows.first_row + rows.experts]
            yield from _with_worst_expert(named, part, index, vectors_EV, loss_scale)


def _with_worst_expert(
    slot: Slot, part: Part, index: int, vectors_EV: Vector, loss_scale: float
) -> Iterator[tuple[Slot, int, Vector]]:
    if part in GRADIENT_PARTS and loss_scale != 1.0:
        vectors_EV = unscaled(vectors_EV, loss_scale)
    yield slot, index, _merged(vectors_EV)
    if len(vectors_EV) > 1:
        worst = _worst_expert(vectors_EV, gemm=part in GEMM_PARTS)
        yield replace(slot, expert=worst), index, vectors_EV[worst]


def _rows(layers: list[ObservedLayer]) -> Iterator[tuple[Slot, Part, int, int]]:
    for layer in layers:
        for part in Part:
            yield layer.slots[part], part, layer.row(part), layer.experts


def _merged(vectors_EV: Vector) -> Vector:
    merged: Vector = vectors_EV.sum(axis=0)
    merged[AMAX] = vectors_EV[:, AMAX].max()
    return merged


def unscaled(vectors_EV: Vector, loss_scale: float) -> Vector:
    """Statistics [E, V] of gradients as they are without that loss scale."""
    divided = vectors_EV.copy()
    for name, power in SCALE_POWER.items():
        divided[:, COLUMNS.index(name)] /= loss_scale**power
    return divided


def _worst_expert(vectors_EV: Vector, *, gemm: bool) -> int:
    """The expert with the most non-finite values, then the highest underflow (operands) or error (GEMMs)."""
    column = {name: vectors_EV[:, COLUMNS.index(name)] for name in COLUMNS}
    part, whole = ("sum_sq_err", "sum_sq") if gemm else ("underflow", "count")
    # An expert without a token comes last.
    none = np.full(len(vectors_EV), -1.0)
    ratio = np.divide(column[part], column[whole], out=none, where=column[whole] > 0)
    return int(np.lexsort((-np.nan_to_num(ratio), -(column["nan"] + column["inf"])))[0])


def _columns(
    vectors: list[Vector], slots: list[Slot]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """Wire columns and their null masks: a recomputed GEMM has few, an operand all, one sampled by tiles only rates."""
    table_SV = np.array(vectors).reshape(len(slots), VECTOR_LENGTH)
    recomputed_S = np.array([slot.gemm is not None for slot in slots], dtype=bool)
    never_S = np.zeros(len(slots), dtype=bool)
    # Of an operand that was sampled by tiles they say no more than rates; a count is NaN nowhere else.
    tiles_S = np.isnan(table_SV[:, COLUMNS.index("rows")])
    columns: dict[str, NDArray[Any]] = {}
    nulls: dict[str, NDArray[np.bool_]] = {}
    for position, name in enumerate(COLUMNS):
        nulls[name] = never_S if name in GEMM_COLUMNS else recomputed_S
        if name not in SAMPLED_COLUMNS:
            nulls[name] = nulls[name] | tiles_S
        values_S = table_SV[:, position]
        if name in COUNT_COLUMNS:
            columns[name] = np.where(nulls[name], 0, np.nan_to_num(values_S)).astype(np.int64)
        else:
            columns[name] = np.where(nulls[name], np.nan, values_S)
    nulls[HISTOGRAM] = recomputed_S | tiles_S
    bins = np.nan_to_num(table_SV[:, len(COLUMNS) :]).astype(np.int64)
    columns[HISTOGRAM] = np.where(nulls[HISTOGRAM][:, None], 0, bins)
    return columns, nulls


def _as_float(value: Number) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def log_sample(run: str, sample: Sample) -> None:
    """One line at INFO with the worst underflow and the worst cosine of the sample, and with NaN and Inf if there are any.

    What-ifs are no part of it: they did not happen.
    """
    if not logger.isEnabledFor(logging.INFO) or not sample.slots:
        return
    real = np.array([slot.variant is None for slot in sample.slots], dtype=bool)
    underflow, cosine = (
        _extreme(sample, metric, sign, real) for metric, sign in (("underflow_ratio", -1.0), ("cosine", 1.0))
    )
    nonfinite = _extreme(sample, "nonfinite_count", -1.0, real)
    logger.info(
        "%s step %d: worst underflow %s, worst cosine %s, %d slots%s",
        run,
        sample.step,
        "none" if underflow is None else f"{100 * underflow[0]:.3g} % ({underflow[1]})",
        "none" if cosine is None else f"{cosine[0]:.5f} ({cosine[1]})",
        np.count_nonzero(real),
        f", {nonfinite[0]:.0f} NaN or Inf ({nonfinite[1]})" if nonfinite and nonfinite[0] > 0 else "",
    )


def _extreme(sample: Sample, metric: str, sign: float, among: NDArray[np.bool_]) -> tuple[float, str] | None:
    """Worst value of a metric and its slot; `sign` -1 where higher is worse. NaN is worst of all."""
    values = sample.table.derive(metric)
    known = among & ~sample.table.undefined(metric)
    if not known.any():
        return None
    ranked = np.where(known, np.where(np.isnan(values), -np.inf, sign * values), np.inf)
    worst = int(np.argmin(ranked))
    return float(values[worst]), sample.slots[worst].label
