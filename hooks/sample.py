"""Turns a step's buffers into the sample that travels."""

# Shapes: S slots of a sample, V = 29 TensorStats entries, E experts of a layer.

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from fp8_safeguard.monitor.stats import ALL_COLUMNS, COLUMNS, COUNT_COLUMNS, HISTOGRAM
from fp8_safeguard.monitor.wire import Attempt, Sample

logger = logging.getLogger("fp8_safeguard")

Vector = NDArray[np.float64]


# Columns of a table [S, V]: the counts come first, the histogram last.
_COUNTS = slice(0, len(COUNT_COLUMNS))
_SUMS = slice(len(COUNT_COLUMNS), len(COLUMNS))
_BINS = slice(len(COLUMNS), None)
_MASKS = [(name not in GEMM_COLUMNS) + 2 * (name not in SAMPLED_COLUMNS) for name in ALL_COLUMNS]
"""Where each column is null, as a place in `_columns`' masks."""

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


class _Place(NamedTuple):
    """A slot of the model, and where a snapshot has it."""

    slot: Slot
    part: Part
    order: int
    """Place in the model's order."""
    first_row: int
    experts: int


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
        self._places = list(_places(layers))
        self._experts = any(place.experts > 1 for place in self._places)
        """Whether any layer has more than one."""
        self._by_row = {place.first_row: place for place in self._places}

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
        slots, indices, table_SV = self._measured(record)
        columns, nulls = _columns(table_SV, slots)
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
            slots=tuple(slots),
            indices=tuple(indices),
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

    def _measured(self, record: StepRecord) -> tuple[list[Slot], list[int], Vector]:
        """Slots in the model's order, a layer's worst expert behind its own; then the variants. Their places, and [S, V]."""
        values_RV, scale = record.snapshot.numpy(), self.loss_scale(record)
        places = [place for place in self._places if place.first_row in record.filled]
        if record.marks:
            places = [_marked(place, record.marks.get(place.first_row)) for place in places]
        places += self._variants(record)
        if scale != 1.0:
            values_RV = _without_scale(values_RV, places, scale)
        merged: dict[int, Vector] = {}
        """Of the layers with experts, by position among the slots: no row holds it."""
        if self._experts:
            places, merged = _with_worst_experts(places, values_RV)
        rows = np.array([place.first_row for place in places], dtype=np.intp)
        table_SV: Vector = values_RV.take(rows, axis=0)
        for position, vector in merged.items():
            table_SV[position] = vector
        return [place.slot for place in places], [place.order for place in places], table_SV

    def _variants(self, record: StepRecord) -> Iterator[_Place]:
        for rows in record.snapshot.variants:
            place = self._by_row[rows.slot_row]
            fmt = None if rows.fmt == "e4m3" else rows.fmt
            slot = replace(place.slot, variant=rows.name, emulated=True, fmt=fmt)
            yield place._replace(slot=slot, first_row=rows.first_row, experts=rows.experts)


def _places(layers: list[ObservedLayer]) -> Iterator[_Place]:
    pairs = ((layer, part) for layer in layers for part in Part)
    for order, (layer, part) in enumerate(pairs):
        yield _Place(layer.slots[part], part, order, layer.row(part), layer.experts)


def _with_worst_experts(
    places: Iterable[_Place], values_RV: Vector
) -> tuple[list[_Place], dict[int, Vector]]:
    """Each layer's worst expert behind the layer itself, whose merged statistics are by its position."""
    listed: list[_Place] = []
    merged: dict[int, Vector] = {}
    for place in places:
        if place.experts > 1:
            vectors_EV = values_RV[place.first_row : place.first_row + place.experts]
            merged[len(listed)] = _merged(vectors_EV)
            worst = _worst_expert(vectors_EV, gemm=place.part in GEMM_PARTS)
            expert = place._replace(slot=replace(place.slot, expert=worst), first_row=place.first_row + worst)
            listed += (place, expert)
        else:
            listed.append(place)
    return listed, merged


def _marked(place: _Place, mark: Mapping[str, Any] | None) -> _Place:
    return place if mark is None else place._replace(slot=replace(place.slot, **mark))


def _merged(vectors_EV: Vector) -> Vector:
    merged: Vector = vectors_EV.sum(axis=0)
    merged[AMAX] = vectors_EV[:, AMAX].max()
    return merged


def _without_scale(values_RV: Vector, places: Iterable[_Place], loss_scale: float) -> Vector:
    """A copy with the measured gradients as they are without that loss scale."""
    gradients = (place for place in places if place.part in GRADIENT_PARTS)
    rows = [row for place in gradients for row in range(place.first_row, place.first_row + place.experts)]
    values_RV = values_RV.copy()
    values_RV[rows] = unscaled(values_RV[rows], loss_scale)
    return values_RV


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
    table_SV: Vector, slots: list[Slot]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """Wire columns and their null masks: a recomputed GEMM has few, an operand all, one sampled by tiles only rates."""
    nan_SV = np.isnan(table_SV)
    recomputed_S = np.array([slot.gemm is not None for slot in slots], dtype=bool)
    # Of an operand that was sampled by tiles they say no more than rates; a count is NaN nowhere else.
    tiles_S = nan_SV[:, COLUMNS.index("rows")]
    masks = (np.zeros(len(slots), dtype=bool), recomputed_S, tiles_S, recomputed_S | tiles_S)
    nulls = {name: masks[mask] for name, mask in zip(ALL_COLUMNS, _MASKS, strict=True)}
    null_SC = np.array([nulls[name] for name in ALL_COLUMNS]).T

    def counted(part: slice, null: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.where(nan_SV[:, part] | null, 0.0, table_SV[:, part]).astype(np.int64)

    counts_SC = counted(_COUNTS, null_SC[:, _COUNTS])
    sums_SC = np.where(null_SC[:, _SUMS], np.nan, table_SV[:, _SUMS])
    columns: dict[str, NDArray[Any]] = dict(zip(COLUMNS, (*counts_SC.T, *sums_SC.T), strict=True))
    columns[HISTOGRAM] = counted(_BINS, null_SC[:, -1:])
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
