"""Compiled quantisation into the order that matrix tiles read."""

# Shapes: R rows, C columns, P pairs of rows (R / 2), E experts, b counts blocks of 128.
# A code is exact in bfloat16: the upper half of its float32 bits. Pairs put rows 2p and 2p + 1 into one int32.

from __future__ import annotations

from typing import Any

import numpy as np

from fp8_safeguard.kernels.numba_bits import (
    INFINITY_BITS,
    LEAST_EXPONENT,
    MAGNITUDE_MASK,
    MAXIMUM,
    QUANTUM_SHIFT,
    SIGN_MASK,
    bits_of,
    exact,
    finite_or_zero,
    float_of,
    inverse_or_zero,
    magic,
    magnitude,
    quotient,
    rounded,
    wide_vectors,
    widened,
)
from fp8_safeguard.kernels.numba_quantize import NAN_BITS, scale_blocks, scale_columns


@exact
def codes_of_rows(bits_RC: Any, shift: Any, grid: Any, codes_RC: Any, scale_bR: Any) -> None:
    """`row` blocks: codes [R, whole blocks], zeros behind the last column, and the scales by block and row."""
    wide_vectors()
    columns = bits_RC.shape[1]
    scales_b = np.empty(scale_bR.shape[0], np.float32)
    for row in range(bits_RC.shape[0]):
        scale_blocks(bits_RC, shift, row, row + 1, grid, scales_b)
        _code_line(bits_RC[row], shift, scales_b, grid, codes_RC[row])
        for block in range(len(scales_b)):
            scale_bR[block, row] = scales_b[block]
        codes_RC[row, columns:] = 0


@exact
def codes_of_tiles(
    bits_RC: Any, shift: Any, rows: Any, grid: Any, codes_ERC: Any, scale_EcR: Any, scale_ErC: Any
) -> None:
    """`tile` blocks of experts of `rows` rows each: codes [E, whole blocks, whole blocks] into zeros.

    A tile's scale is written out for each of its rows (by column block) and for each of its columns (by row block).
    """
    wide_vectors()
    columns = bits_RC.shape[1]
    scales_c = np.empty(scale_EcR.shape[1], np.float32)
    for expert in range(codes_ERC.shape[0]):
        first = expert * rows
        for row_block, top in enumerate(range(0, rows, 128)):
            bottom = min(top + 128, rows)
            scale_blocks(bits_RC, shift, first + top, first + bottom, grid, scales_c)
            for block, left in enumerate(range(0, columns, 128)):
                scale_EcR[expert, block, top : top + 128] = scales_c[block]
                scale_ErC[expert, row_block, left : left + 128] = scales_c[block]
            for row in range(top, bottom):
                _code_line(bits_RC[first + row], shift, scales_c, grid, codes_ERC[expert, row])


@exact
def pairs_of_columns(
    bits_RC: Any, shift: Any, segments: Any, grid: Any, pairs_PC: Any, scale_bC: Any
) -> None:
    """`col` blocks as pairs [64 b, C or more], zeros behind each segment's last row, and scales [b, C or more]."""
    wide_vectors()
    columns = bits_RC.shape[1]
    inverses_C, peaks_C = np.empty(columns, np.float32), np.empty(columns, np.int32)
    blank_C = np.zeros(columns, bits_RC.dtype)
    block = 0
    for segment in range(len(segments) - 1):
        for top in range(segments[segment], segments[segment + 1], 128):
            bottom = min(top + 128, segments[segment + 1])
            scales_C = scale_bC[block, :columns]
            divide = scale_columns(bits_RC, shift, top, bottom, grid, peaks_C, scales_C, inverses_C)
            for pair in range(64):
                row = top + 2 * pair
                pairs_C = pairs_PC[block * 64 + pair, :columns]
                if row >= bottom:
                    pairs_C[:] = 0
                    continue
                following = bits_RC[row + 1] if row + 1 < bottom else blank_C
                _pair_line(bits_RC[row], following, shift, divide, scales_C, inverses_C, grid, pairs_C)
            block += 1


@exact
def pairs_of_rows(codes_ERC: Any, pairs_EPC: Any) -> None:
    """Codes [E,R,C] as pairs along the rows [E,R/2,C]."""
    wide_vectors()
    for expert in range(codes_ERC.shape[0]):
        for pair in range(pairs_EPC.shape[1]):
            low_C, high_C = codes_ERC[expert, 2 * pair], codes_ERC[expert, 2 * pair + 1]
            pairs_C = pairs_EPC[expert, pair]
            for column in range(len(pairs_C)):
                pairs_C[column] = np.int32(low_C[column]) | np.int32(np.int32(high_C[column]) << 16)


@exact
def transposed(words_ERC: Any, out_ECR: Any) -> None:
    """int32 [E,R,C] with the last two dimensions swapped, 16 x 16 at a time so that both sides stay in the cache."""
    wide_vectors()
    rows, columns = words_ERC.shape[1], words_ERC.shape[2]
    for expert in range(words_ERC.shape[0]):
        for top in range(0, rows, 16):
            for left in range(0, columns, 16):
                for column in range(left, min(left + 16, columns)):
                    for row in range(top, min(top + 16, rows)):
                        out_ECR[expert, column, row] = words_ERC[expert, row, column]


@exact
def _upper_half(bits: Any, q: Any) -> Any:
    """bfloat16 bits, in the lower half of an int32, of q with the sign of bits; NaN where bits are NaN or Inf."""
    finite = np.int32(bits & MAGNITUDE_MASK) < INFINITY_BITS
    value = np.int32(bits_of(q) if finite else NAN_BITS)
    return np.int32(np.int32(np.int32(value | np.int32(bits & SIGN_MASK)) >> 16) & 0xFFFF)


@exact
def _code_line(bits_W: Any, shift: Any, scales_b: Any, grid: Any, codes_W: Any) -> None:
    """Codes of one line, each block of it with its scale."""
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    for block in range(len(scales_b)):
        first, s = block * 128, scales_b[block]
        inverse = inverse_or_zero(s, grid)
        for column in range(min(128, len(bits_W) - first)):
            bits = widened(bits_W[first + column], shift)
            x = float_of(finite_or_zero(magnitude(bits_W[first + column], shift)))
            ratio = quotient(x, s, inverse) if inverse > np.float32(0.0) else np.float32(x / s)
            y = min(ratio, maximum)
            q = rounded(y, magic(y, quantum_shift, least_exponent))
            codes_W[first + column] = np.uint16(_upper_half(bits, q))


@exact
def _pair_line(
    low_W: Any, high_W: Any, shift: Any, divide: Any, scales_W: Any, inverses_W: Any, grid: Any, pairs_W: Any
) -> None:
    """Codes of two rows side by side, columns with scales of their own."""
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    for column in range(len(pairs_W)):
        s, inverse = scales_W[column], inverses_W[column]
        x = float_of(finite_or_zero(magnitude(low_W[column], shift)))
        y = min(np.float32(x / s) if divide else quotient(x, s, inverse), maximum)
        q = rounded(y, magic(y, quantum_shift, least_exponent))
        low = _upper_half(widened(low_W[column], shift), q)
        x = float_of(finite_or_zero(magnitude(high_W[column], shift)))
        y = min(np.float32(x / s) if divide else quotient(x, s, inverse), maximum)
        q = rounded(y, magic(y, quantum_shift, least_exponent))
        high = _upper_half(widened(high_W[column], shift), q)
        pairs_W[column] = np.int32(low | np.int32(high << 16))
