"""Sampled rows, and the comparison that is made of them."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
import numpy as np
import pytest
import torch

from fp8_safeguard.hooks import recompute
from fp8_safeguard.hooks.recompute import SAMPLED_ROWS, RowSampler, compare
from fp8_safeguard.kernels import (
    LinearPrecision,
    OperandFormat,
    native_exact,
    native_gemm,
    numba_tiles,
    quantize,
    tensor_stats,
    tiles,
)
from fp8_safeguard.monitor import stats

CPU = torch.device("cpu")
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


@pytest.fixture
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without matrix tiles: torch multiplies."""
    monkeypatch.setattr(native_exact, "rows_of_product", lambda *operands: None)


@pytest.fixture(params=["native", "numba", "round trips"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to multiply in FP8."""
    kind = str(request.param)
    if kind == "round trips":
        monkeypatch.setattr(tiles, "usable", lambda x: False)
    else:
        monkeypatch.setattr(tiles, "_default", lambda: kind)
        if not (native_gemm.available() if kind == "native" else numba_tiles.available()):
            pytest.skip(f"{kind} products cannot run here")
    return kind


class TestMatmul:
    @pytest.mark.usefixtures("without_tiles")
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

    def test_settings_that_torch_refuses_to_tell_count_as_fast(self, without_tiles: None) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            assert recompute.matmul(torch.eye(2), torch.eye(2)).dtype == torch.float64
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"
        assert recompute.matmul(torch.eye(2), torch.eye(2)).dtype == torch.float32

    @pytest.mark.parametrize("autocast", [False, True])
    def test_rows_on_tiles_are_as_exact_whatever_the_settings(self, autocast: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(300, 512, generator=generator), torch.randn(512, 256, generator=generator)
        rows = torch.tensor([3, 3, 299])
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                got = recompute.matmul(a, b, rows)
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"
        exact = a[rows].double() @ b.double()
        assert ((got - exact).norm() / exact.norm()) < 1e-6


PRECISIONS = [
    LinearPrecision(),
    LinearPrecision(
        x=OperandFormat(scale="pow2"), w=OperandFormat(multiplier=0.5), dy=OperandFormat(fmt="e5m2")
    ),
]


def dequantised(x: torch.Tensor, layout: str, operand: OperandFormat) -> torch.Tensor:
    """float64 values of its FP8 codes."""
    named = {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}
    return quantize(x, layout=layout, **named).dequantize(torch.float64)  # type: ignore[call-overload, no-any-return]


def assert_emulates(got: torch.Tensor, exact: torch.Tensor, actual: torch.Tensor) -> None:
    """The comparison of two float64 products, within what float32 sums lose."""
    wanted = stats.compare(exact.numpy(), actual.numpy()).to_vector()
    kept = [index for index, value in enumerate(wanted) if not math.isnan(value)]
    np.testing.assert_allclose(got.numpy()[kept], wanted[kept], rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
class TestEmulated:
    """Each GEMM against float64 products of the operands and of what their codes stand for."""

    @pytest.fixture
    def operands(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, K], w [N, K], dy [T, N]."""
        generator = torch.Generator().manual_seed(0)
        x, w, dy = (torch.randn(shape, generator=generator) for shape in ((300, 140), (200, 140), (300, 200)))
        x[:, 5] *= 300
        return x.to(dtype), w.to(dtype), (dy * 1e-4).to(dtype)

    def test_fprop(self, operands: Triple, precision: LinearPrecision, products: str) -> None:
        x, w, _ = operands
        rows = RowSampler().rows(300, CPU)
        got = recompute.fprop_error(x, w, x, rows, emulate=precision)
        low = dequantised(x[rows], "row", precision.x) @ dequantised(w, "tile", precision.w).T
        assert_emulates(got, x[rows].double() @ w.double().T, low)

    def test_dgrad_with_codes_and_without(
        self, operands: Triple, precision: LinearPrecision, products: str
    ) -> None:
        _, w, dy = operands
        rows = RowSampler().rows(300, CPU)
        gain = torch.linspace(0.5, 2, 140)
        low = dequantised(dy[rows], "row", precision.dy) @ dequantised(w, "tile", precision.w)
        high = dy[rows].double() @ w.double()
        _, weight = recompute.weigh(w, precision.w)
        assert (weight is not None) == (products == "native")
        for each in (None, weight):
            for scaled in (None, gain):
                got = recompute.dgrad_error(dy, w, None, rows, gain_K=scaled, emulate=precision, weight=each)
                factor = 1.0 if scaled is None else scaled.double()
                assert_emulates(got, high * factor, low * factor)

    def test_wgrad(self, operands: Triple, precision: LinearPrecision, products: str) -> None:
        x, _, dy = operands
        rows = RowSampler().rows(200, CPU)
        got = recompute.wgrad_error(dy, x, None, rows, emulate=precision)
        low = dequantised(dy, "col", precision.dy)[:, rows].T @ dequantised(x, "col", precision.x)
        assert_emulates(got, dy[:, rows].double().T @ x.double(), low)


class TestWeigh:
    def test_statistics_and_codes_are_those_of_two_calls(self, products: str) -> None:
        generator = torch.Generator().manual_seed(0)
        w_ENK = torch.randn(3, 150, 140, generator=generator)
        operand = OperandFormat(scale="pow2")
        for w, expected in ((w_ENK, [*w_ENK]), (w_ENK[0], [w_ENK[0]])):
            vectors, weight = recompute.weigh(w, operand)
            wanted = torch.stack([tensor_stats(each, layout="tile", scale="pow2") for each in expected])
            np.testing.assert_allclose(vectors.numpy(), wanted.numpy(), rtol=1e-12)
            if weight is None:
                assert products != "native"
                continue
            codes = quantize(w, layout="tile", scale="pow2")
            assert torch.equal(weight.codes.data.view(torch.uint8), codes.data.view(torch.uint8))
            assert torch.equal(weight.codes.scale, codes.scale)

    def test_codes_of_another_format_are_not_used(self) -> None:
        generator = torch.Generator().manual_seed(0)
        w, dy = torch.randn(100, 140, generator=generator), torch.randn(80, 100, generator=generator)
        rows, precision = torch.arange(80), LinearPrecision()
        _, other = recompute.weigh(w, OperandFormat(fmt="e5m2"))
        got = recompute.dgrad_error(dy, w, None, rows, emulate=precision, weight=other)
        assert torch.equal(got, recompute.dgrad_error(dy, w, None, rows, emulate=precision))

    def test_experts_get_their_own_codes(self) -> None:
        generator = torch.Generator().manual_seed(0)
        w, dy = torch.randn(3, 100, 140, generator=generator), torch.randn(90, 100, generator=generator)
        x, bounds, precision = torch.randn(90, 140, generator=generator), [0, 50, 50, 90], LinearPrecision()
        _, weight = recompute.weigh(w, precision.w)
        for gemm, operand in ((recompute.grouped_dgrad_error, dy), (recompute.grouped_fprop_error, x)):
            with_codes = gemm(operand, w, x, bounds, RowSampler(), emulate=precision, weight=weight)
            without = gemm(operand, w, x, bounds, RowSampler(), emulate=precision)
            assert torch.equal(with_codes, without)
            assert with_codes.shape == (3, stats.VECTOR_LENGTH)


def test_other_kinds_of_tensors_are_compared_by_torch() -> None:
    exact = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    actual = torch.tensor([[0.0, 0.0], [1.0, 2.5]], dtype=torch.float16)
    got = compare(exact, actual, torch.tensor([1, 0]), torch.tensor([0.0, 0.5], dtype=torch.float16))
    wanted = stats.compare([[1.0, 2.5], [3.0, 4.5]], [[1.0, 2.5], [0.0, 0.0]]).to_vector()
    kept = [index for index, value in enumerate(wanted) if not math.isnan(value)]
    np.testing.assert_allclose(got.numpy()[kept], wanted[kept])
