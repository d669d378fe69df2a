"""Compiled TensorStats: one read of the tensor, no copy of it."""

# Shapes: R rows, C columns, S segments of rows (no block crosses one); a patch is the rows of one row of blocks
# times the W columns of a chunk, which the caches hold.
# A line is scaled and rounded in float32 into scratch, then summed in float64. Results are added to what the caller
# hands in.

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

CHUNK = 1024
"""Columns of a patch: 128 rows of them stay in the second-level cache, a line's scratch in the first."""

COUNT, ZEROS, UNDERFLOW, SATURATED, NAN, INF, ROWS, FLUSHED, AMAX = range(9)
SUM_SQ, SUM_SQ_Q, SUM_SQ_ERR, SUM_4TH, HISTOGRAM = range(9, 14)
SCALE, INVERSE = range(2)
SIGNAL, NOISE = range(2)
LOST, BLANK = range(2)


@exact
def stats_of_blocks(
    bits_RC: Any,
    shift: Any,
    segments: Any,
    block_rows: Any,
    grid: Any,
    edges: Any,
    out_S: Any,
    scales_b: Any,
    codes_RC: Any,
) -> None:
    """`row` (block_rows 1) or `tile` (128) statistics of each segment into out [S,29].

    Scales and codes too, as encode_blocks gives them, unless those are None.
    """
    wide_vectors()
    row_block = 0
    columns = bits_RC.shape[1]
    x_W, q_W = np.empty(128, np.float32), np.empty(128, np.float32)
    scales, peaks = np.empty((2, CHUNK // 128), np.float32), np.empty(CHUNK // 128, np.int32)
    energy = np.empty((2, CHUNK // 128))
    lost, sums = np.empty((2, block_rows), np.int64), np.empty(4)
    for segment in range(len(segments) - 1):
        out, low = out_S[segment], np.zeros(4)
        for top in range(segments[segment], segments[segment + 1], block_rows):
            bottom = min(top + block_rows, segments[segment + 1])
            lost[:] = 0
            sums[:] = 0.0
            for left in range(0, columns, CHUNK):
                right = min(left + CHUNK, columns)
                patch = (top, bottom, left, right)
                _scale_blocks(bits_RC, shift, patch, grid, peaks, scales, out)
                if scales_b is not None:
                    scales_b[row_block, left // 128 : (right + 127) // 128] = scales[
                        SCALE, : (right - left + 127) // 128
                    ]
                energy[:] = 0.0
                for row in range(top, bottom):
                    line = bits_RC[row, left:right]
                    codes = None if codes_RC is None else codes_RC[row, left:right]
                    zeros, blanks = _measure_line(line, shift, grid, scales, x_W, q_W, energy, sums, codes)
                    lost[LOST, row - top] += zeros
                    lost[BLANK, row - top] += blanks
                for block in range((right - left + 127) // 128):
                    enter(out, edges, energy[SIGNAL, block], energy[NOISE, block])
            add_sums(out, low, sums)
            count_rows(lost, bottom - top, columns, out)
            row_block += 1
        out[SUM_SQ:HISTOGRAM] += low


@exact
def _scale_blocks(bits_RC: Any, shift: Any, patch: Any, grid: Any, peaks: Any, scales: Any, out: Any) -> None:
    """Scales of a patch's blocks and their inverses; amax, NaN, Inf and saturated values into out."""
    wide_vectors()
    top, bottom, left, right = patch
    peaks_b = peaks[: (right - left + 127) // 128]
    peaks_b[:] = 0
    for row in range(top, bottom):
        raise_block_peaks(bits_RC[row, left:right], shift, peaks_b)
    if peaks_b.max() >= INFINITY_BITS:
        peaks_b[:] = 0
        for row in range(top, bottom):
            _raise_finite_peaks(bits_RC[row, left:right], shift, peaks_b, out)
    for block in range(len(peaks_b)):
        peak = peaks_b[block]
        out[AMAX] = max(out[AMAX], np.float64(float_of(peak)))
        s = block_scale(peak, grid)
        scales[SCALE, block], scales[INVERSE, block] = s, inverse_or_zero(s, grid)
        # Where the block's largest value is kept all are, and nobody needs to look.
        if np.float32(float_of(peak) / s) > grid[LAST_KEPT]:
            first = left + block * 128
            for row in range(top, bottom):
                line = bits_RC[row, first : min(first + 128, right)]
                out[SATURATED] += _saturated(line, shift, s, grid)


# The loops below count a block's start and a column within it, and slice nothing: a slice counts references, which
# costs as much as forty elements, and an index that might be negative keeps a loop from using vectors.


@exact
def raise_block_peaks(bits_W: Any, shift: Any, peaks_b: Any) -> None:
    """Largest magnitude of each block of a line so far, as bits; NaN and Inf are the largest."""
    wide_vectors()
    for block in range(len(peaks_b)):
        first = block * 128
        peak = peaks_b[block]
        for column in range(min(128, len(bits_W) - first)):
            peak = max(peak, magnitude(bits_W[first + column], shift))
        peaks_b[block] = peak


@exact
def _raise_finite_peaks(bits_W: Any, shift: Any, peaks_b: Any, out: Any) -> None:
    """The same over finite elements, NaN and Inf counted into out."""
    nan, inf = 0, 0
    for column in range(len(bits_W)):
        bits = magnitude(bits_W[column], shift)
        nan += bits > INFINITY_BITS
        inf += bits == INFINITY_BITS
        peaks_b[column // 128] = max(peaks_b[column // 128], finite_or_zero(bits))
    out[NAN] += nan
    out[INF] += inf


@exact
def _saturated(bits_W: Any, shift: Any, s: Any, grid: Any) -> Any:
    """Finite elements of a line that only the clamp keeps from rounding past the maximum."""
    count = 0
    for column in range(len(bits_W)):
        x = float_of(finite_or_zero(magnitude(bits_W[column], shift)))
        count += np.float32(x / s) > grid[LAST_KEPT]
    return count


@reordered
def _measure_line(
    bits_W: Any, shift: Any, grid: Any, scales: Any, x_W: Any, q_W: Any, energy: Any, sums: Any, codes_W: Any
) -> Any:
    """Round a line and take its sums, block by block; how many finite elements became and were zero.

    Codes are written unless codes_W is None, which compiles without them.

    Scratch holds a block's |x| and rounded |x / s|, 0 where not finite. The sums are exact up to the additions: code
    times scale has 28 bits, and their difference to x no more than 53.
    """
    wide_vectors()
    maximum = np.float32(grid[MAXIMUM])
    quantum_shift, least_exponent = np.int32(grid[QUANTUM_SHIFT]), np.int32(grid[LEAST_EXPONENT])
    zeros, blanks = np.int32(0), np.int32(0)
    for block in range((len(bits_W) + 127) // 128):
        first = block * 128
        width = min(128, len(bits_W) - first)
        s, inverse = scales[SCALE, block], scales[INVERSE, block]
        for column in range(width):
            bits = magnitude(bits_W[first + column], shift)
            kept = finite_or_zero(bits)
            x = float_of(kept)
            ratio = quotient(x, s, inverse) if inverse > np.float32(0.0) else np.float32(x / s)
            y = min(ratio, maximum)
            q = rounded(y, magic(y, quantum_shift, least_exponent))
            if codes_W is not None:
                sign = widened(bits_W[first + column], shift)
                codes_W[first + column] = code_of(sign, y, quantum_shift, least_exponent)
            x_W[column], q_W[column] = x, q
            finite = bits < INFINITY_BITS
            zeros = np.int32(zeros + np.int32((q == np.float32(0.0)) & finite))
            blanks = np.int32(blanks + np.int32((kept == 0) & finite))
        sxx, sqq, see, s4 = _line_sums(x_W, q_W, width, np.float64(s))
        energy[SIGNAL, block] += sxx
        energy[NOISE, block] += see
        sums[0] += sxx
        sums[1] += sqq
        sums[2] += see
        sums[3] += s4
    return zeros, blanks


@reordered
def _line_sums(x_W: Any, q_W: Any, width: Any, s: Any) -> Any:
    """Sums of x^2, xq^2, (x - xq)^2 and x^4 over a block's line."""
    wide_vectors()
    sxx, sqq, see, s4 = 0.0, 0.0, 0.0, 0.0
    for column in range(width):
        x = np.float64(x_W[column])
        xq = np.float64(q_W[column]) * s
        error = x - xq
        square = x * x
        sxx += square
        sqq += xq * xq
        see += error * error
        s4 += square * square
    return sxx, sqq, see, s4


@exact
def enter(out: Any, edges: Any, signal: Any, noise: Any) -> None:
    """One block into the histogram, by its ratio of signal to noise; a block of zeros is not counted."""
    if signal > 0.0:
        ratio = signal / noise if noise > 0.0 else np.inf
        place = 0
        for index in range(len(edges)):  # a search would branch on what is nearly random
            place += ratio >= edges[index]
        out[HISTOGRAM + place] += 1.0


@exact
def add_sums(out: Any, low: Any, sums: Any) -> None:
    """Add a stripe's sums to the totals, keeping what rounding drops in `low` (Knuth's two-sum).

    So the number of stripes does not add to the error.
    """
    for index in range(4):
        before, value = out[SUM_SQ + index], sums[index]
        after = before + value
        part = after - before
        low[index] += (before - (after - part)) + (value - part)
        out[SUM_SQ + index] = after


@exact
def count_rows(lost: Any, count: Any, columns: Any, out: Any) -> None:
    """The counts that whole rows decide: a row is flushed if all of it is zero now and not all of it was."""
    for row in range(count):
        zeros, blanks = lost[LOST, row], lost[BLANK, row]
        out[ZEROS] += zeros
        out[UNDERFLOW] += zeros - blanks
        out[FLUSHED] += (zeros == columns) & (blanks < columns)
    out[COUNT] += count * columns
    out[ROWS] += count
