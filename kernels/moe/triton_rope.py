"""Triton: RMSNorm of each head with rotary embedding, and its backward."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens, S positions, H heads, C channels of a head. Token t stands at position t mod S. Channels i and i + C/2 form a pair, so a head is held as two
# halves. Elements of x are b bytes wide.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.moe.triton_plan import UNFUSED_FLOATS, run, source
from fp8_safeguard.kernels.moe.triton_sums import plan_sum
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two

ELEMENTS = 2048
"""Elements of each half that a program holds."""
HEADS_OF_GAIN = 128
"""Heads whose part of the gain's gradient one program adds up: fixed, so that the result is."""


@triton.jit
def load_half(
    base_ptr: tl.tensor, token_1: tl.tensor, head_1: tl.tensor, channel_1: tl.tensor, read: tl.tensor,
    stride_t: tl.tensor, stride_h: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """float32 [heads, half channels]; 0 where not read."""
    at = token_1.to(tl.int64) * stride_t + head_1 * stride_h + channel_1
    return tl.load(base_ptr + at, mask=read, other=0.0).to(tl.float32)


@triton.jit
def qk_norm_rope_kernel(
    x_ptr: tl.tensor, gain_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, y_ptr: tl.tensor, rstd_ptr: tl.tensor,
    count: tl.tensor, heads: tl.tensor, half: tl.tensor, positions: tl.tensor, stride_t: tl.tensor, stride_h: tl.tensor, epsilon: tl.tensor,
    ROWS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """n = x rstd gain; y = (n_low cos - n_high sin, n_high cos + n_low sin), of ROWS heads."""
    index_1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token_1, head_1 = index_1 // heads, index_1 % heads
    channel_1 = tl.arange(0, LANES)[None, :]
    inside = channel_1 < half
    read = (index_1 < count) & inside
    low = load_half(x_ptr, token_1, head_1, channel_1, read, stride_t, stride_h)
    high = load_half(x_ptr + half, token_1, head_1, channel_1, read, stride_t, stride_h)
    squares = tl.sum(low * low + high * high, axis=1, keep_dims=True)
    mean = tl.div_rn(squares, tl.zeros((ROWS, 1), tl.float32) + 2 * half)
    rstd = tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), tl.sqrt_rn(mean + epsilon))
    tl.store(rstd_ptr + index_1, rstd, mask=index_1 < count)
    low *= rstd
    high *= rstd
    low *= tl.load(gain_ptr + channel_1, mask=inside, other=0.0).to(tl.float32)
    high *= tl.load(gain_ptr + half + channel_1, mask=inside, other=0.0).to(tl.float32)
    angle = token_1 % positions * (2 * half) + channel_1
    y_low = low * tl.load(cos_ptr + angle, mask=read, other=0.0)
    y_low -= high * tl.load(sin_ptr + angle, mask=read, other=0.0)
    y_high = high * tl.load(cos_ptr + half + angle, mask=read, other=0.0)
    y_high += low * tl.load(sin_ptr + half + angle, mask=read, other=0.0)
    to = y_ptr + index_1.to(tl.int64) * (2 * half) + channel_1
    tl.store(to, y_low, mask=read)
    tl.store(to + half, y_high, mask=read)


@triton.jit
def qk_norm_rope_backward_kernel(
    dy_ptr: tl.tensor, x_ptr: tl.tensor, gain_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    rstd_ptr: tl.tensor, dx_ptr: tl.tensor, dgain_ptr: tl.tensor,
    count: tl.tensor, heads: tl.tensor, half: tl.tensor, positions: tl.tensor,
    dy_stride_t: tl.tensor, dy_stride_h: tl.tensor, stride_t: tl.tensor, stride_h: tl.tensor,
    TOTAL: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """dn: dy rotated back; dx = (dn gain - m mean(dn gain m)) rstd with m = x rstd; dgain = sum of dn m over TOTAL heads."""
    channel_1 = tl.arange(0, LANES)[None, :]
    inside = channel_1 < half
    gain_low = tl.load(gain_ptr + channel_1, mask=inside, other=0.0).to(tl.float32)
    gain_high = tl.load(gain_ptr + half + channel_1, mask=inside, other=0.0).to(tl.float32)
    dgain_low, dgain_high = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)
    for start in range(0, TOTAL, ROWS):
        index_1 = tl.program_id(0) * TOTAL + start + tl.arange(0, ROWS)[:, None]
        token_1, head_1 = index_1 // heads, index_1 % heads
        read = (index_1 < count) & inside
        dy_low = load_half(dy_ptr, token_1, head_1, channel_1, read, dy_stride_t, dy_stride_h)
        dy_high = load_half(dy_ptr + half, token_1, head_1, channel_1, read, dy_stride_t, dy_stride_h)
        angle = token_1 % positions * (2 * half) + channel_1
        dn_low = dy_low * tl.load(cos_ptr + angle, mask=read, other=0.0)
        dn_low += dy_high * tl.load(sin_ptr + half + angle, mask=read, other=0.0)
        dn_high = dy_high * tl.load(cos_ptr + half + angle, mask=read, other=0.0)
        dn_high -= dy_low * tl.load(sin_ptr + angle, mask=read, other=0.0)
        rstd = tl.load(rstd_ptr + index_1, mask=index_1 < count, other=0.0)
        low = load_half(x_ptr, token_1, head_1, channel_1, read, stride_t, stride_h) * rstd
        high = load_half(x_ptr + half, token_1, head_1, channel_1, read, stride_t, stride_h) * rstd
        dgain_low += dn_low * low
        dgain_high += dn_high * high
        dn_low *= gain_low
        dn_high *= gain_high
        along = tl.sum(dn_low * low + dn_high * high, axis=1, keep_dims=True)
        along = tl.div_rn(along, tl.zeros((ROWS, 1), tl.float32) + 2 * half)
        to = dx_ptr + index_1.to(tl.int64) * (2 * half) + channel_1
        kind = dx_ptr.dtype.element_ty
        tl.store(to, ((dn_low - low * along) * rstd).to(kind), mask=read)
        tl.store(to + half, ((dn_high - high * along) * rstd).to(kind), mask=read)
    channel = tl.arange(0, LANES)
    at = dgain_ptr + tl.program_id(0).to(tl.int64) * (2 * half) + channel
    tl.store(at, tl.sum(dgain_low, axis=0), mask=channel < half)
    tl.store(at + half, tl.sum(dgain_high, axis=0), mask=channel < half)


