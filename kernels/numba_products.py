"""FP8 products of quantised tensors on matrix tiles, through numba."""

# Shapes: M x N the result, K the summed dimension, T tokens, E experts, b counts blocks of 128 along K or T.
# Kp, Np: padded to whole blocks. A code is exact in bfloat16.

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.kernels import numba_amx, numba_operands
from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.gemm import SMALLEST_SCALE, dequantized
from fp8_safeguard.kernels.grouped import grouped_mm, grouped_mm_wgrad
from fp8_safeguard.kernels.quantized import QuantizedTensor

LARGEST_SCALE = 2.0**60
"""Up to it a block's sum times one scale stays finite; beyond it, as below SMALLEST_SCALE, torch multiplies."""


def gemm_nt(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    """a [M,K] times b [N,K] transposed: [M,N] in out_dtype."""
    experts = QuantizedTensor(b.data[None], b.scale[None], b.layout, b.fmt)
    return grouped_nt(a, experts, [0, a.shape[0]], out_dtype)


def grouped_nt(a: QuantizedTensor, b: QuantizedTensor, bounds: list[int], out_dtype: torch.dtype) -> Tensor:
    """Each expert's rows of a [M,K] times its b [E,N,K] transposed: [M,N], zeros behind the last bound."""
    if not _takes(a) or not _takes(b):
        a_MK, b_ENK = dequantized(a, b)
        return grouped_mm(a_MK, b_ENK.mT, bounds).to(out_dtype)
    (rows, depth), (experts, features, _) = a.shape, b.shape
    depth_p, features_p = _whole(depth), _whole(features)
    codes = _padded(_bits(a.data), (rows + numba_amx.PANEL, depth_p))
    scale_bM = _padded(_by_row(a).t(), (depth_p // BLOCK, rows + numba_amx.PANEL))
    words = _padded(_bits(b.data), (experts, features_p, depth_p)).view(torch.int32)
    pairs = torch.empty((experts, words.shape[2], features_p), dtype=torch.int32, device="cpu")
    numba_operands.transposed(words.numpy(), pairs.numpy())
    scale_EbN = _padded(_by_row(b).mT, (experts, depth_p // BLOCK, features_p))
    out_MN = torch.empty((rows, features), dtype=torch.float32, device="cpu")
    out_MN[bounds[-1] :] = 0
    arrays = codes.numpy(), scale_bM.numpy(), pairs.numpy(), scale_EbN.numpy(), out_MN.numpy()
    numba_amx.grouped_nt(numba_amx.tile_configuration(), np.array(bounds), *arrays)
    return out_MN.to(out_dtype)


def grouped_wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, bounds: list[int], out_dtype: torch.dtype
) -> Tensor:
    """dy [T,N] (col) transposed times x [T,K] (col): [E,N,K], zeros for an expert without rows."""
    if not (_takes(dy) and _takes(x) and _cut_alike(dy, x, bounds)):
        dy_TN, x_TK = dequantized(dy, x)
        return grouped_mm_wgrad(dy_TN, x_TK, bounds).to(out_dtype)
    blocks = np.cumsum([0, *(len(_cuts(start, end, dy)) for start, end in pairwise(bounds))])
    cuts = [cut for start, end in pairwise(bounds) for cut in _cuts(start, end, dy)]
    dy_codes, dy_scale = _blocked(dy, cuts)
    x_codes, x_scale = _blocked(x, cuts)
    pairs = torch.empty((1, x_codes.shape[0] // 2, x_codes.shape[1]), dtype=torch.int32, device="cpu")
    numba_operands.pairs_of_rows(x_codes.numpy()[None], pairs.numpy())
    dy_turned = dy_codes.view(torch.int16).t().contiguous().view(torch.uint16)
    out_ENK = torch.empty((len(bounds) - 1, dy.shape[1], x.shape[1]), dtype=torch.float32, device="cpu")
    arrays = dy_turned.numpy(), dy_scale.numpy(), pairs[0].numpy(), x_scale.numpy(), out_ENK.numpy()
    numba_amx.grouped_tn(numba_amx.tile_configuration(), blocks, *arrays)
    return out_ENK.to(out_dtype)


def _cut_alike(dy: QuantizedTensor, x: QuantizedTensor, bounds: list[int]) -> bool:
    """Whether both operands' blocks start at the experts' first rows, or neither's do."""
    starts = [None if operand.offsets is None else operand.offsets.tolist() for operand in (dy, x)]
    return starts in ([None, None], [bounds, bounds])


def _takes(operand: QuantizedTensor) -> bool:
    """Whether there is anything to multiply, and a block's sum times the scales stays a normal float32."""
    if not operand.data.numel():
        return False
    least, most = operand.scale.aminmax()
    return bool(least >= SMALLEST_SCALE) and bool(most <= LARGEST_SCALE)


def _whole(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _bits(codes: Tensor) -> Tensor:
    """The codes as bfloat16 bits, int16."""
    return codes.to(torch.bfloat16).view(torch.int16)


def _padded(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """values in the corner of zeros of that shape; int16 becomes the uint16 of the compiled kernels."""
    out = torch.zeros(shape, dtype=values.dtype, device="cpu")
    out[tuple(slice(size) for size in values.shape)] = values
    return out.view(torch.uint16) if values.dtype == torch.int16 else out


def _by_row(operand: QuantizedTensor) -> Tensor:
    """Scales [..., rows, b] of a `row` or `tile` operand."""
    if operand.layout == "row":
        return operand.scale
    return operand.scale.repeat_interleave(BLOCK, dim=-2)[..., : operand.shape[-2], :]


def _cuts(start: int, end: int, operand: QuantizedTensor) -> list[tuple[int, int, int]]:
    """Rows of one expert cut where a scale ends: first row, last row, and the block of rows before it.

    Blocks begin at the expert's first row if the operand was split by expert, else at every 128th row of all.
    """
    first = start if operand.offsets is not None else start // BLOCK * BLOCK
    return [(max(top, start), min(top + BLOCK, end), top) for top in range(first, end, BLOCK)]


def _blocked(operand: QuantizedTensor, cuts: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """bfloat16 codes [128 blocks, C padded], each cut filled up with zero rows, and its scales [blocks, C padded]."""
    width = _whole(operand.shape[1])
    codes = torch.zeros((len(cuts) * BLOCK, width), dtype=torch.int16, device="cpu")
    scale = torch.zeros((len(cuts), width), dtype=torch.float32, device="cpu")
    bits = _bits(operand.data)
    for index, (top, bottom, block) in enumerate(cuts):
        codes[index * BLOCK : index * BLOCK + bottom - top, : bits.shape[1]] = bits[top:bottom]
        row = index if operand.offsets is not None else block // BLOCK
        scale[index, : bits.shape[1]] = operand.scale[row]
    return codes.view(torch.uint16), scale
