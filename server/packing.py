"""A sample's columns as the packed bytes of one row, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.metrics import (
    ALL_COLUMNS,
    COLUMNS,
    COUNT_COLUMNS,
    FLOAT_COLUMNS,
    HISTOGRAM,
    HISTOGRAM_BINS,
)
from fp8_safeguard.monitor.wire import Sample

# Legend: T rows, S slots of the row's list, C columns. A row holds each column's S values side by side,
# so that a query of two columns touches two runs of memory and not S small ones.


def _record(slots: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("counts", "<i8", (len(COUNT_COLUMNS), slots)),
            ("floats", "<f8", (len(FLOAT_COLUMNS), slots)),
            ("nulls", "u1", (len(ALL_COLUMNS), slots)),
        ]
    )


def pack(sample: Sample, chosen: Sequence[int]) -> tuple[bytes, bytes]:
    """The packed columns and histograms of the chosen slots of a sample."""
    index = np.asarray(chosen, dtype=np.intp)
    record = np.zeros(1, dtype=_record(len(index)))
    for place, name in enumerate(ALL_COLUMNS):
        null = _null_mask(sample, name)[index]
        record["nulls"][0, place] = null
        if name in COLUMNS and name in sample.columns:
            kind = "counts" if name in COUNT_COLUMNS else "floats"
            row = (COUNT_COLUMNS if name in COUNT_COLUMNS else FLOAT_COLUMNS).index(name)
            record[kind][0, row] = np.where(null, 0, sample.columns[name][index])
    return record.tobytes(), zstandard.compress(_histograms(sample)[index].tobytes(), 1)


def _null_mask(sample: Sample, name: str) -> NDArray[np.bool_]:
    """True where the slot has no value; a column that was not sent is null throughout."""
    if name not in sample.columns:
        return np.ones(len(sample.slots), dtype=np.bool_)
    if name not in sample.nulls:
        return np.zeros(len(sample.slots), dtype=np.bool_)
    return np.asarray(sample.nulls[name], dtype=np.bool_)


def _histograms(sample: Sample) -> NDArray[np.int64]:
    bins = np.zeros((len(sample.slots), HISTOGRAM_BINS), dtype="<i8")
    if HISTOGRAM in sample.columns:
        sent = ~_null_mask(sample, HISTOGRAM)
        bins[sent] = sample.columns[HISTOGRAM][sent]
    return bins


class Packed:
    """Several rows of one slot list, decoded without a copy."""

    def __init__(self, columns: Sequence[bytes], histograms: Sequence[bytes], slots: int) -> None:
        self.slots = slots
        self._histograms = histograms
        self._records = np.frombuffer(b"".join(columns), dtype=_record(slots)) if slots else None
        self._rows = len(columns)

    def column(self, name: str) -> NDArray[Any]:
        """[T, S] values as stored; 0 where null."""
        if self._records is None:
            return np.zeros((self._rows, 0))
        if name in COUNT_COLUMNS:
            values: NDArray[Any] = self._records["counts"][:, COUNT_COLUMNS.index(name)]
        else:
            values = self._records["floats"][:, FLOAT_COLUMNS.index(name)]
        return values

    def null(self, name: str) -> NDArray[np.bool_]:
        """[T, S] True where the slot has no value."""
        if self._records is None:
            return np.zeros((self._rows, 0), dtype=np.bool_)
        return np.asarray(self._records["nulls"][:, ALL_COLUMNS.index(name)] != 0)

    def histogram(self) -> NDArray[np.int64]:
        """[T, S, bins] block counts; 0 where null."""
        raw = b"".join(zstandard.decompress(blob) for blob in self._histograms)
        return np.frombuffer(raw, dtype="<i8").reshape(self._rows, self.slots, HISTOGRAM_BINS)

    def table(self, row: int = 0) -> StatsTable:
        """One row as a table of TensorStats."""
        nulls = {name: self.null(name)[row] for name in ALL_COLUMNS}
        columns = {name: self.column(name)[row] for name in COLUMNS}
        for name in FLOAT_COLUMNS:
            columns[name] = np.where(nulls[name], np.nan, columns[name])
        return StatsTable({**columns, HISTOGRAM: self.histogram()[row]}, nulls)


def differing(
    stored: Packed, stored_index: Sequence[int], sent: Packed, sent_index: Sequence[int]
) -> list[int]:
    """Positions of the pairs whose slots do not hold the same statistics; NaN equals itself."""
    left = np.asarray(stored_index, dtype=np.intp)
    right = np.asarray(sent_index, dtype=np.intp)
    differs = np.zeros(len(left), dtype=np.bool_)
    for name in ALL_COLUMNS:
        differs |= stored.null(name)[0, left] != sent.null(name)[0, right]
    for name in COLUMNS:
        old, new = stored.column(name)[0, left], sent.column(name)[0, right]
        differs |= (old != new) & ~((old != old) & (new != new))
    differs |= (stored.histogram()[0, left] != sent.histogram()[0, right]).any(axis=1)
    return [int(place) for place in np.flatnonzero(differs)]
