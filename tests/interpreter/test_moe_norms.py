"""Fused norms: of tokens with quantisation, of heads with rotary embedding."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.moe import Wanted, eager, triton_ops
from fp8_safeguard.kernels.moe.triton_norm import WIDEST
from fp8_safeguard.kernels.moe.triton_sums import plan_sum

from .moe_checks import BOTH, HIDDEN, assert_quantised, assert_rounded, same_bits

DTYPES = [torch.bfloat16, torch.float32]
EPSILON = 1e-6


def tokens(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Tokens of very different sizes."""
    size = torch.exp(2 * torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator))
    return (size * torch.randn(shape, generator=generator)).to(dtype)


def angles(count: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(count)[:, None] * 10.0 ** -torch.linspace(0, 2, channels // 2)[None]
    both = torch.cat([angle, angle], dim=-1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("shape", [(140, 200), (3, 1100), (1, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> None:
    x, gain = tokens(shape, dtype, generator), torch.rand(shape[1], generator=generator)
    got, rstd = triton_ops.rms_norm(x, gain, EPSILON, BOTH)
    exact, exact_rstd = eager.rms_norm(x.double(), gain.double(), EPSILON, Wanted())
    assert got.values is not None
    assert exact.values is not None
    assert_rounded(got.values, exact.values)
    assert_rounded(rstd, exact_rstd)
    assert_quantised(got, got.values, BOTH)
    hidden, _ = triton_ops.rms_norm(x, gain, EPSILON, HIDDEN)
    assert_quantised(hidden, got.values, HIDDEN)


def test_rms_norm_with_statistics_and_strides(generator: torch.Generator) -> None:
    wide, gain = tokens((40, 300), torch.bfloat16, generator), torch.rand(200, generator=generator)
    wanted = Wanted(row=True, blocks="col", stats=True, fmt="e5m2", scale="pow2")
    x = wide[::2, 50:250]
    got, rstd = triton_ops.rms_norm(x, gain, EPSILON, wanted)
    packed, packed_rstd = triton_ops.rms_norm(x.contiguous(), gain, EPSILON, wanted)
    assert same_bits(rstd, packed_rstd)
    assert packed.values is not None
    assert_quantised(got, packed.values, wanted)


def test_nan_and_zero_tokens_stay_their_own(generator: torch.Generator) -> None:
    x, gain = tokens((40, 128), torch.float32, generator), torch.ones(128)
    x[3], x[5, 7], x[6, 1] = 0, torch.nan, torch.inf
    got, _ = triton_ops.rms_norm(x, gain, EPSILON, BOTH)
    assert got.values is not None
    assert (got.values[3] == 0).all()
    assert torch.isnan(got.values[5]).all()
    assert torch.isfinite(got.values[[0, 1, 2, 4, 7]]).all()
    assert_quantised(got, got.values, BOTH)


@pytest.mark.parametrize("shape", [(70, 200), (2, 1024)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_backward(dtype: torch.dtype, shape: tuple[int, int], generator: torch.Generator) -> None:
    """Against torch's autograd of the formula, in float64."""
    x, gain = tokens(shape, dtype, generator), torch.rand(shape[1], generator=generator)
    dy = torch.randn(shape, generator=generator).to(dtype)
    leaf, weight = x.double().requires_grad_(), gain.double().requires_grad_()
    (leaf * (leaf.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight).backward(dy.double())
    _, rstd = triton_ops.rms_norm(x, gain, EPSILON, Wanted())
    dx, dgain = triton_ops.rms_norm_backward(dy, x, gain, rstd)
    assert leaf.grad is not None
    assert weight.grad is not None
    assert (dx.dtype, dgain.dtype) == (dtype, torch.float32)
    assert_rounded(dx, leaf.grad)
    assert_rounded(dgain, weight.grad)


def test_rms_norm_backward_of_a_row_too_wide_says_so() -> None:
    x, gain = torch.zeros(1, WIDEST + 1), torch.ones(WIDEST + 1)
    with pytest.raises(OperandError, match=str(WIDEST)):
        triton_ops.rms_norm_backward(x, x, gain, torch.ones(1))


@pytest.mark.parametrize("shape", [(13, 3, 16), (50, 5, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope(dtype: torch.dtype, shape: Any, generator: torch.Generator) -> None:
    """Of heads that are a part of a larger tensor, as queries are of qkv, in two sequences of the same positions."""
    positions, heads, channels = shape
    count = 2 * positions
    x = tokens((count, 2 * heads, channels), dtype, generator)[:, heads:]
    gain, table = torch.rand(channels, generator=generator), angles(positions, channels)
    y, rstd = triton_ops.qk_norm_rope(x, gain, *table, EPSILON)
    exact, exact_rstd = eager.qk_norm_rope(
        x.double(), gain.double(), *(part.double() for part in table), EPSILON
    )
    assert y.dtype == torch.float32
    assert_rounded(y, exact)
    assert_rounded(rstd, exact_rstd)


@pytest.mark.parametrize("shape", [(13, 3, 16), (50, 5, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_backward(dtype: torch.dtype, shape: Any, generator: torch.Generator) -> None:
    """Against torch's autograd of the formula, in float64; several programs share the gain's gradient."""
    positions, heads, channels = shape
    count = 2 * positions
    x = tokens((count, 2 * heads, channels), dtype, generator)[:, heads:]
    gain, (cos, sin) = torch.rand(channels, generator=generator), angles(positions, channels)
    dy = torch.randn(count, heads, channels, generator=generator)
    leaf, weight = x.double().requires_grad_(), gain.double().requires_grad_()
    normed = leaf * (leaf.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight
    low, high = normed.chunk(2, dim=-1)
    wide_cos, wide_sin = (part.double().repeat(2, 1)[:, None] for part in (cos, sin))
    turned = normed * wide_cos + torch.cat([-high, low], -1) * wide_sin
    turned.backward(dy.double())
    _, rstd = triton_ops.qk_norm_rope(x, gain, cos, sin, EPSILON)
    dx, dgain = triton_ops.qk_norm_rope_backward(dy, x, gain, cos, sin, rstd)
    assert leaf.grad is not None
    assert weight.grad is not None
    assert (dx.dtype, dgain.dtype) == (dtype, torch.float32)
    assert_rounded(dx, leaf.grad)
    assert_rounded(dgain, weight.grad)


def test_partial_sums_of_many_programs(generator: torch.Generator) -> None:
    parts = torch.randn(70, 150, generator=generator)
    launch, total = plan_sum(parts)
    launch.run()
    assert_rounded(total, parts.double().sum(0))
    index = torch.tensor([[3, -1], [149, 3]], dtype=torch.int32)
    launch, picked = plan_sum(parts, index)
    launch.run()
    assert same_bits(
        picked, torch.stack([total[[3, 149]], torch.stack([total.new_zeros(()), total[3]])], dim=1)
    )


def test_no_tokens() -> None:
    x, gain = torch.zeros(0, 128), torch.ones(128)
    got, rstd = triton_ops.rms_norm(x, gain, EPSILON, BOTH)
    assert got.values is not None
    assert got.values.shape == (0, 128)
    dx, dgain = triton_ops.rms_norm_backward(x, x, gain, rstd)
    assert dx.shape == (0, 128)
    assert (dgain == 0).all()
