"""Eager torch definition of quantisation and of TensorStats, bit for bit."""

# Shapes: B matrices, R rows, C columns; r x c the block, Rb and Cb blocks along rows and columns; S segments of rows.

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, NAN_CODE, CodeFormat
from fp8_safeguard.monitor.formats import SCALE_CEILING, SCALE_FLOOR
from fp8_safeguard.monitor.stats import BLOCK_SHAPES, HISTOGRAM_BINS, TILE_SQNR_EDGES_DB, VECTOR_LENGTH

SQNR_RATIO_EDGES = tuple(10.0 ** (edge / 10.0) for edge in TILE_SQNR_EDGES_DB[1:-1].tolist())
"""Inner edges of the histogram as ratios of sums; the outer two are 0 and infinity."""


def quantize_rows(
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    amax_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes [R,C] and float32 scales of all row blocks, those of each segment after the one before."""
    parts = [
        quantize_matrices(x_BRC, layout, code_format, scale, multiplier, amax_floor)
        for x_BRC in _segments(x_RC, bounds)
    ]
    if not parts:
        empty = x_RC.new_empty((0, x_RC.shape[1]), dtype=code_format.dtype)
        columns = x_RC.shape[1] if layout == "col" else -(-x_RC.shape[1] // BLOCK)
        return empty, x_RC.new_empty((0, columns), dtype=torch.float32)
    codes = torch.cat([codes.view(torch.uint8).flatten(0, 1) for codes, _ in parts])
    return codes.view(code_format.dtype), torch.cat([scales.flatten(0, 1) for _, scales in parts])


def round_trip_rows(
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    amax_floor: float = 0.0,
) -> Tensor:
    """Codes times scales, float32 [R,C]; rows outside the segments are unspecified."""
    out_RC = torch.zeros(x_RC.shape, dtype=torch.float32, device=x_RC.device)
    start = 0
    for x_BRC in _segments(x_RC, bounds):
        codes, scales = quantize_matrices(x_BRC, layout, code_format, scale, multiplier, amax_floor)
        values = _unblocked(_blocked(codes.float(), layout) * scales[:, :, None, :, None], x_BRC.shape)
        end = start + values.shape[0] * values.shape[1]
        out_RC[start:end] = values.flatten(0, 1)
        start = end
    return out_RC


def stats_of_rows(
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    amax_floor: float = 0.0,
) -> Tensor:
    """TensorStats vectors of the segments, float64 [S,29]."""
    vectors = [
        stats_of_matrices(x_RC[start:end].float()[None], layout, code_format, scale, multiplier, amax_floor)
        for start, end in pairwise(bounds)
    ]
    return torch.stack(vectors) if vectors else x_RC.new_zeros((0, VECTOR_LENGTH), dtype=torch.float64)


def _segments(x_RC: Tensor, bounds: list[int]) -> list[Tensor]:
    """The segments as float32 [B,R,C]: one tensor if all have the same number of rows, else one each."""
    x_RC = x_RC[: bounds[-1]].float()
    lengths = {end - start for start, end in pairwise(bounds)}
    if len(lengths) == 1:
        return [x_RC.reshape(len(bounds) - 1, lengths.pop(), x_RC.shape[1])]
    return [x_RC[start:end][None] for start, end in pairwise(bounds)]


def block_scales(amax: Tensor, code_format: CodeFormat, scale: str, multiplier: float) -> Tensor:
    """float32 scales of blocks with that float32 amax (0: no finite non-zero element).

    `fp32` is one IEEE division amax / maximum; `pow2` the smallest power of two not below it, found on the
    mantissa and exponent because log2 rounds. Neither is ever zero, and a block without values has scale 1.
    """
    if scale == "pow2":
        base = _power_of_two_scales(amax.double(), code_format.maximum)
    else:
        base = (amax / code_format.maximum).double()
    base = base.clamp(min=SCALE_FLOOR)
    scaled = (base * multiplier).clamp(min=SCALE_FLOOR, max=SCALE_CEILING).float()
    return torch.where(amax > 0, scaled, torch.ones_like(scaled))


def _power_of_two_scales(amax: Tensor, maximum: float) -> Tensor:
    """amax = f 2^e and maximum = g 2^h with f, g in [0.5, 1): 2^(e - h) if f <= g, else one more. float64."""
    fraction, exponent = torch.frexp(amax)
    max_fraction, max_exponent = math.frexp(maximum)
    power = exponent - max_exponent + (fraction > max_fraction)
    return torch.ldexp(torch.ones_like(amax), power)


def quantize_matrices(
    x_BRC: Tensor,
    layout: str,
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    amax_floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes [B,R,C] and float32 scales [B,Rb,Cb] of float32 matrices; ragged edges make smaller blocks."""
    x_blocks = _blocked(x_BRC, layout)
    finite = torch.isfinite(x_blocks)
    amax = torch.where(finite, x_blocks.abs(), 0.0)
    amax = amax.amax(dim=(2, 4), keepdim=True) if x_blocks.numel() else amax.new_zeros(_scale_shape(x_blocks))
    scales = block_scales(amax.clamp(min=amax_floor), code_format, scale, multiplier)
    # The clamp is what makes the cast independent of the torch version; NaN passes through clamp and cast.
    scaled = (x_blocks / scales).clamp(-code_format.maximum, code_format.maximum)
    codes = scaled.to(code_format.dtype).view(torch.uint8)
    codes = torch.where(finite, codes, (codes & 0x80) | NAN_CODE)
    codes = _unblocked(codes, x_BRC.shape).view(code_format.dtype)
    return codes, scales[:, :, 0, :, 0]


def stats_of_matrices(
    x_BRC: Tensor,
    layout: str,
    code_format: CodeFormat,
    scale: str,
    multiplier: float,
    amax_floor: float = 0.0,
) -> Tensor:
    """TensorStats of all B matrices together, float64 [29]: sums over the matrices, maximum for amax."""
    codes, scales = quantize_matrices(x_BRC, layout, code_format, scale, multiplier, amax_floor)
    x = x_BRC.double()
    finite = torch.isfinite(x)
    x_finite = torch.where(finite, x, 0.0)
    q = torch.where(
        finite, codes.double(), 1.0
    )  # any non-zero stand-in: a non-finite element is never a zero
    scale_blocks = scales.double()[:, :, None, :, None]
    xq = _unblocked(_blocked(torch.where(finite, q, 0.0), layout) * scale_blocks, x.shape)
    ratio = _unblocked(_blocked(x_finite.float(), layout) / scales[:, :, None, :, None], x.shape).abs()
    zero = q == 0
    error = x_finite - xq
    flushed = zero.all(dim=-1) & (x_finite != 0).any(dim=-1)
    columns = [
        torch.tensor(x.numel(), device=x.device),
        zero.sum(),
        (zero & (x != 0)).sum(),
        (ratio > code_format.last_kept).sum(),
        torch.isnan(x).sum(),
        torch.isinf(x).sum(),
        torch.tensor(x.shape[0] * x.shape[1], device=x.device),
        flushed.sum(),
        x_finite.abs().max() if x.numel() else x_finite.new_zeros(()),
        x_finite.square().sum(),
        xq.square().sum(),
        error.square().sum(),
        x_finite.square().square().sum(),
    ]
    vector = torch.stack([column.double() for column in columns])
    return torch.cat([vector, histogram_of(x_finite.square(), error.square(), layout)])


def histogram_of(squares_BRC: Tensor, errors_BRC: Tensor, layout: str) -> Tensor:
    """float64 [16]: blocks by 10 log10(sum x^2 / sum (x - xq)^2), from the squares; lower edge inclusive."""
    signal = _blocked(squares_BRC, layout).sum(dim=(2, 4)).flatten().double()
    noise = _blocked(errors_BRC, layout).sum(dim=(2, 4)).flatten().double()
    counted = signal > 0
    ratios = signal[counted] / noise[counted]
    edges = torch.tensor(SQNR_RATIO_EDGES, dtype=torch.float64, device=ratios.device)
    bins = torch.bucketize(ratios, edges, right=True)
    return torch.bincount(bins, minlength=HISTOGRAM_BINS).double()


def _blocked(x_BRC: Tensor, layout: str) -> Tensor:
    """x padded with zeros to whole blocks, as [B, Rb, r, Cb, c]."""
    block_rows, block_cols = BLOCK_SHAPES[layout]
    batch, rows, cols = x_BRC.shape
    padding = (0, -cols % block_cols, 0, -rows % block_rows)
    padded = torch.nn.functional.pad(x_BRC, padding) if any(padding) else x_BRC
    return padded.reshape(batch, -(-rows // block_rows), block_rows, -(-cols // block_cols), block_cols)


def _unblocked(x_blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of _blocked: padding cut off again, contiguous."""
    batch, row_blocks, block_rows, col_blocks, block_cols = x_blocks.shape
    padded = x_blocks.reshape(batch, row_blocks * block_rows, col_blocks * block_cols)
    return padded[:, : shape[1], : shape[2]].contiguous()


def _scale_shape(x_blocks: Tensor) -> tuple[int, ...]:
    """Shape of one number per block, block dimensions kept."""
    batch, row_blocks, _, col_blocks, _ = x_blocks.shape
    return batch, row_blocks, 1, col_blocks, 1
