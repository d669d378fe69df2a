"""The error of sampled rows is that of the whole GEMM, wherever in it the error sits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fp8_safeguard.hooks import recompute
from fp8_safeguard.hooks.recompute import SAMPLED_ROWS, RowSampler

CPU = torch.device("cpu")
DRAWS = 1500
CASES = ("alike", "decades", "rare", "band", "periodic", "rising")


def row_sums(case: str, total: int) -> tuple[np.ndarray, np.ndarray]:
    """sum_sq and sum_sq_err of each row of a result with 128 columns."""
    generator = np.random.default_rng(CASES.index(case))
    signal = generator.chisquare(128, total)
    error = 0.036**2 * generator.chisquare(128, total)
    row = np.arange(total)
    factors = {
        "alike": np.ones(total),
        "decades": np.exp(generator.normal(0.0, 1.5, total)),
        "rare": np.where(generator.random(total) < 0.01, 400.0, 1.0),
        "band": np.where((row >= total // 3) & (row < total // 3 + 40), 400.0, 1.0),
        "periodic": np.where(row % 16 == 0, 400.0, 1.0),
        "rising": np.exp(6.0 * row / total),
    }[case]
    # Tokens of other magnitudes have both; what is broken has only the error.
    return signal * (factors if case == "decades" else 1.0), error * factors


def draws(case: str, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row sums, and estimates [draws] of the total squared error and of the relative error."""
    signal, error = row_sums(case, total)
    sampler = RowSampler(3)
    rows = torch.stack([sampler.rows(total, CPU) for _ in range(DRAWS)]).numpy()
    whole = error[rows].sum(axis=1) / SAMPLED_ROWS * total
    return signal, error, whole, np.sqrt(error[rows].sum(axis=1) / signal[rows].sum(axis=1))


def row_standard_error(sum_sq_T: NDArray[np.float64], sum_sq_err_T: NDArray[np.float64]) -> float:
    """Relative standard error of the relative error that 64 of T rows give; from the two sums of each row.

    The estimate is E = sqrt(sum e / sum s) over the sampled rows, e and s a row's sum_sq_err and sum_sq. Every row is
    equally likely, so both sums are unbiased, and E^2 is a ratio estimate: with d = e - E^2 s and R of T rows its
    relative variance is (1 - R/T)/R x mean(d^2)/mean(e)^2, its bias of order 1/R (Cochran, Sampling Techniques, third
    edition 1977, sections 6.4 and 6.8), and that of E a quarter of it. One row from each stratum can only lower it
    (theorem 5.8). Rows that are alike give 1 to 2 %; where 1 % of the rows hold most of the error it is half of E, which is
    then far beyond every threshold.
    """
    rows, squared = len(sum_sq_T), sum_sq_err_T.sum() / sum_sq_T.sum()
    sampled = min(rows, SAMPLED_ROWS)
    residual = (sum_sq_err_T - squared * sum_sq_T) / sum_sq_err_T.mean()
    return 0.5 * float(np.sqrt((1.0 - sampled / rows) / sampled * np.square(residual).mean()))


@pytest.mark.parametrize("total", [1000, 4096])
@pytest.mark.parametrize("case", CASES)
def test_the_sum_over_the_rows_is_unbiased(case: str, total: int) -> None:
    _, error, estimates, _ = draws(case, total)
    standard_error = estimates.std() / math.sqrt(DRAWS)
    assert abs(estimates.mean() - error.sum()) < 4.5 * standard_error
    # The test can tell a bias of a few percent from none, except where a handful of rows hold all of the error.
    assert standard_error < (0.04 if case in ("rare", "band") else 0.02) * error.sum()


@pytest.mark.parametrize("case", CASES)
def test_the_relative_errors_standard_error_is_the_ratio_estimators(case: str) -> None:
    signal, error, _, found = draws(case, 4096)
    whole = math.sqrt(error.sum() / signal.sum())
    predicted = row_standard_error(signal, error) * whole
    # Strata can only help: much where neighbours are alike, not at all where rows are in no order.
    assert found.std() < 1.15 * predicted
    if case == "alike":
        assert found.std() == pytest.approx(predicted, rel=0.1)
        assert found.mean() == pytest.approx(whole, rel=0.01)
        assert predicted < 0.02 * whole
    if case == "rising":
        assert found.std() < 0.2 * predicted


def test_a_sample_of_everything_has_no_error() -> None:
    signal, error = row_sums("decades", SAMPLED_ROWS)
    assert row_standard_error(signal, error) == 0.0


def test_every_row_is_one_of_the_total_and_totals_that_change_do_not_add_up() -> None:
    sampler = RowSampler(1)
    for total in range(1, 400):
        rows = sampler.rows(total, CPU)
        assert len(rows) == min(total, SAMPLED_ROWS)
        assert int(rows[0]) >= 0
        assert int(rows[-1]) < total
        assert bool((rows.diff() >= 0).all())
    assert len(sampler._drawn) <= recompute._TOTALS_KEPT


def test_no_place_rounds_up_to_the_row_behind_the_last() -> None:
    totals = np.arange(SAMPLED_ROWS + 1, 10**6, dtype=np.float64)
    places = recompute._STRATA_END * (totals / SAMPLED_ROWS)
    assert (places.astype(np.int64) == totals - 1).all()
