"""Columns of a sample: arrays over slots, and their wire form.

A column is a list (JSON; null, numbers, and for measured values the three non-finite words) or raw little-endian bytes
(msgpack): {"dtype": "int64" | "float64", "data": bytes, "nulls": [slot positions]}. A null is named in `nulls`, and
whatever number stands there is ignored. A NaN in raw bytes is a measured NaN in a sum or amax; no count can be NaN, so in a
count, or throughout a histogram, it means null too, except in `count`, which every slot has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.document import MAX_FAULTS
from fp8_safeguard.monitor.metrics import (
    ALL_COLUMNS,
    COUNT_COLUMNS,
    HISTOGRAM,
    HISTOGRAM_BINS,
    derive,
    undefined,
)
from fp8_safeguard.monitor.numbers import NumberError, decode_count, decode_number, encode_number
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import INT64_MAX, Slot
from fp8_safeguard.monitor.stats import TensorStats

_DTYPES = {"int64": "<i8", "<i8": "<i8", "float64": "<f8", "<f8": "<f8"}
_INTEGERS = (*COUNT_COLUMNS, HISTOGRAM)

Report = Callable[[str, str], None]
"""Takes the JSON pointer of a fault, relative to the column, and what is wrong."""


@dataclass(frozen=True)
class StatsTable:
    """TensorStats of S slots as columns: counts int64 and sums float64 [S], histogram int64 [S, 16]."""

    columns: Mapping[str, NDArray[Any]]
    """Every column by name; 0 (counts) or NaN (sums) where null."""
    nulls: Mapping[str, NDArray[np.bool_]]
    """Every column's mask [S], True where null."""

    def __len__(self) -> int:
        return len(self.columns["count"])

    @classmethod
    def from_stats(cls, stats: Sequence[TensorStats]) -> Self:
        """One row for each."""
        columns, nulls = {}, {}
        for name in ALL_COLUMNS:
            values = [part.column(name) for part in stats]
            nulls[name] = np.array([value is None for value in values], dtype=bool)
            columns[name] = _array(name, values)
        return cls(columns, nulls)

    def stats(self, position: int) -> TensorStats:
        """The statistics of one slot."""
        fields: dict[str, Any] = {}
        for name in ALL_COLUMNS:
            if not self.nulls[name][position]:
                value = self.columns[name][position].tolist()
                fields["histogram" if name == HISTOGRAM else name] = (
                    tuple(value) if name == HISTOGRAM else value
                )
        return TensorStats(**fields)

    def derive(self, metric: str) -> NDArray[np.float64]:
        """A metric of every slot [S], NaN where it is null (see `undefined`) or measured as NaN."""
        return derive(metric, self.float_columns())

    def undefined(self, metric: str) -> NDArray[np.bool_]:
        """Where a metric is null [S]."""
        return undefined(metric, self.float_columns(), self.nulls)

    def null_positions(self) -> dict[str, list[int]]:
        """Where each column is null. Columns of one sample share few masks: each of those is read once."""
        masks = dict(self.nulls)
        read: dict[int, list[int]] = {}
        for mask in masks.values():
            if id(mask) not in read:
                read[id(mask)] = mask.nonzero()[0].tolist()
        return {name: read[id(mask)] for name, mask in masks.items()}

    def float_columns(self) -> Mapping[str, NDArray[np.float64]]:
        """The columns as float64 with NaN for null: what `derive` takes."""
        return _FloatView(self)


def merge_tables(
    parts: Sequence[tuple[Sequence[Slot], StatsTable]],
) -> tuple[tuple[Slot, ...], StatsTable]:
    """Slots and statistics of several groups' samples of one step, merged as TensorStats.merge does."""
    if len(parts) == 1:
        return tuple(parts[0][0]), parts[0][1]
    rows: dict[str, int] = {}
    slots: list[Slot] = []
    for listed, _ in parts:
        for slot in listed:
            if rows.setdefault(slot.key, len(slots)) == len(slots):
                slots.append(slot)
    columns, nulls = {}, {}
    for name in ALL_COLUMNS:
        columns[name], nulls[name] = empty_column(name, len(slots))
        columns[name] = np.zeros_like(columns[name])
        for listed, table in parts:
            into = np.array([rows[slot.key] for slot in listed], dtype=np.intp)
            _add(columns[name], nulls[name], into, table.columns[name], table.nulls[name], name)
        if name not in _INTEGERS:
            columns[name][nulls[name]] = np.nan
    return tuple(slots), StatsTable(columns, nulls)


