"""The columns of TensorStats and the metrics derived from them.

One definition of each derived metric, over arrays of slots. Columns are sums (the maximum for amax), so parts merge first
and metrics are derived last. A metric is null (NaN in arrays) where a column it needs is null or its denominator is 0:

    underflow_ratio, zero_ratio, saturation_ratio   underflow, zeros, saturated over count
    nonfinite_count                                 nan + inf
    rows_flushed_ratio                              rows_flushed / rows
    cosine                                          (sum_sq + sum_sq_q - sum_sq_err) / (2 sqrt(sum_sq sum_sq_q)); 0 if sum_sq_q is 0
    cosine_distortion                               1 - cosine
    sqnr_db                                         10 log10(sum_sq / sum_sq_err); Inf if nothing was lost
    relative_error                                  sqrt(sum_sq_err / sum_sq)
    kurtosis                                        n sum_4th / sum_sq^2, n = finite elements (uncentred: a Gaussian has 3)
    tile_sqnr_p01_db                                lower edge of the histogram bin that holds the ceil(0.01 n)-th block

The cosine follows from |x - xq|^2 = |x|^2 + |xq|^2 - 2 x.xq, so no fourth sum is needed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Columns = Mapping[str, NDArray[Any]]

COUNT_COLUMNS = ("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed")
FLOAT_COLUMNS = ("amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")
COLUMNS = COUNT_COLUMNS + FLOAT_COLUMNS
HISTOGRAM = "tile_sqnr_hist"
HISTOGRAM_BINS = 16
ALL_COLUMNS = (*COLUMNS, HISTOGRAM)
VECTOR_LENGTH = len(COLUMNS) + HISTOGRAM_BINS

TILE_SQNR_EDGES_DB: FloatArray = np.array(
    [-np.inf, 0, 4, 8, 12, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 38, np.inf], dtype=np.float64
)
TILE_SQNR_EDGES_DB.setflags(write=False)

_ROUNDING_NEGATIVE = -1e-12
"""A cosine distortion between this and 0 is rounding of a perfect match, and reads 0."""


class UnknownMetricError(ValueError):
    """A metric name that is neither derived nor a column."""


@dataclass(frozen=True)
class _Metric:
    needs: tuple[str, ...]
    denominator: str | None
    formula: Callable[[Columns], FloatArray]
    carries_nan: bool = True
    """Whether the value is NaN wherever a column that it needs is."""


def _ratio(numerator: str, denominator: str) -> _Metric:
    return _Metric((numerator, denominator), denominator, lambda c: c[numerator] / c[denominator])


def _cosine(columns: Columns) -> FloatArray:
    # Divided by sum_sq first: no product of two sums that could overflow, and exactly 1 where xq equals x.
    quantised = columns["sum_sq_q"] / columns["sum_sq"]
    error = columns["sum_sq_err"] / columns["sum_sq"]
    cosine = (1.0 + quantised - error) / (2.0 * np.sqrt(quantised))
    return np.where(quantised == 0, 0.0, cosine)


def _cosine_distortion(columns: Columns) -> FloatArray:
    distortion = 1.0 - _cosine(columns)
    return np.where((distortion < 0) & (distortion > _ROUNDING_NEGATIVE), 0.0, distortion)


def _mean_squared_error(columns: Columns) -> FloatArray:
    mean: FloatArray = columns["sum_sq_err"] / (columns["count"] - columns["nan"] - columns["inf"])
    return mean


def _kurtosis(columns: Columns) -> FloatArray:
    finite = columns["count"] - columns["nan"] - columns["inf"]
    kurtosis: FloatArray = finite * (columns["sum_4th"] / columns["sum_sq"]) / columns["sum_sq"]
    return kurtosis


def _tile_sqnr_p01(columns: Columns) -> FloatArray:
    histogram = _held(columns[HISTOGRAM]).astype(np.int64).reshape(-1, HISTOGRAM_BINS)
    blocks_below = histogram.cumsum(axis=1)
    # ceil(0.01 n) in integers: no number of blocks can round across a rank.
    rank = (blocks_below[:, -1:] + 99) // 100
    bins = (blocks_below >= rank).argmax(axis=1)
    lower_edges: FloatArray = TILE_SQNR_EDGES_DB[bins]
    return lower_edges


def _held(histogram: FloatArray) -> FloatArray:
    return np.where(np.isnan(histogram), 0.0, histogram)


_SUMS = ("sum_sq", "sum_sq_q", "sum_sq_err")

_DEFINITIONS: dict[str, _Metric] = {
    "underflow_ratio": _ratio("underflow", "count"),
    "zero_ratio": _ratio("zeros", "count"),
    "saturation_ratio": _ratio("saturated", "count"),
    "nonfinite_count": _Metric(("nan", "inf"), None, lambda c: c["nan"] + c["inf"]),
    "rows_flushed_ratio": _ratio("rows_flushed", "rows"),
    "cosine": _Metric(_SUMS, "sum_sq", _cosine, carries_nan=False),
    "cosine_distortion": _Metric(_SUMS, "sum_sq", _cosine_distortion, carries_nan=False),
    "sqnr_db": _Metric(
        ("sum_sq", "sum_sq_err"), "sum_sq", lambda c: 10.0 * np.log10(c["sum_sq"] / c["sum_sq_err"])
    ),
    "relative_error": _Metric(
        ("sum_sq", "sum_sq_err"), "sum_sq", lambda c: np.sqrt(c["sum_sq_err"] / c["sum_sq"])
    ),
    "mse": _Metric(
        ("count", "nan", "inf", "sum_sq", "sum_sq_err"), "sum_sq", _mean_squared_error, carries_nan=False
    ),
    "kurtosis": _Metric(("count", "nan", "inf", "sum_sq", "sum_4th"), "sum_sq", _kurtosis),
    "tile_sqnr_p01_db": _Metric((HISTOGRAM,), HISTOGRAM, _tile_sqnr_p01, carries_nan=False),
}

DERIVED_METRICS = tuple(_DEFINITIONS)
METRICS = (*DERIVED_METRICS, *COLUMNS)
LOWER_IS_WORSE = frozenset({"cosine", "sqnr_db", "tile_sqnr_p01_db"})


def worst(metric: str) -> Literal["max", "min"]:
    """Which extreme of a metric is the bad one: how steps and slots of a layer are reduced to one value."""
    return "min" if metric in LOWER_IS_WORSE else "max"


def metric_needs(metric: str) -> tuple[str, ...]:
    """The columns that a metric is computed from. Raises UnknownMetricError."""
    if metric in COLUMNS:
        return (metric,)
    try:
        return _DEFINITIONS[metric].needs
    except (KeyError, TypeError):
        raise UnknownMetricError(
            f"metric {metric!r} is not known; choose one of {', '.join(METRICS)}"
        ) from None


def derive(metric: str, columns: Columns) -> FloatArray:
    """The metric of every slot, float64 [S]. `columns` maps names to arrays [S] (histogram [S, 16]) with NaN for null.

    NaN where the metric is null, and where the measured sums themselves are NaN: `undefined` tells the two apart.
    """
    needed = {name: np.asarray(columns[name], dtype=np.float64) for name in metric_needs(metric)}
    if metric in COLUMNS:
        return needed[metric].copy()
    definition = _DEFINITIONS[metric]
    with np.errstate(all="ignore"):
        values = definition.formula(needed)
    told = () if definition.carries_nan else needed
    absent = {name: np.isnan(_flat(needed[name])) for name in told}
    return np.where(_undefined(metric, needed, absent), np.nan, values)


def undefined(
    metric: str, columns: Columns, nulls: Mapping[str, NDArray[np.bool_]] | None = None
) -> NDArray[np.bool_]:
    """Where the metric is null: a column it needs is null (by `nulls`, or a NaN if not given), or divides by 0."""
    needed = {name: np.asarray(columns[name], dtype=np.float64) for name in metric_needs(metric)}
    if nulls is None:
        nulls = {name: np.isnan(_flat(values)) for name, values in needed.items()}
    return _undefined(metric, needed, nulls)


def _undefined(metric: str, needed: Columns, nulls: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.bool_]:
    definition = _DEFINITIONS.get(metric)
    denominator = definition.denominator if definition else None
    result: NDArray[np.bool_]
    if denominator == HISTOGRAM:
        result = ~(_held(needed[HISTOGRAM]).sum(axis=1) > 0)
    elif denominator:
        result = needed[denominator] == 0
    else:
        result = np.zeros(len(next(iter(needed.values()))), dtype=bool)
    for name in needed.keys() & nulls.keys():
        result |= nulls[name]
    return result


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    """One number a slot: the histogram of a slot is null as a whole."""
    return values[:, 0] if values.ndim == 2 else values
