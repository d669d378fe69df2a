"""Compiled TensorStats of the `col` layout, columns side by side."""

# Shapes as in numba_stats: a patch is up to 128 rows times W columns, every column of it one block.

from __future__ import annotations

from typing import Any

import numpy as np

from fp8_safeguard.kernels.numba_bits import (
    INFINITY_BITS,
    LAST_KEPT,
    LEAST_EXPONENT,
    MAXIMUM,
    QUANTUM_SHIFT,
    block_scale,
    exact,
    finite_or_zero,
    float_of,
    inverse_or_zero,
    magic,
    magnitude,
    quotient,
    reordered,
    rounded,
    wide_vectors,
    widened,
)
from fp8_safeguard.kernels.numba_quantize import code_of
from fp8_safeguard.kernels.numba_stats import (
    AMAX,
    BLANK,
    HISTOGRAM,
    INF,
    LOST,
    NAN,
    NOISE,
    SATURATED,
    SIGNAL,
    SUM_SQ,
    add_sums,
    count_rows,
    enter,
)

X, Q, SCALE, INVERSE = range(4)
CHUNK = 1024
"""Columns of a patch: 128 rows of bfloat16 are 256 KiB, a part of the second-level cache."""


@exact
def stats_of_columns(
    bits_RC: Any, shift: Any, segments: Any, grid: Any, edges: Any, out_S: Any, scales_bC: Any, codes_RC: Any
) -> None:
    """`col` statistics of each segment into out [S,29].

    Scales and codes too, as encode_columns gives them, unless those are None.
    """
    wide_vectors()
    columns, row_block = bits_RC.shape[1], 0
    scratch, energy = np.empty((4, CHUNK), np.float32), np.empty((2, CHUNK))
    peaks = np.empty(CHUNK, np.int32)
    lost, sums = np.empty((2, 128), np.int64), np.empty(4)
    for segment in range(len(segments) - 1):
        out, low = out_S[segment], np.zeros(4)
        for top in range(segments[segment], segments[segment + 1], 128):
            bottom = min(top + 128, segments[segment + 1])
            lost[:] = 0
            sums[:] = 0.0
            for left in range(0, columns, CHUNK):
                patch = (top, bottom, left, min(left + CHUNK, columns))
                _measure_patch(bits_RC, shift, patch, grid, peaks, scratch, energy, lost, sums, out, codes_RC)
                if scales_bC is not None:
                    scales_bC[row_block, left : patch[3]] = scratch[SCALE, : patch[3] - left]
                for column in range(patch[3] - left):
                    enter(out, edges, energy[SIGNAL, column], energy[NOISE, column])
            add_sums(out, low, sums)
            count_rows(lost, bottom - top, columns, out)
            row_block += 1
        out[SUM_SQ:HISTOGRAM] += low


@exact
def _measure_patch(
    bits_RC: Any,
    shift: Any,
    patch: Any,
    grid: Any,
    peaks: Any,
    scratch: Any,
    energy: Any,
    lost: Any,
    sums: Any,
    out: Any,
    codes_RC: Any,
) -> None:
    """Every column's sums into `energy`, the patch's into `sums`, each row's zeros into `lost`."""
    wide_vectors()
    top, bottom, left, right = patch
    width = right - left
    divide = scale_columns(bits_RC, shift, patch, grid, peaks, scratch, out)
    energy[:] = 0.0
    x_W, q_W, s_W = scratch[X, :width], scratch[Q, :width], scratch[SCALE, :width]
    inverse_W, signal_W, noise_W = scratch[INVERSE, :width], energy[SIGNAL, :width], energy[NOISE, :width]
    for row in range(top, bottom):
        line = bits_RC[row, left:right]
        codes_W = None if codes_RC is None else codes_RC[row, left:right]
        zeros, blanks = _round_line(line, shift, divide, grid, s_W, inverse_W, x_W, q_W, codes_W)
        lost[LOST, row - top] += zeros
        lost[BLANK, row - top] += blanks
        sqq, s4 = _line_sums(x_W, q_W, s_W, signal_W, noise_W)
        sums[1] += sqq
        sums[3] += s4
    for column in range(width):
        sums[0] += energy[SIGNAL, column]
        sums[2] += energy[NOISE, column]


