"""TensorStats against element-by-element loops, exact fractions and closed forms."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_safeguard.monitor import stats
from fp8_safeguard.monitor.formats import block_scale
from fp8_safeguard.monitor.metrics import metric_needs
from fp8_safeguard.monitor.stats import COLUMNS, TensorStats, compare, measure

EDGES_DB = [-math.inf, 0, 4, 8, 12, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 38, math.inf]
DTYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 464.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 61440.0)}
SHAPES = [(1,), (130,), (1, 1), (3, 128), (5, 130), (129, 130), (2, 3, 131), (2, 130, 5), (2, 2, 3, 4)]


def blocks_of(shape: tuple[int, ...], layout: str) -> Iterator[list[tuple[int, ...]]]:
    """Index arrays of every block, by loops."""
    matrices = list(np.ndindex(*shape[:-2])) if len(shape) > 2 else [()]
    rows = shape[-2] if len(shape) > 1 else 1
    height, width = {"row": (1, 128), "col": (128, 1), "tile": (128, 128)}[layout]
    for matrix in matrices:
        for top in range(0, rows, height):
            for left in range(0, shape[-1], width):
                yield [
                    (*matrix, row, column) if len(shape) > 1 else (column,)
                    for row in range(top, min(top + height, rows))
                    for column in range(left, min(left + width, shape[-1]))
                ]


def brute_force(
    x: np.ndarray, layout: str, name: str, kind: str, multiplier: float
) -> tuple[dict[str, Any], list[int]]:
    """The definition in loops over float32 scalars, with the casts of ml_dtypes. Returns the 13 columns and the histogram."""
    dtype, limit, edge = DTYPES[name]
    x = np.asarray(x).astype(np.float32)
    q = np.zeros(x.shape)
    column = dict.fromkeys(COLUMNS, 0)
    histogram = [0] * 16
    for block in blocks_of(x.shape, layout):
        finite = [at for at in block if np.isfinite(x[at])]
        amax = max((abs(x[at]) for at in finite), default=np.float32(0))
        s = block_scale(amax, name, kind, multiplier)[()]
        signal = noise = 0.0
        for at in block:
            if not np.isfinite(x[at]):
                column["nan" if np.isnan(x[at]) else "inf"] += 1
                q[at] = np.nan
                continue
            ratio = np.float32(x[at]) / s
            q[at] = float(np.clip(ratio, np.float32(-limit), np.float32(limit)).astype(dtype))
            past = abs(ratio) >= edge if name == "e5m2" else abs(ratio) > edge
            value, kept = float(x[at]), q[at] * float(s)
            column["saturated"] += bool(past)
            column["zeros"] += q[at] == 0
            column["underflow"] += q[at] == 0 and value != 0
            column["amax"] = max(column["amax"], abs(value))
            column["sum_sq"] += value**2
            column["sum_sq_q"] += kept**2
            column["sum_sq_err"] += (value - kept) ** 2
            column["sum_4th"] += value**4
            signal, noise = signal + value**2, noise + (value - kept) ** 2
        if signal > 0:
            db = math.inf if noise == 0 else 10 * math.log10(signal / noise)
            histogram[max(i for i in range(16) if EDGES_DB[i] <= db)] += 1
    rows = x.reshape(-1, x.shape[-1])
    column["count"], column["rows"] = x.size, len(rows)
    for row, row_q in zip(rows, q.reshape(rows.shape), strict=True):
        column["rows_flushed"] += any(row != 0) and all(row_q == 0)
    return column, histogram


def wide(shape: tuple[int, ...], seed: int, *, special: bool = True) -> np.ndarray:
    """Values over 40 binades, with zeros, subnormals, NaN and Inf among them."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-40, 1, shape))).astype(np.float32)
    flat = x.reshape(-1)
    if special and flat.size > 8:
        flat[:: max(flat.size // 7, 1)] = 0
        flat[1 :: max(flat.size // 3, 2)] = 1e-45
        flat[2 :: max(flat.size // 2, 3)] = np.nan
        flat[5] = -np.inf
    return x


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_measure_equals_the_loops(shape: tuple[int, ...], layout: str) -> None:
    cases = [("e4m3", "fp32", 1.0), ("e5m2", "fp32", 1.0), ("e4m3", "pow2", 1.0), ("e4m3", "fp32", 2.0**-3)]
    for seed, (name, kind, multiplier) in enumerate(cases[:: 3 if math.prod(shape) > 10_000 else 1]):
        x = wide(shape, seed)
        got = measure(x, layout=layout, fmt=name, scale=kind, multiplier=multiplier)
        columns, histogram = brute_force(x, layout, name, kind, multiplier)
        for column, expected in columns.items():
            assert getattr(got, column) == pytest.approx(expected, rel=1e-12, abs=0), (column, name, kind)
        assert list(got.histogram) == histogram


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_measure_takes_every_float_dtype_exactly(dtype: Any) -> None:
    x = wide((4, 200), 3).astype(dtype)
    columns, _ = brute_force(x.astype(np.float32), "row", "e4m3", "fp32", 1.0)
    assert measure(x, layout="row").sum_sq_err == pytest.approx(columns["sum_sq_err"], rel=1e-12)


def test_float64_is_rounded_to_float32_first() -> None:
    assert measure(np.array([[1e300, 1.0]]), layout="row").inf == 1
    assert measure(np.array([[1.0 + 2.0**-40]]), layout="row").amax == 1.0


def test_non_contiguous_input_is_read_in_place() -> None:
    x = wide((260, 130), 5)
    view = x[::2, ::-1]
    assert not view.flags["C_CONTIGUOUS"]
    for strided, layout in ((view, "tile"), (x.T, "row")):
        dense = measure(np.ascontiguousarray(strided), layout=layout)
        assert measure(strided, layout=layout).to_vector() == pytest.approx(dense.to_vector(), rel=1e-13)


def test_one_float32_division_decides_ties() -> None:
    """x / s is exactly between 16 and 18 in float32, so it goes to 16 (even); in float64 it is above, and went to 18."""
    rng = np.random.default_rng(0)
    amax = rng.uniform(100, 200, 10_000).astype(np.float32)
    scale = amax / np.float32(448)
    x = np.float32(17) * scale
    misleading = (x / scale == 17) & (x.astype(np.float64) / scale.astype(np.float64) > 17)
    assert misleading.any()
    some = np.flatnonzero(misleading)[:50]
    for largest, s, value in zip(amax[some], scale[some], x[some], strict=True):
        got = measure(np.array([[largest, value]]), layout="row")
        assert got.sum_sq_q == pytest.approx((448.0 * float(s)) ** 2 + (16.0 * float(s)) ** 2, rel=1e-12)


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_b26_all_zero_block_gives_zeros_and_no_nan(layout: str, fmt: str) -> None:
    x = np.zeros((130, 260), dtype=np.float32)
    x[0, 0] = 3.0
    got = measure(x, layout=layout, fmt=fmt)
    assert (got.nan, got.zeros, got.underflow, got.rows_flushed) == (0, x.size - 1, 0, 0)
    assert got.sum_sq == 9.0
    assert got.sum_sq_q == pytest.approx(9.0, rel=1e-6)
    # Only the block that holds the value is counted.
    assert sum(got.histogram) == 1


@pytest.mark.parametrize(
    ("fmt", "values", "kept"),
    [
        ("e4m3", [448.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 0.0], [448.0, 2.0**-9, 2.0**-8]),
        ("e5m2", [57344.0, 2.0**-16, 2.0**-17, 3 * 2.0**-17, 0.0], [57344.0, 2.0**-16, 2.0**-15]),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_b44_underflow_is_what_becomes_zero_and_not_what_is_subnormal(
    fmt: str, values: list[float], kept: list[float], sign: float
) -> None:
    got = measure(sign * np.array([values], dtype=np.float32), layout="row", fmt=fmt)
    assert (got.zeros, got.underflow) == (2, 1)
    assert got.sum_sq_q == sum(value**2 for value in kept)


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_b28_a_block_of_small_gradients_does_not_underflow(layout: str, fmt: str) -> None:
    x = (np.arange(1, 9) / 8 * 1e-9).astype(np.float32).reshape((1, 8) if layout == "row" else (8, 1))
    got = measure(x, layout=layout, fmt=fmt)
    assert (got.underflow, got.zeros) == (0, 0)
    assert got.relative_error <= {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt]


def test_all_zero_tensor_has_no_quality() -> None:
    got = measure(np.zeros((4, 128)), layout="row")
    assert got.zero_ratio == 1.0
    assert got.underflow_ratio == 0.0
    assert (got.cosine, got.sqnr_db, got.relative_error, got.kurtosis, got.tile_sqnr_p01_db) == (None,) * 5
    assert sum(got.histogram) == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_empty_tensor_gives_zeros_and_null_ratios(shape: tuple[int, ...], layout: str) -> None:
    got = measure(np.zeros(shape), layout=layout)
    assert got.to_vector().tolist() == [0] * 6 + [got.rows] + [0] * 22
    assert got.nulls == frozenset()
    ratios = ("underflow_ratio", "zero_ratio", "saturation_ratio", "cosine", "sqnr_db", "tile_sqnr_p01_db")
    assert [got.metric(name) for name in ratios] == [None] * 6
    assert got.nonfinite_count == 0


def test_non_finite_elements_take_no_part_in_scales_sums_or_histogram() -> None:
    clean = wide((3, 128), 8, special=False)
    dirty = clean.copy()
    dirty[0, 3], dirty[1, 4], dirty[2, 5] = np.nan, np.inf, -np.inf
    holes = clean.copy()
    holes[0, 3] = holes[1, 4] = holes[2, 5] = 0
    got, expected = measure(dirty, layout="row"), measure(holes, layout="row")
    assert (got.nan, got.inf, got.nonfinite_count) == (1, 2, 3)
    assert got.zeros == expected.zeros - 3
    for column in ("count", "amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th", "histogram", "underflow"):
        assert getattr(got, column) == getattr(expected, column)


def test_a_row_with_a_nan_is_not_flushed() -> None:
    x = np.zeros((3, 128), dtype=np.float32)
    x[0, 0], x[1, :2] = 1e-30, [np.nan, 1e-30]
    got = measure(np.vstack([x, np.ones((125, 128))]).astype(np.float32), layout="tile")
    assert (got.rows_flushed, got.rows, got.underflow) == (1, 128, 2)
    assert got.rows_flushed_ratio == 1 / 128


def test_flushed_block_reads_zero_db_and_lossless_block_the_last_bin() -> None:
    # With a multiplier of 2^20 the scale is 2^11, and everything goes to zero: all of the signal is noise.
    halves = np.full((1, 128), 0.5, dtype=np.float32)
    flushed = measure(halves, layout="row", scale="pow2", multiplier=2.0**20)
    assert (flushed.histogram[1], sum(flushed.histogram), flushed.rows_flushed) == (1, 1, 1)
    assert (flushed.sqnr_db, flushed.cosine) == (0.0, 0.0)
    kept = measure(halves, layout="row", scale="pow2")
    assert (kept.histogram[15], kept.sqnr_db, kept.cosine, kept.cosine_distortion) == (1, math.inf, 1.0, 0.0)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-38, 3e-43])
def test_sums_of_tiny_gradients_are_exact(magnitude: float) -> None:
    x = (np.random.default_rng(1).standard_normal((2, 130)) * magnitude).astype(np.float32)
    got = measure(x, layout="row")
    exact = [Fraction(float(value)) for value in x.reshape(-1)]
    assert got.sum_sq == pytest.approx(float(sum(value**2 for value in exact)), rel=1e-14, abs=0)
    assert got.sum_4th == pytest.approx(float(sum(value**4 for value in exact)), rel=1e-14, abs=0)
    assert got.sum_sq > 0
    assert got.cosine > 0.99


def test_saturation_counts_what_only_the_clamp_held() -> None:
    x = np.array([[448.0, 232.0, 233.0, 100.0]], dtype=np.float32)
    got = measure(x, layout="row", multiplier=0.5)
    # s = 0.5: 448 / s = 896 and 233 / s = 466 are beyond 464; 232 / s is 464 exactly and rounds to 448.
    assert got.saturated == 2
    assert measure(x, layout="row").saturated == 0


def test_healthy_block_maxima_are_never_saturated() -> None:
    x = np.random.default_rng(2).standard_normal((5000, 128)).astype(np.float32)
    amax = np.abs(x).max(axis=1)
    assert (amax / (amax / np.float32(448)) > 448).any()
    assert measure(x, layout="row").saturated == 0


def test_noise_floor_of_gaussian_data() -> None:
    x = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    got = measure(x, layout="row")
    assert got.cosine == pytest.approx(0.99967, abs=2e-5)
    assert got.sqnr_db == pytest.approx(31.8, abs=0.05)
    assert got.relative_error == pytest.approx(0.0257, abs=2e-4)
    assert got.kurtosis == pytest.approx(3.0, abs=0.02)
    assert got.underflow_ratio == pytest.approx(4e-6, abs=5e-6)
    assert measure(x, layout="row", fmt="int8").zero_ratio == pytest.approx(0.0089, abs=4e-4)
    assert measure(x, layout="row", fmt="e5m2").sqnr_db == pytest.approx(25.8, abs=0.1)
    assert got.tile_sqnr_p01_db == 30.0


def test_derived_metrics_equal_their_definition_on_the_tensors() -> None:
    x = wide((64, 256), 11, special=False).astype(np.float64)
    xq = x * (1 + np.random.default_rng(4).uniform(-0.2, 0.2, x.shape))
    got = compare(x, xq)
    assert got.cosine == pytest.approx((x * xq).sum() / np.linalg.norm(x) / np.linalg.norm(xq), rel=1e-12)
    assert got.relative_error == pytest.approx(np.linalg.norm(x - xq) / np.linalg.norm(x), rel=1e-12)
    assert got.sqnr_db == pytest.approx(-20 * math.log10(got.relative_error), rel=1e-12)
    assert got.cosine_distortion == pytest.approx(1 - got.cosine, abs=1e-15)


def test_compare_leaves_quantisation_columns_null_and_excludes_non_finite_pairs() -> None:
    got = compare([1.0, np.nan, 2.0, np.inf, 3.0], [1.5, 1.0, np.inf, np.nan, 3.0])
    assert (got.count, got.nan, got.inf) == (5, 2, 1)
    assert (got.amax, got.sum_sq, got.sum_sq_q, got.sum_sq_err) == (3.0, 10.0, 11.25, 0.25)
    nulls = {"zeros", "underflow", "saturated", "rows", "rows_flushed", "sum_4th", stats.HISTOGRAM}
    assert got.nulls == nulls
    assert (got.underflow_ratio, got.kurtosis, got.tile_sqnr_p01_db) == (None, None, None)
    with pytest.raises(stats.StatsError, match="shape"):
        compare([1.0], [1.0, 2.0])


def test_cosine_is_zero_when_everything_was_flushed_and_null_without_a_signal() -> None:
    assert TensorStats(count=2, sum_sq=4.0, sum_sq_q=0.0, sum_sq_err=4.0).cosine == 0.0
    assert TensorStats(count=2, sum_sq=4.0, sum_sq_q=0.0, sum_sq_err=4.0).cosine_distortion == 1.0
    assert TensorStats(count=2, sum_sq=0.0, sum_sq_q=0.0, sum_sq_err=0.0).cosine is None
    assert TensorStats(count=2, sum_sq=4.0, sum_sq_q=4.0, sum_sq_err=16.0).cosine == -1.0


def test_measured_nan_is_nan_and_not_null() -> None:
    got = TensorStats(count=2, sum_sq=math.nan, sum_sq_q=1.0, sum_sq_err=1.0)
    assert math.isnan(got.cosine)
    assert math.isnan(got.relative_error)


@pytest.mark.parametrize(
    ("blocks", "low_blocks", "expected"),
    [(1, 1, 0.0), (99, 1, 0.0), (100, 1, 0.0), (101, 1, 30.0), (700, 7, 0.0), (700, 6, 30.0), (701, 7, 30.0)],
)
def test_p01_is_the_bin_of_the_block_at_the_first_percentile(
    blocks: int, low_blocks: int, expected: float
) -> None:
    histogram = [0] * 16
    histogram[1], histogram[12] = low_blocks, blocks - low_blocks
    assert TensorStats(histogram=tuple(histogram)).tile_sqnr_p01_db == expected


def test_p01_of_blocks_worse_than_their_signal_is_minus_infinity() -> None:
    assert TensorStats(histogram=(5, *[0] * 15)).tile_sqnr_p01_db == -math.inf


@pytest.mark.parametrize("layout", ["row", "tile"])
def test_merging_parts_equals_the_whole(layout: str) -> None:
    x = wide((512, 130), 21)
    parts = [measure(x[at : at + 128], layout=layout) for at in range(0, 512, 128)]
    merged, whole = TensorStats.merge(parts), measure(x, layout=layout)
    assert merged.to_vector() == pytest.approx(whole.to_vector(), rel=1e-12)
    assert merged.histogram == whole.histogram


def test_merge_keeps_a_nan_maximum_and_null_only_where_all_are_null() -> None:
    merged = TensorStats.merge([TensorStats(count=1, amax=math.nan), TensorStats(count=2, amax=5.0, rows=3)])
    assert math.isnan(merged.amax)
    assert (merged.count, merged.rows, merged.zeros) == (3, 3, None)
    assert TensorStats.merge([]) == TensorStats()


def test_vector_round_trip_keeps_nulls_and_measured_nan() -> None:
    for got in (measure(wide((3, 200), 2), layout="row"), compare([1.0, 2.0], [1.0, 2.5])):
        assert TensorStats.from_vector(got.to_vector(), got.nulls) == got
    broken = TensorStats(count=1, amax=math.nan)
    again = TensorStats.from_vector(broken.to_vector(), broken.nulls)
    assert math.isnan(again.amax)
    assert again.sum_sq is None


def test_vectors_that_are_none_are_refused() -> None:
    with pytest.raises(stats.StatsError, match=r"\(29,\)"):
        TensorStats.from_vector([1.0] * 28)
    with pytest.raises(stats.StatsError, match="count counts elements"):
        TensorStats.from_vector([0.5] + [0.0] * 28)
    with pytest.raises(stats.StatsError, match="zeros counts elements"):
        TensorStats.from_vector([1.0, -1.0] + [0.0] * 27)


def test_bad_layouts_and_scalars_are_refused() -> None:
    with pytest.raises(stats.StatsError, match="row, col, tile"):
        measure([1.0], layout="rows")
    with pytest.raises(stats.StatsError, match="0-d"):
        measure(1.0, layout="row")


def test_columns_are_the_contract_in_order() -> None:
    assert (*COLUMNS, stats.HISTOGRAM) == (
        *("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed"),
        *("amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th", "tile_sqnr_hist"),
    )
    assert stats.VECTOR_LENGTH == 29
    assert stats.TILE_SQNR_EDGES_DB.tolist() == EDGES_DB


counts = st.integers(0, 10**6)
sums = st.one_of(st.just(0.0), st.floats(1e-60, 1e60))
columns_of_slots = st.lists(
    st.fixed_dictionaries(
        {
            **{name: st.none() | (counts if name in stats.COUNT_COLUMNS else sums) for name in COLUMNS},
            "histogram": st.none() | st.tuples(*[st.integers(0, 50)] * 16),
        }
    ),
    min_size=1,
    max_size=5,
)


@given(columns_of_slots)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_derive_over_slots_equals_each_slot_alone(slots: Any) -> None:
    table = {
        name: np.array([np.nan if slot[name] is None else slot[name] for slot in slots], dtype=np.float64)
        for name in COLUMNS
    }
    nothing = [np.nan] * 16
    table[stats.HISTOGRAM] = np.array(
        [nothing if slot["histogram"] is None else slot["histogram"] for slot in slots], dtype=np.float64
    )
    for metric in stats.METRICS:
        together = stats.derive(metric, table)
        null = stats.undefined(metric, table)
        for at, slot in enumerate(slots):
            alone = TensorStats(**slot).metric(metric)
            assert null[at] == (alone is None)
            assert together[at] == alone or (
                math.isnan(together[at]) and (alone is None or math.isnan(alone))
            )


@pytest.mark.parametrize("metric", stats.METRICS)
def test_a_metric_is_null_where_any_column_that_it_needs_is(metric: str) -> None:
    """Of numbers with which no formula divides by 0 or gives a NaN itself, an exact zero among them."""
    whole = {name: np.array([2.0]) for name in COLUMNS} | {
        "count": np.array([8.0]),
        "sum_sq_q": np.array([0.0]),
        stats.HISTOGRAM: np.ones((1, 16)),
    }
    assert not np.isnan(stats.derive(metric, whole)).any()
    for name in metric_needs(metric):
        gap = whole | {name: np.full_like(whole[name], np.nan)}
        assert np.isnan(stats.derive(metric, gap)).all()
        assert stats.undefined(metric, gap).all()


def test_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(stats.UnknownMetricError, match=r"distortion.*underflow_ratio"):
        TensorStats().metric("distortion")


def test_worst_direction_of_a_metric() -> None:
    assert [stats.worst(name) for name in ("cosine", "sqnr_db", "tile_sqnr_p01_db")] == ["min"] * 3
    assert [stats.worst(name) for name in ("underflow_ratio", "cosine_distortion", "amax")] == ["max"] * 3
