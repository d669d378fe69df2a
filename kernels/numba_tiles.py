"""The numba side of tiles.py: operands and products on matrix tiles."""

# Shapes: T tokens, N output features, K input features, E experts, b counts blocks of 128.
# Kp, Np, Tp: padded to whole blocks, with zeros where the dimension is summed.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.compiled import bit_pattern, grid_of
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor


def available() -> bool:
    """Whether this processor has the tiles; asks Linux for them."""
    return bool(compiled_module("numba_amx").available())


@dataclass(frozen=True)
class Weight:
    """A weight's codes and scales, kept from fprop for dgrad."""

    codes_ENK: Tensor
    """bfloat16 codes as uint16 [E,Np,Kp]."""
    scale_EkN: Tensor
    """float32 [E,Kb,Np]: scales by block of K and output feature."""
    scale_EnK: Tensor
    """float32 [E,Nb,Kp]: scales by block of N and input feature."""
    fmt: str = "e4m3"
    """Format of the codes."""


def weight(w_ENK: Tensor, operand: OperandFormat) -> Weight:
    """Quantise weights [E,N,K] in tiles."""
    experts, rows, columns = w_ENK.shape
    bits, shift = bit_pattern(w_ENK.reshape(experts * rows, columns))
    codes = torch.zeros((experts, _whole(rows), _whole(columns)), dtype=torch.uint16, device="cpu")
    scale_EkN = torch.empty(
        (experts, codes.shape[2] // BLOCK, codes.shape[1]), dtype=torch.float32, device="cpu"
    )
    scale_EnK = torch.empty(
        (experts, codes.shape[1] // BLOCK, codes.shape[2]), dtype=torch.float32, device="cpu"
    )
    arrays = codes.numpy(), scale_EkN.numpy(), scale_EnK.numpy()
    _operands().codes_of_tiles(bits, shift, rows, _grid(operand), *arrays)
    return Weight(codes, scale_EkN, scale_EnK, operand.fmt)


def codes_of(w: Weight, rows: int, columns: int) -> QuantizedTensor:
    """The same [E, rows, columns] as FP8 codes and scales: each code is exact in bfloat16, so nothing is rounded."""
    values = w.codes_ENK.view(torch.bfloat16)[:, :rows, :columns].float()
    scale = w.scale_EkN[:, :, :rows:BLOCK].mT.contiguous()
    return QuantizedTensor(values.to(get_format(w.fmt).dtype), scale, "tile", w.fmt)


def fprop(
    x_TK: Tensor, w: Weight, features: int, operand: OperandFormat, bounds: list[int], dtype: torch.dtype
) -> Tensor:
    """Y = X W^T [T,N] in dtype, each expert's rows with its weight."""
    if not w.codes_ENK.numel():
        return torch.zeros((x_TK.shape[0], features), dtype=dtype, device="cpu")
    words = w.codes_ENK.view(torch.int32)
    pairs = torch.empty((words.shape[0], words.shape[2], words.shape[1]), dtype=torch.int32, device="cpu")
    _operands().transposed(words.numpy(), pairs.numpy())
    return _grouped_nt(x_TK, operand, pairs, w.scale_EkN, features, bounds, dtype)


def dgrad(
    dy_TN: Tensor,
    w: Weight,
    features: int,
    operand: OperandFormat,
    bounds: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """dX = dY W [T,K] in dtype, each expert's rows with its weight."""
    if not w.codes_ENK.numel():
        return torch.zeros((dy_TN.shape[0], features), dtype=dtype, device="cpu")
    experts, rows, columns = w.codes_ENK.shape
    pairs = torch.empty((experts, rows // 2, columns), dtype=torch.int32, device="cpu")
    _operands().pairs_of_rows(w.codes_ENK.numpy(), pairs.numpy())
    return _grouped_nt(dy_TN, operand, pairs, w.scale_EnK, features, bounds, dtype)


def wgrad(
    dy_TN: Tensor, x_TK: Tensor, dy_operand: OperandFormat, x_operand: OperandFormat, bounds: list[int]
) -> Tensor:
    """dW = dY^T X [E,N,K] in float32, zeros for an expert without rows."""
    if not (dy_TN.shape[1] and x_TK.shape[1]):
        return torch.zeros(
            (len(bounds) - 1, dy_TN.shape[1], x_TK.shape[1]), dtype=torch.float32, device="cpu"
        )
    blocks = np.zeros(len(bounds), np.int64)
    np.cumsum([-(-(end - start) // BLOCK) for start, end in pairwise(bounds)], out=blocks[1:])
    dy_pairs, dy_scale = _column_pairs(dy_TN, bounds, int(blocks[-1]), dy_operand)
    x_pairs, x_scale = _column_pairs(x_TK, bounds, int(blocks[-1]), x_operand)
    # A row of pairs along T, transposed, is a row of codes along T.
    turned = torch.empty((1, dy_pairs.shape[1], dy_pairs.shape[0]), dtype=torch.int32, device="cpu")
    _operands().transposed(dy_pairs.numpy()[None], turned.numpy())
    codes = turned[0].view(torch.uint16)
    out_ENK = torch.empty((len(bounds) - 1, dy_TN.shape[1], x_TK.shape[1]), dtype=torch.float32, device="cpu")
    amx = compiled_module("numba_amx")
    arrays = codes.numpy(), dy_scale.numpy(), x_pairs.numpy(), x_scale.numpy(), out_ENK.numpy()
    amx.grouped_tn(_configuration(), blocks, *arrays)
    return out_ENK


def _grouped_nt(
    a_MK: Tensor,
    operand: OperandFormat,
    pairs: Tensor,
    scales: Tensor,
    features: int,
    bounds: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Rows of a, quantised in rows, times experts' pairs: [M, features] in dtype, zeros behind the last bound."""
    rows, depth = a_MK.shape
    bits, shift = bit_pattern(a_MK)
    amx = compiled_module("numba_amx")
    codes = torch.empty((rows + amx.PANEL, _whole(depth)), dtype=torch.uint16, device="cpu")
    scale_bM = torch.empty((codes.shape[1] // BLOCK, rows + amx.PANEL), dtype=torch.float32, device="cpu")
    _operands().codes_of_rows(bits, shift, _grid(operand), codes.numpy(), scale_bM.numpy())
    narrow = dtype == torch.bfloat16
    out_dtype = torch.bfloat16 if narrow else torch.float32
    out_MN = torch.empty((rows, features), dtype=out_dtype, device="cpu")
    out_MN[bounds[-1] :] = 0
    out = out_MN.view(torch.uint16) if narrow else out_MN
    arrays = codes.numpy(), scale_bM.numpy(), pairs.numpy(), scales.numpy(), out.numpy()
    amx.grouped_nt(_configuration(), np.array(bounds), *arrays)
    return out_MN.to(dtype)


def _column_pairs(
    x_TC: Tensor, bounds: list[int], blocks: int, operand: OperandFormat
) -> tuple[Tensor, Tensor]:
    """x quantised in columns: pairs [64 blocks, C padded] and scales [blocks, C padded]."""
    bits, shift = bit_pattern(x_TC)
    width = _whole(x_TC.shape[1])
    pairs = torch.empty((blocks * BLOCK // 2, width), dtype=torch.int32, device="cpu")
    scales = torch.empty((blocks, width), dtype=torch.float32, device="cpu")
    _operands().pairs_of_columns(bits, shift, np.array(bounds), _grid(operand), pairs.numpy(), scales.numpy())
    return pairs, scales


def _whole(size: int) -> int:
    """size rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def _operands() -> ModuleType:
    return compiled_module("numba_operands")


def _grid(operand: OperandFormat) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return grid_of(get_format(operand.fmt), operand.scale, operand.multiplier)


@cache
def _configuration() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    configuration: np.ndarray[tuple[int], np.dtype[np.uint8]] = compiled_module(
        "numba_amx"
    ).tile_configuration()
    return configuration
