"""MXFP8 against ml_dtypes, block by block, and its statistics against the float64 definition."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8_safeguard.kernels import OperandError, UnknownOptionError
from fp8_safeguard.kernels.mx import MxTensor, mx_round_trip, mx_stats, quantize_mx
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH, measure

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}
EMAX = {"e4m3": 8, "e5m2": 15}


def literal(x: torch.Tensor, fmt: str, rounding: str) -> tuple[Any, Any]:
    """Codes and scale bytes of a matrix: every E8M0 scale is tried in turn."""
    values = x.double().numpy()
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((len(values), -(-values.shape[1] // 32)), np.uint8)
    for row, block in np.ndindex(*scales.shape):
        part = values[row, block * 32 : block * 32 + 32]
        finite = np.isfinite(part)
        amax = np.max(np.abs(part[finite]), initial=0)
        byte = 127
        if amax > 0 and rounding == "up":
            byte = next(e for e in range(255) if MAXIMUM[fmt] * 2.0 ** (e - 127) >= amax)
        elif amax > 0:
            byte = max((e for e in range(255) if 2.0 ** (e - 127 + EMAX[fmt]) <= amax), default=0)
        ratio = np.clip(np.where(finite, part, 0) / 2.0 ** (byte - 127), -MAXIMUM[fmt], MAXIMUM[fmt])
        encoded = ratio.astype(np.float32).astype(ML_DTYPES[fmt]).view(np.uint8)
        negative = np.signbit(part) * np.uint8(0x80)
        codes[row, block * 32 : block * 32 + 32] = np.where(finite, encoded, 0x7F | negative)
        scales[row, block] = byte
    return codes, scales


def assert_literal(x: torch.Tensor, fmt: str, rounding: str) -> MxTensor:
    ours, (codes, scales) = quantize_mx(x, fmt=fmt, rounding=rounding), literal(x, fmt, rounding)
    np.testing.assert_array_equal(ours.scale.numpy(), scales)
    np.testing.assert_array_equal(ours.data.view(torch.uint8).numpy(), codes)
    return ours


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(3, 32), (40, 130), (1, 7)])
def test_codes_and_scales_block_by_block(
    shape: Any, fmt: str, rounding: str, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x[0, 2], x[-1, -1] = float("nan"), -0.0
    assert_literal(x, fmt, rounding)


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_bfloat16_value(bfloat16_values: torch.Tensor, fmt: str, rounding: str) -> None:
    x = bfloat16_values[::8]
    ours = assert_literal(x, fmt, rounding)
    finite = torch.isfinite(x)
    assert torch.equal(torch.isnan(ours.dequantize()), ~finite)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_b46_the_outermost_scales_neither_vanish_nor_make_nan(fmt: str) -> None:
    """Inf among ordinary values, floats of the top binade, and blocks whose scale is E8M0's 2^-127, a float32 subnormal."""
    x = torch.ones(5, 32)
    x[0, 3], x[0, 7] = torch.inf, -torch.inf
    x[1] = 1.5 * 2.0**127
    x[2] = 2.0**-127
    x[3] = 2.0**-149
    x[4] = 0.0
    for rounding in ("up", "floor"):
        ours = assert_literal(x, fmt, rounding)
        wide = ours.dequantize()
        assert torch.isnan(wide[0, [3, 7]]).all()
        assert torch.isfinite(wide).sum() == x.numel() - 2
        assert (wide[0].nan_to_num(1.0, 1.0, 1.0) == 1).all()
        assert ours.scale[2:, 0].tolist() == [0, 0, 127]
        assert torch.equal(wide[2], x[2])
        assert torch.equal(wide[1], x[1])
        stats = dict(zip(COLUMNS, mx_stats(x, fmt=fmt, rounding=rounding).tolist(), strict=False))
        assert (stats["inf"], stats["nan"], stats["amax"]) == (2, 0, 1.5 * 2.0**127)


