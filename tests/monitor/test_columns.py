"""Raw columns: a NaN is a measurement where one can be, and null where none can."""

from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.columns import StatsTable, read_column, write_column

BINS = [0.0] * 12 + [510.0, 2.0, 0.0, 0.0]


def read(name: str, values: Any) -> tuple[Any, list[str]]:
    """Values and null mask of a float64 column, and the pointers of its faults."""
    faults: list[str] = []
    raw = {"dtype": "float64", "data": np.array(values, dtype="<f8").tobytes()}
    return read_column(name, raw, len(values), lambda pointer, _: faults.append(pointer)), faults


@pytest.mark.parametrize("name", ["zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed"])
def test_a_nan_in_a_float64_count_is_null(name: str) -> None:
    """A client written from the contract knows no other way to say null in raw bytes."""
    (values, null), faults = read(name, [12.0, np.nan])
    assert (values.tolist(), null.tolist(), faults) == ([12, 0], [False, True], [])
    assert values.dtype == np.int64


def test_a_histogram_of_nan_is_null_and_one_with_a_nan_is_a_fault() -> None:
    (values, null), faults = read("tile_sqnr_hist", [BINS, [np.nan] * 16])
    assert (values.tolist(), null.tolist(), faults) == ([BINS, [0] * 16], [False, True], [])
    assert read("tile_sqnr_hist", [BINS, [np.nan, *BINS[1:]]]) == (None, ["/data"])


@pytest.mark.parametrize("name", ["amax", "sum_sq", "sum_4th"])
def test_a_nan_in_a_sum_stays_a_measured_nan(name: str) -> None:
    (values, null), faults = read(name, [2.0, np.nan])
    np.testing.assert_array_equal(values, [2.0, np.nan])
    assert (null.tolist(), faults) == ([False, False], [])


def test_every_slot_has_a_count() -> None:
    assert read("count", [1.0, np.nan]) == (None, ["/data"])


def test_columns_with_one_mask_and_with_equal_ones_are_null_where_they_say() -> None:
    shared, other = np.array([False, True, True]), np.array([False, False, False])
    nulls = {"count": other, "zeros": shared, "underflow": shared, "amax": shared.copy()}
    columns = {"count": np.array([1, 2, 3]), "zeros": np.array([4, 0, 0]), "underflow": np.array([5, 0, 0])}
    table = StatsTable({**columns, "amax": np.array([np.nan, np.nan, np.nan])}, nulls)
    assert table.null_positions() == {"count": [], "zeros": [1, 2], "underflow": [1, 2], "amax": [1, 2]}
    for name, expected in (
        ("count", [1, 2, 3]),
        ("underflow", [5, None, None]),
        ("amax", ["NaN", None, None]),
    ):
        assert write_column(table, name, binary=False) == expected
        known = table.null_positions()[name]
        assert write_column(table, name, binary=False, null_at=known) == expected
        raw = write_column(table, name, binary=True, null_at=known)
        assert raw == write_column(table, name, binary=True)
        assert raw.get("nulls", []) == known