def _add(
    total: NDArray[Any],
    null: NDArray[np.bool_],
    into: NDArray[np.intp],
    values: NDArray[Any],
    absent: NDArray[np.bool_],
    name: str,
) -> None:
    held = ~absent
    combine = np.maximum if name == "amax" else np.add
    # A NaN among the parts stays in the total; the flag that it raises on the way is no news.
    with np.errstate(invalid="ignore"):
        combine.at(total, into[held], values[held])
    null[into[held]] = False


class _FloatView(Mapping[str, NDArray[np.float64]]):
    """Columns as float64 with NaN for null, converted as they are read."""

    def __init__(self, table: StatsTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        null = self._table.nulls[name]
        return np.where(null if name != HISTOGRAM else null[:, None], np.nan, self._table.columns[name])

    def __iter__(self) -> Any:
        return iter(self._table.columns)

    def __len__(self) -> int:
        return len(self._table.columns)


def read_column(
    name: str, wire: Any, slots: int, report: Report
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    """The values and null mask of one column; None after reporting what is wrong with it."""
    if isinstance(wire, Mapping):
        return _read_binary(name, wire, slots, report)
    if not isinstance(wire, (list, tuple)):
        report("", f"a column is a list, or dtype and data, not {type(wire).__name__}")
        return None
    if len(wire) != slots:
        report("", f"has {len(wire)} values for {slots} slots")
        return None
    if name == HISTOGRAM:
        return _read_histogram_list(wire, report)
    return _read_fast(name, wire) or _read_values(name, wire, report)


def empty_column(name: str, slots: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """A column that is null for every slot."""
    return _array(name, [None] * slots), np.ones(slots, dtype=bool)


def _array(name: str, values: Sequence[Any]) -> NDArray[Any]:
    if name == HISTOGRAM:
        filled = [[0] * HISTOGRAM_BINS if value is None else value for value in values]
        return np.array(filled, dtype=np.int64).reshape(len(values), HISTOGRAM_BINS)
    if name in COUNT_COLUMNS:
        return np.array([0 if value is None else value for value in values], dtype=np.int64)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _read_fast(name: str, wire: Sequence[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    """Whole list at once where every value is null or a plain number; None where a closer look is needed."""
    kinds = set(map(type, wire))
    if not kinds <= ({int, type(None)} if name in COUNT_COLUMNS else {int, float, type(None)}):
        return None
    null = np.array([value is None for value in wire], dtype=bool)
    try:
        values = _array(name, wire)
    except OverflowError:
        return None
    return None if (values < 0).any() else (values, null)


def _read_values(
    name: str, wire: Sequence[Any], report: Report
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    values: list[Any] = []
    faults = 0
    for position, item in enumerate(wire):
        try:
            values.append(decode_count(item) if name in COUNT_COLUMNS else _decode_sum(item))
        except NumberError as error:
            report(f"/{position}", f"{name}: {error}")
            faults += 1
            if faults == MAX_FAULTS:
                break
    if faults:
        return None
    return _array(name, values), np.array([value is None for value in values], dtype=bool)


def _decode_sum(item: Any) -> float | None:
    number = decode_number(item)
    # -Infinity is a broken measurement, kept as evidence; a finite negative sum of squares is a broken client.
    if number is not None and -np.inf < number < 0:
        raise NumberError(f"{quoted(item)} is negative, and this is a sum of even powers or a magnitude")
    return number


def _read_histogram_list(
    wire: Sequence[Any], report: Report
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    faults = 0
    for position, bins in enumerate(wire):
        if faults >= MAX_FAULTS:
            break
        if bins is None or _plain_bins(bins):
            continue
        if not isinstance(bins, (list, tuple)) or len(bins) != HISTOGRAM_BINS:
            report(f"/{position}", f"a histogram is a list of {HISTOGRAM_BINS} counts")
            faults += 1
        else:
            faults += _check_bins(position, bins, report)
    if faults:
        return None
    return _array(HISTOGRAM, wire), np.array([bins is None for bins in wire], dtype=bool)


def _plain_bins(bins: Any) -> bool:
    """Whether a histogram is right at first sight; if not, a closer look finds the fault or clears it."""
    usual = isinstance(bins, (list, tuple)) and len(bins) == HISTOGRAM_BINS and set(map(type, bins)) == {int}
    return usual and min(bins) >= 0 and max(bins) <= INT64_MAX


def _check_bins(position: int, bins: Sequence[Any], report: Report) -> int:
    faults = 0
    for place, count in enumerate(bins):
        try:
            if decode_count(count) is None:
                raise NumberError("a bin cannot be null; make the whole histogram null")
        except NumberError as error:
            report(f"/{position}/{place}", f"{HISTOGRAM}: {error}")
            faults += 1
    return faults


def _read_binary(
    name: str, wire: Mapping[str, Any], slots: int, report: Report
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    dtype, data = wire.get("dtype"), wire.get("data")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        report("/dtype", f"dtype is int64 or float64, little-endian, not {quoted(dtype)}")
        return None
    if not isinstance(data, (bytes, bytearray, memoryview)):
        report("/data", f"data is raw bytes (msgpack bin), not {type(data).__name__}; in JSON send a list")
        return None
    expected = slots * (HISTOGRAM_BINS if name == HISTOGRAM else 1)
    if len(data) != 8 * expected:
        report("/data", f"has {len(data)} bytes; {expected} values of 8 bytes are {8 * expected}")
        return None
    null = _read_nulls(wire.get("nulls"), slots, report)
    if null is None:
        return None
    values = np.frombuffer(data, dtype=_DTYPES[dtype])
    if name == HISTOGRAM:
        values = values.reshape(slots, HISTOGRAM_BINS)
    return _checked_binary(name, values, null, report)


def _read_nulls(wire: Any, slots: int, report: Report) -> NDArray[np.bool_] | None:
    null = np.zeros(slots, dtype=bool)
    if wire is None:
        return null
    good = isinstance(wire, (list, tuple)) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < slots for item in wire
    )
    if not good:
        report("/nulls", f"nulls lists slot positions, integers from 0 to {slots - 1}")
        return None
    null[list(wire)] = True
    return null


def _checked_binary(
    name: str, values: NDArray[Any], null: NDArray[np.bool_], report: Report
) -> tuple[NDArray[Any], NDArray[np.bool_]] | None:
    whole = name in _INTEGERS
    if whole and name != "count" and values.dtype.kind == "f":
        missing = np.isnan(values)
        null = null | (missing if missing.ndim == 1 else missing.all(axis=1))
    bad = _not_counts(values) if whole else (values < 0) & (values > -np.inf)
    absent = null if values.ndim == 1 else null[:, None]
    bad &= ~absent
    wrong = (
        "is not a whole number from 0 to 2^63 - 1"
        if whole
        else "is negative, and this is a sum of even powers or a magnitude"
    )
    for index in np.argwhere(bad)[:MAX_FAULTS]:
        report("/data", f"{name}: value {values[tuple(index)]} at {index.tolist()} {wrong}")
    if bad.any():
        return None
    filled: NDArray[Any] = np.where(absent, 0 if whole else np.nan, values)
    return filled.astype(np.int64 if whole else np.float64), null


def _not_counts(values: NDArray[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "i":
        return np.asarray(values < 0)
    with np.errstate(invalid="ignore"):
        # 2^63 itself is a float64, and would wrap round in the cast.
        return np.asarray(~((values >= 0) & (values < 2.0**63) & (values == np.floor(values))))


def write_column(table: StatsTable, name: str, *, binary: bool, null_at: Sequence[int] | None = None) -> Any:
    """The wire form of one column. null_at: its entry of `null_positions`, where that is known already."""
    values = table.columns[name]
    if null_at is None:
        null_at = np.flatnonzero(table.nulls[name]).tolist()
    if binary:
        dtype = "int64" if name in _INTEGERS else "float64"
        wire: dict[str, Any] = {"dtype": dtype, "data": values.astype(_DTYPES[dtype], copy=False).tobytes()}
        if null_at:
            wire["nulls"] = null_at
        return wire
    listed = values.tolist()
    if name not in _INTEGERS and not np.isfinite(values).all():
        listed = [encode_number(value) for value in listed]
    for position in null_at:
        listed[position] = None
    return listed
