"""Products of FP8 layers on a CPU against float64 products of what quantize() gives."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import (
    OperandFormat,
    QuantizedTensor,
    native_gemm,
    numba_tiles,
    quantize,
    reference,
    tiles,
)
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.round_trip import round_trip

ROUTES = ("numba", *native_gemm.INSTRUCTION_SETS)


@pytest.fixture(params=ROUTES, autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """numba's kernels where there are matrix tiles, and the native ones with each instruction set."""
    use(request.param, monkeypatch)
    return str(request.param)


def use(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply on that route from now on."""
    if route == "numba":
        if not numba_tiles.available():
            pytest.skip("this processor has no bfloat16 matrix tiles")
        monkeypatch.setattr(tiles, "_default", lambda: "numba")
        return
    level = native_gemm.INSTRUCTION_SETS.index(route)
    if level > native_gemm.level():
        pytest.skip(f"this processor has no {route}")
    monkeypatch.setattr(tiles, "_default", lambda: "native")
    monkeypatch.setattr(native_gemm, "level", lambda: level)


TOLERANCE = 1e-6
"""Of sum |a||b| in float32: 128 float32 additions a block, then one scale and add for each block."""

FORMATS = [OperandFormat(), OperandFormat(fmt="e5m2", scale="pow2"), OperandFormat(multiplier=0.25)]
SHAPES = [(1, 1, 1), (33, 31, 129), (64, 96, 128), (200, 130, 257), (513, 40, 1030)]


def restored(x: Tensor, layout: str, operand: OperandFormat, offsets: Any = None) -> Tensor:
    options = {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}
    return quantize(x, layout=layout, offsets=offsets, **options).dequantize(torch.float64)


def assert_close(got: Tensor, a: Tensor, b: Tensor) -> None:
    """got is a @ b within TOLERANCE x sum |a||b|, both float64."""
    assert ((got.double() - a @ b).abs() <= TOLERANCE * (a.abs() @ b.abs())).all()


def wide(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Magnitudes that differ from row to row and column to column."""
    spread = torch.exp(
        torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    )
    return torch.randn(rows, columns, generator=generator) * spread


@pytest.mark.parametrize("operand", FORMATS)
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_three_products(
    tokens: int, outputs: int, inputs: int, operand: OperandFormat, generator: torch.Generator
) -> None:
    x, w = wide(tokens, inputs, generator), wide(outputs, inputs, generator)
    dy = wide(tokens, outputs, generator)
    weight, bounds = tiles.weight(w[None], operand), [0, tokens]
    w_exact = restored(w, "tile", operand)
    y = tiles.fprop(x, weight, outputs, operand, bounds, torch.float32)
    assert_close(y, restored(x, "row", operand), w_exact.t())
    dx = tiles.dgrad(dy, weight, inputs, operand, bounds, torch.float32)
    assert_close(dx, restored(dy, "row", operand), w_exact)
    dw = tiles.wgrad(dy, x, operand, operand, bounds)
    assert_close(dw[0], restored(dy, "col", operand).t(), restored(x, "col", operand))


def test_experts_of_any_size(generator: torch.Generator) -> None:
    counts = [0, 130, 1, 0, 256, 77, 0]
    offsets = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
    bounds, rows, operand = offsets.tolist(), sum(counts) + 5, OperandFormat()
    x, w, dy = (
        wide(rows, 200, generator),
        torch.randn(7, 130, 200, generator=generator),
        wide(rows, 130, generator),
    )
    weight = tiles.weight(w, operand)
    y = tiles.fprop(x, weight, 130, operand, bounds, torch.float32)
    dx = tiles.dgrad(dy, weight, 200, operand, bounds, torch.float32)
    dw = tiles.wgrad(dy, x, operand, operand, bounds)
    w_exact = restored(w, "tile", operand)
    for expert, (start, end) in enumerate(pairwise(bounds)):
        assert_close(y[start:end], restored(x[start:end], "row", operand), w_exact[expert].t())
        assert_close(dx[start:end], restored(dy[start:end], "row", operand), w_exact[expert])
        dy_exact, x_exact = restored(dy[start:end], "col", operand), restored(x[start:end], "col", operand)
        assert_close(dw[expert], dy_exact.t(), x_exact)
        assert end > start or torch.equal(dw[expert], torch.zeros(130, 200))
    assert torch.equal(y[-5:], torch.zeros(5, 130))
    assert torch.equal(dx[-5:], torch.zeros(5, 200))


def test_bfloat16_results_are_float32_results_rounded_once(generator: torch.Generator) -> None:
    x, w = torch.randn(50, 256, generator=generator), torch.randn(40, 256, generator=generator)
    x[3] = float("nan")
    weight = tiles.weight(w[None], OperandFormat())
    narrow, full = (
        tiles.fprop(x, weight, 40, OperandFormat(), [0, 50], dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(narrow.nan_to_num(), full.bfloat16().nan_to_num())
    assert torch.isnan(narrow[3]).all()
    assert torch.isfinite(narrow[[2, 4]]).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-38, 1e-41, 1e30])
def test_tiny_gradients_keep_their_precision(magnitude: float, generator: torch.Generator) -> None:
    """Scales near the smallest float32 times scales of the weight would underflow if multiplied first."""
    dy = (torch.randn(64, 128, generator=generator).double() * magnitude).float()
    w = torch.randn(128, 96, generator=generator)
    dx = tiles.dgrad(dy, tiles.weight(w[None], OperandFormat()), 96, OperandFormat(), [0, 64], torch.float32)
    dy_exact, w_exact = restored(dy, "row", OperandFormat()), restored(w, "tile", OperandFormat())
    quantum = 2.0**-149  # a subnormal result has no finer steps
    assert (
        (dx.double() - dy_exact @ w_exact).abs() <= 1e-6 * (dy_exact.abs() @ w_exact.abs()) + 2 * quantum
    ).all()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, all NaN being one."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bounds", [[0, 700], [0, 130, 131, 131, 387, 690]])