def qk_norm_rope(
    x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head, then the rotation of channel pairs (i, i + C/2); float32. And rstd [T, H].

    Moves b bytes read and 4 written for each element, and 8 C for the angles of a token.
    """
    launch, y_THC, rstd_TH = plan_qk_norm_rope(x_THC, gain_C, cos_SC, sin_SC, epsilon)
    launch.run()
    return y_THC, rstd_TH


def plan_qk_norm_rope(
    x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, epsilon: float
) -> tuple[Launch, Tensor, Tensor]:
    """The kernel of `qk_norm_rope` and what it fills."""
    x_THC = source(x_THC)
    tokens, heads, channels = x_THC.shape
    y_THC = torch.empty((tokens, heads, channels), dtype=torch.float32, device=x_THC.device)
    rstd_TH = torch.empty((tokens, heads), dtype=torch.float32, device=x_THC.device)
    arguments = _shared(x_THC, gain_C, cos_SC, sin_SC) | {
        "y_ptr": y_THC,
        "rstd_ptr": rstd_TH,
        "epsilon": epsilon,
    }
    grid = (-(-tokens * heads // arguments["ROWS"]),)
    launch = Launch(
        kernel=qk_norm_rope_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS
    )
    return launch, y_THC, rstd_TH


def qk_norm_rope_backward(
    dy_THC: Tensor, x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, rstd_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, H, C] in x's dtype and of the gain [C] in the gain's.

    Moves 4 + b bytes read and b written for each element, and 8 C for the angles of a token.
    """
    launches, dx_THC, dgain_C = plan_qk_norm_rope_backward(dy_THC, x_THC, gain_C, cos_SC, sin_SC, rstd_TH)
    run(launches)
    return dx_THC, dgain_C


def plan_qk_norm_rope_backward(
    dy_THC: Tensor, x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, rstd_TH: Tensor
) -> tuple[list[Launch], Tensor, Tensor]:
    """The kernels of `qk_norm_rope_backward` and what they fill."""
    dy_THC, x_THC = source(dy_THC), source(x_THC)
    tokens, heads, channels = x_THC.shape
    programs = -(-tokens * heads // HEADS_OF_GAIN)
    dx_THC = torch.empty((tokens, heads, channels), dtype=x_THC.dtype, device=x_THC.device)
    parts = torch.empty((programs, channels), dtype=torch.float32, device=x_THC.device)
    shared = _shared(x_THC, gain_C, cos_SC, sin_SC)
    arguments = shared | {
        "dy_ptr": dy_THC,
        "rstd_ptr": rstd_TH.contiguous(),
        "dx_ptr": dx_THC,
        "dgain_ptr": parts,
        "dy_stride_t": dy_THC.stride(0),
        "dy_stride_h": dy_THC.stride(1),
        "TOTAL": max(HEADS_OF_GAIN, shared["ROWS"]),
    }
    first = Launch(
        kernel=qk_norm_rope_backward_kernel,
        grid=(programs,),
        arguments=arguments,
        stages=1,
        options=UNFUSED_FLOATS,
    )
    last, dgain_C = plan_sum(parts, dtype=gain_C.dtype)
    return [first, last], dx_THC, dgain_C


def _shared(x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> dict[str, Any]:
    """Arguments of both kernels."""
    tokens, heads, channels = x_THC.shape
    lanes = next_power_of_two(channels // 2)
    return {
        "x_ptr": x_THC,
        "gain_ptr": gain_C.detach().contiguous(),
        "cos_ptr": cos_SC.contiguous(),
        "sin_ptr": sin_SC.contiguous(),
        "count": tokens * heads,
        "heads": heads,
        "half": channels // 2,
        "positions": cos_SC.shape[0],
        "stride_t": x_THC.stride(0),
        "stride_h": x_THC.stride(1),
        "ROWS": min(max(ELEMENTS // lanes, 1), HEADS_OF_GAIN),
        "LANES": lanes,
    }
