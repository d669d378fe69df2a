"""Sampled rows, and the comparison that is made of them."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import pytest
import torch

from fp8_safeguard.hooks import recompute
from fp8_safeguard.hooks.recompute import SAMPLED_ROWS, RowSampler, compare
from fp8_safeguard.monitor import stats

CPU = torch.device("cpu")


class TestRowSampler:
    @pytest.mark.parametrize("total", [0, 1, 63, 64, 65, 100, 4096])
    def test_rows_are_in_range_rising_and_as_many_as_promised(self, total: int) -> None:
        rows = RowSampler().rows(total, CPU)
        assert len(rows) == min(total, SAMPLED_ROWS)
        assert (rows.diff() >= 0).all()
        assert total == 0 or 0 <= rows[0] <= rows[-1] < total

    @pytest.mark.parametrize("total", [100, 129])
    def test_every_row_is_equally_likely(self, total: int) -> None:
        sampler, draws = RowSampler(), 4000
        hits = torch.zeros(total)
        for _ in range(draws):
            hits.index_add_(0, sampler.rows(total, CPU), torch.ones(SAMPLED_ROWS))
        expected = draws * SAMPLED_ROWS / total
        assert (hits - expected).abs().max() < 5 * math.sqrt(expected)

    def test_the_global_generator_is_not_touched(self) -> None:
        before = torch.get_rng_state()
        RowSampler().rows(1000, CPU)
        assert torch.equal(torch.get_rng_state(), before)


def test_the_error_of_the_sample_is_that_of_the_whole_gemm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2048, 96, generator=generator), torch.randn(80, 96, generator=generator)
    y = x @ w.T
    y[: len(y) // 2] *= 1.05  # half of the rows are wrong: the sample must see that half
    whole = stats.compare(x.double().numpy() @ w.double().numpy().T, y.numpy()).relative_error
    sampler = RowSampler(1)
    errors = [
        stats.TensorStats.from_vector(
            recompute.fprop_error(x, w, y, sampler.rows(2048, CPU)).numpy(), NULLS
        ).relative_error
        for _ in range(50)
    ]
    assert np.mean(errors) == pytest.approx(whole, rel=0.01)
    assert max(abs(error / whole - 1) for error in errors) < 0.1


NULLS = set(stats.ALL_COLUMNS) - set(recompute.GEMM_COLUMNS)


class TestCompare:
    @pytest.mark.parametrize(
        ("exact", "actual"),
        [
            ([1.0, -2.0, 3.0], [1.0, -2.25, 3.0]),
            ([1.0, math.nan, 3.0, 4.0], [1.0, 2.0, math.inf, math.nan]),
            ([math.inf, -math.inf], [math.inf, 1.0]),
            ([0.0, 0.0], [0.0, 0.0]),
            ([1e-30, 3e-30], [1e-30, 2e-30]),
            ([3e38, 3e38], [1.0, 1.0]),
            ([], []),
        ],
    )
    def test_it_is_the_definition(self, exact: list[float], actual: list[float]) -> None:
        high, low = (torch.tensor(values, dtype=torch.float64).reshape(1, -1) for values in (exact, actual))
        got = stats.TensorStats.from_vector(compare(high, low).numpy(), NULLS)
        masked = recompute._compare_masked(high.flatten(), low.flatten())
        for vector in (got, stats.TensorStats.from_vector(masked.numpy(), NULLS)):
            wanted = stats.compare(high.numpy(), low.numpy())
            assert vector.nulls == wanted.nulls
            np.testing.assert_allclose(vector.to_vector(), wanted.to_vector(), rtol=1e-14)


class TestMatmul:
    @pytest.mark.parametrize("precision", ["highest", "high", "medium"])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_it_is_ieee_whatever_the_settings(self, precision: str, autocast: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(64, 512, generator=generator), torch.randn(512, 256, generator=generator)
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                got = recompute.matmul(a, b)
                assert torch.is_autocast_enabled("cpu") is autocast
        finally:
            torch.set_float32_matmul_precision("highest")
        exact = a.double() @ b.double()
        # float32 rounding of 512 terms; bfloat16 would be off by 1e-3.
        assert ((got - exact).norm() / exact.norm()) < 1e-6

    def test_settings_that_torch_refuses_to_tell_count_as_fast(self) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            assert recompute.matmul(torch.eye(2), torch.eye(2)).dtype == torch.float64
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"
        assert recompute.matmul(torch.eye(2), torch.eye(2)).dtype == torch.float32
