"""Worst-of reductions over slots of a layer and steps of a column."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.metrics import worst


@dataclass(frozen=True)
class Measured:
    """A table of one metric, with what a null in it cannot say."""

    values: NDArray[np.float64]
    """NaN where null."""
    bad: NDArray[np.bool_]
    """Where the value itself was measured as NaN: worse than any number."""
    nan: NDArray[np.int64]
    """NaN elements of the tensor."""
    inf: NDArray[np.int64]
    """Infinite elements of the tensor."""

    def transposed(self) -> "Measured":
        """The same with rows and columns exchanged."""
        return Measured(self.values.T, self.bad.T, self.nan.T, self.inf.T)


def reduce_rows(metric: str, table: Measured, row_of: NDArray[np.intp], rows: int) -> Measured:
    """Merge rows with one number into one row, keeping the worst value; rows nobody names are null."""
    columns = table.values.shape[1]
    extreme = np.fmin if worst(metric) == "min" else np.fmax
    values = np.full((rows, columns), np.nan)
    extreme.at(values, row_of, table.values)
    bad = np.zeros((rows, columns), dtype=np.bool_)
    np.logical_or.at(bad, row_of, table.bad)
    nan, inf = (np.zeros((rows, columns), dtype=np.int64) for _ in range(2))
    # A maximum, not a sum: x in rows and x in columns are the same elements.
    np.maximum.at(nan, row_of, table.nan)
    np.maximum.at(inf, row_of, table.inf)
    return Measured(values, bad, nan, inf)


def column_width(steps: NDArray[np.int64], columns: int) -> tuple[int, int]:
    """(spacing of the samples, width of a column in steps) that shows `steps` in at most `columns` columns."""
    if len(steps) < 2:
        return 1, 1
    spacing = int(np.gcd.reduce(np.diff(steps)))
    if len(steps) <= columns:
        return spacing, spacing
    places = (int(steps[-1]) - int(steps[0])) // spacing + 1
    return spacing, spacing * -(-places // columns)


def reduce_columns(
    metric: str, table: Measured, steps: NDArray[np.int64], columns: int
) -> tuple[Measured, NDArray[np.int64], int]:
    """Merge steps into at most `columns` columns of equal width, keeping the worst; columns without samples are left out.

    Returns the table, the first step of each column, and the width in steps.
    """
    _, width = column_width(steps, columns)
    if not len(steps):
        return table, steps, width
    bucket = (steps - steps[0]) // width
    shown, column_of = np.unique(bucket, return_inverse=True)
    if len(shown) == len(steps):
        return table, steps[0] + shown * width, width
    merged = reduce_rows(metric, table.transposed(), column_of.astype(np.intp), len(shown))
    return merged.transposed(), steps[0] + shown * width, width
