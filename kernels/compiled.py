"""Calls into the compiled kernels: tensors seen as arrays of bits."""

# Shapes: B matrices, R rows, C columns, S segments of rows that no block crosses.

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, CodeFormat
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.reference import SQNR_RATIO_EDGES
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

BLOCK_ROWS = {"row": 1, "tile": BLOCK}

_EDGES = np.array(SQNR_RATIO_EDGES)


def quantize_rows(
    x_RC: Tensor, bounds: list[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor]:
    """Codes [R,C] and float32 scales of all row blocks, those of each segment after the one before."""
    kernels = compiled_module("numba_quantize")
    bits_RC, shift = bit_pattern(x_RC)
    segments, grid = np.array(bounds), grid_of(code_format, scale, multiplier)
    rows, columns = x_RC.shape
    codes_RC = torch.empty((rows, columns), dtype=torch.uint8, device="cpu")
    if layout == "col":
        scales = torch.empty((_row_blocks(bounds), columns), dtype=torch.float32, device="cpu")
        kernels.encode_columns(bits_RC, shift, segments, grid, scales.numpy(), codes_RC.numpy())
    else:
        row_blocks = rows if layout == "row" else _row_blocks(bounds)
        scales = torch.empty((row_blocks, -(-columns // BLOCK)), dtype=torch.float32, device="cpu")
        arrays = (scales.numpy(), codes_RC.numpy())
        kernels.encode_blocks(bits_RC, shift, segments, BLOCK_ROWS[layout], grid, *arrays)
    return codes_RC.view(code_format.dtype), scales


def round_trip_rows(
    x_RC: Tensor, bounds: list[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> Tensor:
    """Codes times scales, float32 [R,C]; rows outside the segments are unspecified."""
    kernels = compiled_module("numba_quantize")
    bits_RC, shift = bit_pattern(x_RC)
    segments, grid = np.array(bounds), grid_of(code_format, scale, multiplier)
    out_RC = torch.empty(x_RC.shape, dtype=torch.float32, device="cpu")
    if layout == "col":
        kernels.round_trip_columns(bits_RC, shift, segments, grid, out_RC.numpy())
    else:
        kernels.round_trip_blocks(bits_RC, shift, segments, BLOCK_ROWS[layout], grid, out_RC.numpy())
    return out_RC


def measured_rows(
    x_RC: Tensor, bounds: list[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R,C], scales and the TensorStats vectors of the segments, float64 [S,29], from one read of x."""
    rows, columns = x_RC.shape
    row_blocks = rows if layout == "row" else _row_blocks(bounds)
    shape = (row_blocks, columns if layout == "col" else -(-columns // BLOCK))
    scales = torch.empty(shape, dtype=torch.float32, device="cpu")
    codes_RC = torch.empty((rows, columns), dtype=torch.uint8, device="cpu")
    out_S = _measured(x_RC, bounds, layout, grid_of(code_format, scale, multiplier), scales, codes_RC)
    return codes_RC.view(code_format.dtype), scales, out_S


def stats_of_rows(
    x_RC: Tensor, bounds: list[int], layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> Tensor:
    """TensorStats vectors of the segments, float64 [S,29]."""
    return _measured(x_RC, bounds, layout, grid_of(code_format, scale, multiplier), None, None)


def _measured(
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    grid: NDArray[np.float64],
    scales: Tensor | None,
    codes_RC: Tensor | None,
) -> Tensor:
    """The statistics; codes and scales are filled in too unless None."""
    bits_RC, shift = bit_pattern(x_RC)
    out_S = torch.zeros((len(bounds) - 1, VECTOR_LENGTH), dtype=torch.float64, device="cpu")
    found = [None if tensor is None else tensor.numpy() for tensor in (scales, codes_RC)]
    arrays = out_S.numpy(), *found
    if layout == "col":
        kernels = compiled_module("numba_col_stats")
        kernels.stats_of_columns(bits_RC, shift, np.array(bounds), grid, _EDGES, *arrays)
    else:
        kernels = compiled_module("numba_stats")
        kernels.stats_of_blocks(bits_RC, shift, np.array(bounds), BLOCK_ROWS[layout], grid, _EDGES, *arrays)
    return out_S


def bit_pattern(x_RC: Tensor) -> tuple[NDArray[Any], np.int32]:
    """x's memory as integers, and how far to shift them left for float32 bits."""
    if x_RC.dtype == torch.bfloat16:
        return x_RC.resolve_neg().contiguous().view(torch.uint16).numpy(), np.int32(16)
    return x_RC.float().resolve_neg().contiguous().view(torch.int32).numpy(), np.int32(0)


def _row_blocks(bounds: list[int]) -> int:
    """Row blocks of all segments together."""
    return sum(-(-(end - start) // BLOCK) for start, end in pairwise(bounds))


@lru_cache(maxsize=256)
def grid_of(code_format: CodeFormat, scale: str, multiplier: float) -> NDArray[np.float64]:
    """The `grid` array of numba_bits."""
    quantum_shift = (23 - code_format.mantissa_bits) << 23
    least_exponent = (127 + code_format.min_exponent) << 23
    power_of_two = float(scale == "pow2")
    limits = [code_format.maximum, code_format.last_kept, multiplier, power_of_two]
    return np.array([*limits, quantum_shift, least_exponent])
