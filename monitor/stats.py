"""TensorStats, and the float64 definition of how they are measured.

`measure` and `compare` are the reference that every kernel is tested against: slow, short and literal. Block shapes are
[1, 128] along the last dimension (row), [128, 1] along the one before it (col) and [128, 128] (tile). Leading dimensions
are separate matrices: no block straddles two of them. A 1-d tensor is one row. Ragged edges give smaller blocks.

Shape suffixes: L leading dimensions flattened, R rows, K columns, r row blocks, k column blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_safeguard.monitor.formats import Format, ScaleKind, block_scale, get_format, round_to_format
from fp8_safeguard.monitor.metrics import (
    ALL_COLUMNS,
    COLUMNS,
    COUNT_COLUMNS,
    DERIVED_METRICS,
    FLOAT_COLUMNS,
    HISTOGRAM,
    HISTOGRAM_BINS,
    METRICS,
    TILE_SQNR_EDGES_DB,
    VECTOR_LENGTH,
    UnknownMetricError,
    derive,
    metric_needs,
    undefined,
    worst,
)

__all__ = [
    "ALL_COLUMNS",
    "BLOCK_SHAPES",
    "COLUMNS",
    "COUNT_COLUMNS",
    "DERIVED_METRICS",
    "FLOAT_COLUMNS",
    "HISTOGRAM",
    "HISTOGRAM_BINS",
    "METRICS",
    "TILE_SQNR_EDGES_DB",
    "VECTOR_LENGTH",
    "StatsError",
    "TensorStats",
    "UnknownMetricError",
    "compare",
    "derive",
    "measure",
    "undefined",
    "worst",
]

FloatArray = NDArray[np.float64]
Layout = Literal["row", "col", "tile"]

BLOCK_SHAPES: dict[str, tuple[int, int]] = {"row": (1, 128), "col": (128, 1), "tile": (128, 128)}


class StatsError(ValueError):
    """A tensor, layout or vector that statistics are not defined for."""


@dataclass(frozen=True, kw_only=True)
class TensorStats:
    """The statistics of one slot: additive columns, None where a column does not apply."""

    count: int | None = None
    zeros: int | None = None
    underflow: int | None = None
    saturated: int | None = None
    nan: int | None = None
    inf: int | None = None
    rows: int | None = None
    rows_flushed: int | None = None
    amax: float | None = None
    sum_sq: float | None = None
    sum_sq_q: float | None = None
    sum_sq_err: float | None = None
    sum_4th: float | None = None
    histogram: tuple[int, ...] | None = None
    """Number of quantisation blocks by SQNR bin (edges: TILE_SQNR_EDGES_DB)."""

    @classmethod
    def from_vector(cls, vector: ArrayLike, nulls: Iterable[str] = ()) -> Self:
        """From 29 numbers in COLUMNS order, then the histogram. `nulls` names the null columns.

        A NaN in a count or in the histogram also reads as null; a NaN in a sum is a measured NaN unless named.
        """
        values = np.asarray(vector, dtype=np.float64)
        if values.shape != (VECTOR_LENGTH,):
            raise StatsError(f"a stats vector has shape ({VECTOR_LENGTH},), not {values.shape}")
        absent = set(nulls)
        fields: dict[str, Any] = {}
        for name, value in zip(COLUMNS, values.tolist(), strict=False):
            if name in absent or (name in COUNT_COLUMNS and value != value):
                continue
            fields[name] = _whole(name, value) if name in COUNT_COLUMNS else value
        bins = values[len(COLUMNS) :]
        if HISTOGRAM not in absent and not np.isnan(bins).any():
            fields["histogram"] = tuple(_whole(HISTOGRAM, value) for value in bins.tolist())
        return cls(**fields)

    @property
    def nulls(self) -> frozenset[str]:
        """Names of the null columns."""
        return frozenset(name for name in ALL_COLUMNS if self.column(name) is None)

    def column(self, name: str) -> Any:
        """The value of a column by its wire name."""
        return self.histogram if name == HISTOGRAM else getattr(self, name)

    def to_vector(self) -> FloatArray:
        """29 numbers in COLUMNS order, then the histogram; NaN where null (see `nulls`)."""
        scalars = [self.column(name) for name in COLUMNS]
        bins = self.histogram if self.histogram is not None else (None,) * HISTOGRAM_BINS
        return np.array([*scalars, *bins], dtype=np.float64)

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """Stats of the union of the parts, quantised as they were. A column is null where it is null in every part.

        amax propagates NaN: a maximum that dropped it would hide a broken rank.
        """
        fields: dict[str, Any] = {}
        listed = list(parts)
        for name in ALL_COLUMNS:
            values = [value for part in listed if (value := part.column(name)) is not None]
            if values:
                fields["histogram" if name == HISTOGRAM else name] = _combine(name, values)
        return cls(**fields)

    def metric(self, name: str) -> float | None:
        """Any derived metric or column by name; None where null. Raises UnknownMetricError."""
        needs = metric_needs(name)
        if any(self.column(column) is None for column in needs):
            return None
        columns = {column: np.array([self.column(column)], dtype=np.float64) for column in needs}
        if undefined(name, columns, {})[0]:
            return None
        return float(derive(name, columns)[0])

    @property
    def underflow_ratio(self) -> float | None:
        """Non-zero finite elements that became zero, over all elements."""
        return self.metric("underflow_ratio")

    @property
    def zero_ratio(self) -> float | None:
        """Elements that are zero after quantisation, zero before included (the seed's underflow)."""
        return self.metric("zero_ratio")

    @property
    def saturation_ratio(self) -> float | None:
        """Finite elements that only the clamp kept in range, over all elements."""
        return self.metric("saturation_ratio")

    @property
    def nonfinite_count(self) -> float | None:
        """NaN and Inf elements."""
        return self.metric("nonfinite_count")

    @property
    def rows_flushed_ratio(self) -> float | None:
        """Rows that lost every element to zero, over all rows."""
        return self.metric("rows_flushed_ratio")

    @property
    def cosine(self) -> float | None:
        """Cosine of the tensor and its quantised copy."""
        return self.metric("cosine")

    @property
    def cosine_distortion(self) -> float | None:
        """1 - cosine."""
        return self.metric("cosine_distortion")

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantisation noise, in dB; Inf if nothing was lost."""
        return self.metric("sqnr_db")

    @property
    def relative_error(self) -> float | None:
        """Frobenius norm of the error over that of the tensor."""
        return self.metric("relative_error")

    @property
    def kurtosis(self) -> float | None:
        """Uncentred kurtosis of the finite elements; 3 for a Gaussian."""
        return self.metric("kurtosis")

    @property
    def tile_sqnr_p01_db(self) -> float | None:
        """SQNR, to the lower edge of its bin, of the block at the 1st percentile."""
        return self.metric("tile_sqnr_p01_db")


def _whole(name: str, value: float) -> int:
    if not float(value).is_integer() or value < 0:
        raise StatsError(f"{name} counts elements, so it cannot be {value!r}")
    return int(value)


def _combine(name: str, values: Sequence[Any]) -> Any:
    if name == HISTOGRAM:
        return tuple(sum(bins) for bins in zip(*values, strict=True))
    if name == "amax":
        return float(reduce(np.maximum, values))
    return sum(values)


def measure(
    x: ArrayLike,
    *,
    layout: Layout | str,
    fmt: str | Format = "e4m3",
    scale: ScaleKind = "fp32",
    multiplier: float = 1.0,
) -> TensorStats:
    """Quantise one operand by the contract and sum up what happened, in float64.

    x: any shape of at least one dimension. bfloat16, float16 and float32 values are used exactly; float64 values are
    rounded to float32 first (beyond its range they become Inf, and are counted so). Each element is divided by its
    block's float32 scale in one IEEE float32 division, clamped and rounded (see `formats`). Non-finite elements count in
    `count`, `nan` and `inf`, and take no part in scales, sums or the histogram. An empty tensor gives zeros throughout.

    Raises StatsError on a 0-d tensor or an unknown layout, and what `block_scale` raises.
    """
    fmt = get_format(fmt)
    block = _block_shape(layout)
    x_LRK = _as_matrices(x)
    finite_LRK = np.isfinite(x_LRK)
    clean_LRK = np.where(finite_LRK, x_LRK, np.float32(0))
    scale_Lrk = block_scale(_per_block(np.abs(clean_LRK), block, _maximum), fmt, scale, multiplier)
    scale_LRK = _spread(scale_Lrk, block, x_LRK.shape)
    with np.errstate(over="ignore", under="ignore"):
        ratio_LRK = (clean_LRK / scale_LRK).astype(np.float64)
    q_LRK = np.where(finite_LRK, round_to_format(np.clip(ratio_LRK, -fmt.max, fmt.max), fmt), np.nan)

    value_LRK = clean_LRK.astype(np.float64)
    quantised_LRK = np.where(finite_LRK, q_LRK, 0.0) * scale_LRK
    signal_LRK, noise_LRK = value_LRK**2, (value_LRK - quantised_LRK) ** 2
    lost_rows_LR = (q_LRK == 0).all(axis=2) & (x_LRK != 0).any(axis=2)
    return TensorStats(
        count=x_LRK.size,
        zeros=_count(q_LRK == 0),
        underflow=_count((q_LRK == 0) & (clean_LRK != 0)),
        saturated=_count(fmt.saturates(ratio_LRK)),
        nan=_count(np.isnan(x_LRK)),
        inf=_count(np.isinf(x_LRK)),
        rows=lost_rows_LR.size,
        rows_flushed=_count(lost_rows_LR),
        amax=float(np.max(np.abs(value_LRK), initial=0.0)),
        sum_sq=float(signal_LRK.sum()),
        sum_sq_q=float((quantised_LRK**2).sum()),
        sum_sq_err=float(noise_LRK.sum()),
        sum_4th=float((value_LRK**4).sum()),
        histogram=_histogram(_per_block(signal_LRK, block, np.sum), _per_block(noise_LRK, block, np.sum)),
    )


def compare(x_hp: ArrayLike, x_q: ArrayLike) -> TensorStats:
    """Stats of a recomputed GEMM: x_hp the high-precision result, x_q the FP8 one, same shape.

    An element counts as NaN if it is NaN in either result, as Inf if it is infinite in either; sums and amax (of x_hp)
    are over the elements that are finite in both. Columns that describe quantisation are null.
    """
    high, low = np.asarray(x_hp, dtype=np.float64), np.asarray(x_q, dtype=np.float64)
    if high.shape != low.shape:
        raise StatsError(f"a recomputed result of shape {high.shape} cannot judge one of shape {low.shape}")
    nan = np.isnan(high) | np.isnan(low)
    inf = ~nan & (np.isinf(high) | np.isinf(low))
    high, low = (np.where(nan | inf, 0.0, result) for result in (high, low))
    return TensorStats(
        count=high.size,
        nan=_count(nan),
        inf=_count(inf),
        amax=float(np.max(np.abs(high), initial=0.0)),
        sum_sq=float((high**2).sum()),
        sum_sq_q=float((low**2).sum()),
        sum_sq_err=float(((high - low) ** 2).sum()),
    )


def _block_shape(layout: str) -> tuple[int, int]:
    try:
        return BLOCK_SHAPES[layout]
    except (KeyError, TypeError):
        raise StatsError(f"layout {layout!r} is not known; choose one of {', '.join(BLOCK_SHAPES)}") from None


def _as_matrices(x: ArrayLike) -> NDArray[np.float32]:
    # Overflow to Inf is counted below; casting a signalling NaN of bfloat16 raises the invalid flag.
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.asarray(x).astype(np.float32)
    if values.ndim == 0:
        raise StatsError("a 0-d tensor has no rows to block; reshape it to (1,)")
    rows = values.shape[-2] if values.ndim > 1 else 1
    leading = int(np.prod(values.shape[:-2], dtype=np.int64))
    return values.reshape(leading, rows, values.shape[-1])


def _maximum(values: NDArray[Any], axis: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(np.max(values, axis=axis, initial=0))


def _per_block(
    values_LRK: NDArray[Any], block: tuple[int, int], reduction: Callable[..., NDArray[Any]]
) -> NDArray[Any]:
    """Reduce every block to one number; the zeros that pad ragged edges change neither sums nor maxima."""
    leading, rows, columns = values_LRK.shape
    padding = [(0, 0), (0, -rows % block[0]), (0, -columns % block[1])]
    padded = np.pad(values_LRK, padding)
    row_blocks, column_blocks = padded.shape[1] // block[0], padded.shape[2] // block[1]
    blocks = padded.reshape(leading, row_blocks, block[0], column_blocks, block[1])
    return reduction(blocks, axis=(2, 4))


def _spread(per_block_Lrk: NDArray[Any], block: tuple[int, int], shape: tuple[int, ...]) -> NDArray[Any]:
    spread = per_block_Lrk.repeat(block[0], axis=1).repeat(block[1], axis=2)
    return spread[:, : shape[1], : shape[2]]


def _histogram(signal: FloatArray, noise: FloatArray) -> tuple[int, ...]:
    """A block without a finite non-zero element is not counted; one without noise falls into the last bin."""
    held = signal > 0
    with np.errstate(divide="ignore"):
        sqnr_db = 10.0 * np.log10(signal[held] / noise[held])
    bins = np.searchsorted(TILE_SQNR_EDGES_DB, sqnr_db, side="right") - 1
    counts = np.bincount(np.minimum(bins, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS)
    return tuple(int(count) for count in counts)


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