def test_b46_the_outermost_scale_bytes_are_powers_of_two() -> None:
    codes = torch.ones(1, 64).to(torch.float8_e4m3fn)
    wide = MxTensor(codes, torch.tensor([[0, 254]], dtype=torch.uint8)).dequantize()
    assert wide[0, [0, 31, 32, 63]].tolist() == [2.0**-127, 2.0**-127, 2.0**127, 2.0**127]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_b29_a_nan_at_any_place_of_a_block_is_seen_and_leaves_its_scale_alone(
    rounding: str, dtype: torch.dtype
) -> None:
    """Row i has a NaN at place i and 1.0 elsewhere."""
    x = torch.ones(32, 32, dtype=dtype)
    x.fill_diagonal_(torch.nan)
    ours = quantize_mx(x, rounding=rounding)
    assert ours.scale.flatten().tolist() == [127 - 8] * 32
    assert torch.equal(torch.isnan(ours.dequantize()), torch.eye(32, dtype=torch.bool))
    stats = dict(zip(COLUMNS, mx_stats(x, rounding=rounding).tolist(), strict=False))
    assert (stats["nan"], stats["inf"], stats["amax"], stats["count"]) == (32, 0, 1.0, 1024)


def test_up_never_saturates_and_floor_does_by_less_than_an_eighth(generator: torch.Generator) -> None:
    x = torch.randn(500, 64, generator=generator)
    saturated = COLUMNS.index("saturated")
    assert mx_stats(x)[saturated] == 0
    assert mx_stats(x, rounding="floor")[saturated] > 0
    largest = x.abs().reshape(500, 2, 32).amax(-1)
    kept = mx_round_trip(x, rounding="floor").abs().reshape(500, 2, 32).amax(-1)
    assert (kept >= largest * 7 / 8 * (1 - 2.0**-5)).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_statistics_are_those_of_rows_of_32(fmt: str, generator: torch.Generator) -> None:
    """A row of 32 is one block of our `row` layout with a `pow2` scale: the float64 definition knows its statistics."""
    x = torch.randn(60, 96, generator=generator) * torch.exp(4 * torch.randn(60, 96, generator=generator))
    x[5], x[7, 40:96], x[9, 3], x[9, 64] = 0, 1e-20, float("nan"), float("inf")
    ours = mx_stats(x, fmt=fmt).numpy()
    wanted = measure(x.reshape(180, 32).numpy(), layout="row", fmt=fmt, scale="pow2").to_vector()
    sums = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
    by_row = [COLUMNS.index(name) for name in ("rows", "rows_flushed")]
    exact = [place for place in range(VECTOR_LENGTH) if place not in (*sums, *by_row)]
    np.testing.assert_array_equal(ours[exact], wanted[exact])
    np.testing.assert_allclose(ours[sums], wanted[sums], rtol=1e-12)
    assert ours[by_row].tolist() == [60, 0]


def test_counts_by_hand() -> None:
    """The least scale flushes what is half of its smallest subnormal, 2^-127 x 2^-9 / 2, and a row is flushed whole."""
    x = torch.zeros(2, 40)
    x[0, :3] = 2.0**-137
    x[0, 35], x[1, 0] = 2.0**-138, 1.0
    stats = dict(zip(COLUMNS, mx_stats(x).tolist(), strict=False))
    assert (stats["count"], stats["zeros"], stats["underflow"]) == (80, 79, 4)
    assert (stats["rows"], stats["rows_flushed"]) == (2, 1)
    assert mx_stats(x)[len(COLUMNS) :].tolist() == [0, 2, *[0] * 13, 1]


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (2, 3, 40), (40,), (0,)])
def test_any_shape(shape: Any, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator)
    for source in (x, x.bfloat16(), x.double()):
        ours, stats = quantize_mx(source), mx_stats(source)
        assert ours.data.shape == x.shape
        assert ours.scale.shape == (*x.shape[:-1], -(-x.shape[-1] // 32))
        assert stats.shape == (VECTOR_LENGTH,)
        assert torch.isfinite(stats).all()
        assert stats[0] == x.numel()
        value = source.float()
        bound = 2.0**-4 * value.abs() + (2.0**-9 * value.abs().amax(-1, keepdim=True) if x.numel() else 0)
        assert ((mx_round_trip(source) - value).abs() <= bound).all()


def test_a_view_is_quantised_like_its_copy(generator: torch.Generator) -> None:
    x = torch.randn(70, 64, generator=generator).t()
    assert torch.equal(mx_round_trip(x), mx_round_trip(x.contiguous()))


def test_mistakes_are_explained() -> None:
    with pytest.raises(UnknownOptionError, match="'floor'"):
        quantize_mx(torch.ones(4), rounding="nearest")
    with pytest.raises(UnknownOptionError, match="'e5m2'"):
        mx_stats(torch.ones(4), fmt="e2m1")
    with pytest.raises(OperandError, match="floating-point"):
        mx_round_trip(torch.ones(4, dtype=torch.int32))
