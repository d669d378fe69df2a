"""LogFMT-8: sign and logarithm of each value in eight bits, tile by tile."""

# Shapes: C columns, b a count of 128-tiles along them, N tiles.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.device import triton_installed
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.lazy import compiled_module

LEVELS = 127
"""Magnitudes that have a code: seven bits less the one for zero."""
RANGE = 32.0
"""Binades from the smallest to the largest magnitude of a tile at most: what lies below is rounded like anything else."""
SIGN = 0x80
NAN_CODE = 0x80
"""Negative zero's place: zero has no sign here. NaN and +-Inf take it."""


@dataclass(frozen=True, eq=False)
class LogFmt8:
    """Eight-bit logarithms. A code is a sign bit and k: 0 is zero, k from 1 to 127 is 2^(low + (k - 1) step)."""

    codes: Tensor
    """uint8 in the shape of the source."""
    low: Tensor
    """float32 [..., Cb]: binary logarithm of the smallest magnitude with a code, of each tile."""
    step: Tensor
    """float32 [..., Cb]: distance of two neighbouring logarithms; 0 where a tile has no magnitudes."""

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, computed in float64, rounded to float32 and then to dtype; NaN for NaN_CODE.

        What would round past dtype's largest finite value becomes that value.
        """
        if _fused(self.codes) and dtype != torch.float64:
            values: Tensor = compiled_module("moe.triton_logfmt").logfmt8_decode(self, dtype)
            return values
        columns = self.codes.shape[-1]
        low, step = (
            part.double().repeat_interleave(BLOCK, dim=-1)[..., :columns] for part in (self.low, self.step)
        )
        index = (self.codes & ~SIGN & 0xFF).double() - 1.0
        magnitude = torch.exp2(low + index * step).clamp_max(torch.finfo(dtype).max)
        value = torch.where(self.codes < SIGN, magnitude, -magnitude)
        value = torch.where(index < 0, 0.0, value)
        return torch.where(self.codes == NAN_CODE, torch.nan, value).to(dtype)


def logfmt8_encode(x: Tensor) -> LogFmt8:
    """x [..., C] of any floating dtype as LogFMT-8 (Insights into DeepSeek-V3, ISCA 2025, section 3.2).

    Each tile of 128 neighbours in the last dimension, the last one shorter, spreads its 127 magnitudes evenly over the
    logarithms from its smallest non-zero to its largest magnitude, but over 32 binades at most. A value takes the
    code whose value is nearest to it in LINEAR space, the smaller magnitude where two are equally near. Zero of either
    sign is exact. NaN and +-Inf become the NaN code, decode to NaN, and do not count for the range. Everything is
    computed in float64. OperandError for a tensor that is not floating-point or has no dimension.
    """
    if not x.dtype.is_floating_point or x.dim() < 1:
        raise OperandError(
            f"x is {x.dtype} {list(x.shape)}: pass a floating-point tensor with at least one dimension"
        )
    if _fused(x) and x.dtype != torch.float64:
        encoded: LogFmt8 = compiled_module("moe.triton_logfmt").logfmt8_encode(x.detach())
        return encoded
    columns = x.shape[-1]
    tiles = -(-columns // BLOCK)
    x_NB = F.pad(x.detach().double(), (0, tiles * BLOCK - columns)).reshape(-1, BLOCK)
    finite_NB = torch.isfinite(x_NB)
    magnitude_NB = torch.where(finite_NB, x_NB.abs(), 0.0)
    log_NB = magnitude_NB.log2()
    low_N1, step_N1 = _range(log_NB)
    index_NB = _nearest(magnitude_NB, log_NB, low_N1.double(), step_N1.double())
    codes_NB = index_NB + 1 + torch.where((x_NB < 0) & (index_NB >= 0), SIGN, 0)
    codes_NB = torch.where(finite_NB, codes_NB, NAN_CODE).to(torch.uint8)
    codes = codes_NB.reshape(*x.shape[:-1], tiles * BLOCK)[..., :columns].contiguous()
    shape = (*x.shape[:-1], tiles)
    return LogFmt8(codes, low_N1.reshape(shape), step_N1.reshape(shape))


def _fused(x: Tensor) -> bool:
    """Whether Triton's kernels take x."""
    return x.is_cuda and triton_installed()


def _range(log_NB: Tensor) -> tuple[Tensor, Tensor]:
    """low and step [N, 1] of tiles with those logarithms, -inf for zero; both 0 where all are zero."""
    high_N1 = log_NB.amax(dim=-1, keepdim=True)
    low_N1 = torch.where(log_NB.isinf(), torch.inf, log_NB).amin(dim=-1, keepdim=True)
    empty_N1 = high_N1.isinf()
    low_N1 = torch.where(empty_N1, 0.0, torch.maximum(low_N1, high_N1 - RANGE)).float()
    span_N1 = torch.where(empty_N1, 0.0, high_N1 - low_N1.double())
    # The rounding of low to float32 may put it above the only magnitude there is.
    return low_N1, (span_N1 / (LEVELS - 1)).clamp_min(0.0).float()


def _nearest(magnitude_NB: Tensor, log_NB: Tensor, low_N1: Tensor, step_N1: Tensor) -> Tensor:
    """int64 [N, B]: index of the nearest magnitude in linear space, -1 for zero."""
    flat_N1 = step_N1 == 0
    position_NB = (log_NB - low_N1) / torch.where(flat_N1, 1.0, step_N1)
    # Rounding may move a value across a level, never past the one behind it: two candidates are enough.
    lower_NB = position_NB.clamp(0.0, LEVELS - 2.0).floor()
    below_NB, above_NB = (torch.exp2(low_N1 + (lower_NB + more) * step_N1) for more in (0.0, 1.0))
    index_NB = lower_NB + (magnitude_NB - below_NB > above_NB - magnitude_NB)
    index_NB = torch.where(flat_N1, 0.0, index_NB)
    return torch.where(magnitude_NB <= 0.5 * torch.exp2(low_N1), -1.0, index_NB).long()
