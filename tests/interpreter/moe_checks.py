"""What tests of fused MoE kernels compare with, and how closely."""

from __future__ import annotations

import torch

from fp8_safeguard.kernels import QuantizedTensor
from fp8_safeguard.kernels.moe import Produced, Wanted, eager
from fp8_safeguard.monitor.stats import COLUMNS

SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
BOTH = Wanted(row=True, blocks="col")
HIDDEN = Wanted(values=False, row=True, blocks="col")
"""Codes alone: what is not plain goes through memory that nobody asked for."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2e-6}
"""Relative: half a unit in the last place of bfloat16 and a little; in float32 a dozen roundings of 6e-8."""
CANCELLING = 2e-6
"""Of the largest value: what sums of numbers that cancel may miss in float32."""


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bytes, sign of zero and of NaN included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.dtype == wanted.dtype and torch.equal(
        got.contiguous().view(kind), wanted.contiguous().view(kind)
    )


def same_numbers(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bytes, but one NaN is as good as another: they all become one on their way through float32."""
    nan = wanted.isnan()
    return torch.equal(got.isnan(), nan) and same_bits(got.masked_fill(nan, 0), wanted.masked_fill(nan, 0))


def assert_rounded(got: torch.Tensor, exact: torch.Tensor) -> None:
    """got is float64's result within one rounding of its dtype."""
    assert exact.dtype == torch.float64
    bound = ROUNDING[got.dtype] * exact.abs() + CANCELLING * exact.abs().amax()
    difference = (got.double() - exact).abs()
    assert (difference <= bound).all(), (difference - bound).max()


def assert_quantised(
    got: Produced, values: torch.Tensor, wanted: Wanted, offsets: torch.Tensor | None = None
) -> None:
    """Codes, scales and statistics are those that quantize and tensor_stats give of the values."""
    expected = eager.produced(values, wanted, offsets)
    assert (got.values is not None) == wanted.values
    if got.values is not None:
        assert same_numbers(got.values, values)
    _assert_same(got.row, expected.row)
    _assert_same(got.block, expected.block)
    if expected.stats is None:
        assert got.stats is None
        return
    assert got.stats is not None
    assert got.stats.shape == expected.stats.shape
    exact = [index for index in range(expected.stats.shape[-1]) if index not in SUMS]
    assert torch.equal(got.stats[..., exact], expected.stats[..., exact])
    assert torch.allclose(got.stats[..., SUMS], expected.stats[..., SUMS], rtol=1e-6, atol=0.0)


def _assert_same(got: QuantizedTensor | None, expected: QuantizedTensor | None) -> None:
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return
    assert (got.layout, got.fmt, got.shape) == (expected.layout, expected.fmt, expected.shape)
    assert torch.equal(_one_nan(got.data), _one_nan(expected.data))
    blocks = expected.scale.shape[0]
    assert same_bits(got.scale[:blocks], expected.scale)
    # A device cannot know how many blocks the experts have: the surplus ones are neutral.
    assert (got.scale[blocks:] == 1).all()


def _one_nan(codes: torch.Tensor) -> torch.Tensor:
    """Codes as bytes, every NaN without its sign: the way through bfloat16 may lose it."""
    as_bytes = codes.view(torch.uint8)
    return torch.where(as_bytes & 0x7F == 0x7F, 0x7F, as_bytes)
