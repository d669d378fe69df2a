"""Compiled quantisation to codes and scales, and to float32 operands."""

# Shapes: R rows, C columns, S segments of rows (no block crosses one), W columns of a line, b counts blocks.
# Scales of `row` and `tile` blocks are [Rb, Cb], of `col` blocks [Rb, C]; row blocks of all segments follow each other.

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
    block_scale,
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

NAN_BITS = np.int32(0x7FC00000)
NAN_CODE = np.int32(0x7F)


@exact
def encode_blocks(
    bits_RC: Any, shift: Any, segments: Any, block_rows: Any, grid: Any, scales_b: Any, codes_RC: Any
) -> None:
    """Codes and scales of `row` (block_rows 1) or `tile` (128) blocks."""
    wide_vectors()
    row_block = 0
    for segment in range(len(segments) - 1):
        for top in range(segments[segment], segments[segment + 1], block_rows):
            bottom = min(top + block_rows, segments[segment + 1])
            scale_blocks(bits_RC, shift, top, bottom, grid, scales_b[row_block])
            for row in range(top, bottom):
                _encode_line(bits_RC[row], shift, scales_b[row_block], grid, codes_RC[row])
            row_block += 1


@exact
def round_trip_blocks(
    bits_RC: Any, shift: Any, segments: Any, block_rows: Any, grid: Any, out_RC: Any
) -> None:
    """Codes times scales of `row` (block_rows 1) or `tile` (128) blocks, float32."""
    wide_vectors()
    scales_b = np.empty((bits_RC.shape[1] + 127) // 128, np.float32)
    for segment in range(len(segments) - 1):
        for top in range(segments[segment], segments[segment + 1], block_rows):
            bottom = min(top + block_rows, segments[segment + 1])
            scale_blocks(bits_RC, shift, top, bottom, grid, scales_b)
            for row in range(top, bottom):
                _round_trip_line(bits_RC[row], shift, scales_b, grid, out_RC[row])


@exact
def encode_columns(bits_RC: Any, shift: Any, segments: Any, grid: Any, scales_bC: Any, codes_RC: Any) -> None:
    """Codes and scales of `col` blocks."""
    wide_vectors()
    inverses_C = np.empty(bits_RC.shape[1], np.float32)
    peaks_C = np.empty(bits_RC.shape[1], np.int32)
    row_block = 0
    for segment in range(len(segments) - 1):
        for top in range(segments[segment], segments[segment + 1], 128):
            bottom = min(top + 128, segments[segment + 1])
            scales_C = scales_bC[row_block]
            divide = scale_columns(bits_RC, shift, top, bottom, grid, peaks_C, scales_C, inverses_C)
            for row in range(top, bottom):
                _encode_columns_line(bits_RC[row], shift, divide, scales_C, inverses_C, grid, codes_RC[row])
            row_block += 1


@exact
def round_trip_columns(bits_RC: Any, shift: Any, segments: Any, grid: Any, out_RC: Any) -> None:
    """Codes times scales of `col` blocks, float32."""
    wide_vectors()
    columns = bits_RC.shape[1]
    scales_C, inverses_C = np.empty(columns, np.float32), np.empty(columns, np.float32)
    peaks_C = np.empty(columns, np.int32)
    for segment in range(len(segments) - 1):
        for top in range(segments[segment], segments[segment + 1], 128):
            bottom = min(top + 128, segments[segment + 1])
            divide = scale_columns(bits_RC, shift, top, bottom, grid, peaks_C, scales_C, inverses_C)
            for row in range(top, bottom):
                _round_trip_columns_line(bits_RC[row], shift, divide, scales_C, inverses_C, grid, out_RC[row])


@exact
def scale_blocks(bits_RC: Any, shift: Any, top: Any, bottom: Any, grid: Any, scales_b: Any) -> None:
    """Scales of one row of blocks."""
    peaks_b = np.zeros(len(scales_b), np.int32)
    for row in range(top, bottom):
        raise_block_peaks(bits_RC[row], shift, peaks_b)
    for block in range(len(scales_b)):
        scales_b[block] = block_scale(peaks_b[block], grid)


@exact
def raise_block_peaks(bits_W: Any, shift: Any, peaks_b: Any) -> None:
    """Largest finite magnitude of each block of a line so far, as bits."""
    wide_vectors()
    for block in range(len(peaks_b)):
        first = block * 128
        peak = peaks_b[block]
        for column in range(min(128, len(bits_W) - first)):
            peak = max(peak, finite_or_zero(magnitude(bits_W[first + column], shift)))
        peaks_b[block] = peak


@exact
def scale_columns(
    bits_RC: Any, shift: Any, top: Any, bottom: Any, grid: Any, peaks_C: Any, scales_C: Any, inverses_C: Any
) -> Any:
    """Scales of one row of `col` blocks, and their inverses; whether any of them needs true divisions."""
    wide_vectors()
    peaks_C[:] = 0
    for row in range(top, bottom):
        bits_W = bits_RC[row]
        for column in range(len(bits_W)):
            peaks_C[column] = max(peaks_C[column], finite_or_zero(magnitude(bits_W[column], shift)))
    divide = False
    for column in range(len(peaks_C)):
        scales_C[column] = block_scale(peaks_C[column], grid)
        inverses_C[column] = inverse_or_zero(scales_C[column], grid)
        divide |= inverses_C[column] == np.float32(0.0)
    return divide


@exact
def code_of(bits: Any, y: Any, quantum_shift: Any, least_exponent: Any) -> Any:
    """The code of a clamped ratio y with the sign of bits, or the NaN code where bits are NaN or Inf.

    Codes count the grid upwards from zero: whole binades since the least exponent, then the quanta `magic` counts.
    """
    big = magic(y, quantum_shift, least_exponent)
    quanta = bits_of(np.float32(y + big)) - bits_of(big)
    binades = np.int32(np.int32(bits_of(big) - quantum_shift) - least_exponent)
    code = np.int32(quanta + (binades >> np.int32(quantum_shift >> 23)))
    finite = np.int32(bits & MAGNITUDE_MASK) < INFINITY_BITS
    code = code if finite else NAN_CODE
    return np.uint8(np.int32(code | np.int32(np.int32(bits >> 24) & 0x80)))


@exact
def _value(bits: Any, q: Any, s: Any) -> Any:
    """q times s with the sign of bits, or NaN where bits are NaN or Inf."""
    value = bits_of(np.float32(q * s))
    finite = np.int32(bits & MAGNITUDE_MASK) < INFINITY_BITS
    value = value if finite else NAN_BITS
    return float_of(np.int32(value | np.int32(bits & SIGN_MASK)))


@exact
def _encode_line(bits_W: Any, shift: Any, scales_b: Any, grid: Any, codes_W: Any) -> None:
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
            codes_W[first + column] = code_of(bits, min(ratio, maximum), quantum_shift, least_exponent)


@exact
def _round_trip_line(bits_W: Any, shift: Any, scales_b: Any, grid: Any, out_W: Any) -> None:
    """Codes times scales of one line."""
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
            out_W[first + column] = _value(bits, q, s)


@exact
def _encode_columns_line(
    bits_W: Any, shift: Any, divide: Any, scales_W: Any, inverses_W: Any, grid: Any, codes_W: Any
) -> None:
    """Codes of one line across columns with scales of their own."""
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    for column in range(len(bits_W)):
        bits, s = widened(bits_W[column], shift), scales_W[column]
        x = float_of(finite_or_zero(magnitude(bits_W[column], shift)))
        ratio = np.float32(x / s) if divide else quotient(x, s, inverses_W[column])
        codes_W[column] = code_of(bits, min(ratio, maximum), quantum_shift, least_exponent)


@exact
def _round_trip_columns_line(
    bits_W: Any, shift: Any, divide: Any, scales_W: Any, inverses_W: Any, grid: Any, out_W: Any
) -> None:
    """Codes times scales of one line across columns with scales of their own."""
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    for column in range(len(bits_W)):
        bits, s = widened(bits_W[column], shift), scales_W[column]
        x = float_of(finite_or_zero(magnitude(bits_W[column], shift)))
        ratio = np.float32(x / s) if divide else quotient(x, s, inverses_W[column])
        y = min(ratio, maximum)
        out_W[column] = _value(bits, rounded(y, magic(y, quantum_shift, least_exponent)), s)
