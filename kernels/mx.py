"""MXFP8, blocks of 32 with E8M0 scales: a what-if format."""

# Shapes: R rows (all leading dimensions together), C columns, Cb blocks of 32 along C, S a TensorStats vector.

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import NAN_CODE, CodeFormat, get_format
from fp8_safeguard.kernels.device import device_kernels
from fp8_safeguard.kernels.errors import require_option
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.operands import check_source
from fp8_safeguard.kernels.reference import SQNR_RATIO_EDGES, block_scales
from fp8_safeguard.monitor.stats import HISTOGRAM_BINS

MX_BLOCK = 32
EXPONENT_BIAS = 127
"""Of E8M0, whose smallest scale, 2^-127, is a float32 subnormal: built by shifting an exponent it would be 0."""
ROUNDINGS = ("up", "floor")


@dataclass(frozen=True, eq=False)
class MxTensor:
    """FP8 codes with one E8M0 scale for each 32 along the last dimension."""

    data: Tensor
    """float8_e4m3fn or float8_e5m2, in the shape of the source."""
    scale: Tensor
    """uint8 [..., Cb]: byte e stands for 2^(e - 127), 0 to 254."""

    def dequantize(self) -> Tensor:
        """Codes times scales, float32."""
        wide = self.expanded_scale()
        return (self.data.double() * wide).float()

    def expanded_scale(self) -> Tensor:
        """The scale of every element, float64 in the shape of data."""
        power = self.scale.int() - EXPONENT_BIAS
        scale = torch.ldexp(torch.ones_like(power, dtype=torch.float64), power)
        return scale.repeat_interleave(MX_BLOCK, dim=-1)[..., : self.data.shape[-1]]


def quantize_mx(x: Tensor, *, fmt: str = "e4m3", rounding: str = "up") -> MxTensor:
    """MXFP8 of x [..., C]: q = RNE(clamp(x / 2^e, +-max)), one e for each 32 along the last dimension.

    `up` takes the smallest 2^e >= amax / max, as `quantize` does with `pow2` and as hardware recipes do: nothing
    saturates. `floor` takes e = floor(log2(amax)) - emax, what the standard proposes (OCP Microscaling Formats v1.0,
    section 6.3): amax may saturate by up to an eighth. 2^-127 is the least scale, a block without finite non-zero
    elements has scale 1. NaN and Inf become the NaN code and do not count for the scale, as in `quantize`. On CUDA
    Triton's kernel does the same for `up`. Raises OperandError for a tensor that is not floating-point or has no
    dimension, UnknownOptionError for a format or rounding that does not exist.
    """
    code_format = get_format(fmt)
    require_option("rounding", rounding, ROUNDINGS)
    check_source(x, None)
    if rounding == "up" and device_kernels(x) is not None:
        found: MxTensor = compiled_module("triton_mx").quantize_mx(x, fmt=fmt)
        return found
    x_RC = _rows(x)
    blocks_RC = _blocks(x_RC)
    finite = torch.isfinite(blocks_RC)
    power = _exponents(torch.where(finite, blocks_RC.abs(), 0.0).amax(dim=-1), code_format, rounding)
    # Powers of two divide exactly in float64; only the cast rounds.
    ratio = torch.ldexp(blocks_RC.double(), -power[..., None])
    codes = ratio.clamp(-code_format.maximum, code_format.maximum).to(code_format.dtype).view(torch.uint8)
    codes = torch.where(finite, codes, (codes & 0x80) | NAN_CODE)
    codes = codes.flatten(1)[:, : x_RC.shape[1]].contiguous().view(code_format.dtype)
    scale = (power + EXPONENT_BIAS).to(torch.uint8)
    return MxTensor(codes.reshape(x.shape), scale.reshape(*x.shape[:-1], scale.shape[1]))


