"""One use of a weight in one native call, against the calls that it stands for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8_safeguard.hooks import recompute
from fp8_safeguard.kernels import LinearPrecision, layout_stats, native_use
from fp8_safeguard.kernels.native_use import COL, PRODUCT, ROW, WEIGHT
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.monitor.stats import COLUMNS

PRECISION = LinearPrecision()
ERROR = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err")]
FLOAT32_TOLERANCE = 1e-6
"""Products at float32 precision; their errors' squares are compared."""

X, W = torch.zeros(2, 3), torch.zeros(4, 3)
pytestmark = pytest.mark.skipif(
    not native_use.fits(X, W, PRECISION.x, PRECISION.w), reason="needs the native kernels and matrix tiles"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200, 96, 160), (64, 130, 70), (1, 1, 1), (300, 512, 640)])
@pytest.mark.parametrize("columns", [True, False])
def test_a_forward(
    shape: tuple[int, int, int], dtype: torch.dtype, columns: bool, generator: torch.Generator
) -> None:
    tokens, features, inputs = shape
    x_TK = torch.randn(tokens, inputs, generator=generator).to(dtype)
    w_NK, bias_N = (
        torch.randn(features, inputs, generator=generator),
        torch.randn(features, generator=generator),
    )
    y_TN = (x_TK.float() @ w_NK.T + bias_N).bfloat16()
    rows = torch.randperm(tokens, generator=generator)[:64].sort().values
    room = native_use.room_for_codes(w_NK, "e4m3")
    found = native_use.measure(
        x_TK, w_NK, rows, operand=PRECISION.x, weight=PRECISION.w, wants=(True, columns), codes=room,
        weighs=True, y_TN=y_TN, bias_N=bias_N,
    )  # fmt: skip
    of_x, (of_w, codes) = layout_stats(x_TK).numpy(), recompute.weigh(w_NK, PRECISION.w)
    np.testing.assert_allclose(found.stats[ROW][0], of_x[0], rtol=3e-8)
    np.testing.assert_allclose(found.stats[COL][0], of_x[1] if columns else 0.0, rtol=3e-8)
    np.testing.assert_array_equal(found.stats[WEIGHT][0], of_w[0].numpy())
    assert found.judged
    assert codes is not None
    assert torch.equal(room.data.view(torch.uint8), codes.codes.data.view(torch.uint8))
    assert torch.equal(room.scale, codes.codes.scale)
    exact_RN = x_TK[rows].double() @ w_NK.double().T + bias_N.double()
    assert_compares(found.stats[PRODUCT][0], exact_RN, y_TN[rows].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_one_element_is_every_outputs(dtype: torch.dtype, generator: torch.Generator) -> None:
    """As torch.nn.functional.linear takes it."""
    x_TK, w_NK = torch.randn(9, 32, generator=generator), torch.randn(640, 32, generator=generator)
    bias, rows = torch.tensor([0.5], dtype=dtype), torch.arange(9)
    y_TN = F.linear(x_TK, w_NK, bias.float())
    found = native_use.measure(
        x_TK, w_NK, rows, operand=PRECISION.x, weight=PRECISION.w, wants=(True, True),
        codes=native_use.room_for_codes(w_NK, "e4m3"), weighs=True, y_TN=y_TN, bias_N=bias,
    )  # fmt: skip
    exact_RN = x_TK.double() @ w_NK.double().T + 0.5
    assert_compares(found.stats[PRODUCT][0], exact_RN, y_TN.double())
    vector = recompute.compare(x_TK @ w_NK.T, y_TN, None, bias.float())
    assert_compares(vector.numpy(), exact_RN, y_TN.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200, 96, 160), (64, 130, 70), (1, 1, 1), (300, 512, 640)])
def test_an_emulated_input_gradient(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    tokens, features, inputs = shape
    dy_TN = (torch.randn(tokens, features, generator=generator) * 1e-6).to(dtype)
    w_NK = torch.randn(features, inputs, generator=generator)
    rows = torch.randperm(tokens, generator=generator)[:64].sort().values
    _, weight = recompute.weigh(w_NK, PRECISION.w)
    assert weight is not None
    found = native_use.measure(
        dy_TN, w_NK, rows, operand=PRECISION.dy, weight=PRECISION.w, wants=(True, True), codes=weight.codes,
        weighs=False,
    )  # fmt: skip
    np.testing.assert_allclose(
        np.concatenate(found.stats[ROW : COL + 1]), layout_stats(dy_TN).numpy(), rtol=3e-8
    )
    assert found.judged
    assert not found.stats[WEIGHT].any()
    dyq_RN = round_trip(dy_TN[rows], "row", PRECISION.dy).double()
    actual_RK = dyq_RN @ weight.codes.dequantize().double()
    assert_compares(found.stats[PRODUCT][0], dy_TN[rows].double() @ w_NK.double(), actual_RK)


def assert_compares(vector: np.ndarray, exact: torch.Tensor, actual: torch.Tensor) -> None:
    """The comparison in float64; differences of near equals keep what float32 products leave of them."""
    wanted = [(exact**2).sum(), (actual**2).sum(), ((exact - actual) ** 2).sum()]
    least = 1e-13 * float(wanted[0])
    np.testing.assert_allclose(vector[ERROR], [float(value) for value in wanted], rtol=1e-4, atol=least)
    np.testing.assert_allclose(
        vector[ERROR[:2]], [float(value) for value in wanted[:2]], rtol=FLOAT32_TOLERANCE
    )
    assert vector[COLUMNS.index("count")] == exact.numel()


def test_what_tiles_cannot_multiply_is_measured_all_the_same(generator: torch.Generator) -> None:
    x_TK, w_NK = torch.randn(70, 40, generator=generator), torch.randn(30, 40, generator=generator)
    x_TK[3, 4] = float("inf")
    rows = torch.arange(64)
    found = native_use.measure(
        x_TK, w_NK, rows, operand=PRECISION.x, weight=PRECISION.w, wants=(True, True),
        codes=native_use.room_for_codes(w_NK, "e4m3"), weighs=True, y_TN=x_TK @ w_NK.T,
    )  # fmt: skip
    assert not found.judged
    assert not found.stats[PRODUCT].any()
    assert found.stats[ROW][0, COLUMNS.index("inf")] == 1
    assert found.stats[WEIGHT].any()


def test_it_takes_plain_matrices_with_block_scales_alone() -> None:
    x_TK, w_NK = torch.zeros(4, 6), torch.zeros(5, 6)
    formats = PRECISION.x, PRECISION.w
    assert native_use.fits(x_TK, w_NK, *formats)
    assert not native_use.fits(x_TK.double(), w_NK, *formats)
    assert not native_use.fits(x_TK.T, w_NK.T, *formats)
    assert not native_use.fits(x_TK[:0], w_NK, *formats)
    assert not native_use.fits(x_TK, w_NK.to("meta"), *formats)
    scaled = dataclasses.replace(PRECISION.x, scaling="tensor")
    assert not native_use.fits(x_TK, w_NK, scaled, PRECISION.w)
    assert not native_use.fits(x_TK, w_NK, PRECISION.x, scaled)