@exact
def scale_columns(bits_RC: Any, shift: Any, patch: Any, grid: Any, peaks: Any, scratch: Any, out: Any) -> Any:
    """Scales and their inverses of a patch's columns; whether every quotient needs a true division.

    amax, NaN, Inf and saturated values go into out.
    """
    wide_vectors()
    top, bottom, left, right = patch
    peaks_W = peaks[: right - left]
    peaks_W[:] = 0
    for row in range(top, bottom):
        _raise_peaks(bits_RC[row, left:right], shift, peaks_W)
    if peaks_W.max() >= INFINITY_BITS:
        peaks_W[:] = 0
        for row in range(top, bottom):
            _raise_finite_peaks(bits_RC[row, left:right], shift, peaks_W, out)
    divide = False
    for column in range(right - left):
        peak = peaks_W[column]
        s = block_scale(peak, grid)
        inverse = inverse_or_zero(s, grid)
        divide |= inverse == np.float32(0.0)
        scratch[SCALE, column], scratch[INVERSE, column] = s, inverse
        out[AMAX] = max(out[AMAX], np.float64(float_of(peak)))
        if np.float32(float_of(peak) / s) > grid[LAST_KEPT]:
            for row in range(top, bottom):
                x = float_of(finite_or_zero(magnitude(bits_RC[row, left + column], shift)))
                out[SATURATED] += np.float32(x / s) > grid[LAST_KEPT]
    return divide


@exact
def _raise_peaks(bits_W: Any, shift: Any, peaks_W: Any) -> None:
    """Largest magnitude of each column so far, as bits; NaN and Inf are the largest."""
    wide_vectors()
    for column in range(len(bits_W)):
        peaks_W[column] = max(peaks_W[column], magnitude(bits_W[column], shift))


@exact
def _raise_finite_peaks(bits_W: Any, shift: Any, peaks_W: Any, out: Any) -> None:
    """The same over finite elements, NaN and Inf counted into out."""
    nan, inf = 0, 0
    for column in range(len(bits_W)):
        bits = magnitude(bits_W[column], shift)
        nan += bits > INFINITY_BITS
        inf += bits == INFINITY_BITS
        peaks_W[column] = max(peaks_W[column], finite_or_zero(bits))
    out[NAN] += nan
    out[INF] += inf


@reordered
def _round_line(
    bits_W: Any,
    shift: Any,
    divide: Any,
    grid: Any,
    s_W: Any,
    inverse_W: Any,
    x_W: Any,
    q_W: Any,
    codes_W: Any,
) -> Any:
    """|x| and its rounded |x / s|, 0 where not finite; how many finite elements became and were zero.

    Codes are written unless codes_W is None, which compiles without them.
    """
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    zeros, blanks = np.int32(0), np.int32(0)
    for column in range(len(bits_W)):
        bits = magnitude(bits_W[column], shift)
        kept = finite_or_zero(bits)
        x = float_of(kept)
        s = s_W[column]
        ratio = np.float32(x / s) if divide else quotient(x, s, inverse_W[column])
        y = min(ratio, maximum)
        q = rounded(y, magic(y, quantum_shift, least_exponent))
        if codes_W is not None:
            codes_W[column] = code_of(widened(bits_W[column], shift), y, quantum_shift, least_exponent)
        x_W[column] = x
        q_W[column] = q
        finite = bits < INFINITY_BITS
        zeros = np.int32(zeros + np.int32((q == np.float32(0.0)) & finite))
        blanks = np.int32(blanks + np.int32((kept == 0) & finite))
    return zeros, blanks


@reordered
def _line_sums(x_W: Any, q_W: Any, s_W: Any, signal_W: Any, noise_W: Any) -> Any:
    """Add x^2 and (x - xq)^2 to each column's sums; the line's sums of xq^2 and x^4."""
    wide_vectors()
    sqq, s4 = 0.0, 0.0
    for column in range(len(x_W)):
        x = np.float64(x_W[column])
        xq = np.float64(q_W[column]) * np.float64(s_W[column])
        error = x - xq
        square = x * x
        signal_W[column] += square
        noise_W[column] += error * error
        sqq += xq * xq
        s4 += square * square
    return sqq, s4