def mx_round_trip(x: Tensor, *, fmt: str = "e4m3", rounding: str = "up") -> Tensor:
    """x [..., C] to MXFP8 and back, float32 in x's shape. Options as in `quantize_mx`."""
    return quantize_mx(x, fmt=fmt, rounding=rounding).dequantize()


def mx_stats(x: Tensor, *, fmt: str = "e4m3", rounding: str = "up") -> Tensor:
    """TensorStats of x [..., C] in MXFP8: float64 [S], one entry of the histogram for each block of 32.

    As `tensor_stats`, for comparison with it. Options as in `quantize_mx`; never raises on NaN, Inf or an empty tensor.
    """
    code_format, quantized = get_format(fmt), quantize_mx(x, fmt=fmt, rounding=rounding)
    x_RC = _rows(x).double()
    scale_RC = quantized.expanded_scale().reshape(x_RC.shape)
    finite = torch.isfinite(x_RC)
    kept_RC = torch.where(finite, x_RC, 0.0)
    q_RC = torch.where(finite, quantized.data.reshape(x_RC.shape).double(), 0.0)
    zero = finite & (q_RC == 0)
    flushed = zero.all(dim=-1) & (kept_RC != 0).any(dim=-1)
    xq_RC = q_RC * scale_RC
    error_RC = kept_RC - xq_RC
    columns = [
        torch.tensor(x.numel(), device=x.device),
        zero.sum(),
        (zero & (kept_RC != 0)).sum(),
        ((kept_RC / scale_RC).abs() > code_format.last_kept).sum(),
        torch.isnan(x_RC).sum(),
        torch.isinf(x_RC).sum(),
        torch.tensor(x_RC.shape[0] if x.numel() else 0, device=x.device),
        flushed.sum(),
        kept_RC.abs().max() if x.numel() else kept_RC.new_zeros(()),
        kept_RC.square().sum(),
        xq_RC.square().sum(),
        error_RC.square().sum(),
        kept_RC.square().square().sum(),
    ]
    vector = torch.stack([column.double() for column in columns])
    return torch.cat([vector, _histogram(kept_RC, error_RC)])


def _rows(x: Tensor) -> Tensor:
    """x as float32 [R,C]; float64 is rounded."""
    columns = x.shape[-1]
    return x.detach().float().reshape(math.prod(x.shape[:-1]), columns)


def _blocks(x_RC: Tensor) -> Tensor:
    """[R,Cb,32], zeros behind the last column."""
    missing = -x_RC.shape[1] % MX_BLOCK
    padded = torch.nn.functional.pad(x_RC, (0, missing)) if missing else x_RC
    return padded.reshape(x_RC.shape[0], padded.shape[1] // MX_BLOCK, MX_BLOCK)


def _exponents(amax_Rb: Tensor, code_format: CodeFormat, rounding: str) -> Tensor:
    """Exponents of the scales, int32, from -127."""
    if rounding == "up":
        scale = block_scales(amax_Rb, code_format, "pow2", 1.0)
        power = torch.frexp(scale.double())[1] - 1
    else:
        largest = math.frexp(code_format.maximum)[1]
        power = torch.where(amax_Rb > 0, torch.frexp(amax_Rb.double())[1] - largest, 0)
    return power.clamp(min=-EXPONENT_BIAS).int()


def _histogram(x_RC: Tensor, error_RC: Tensor) -> Tensor:
    """float64 [16]: blocks by their SQNR, lower edge inclusive; blocks of zeros are not counted."""
    signal, noise = (
        _blocks(x_RC).square().sum(dim=-1).flatten(),
        _blocks(error_RC).square().sum(dim=-1).flatten(),
    )
    counted = signal > 0
    ratios = signal[counted] / noise[counted]
    edges = torch.tensor(SQNR_RATIO_EDGES, dtype=torch.float64, device=ratios.device)
    return torch.bincount(torch.bucketize(ratios, edges, right=True), minlength=HISTOGRAM_BINS).double()