def test_all_routes_give_the_same_bits(
    route: str,
    bounds: list[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured with one of them holds for the others."""
    x, dy = wide(700, 384, generator).to(dtype), (1e-6 * wide(700, 260, generator)).to(dtype)
    w = torch.randn(len(bounds) - 1, 260, 384, generator=generator)
    x[5, 7], dy[100, 3] = float("nan"), float("inf")
    found = []
    for name in (route, "AMX" if route == "numba" else "numba"):
        use(name, monkeypatch)
        weight = tiles.weight(w, OperandFormat())
        y = tiles.fprop(x, weight, 260, OperandFormat(), bounds, dtype)
        dx = tiles.dgrad(dy, weight, 384, OperandFormat(), bounds, dtype)
        found.append((y, dx, tiles.wgrad(dy, x, OperandFormat(), OperandFormat(), bounds)))
    assert all(map(same, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operand", FORMATS)
def test_b45_a_weight_kept_for_the_backward_has_the_scales_and_codes_of_quantize(
    operand: OperandFormat, dtype: torch.dtype, generator: torch.Generator
) -> None:
    w = wide(300, 200, generator).to(dtype)
    w[5] = w[128:256, 128:] = 0
    kept = tiles.weight(w[None], operand).kept
    options = (get_format(operand.fmt), operand.scale, operand.multiplier)
    codes, scale = reference.quantize_rows(w, [0, 300], "tile", *options)
    assert scale.shape == (3, 2)
    if isinstance(kept, QuantizedTensor):
        assert kept.scale.dtype == torch.float32
        assert torch.equal(kept.scale, scale[None])
        assert torch.equal(kept.data.float(), codes[None].float())
        return
    for found, wanted, size in ((kept.scale_EkN, scale.t(), 300), (kept.scale_EnK, scale, 200)):
        assert found.dtype == torch.float32
        assert torch.equal(found[0, :, :size], wanted.repeat_interleave(128, dim=1)[:, :size])
    bits = kept.codes_ENK[0, :300, :200].contiguous().view(torch.bfloat16)
    assert torch.equal(bits.float(), codes.float())


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_quantize_and_dequantize(layout: str, dtype: torch.dtype, log_gaussian: Tensor) -> None:
    """The float32 operand of the other route, bit for bit, NaN included."""
    x = log_gaussian[:300].to(dtype)
    x[7, 9], x[200, 300] = float("nan"), -float("inf")
    for operand in FORMATS:
        options = {"fmt": operand.fmt, "scale": operand.scale, "multiplier": operand.multiplier}
        expected = quantize(x, layout=layout, **options).dequantize()
        got = round_trip(x, layout, operand)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
