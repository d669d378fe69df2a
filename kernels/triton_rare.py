"""Triton: quantises and measures the tiles that are not plain, literally."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# NaN and Inf, float32 subnormals, extreme multipliers, blocks of very different magnitude: rare, so short and literal
# rather than fast, in pieces that fit into registers.

import triton
import triton.language as tl

from fp8_safeguard.kernels.triton_codes import (
    BOUND_OF_SCALE,
    block_scale,
    decode,
    divide,
    encode,
    exponent_of,
    finite_magnitude,
    is_finite,
    plain_codes,
    power_of_two,
)
from fp8_safeguard.kernels.triton_quantize import BLOCK, load_tile, magnitude_of_blocks
from fp8_safeguard.kernels.triton_segments import locate
from fp8_safeguard.kernels.triton_stats import (
    ALIVE,
    AMAX,
    BINS_AT,
    COUNT,
    INF,
    LOST,
    NAN,
    SATURATED,
    SUM_4TH,
    SUM_SQ,
    SUM_SQ_ERR,
    SUM_SQ_Q,
    UNDERFLOW,
    WIDTH,
    ZEROS,
    bins_of,
    block_sum,
    float64_power,
    total,
)

PIECE = tl.constexpr(32)
"""Rows (or columns, of `col` blocks) that are in registers at a time."""


@triton.jit
def entry(column: tl.constexpr, value: tl.tensor) -> tl.tensor:
    """A vector of 32 with that value in that column."""
    return tl.where(tl.arange(0, WIDTH) == column, value.to(tl.float64), 0.0)


@triton.jit
def count(mask: tl.tensor) -> tl.tensor:
    """How many elements are true."""
    return total(mask.to(tl.int32))


@triton.jit
def counts_of(x: tl.tensor, ratio: tl.tensor, held: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """Counts of a piece as a vector of 32, and the flags of its rows."""
    # Half the smallest subnormal is a tie that goes to zero. A ratio of what is not finite is NaN, and no zero.
    TO_ZERO: tl.constexpr = 0.0009765625 if E4M3 else 0.00000762939453125
    LAST_KEPT: tl.constexpr = 464.0 if E4M3 else 61439.99609375
    zero = held & (tl.abs(ratio) <= TO_ZERO)
    lost = zero & (x != 0)
    not_a_number = held & (x != x)
    vector = entry(COUNT, count(held)) + entry(ZEROS, count(zero)) + entry(UNDERFLOW, count(lost))
    vector += entry(SATURATED, count(tl.abs(ratio) > LAST_KEPT)) + entry(NAN, count(not_a_number))
    vector += entry(INF, count((is_finite(x) == 0) & (x == x)))
    alive = tl.max((held & (zero == 0)).to(tl.int32), axis=1)
    return vector, alive * ALIVE + tl.max(lost.to(tl.int32), axis=1) * LOST


@triton.jit
def sums_of(
    x: tl.tensor,
    ratio: tl.tensor,
    amax_bits: tl.tensor,
    scale: tl.tensor,
    BLOCKS: tl.constexpr,
    E4M3: tl.constexpr,
) -> tl.tensor:
    """Sums of a piece as a vector of 32, and signal and noise of its blocks.

    Each block in units of its own binade; across blocks, float64.
    """
    exponent = exponent_of(amax_bits)
    unit = power_of_two(-exponent)
    finite = is_finite(x)
    units = tl.where(finite, x, 0.0) * unit
    value = tl.where(finite, decode(plain_codes(ratio, E4M3), E4M3), 0.0)
    # A scale that overflows in these units belongs to a block of zero codes: any number does.
    error = tl.fma(-value, tl.minimum(scale * unit, BOUND_OF_SCALE), units)
    square = units * units
    signal, noise = block_sum(square, BLOCKS), block_sum(error * error, BLOCKS)
    quantised = block_sum(value * value, BLOCKS).to(tl.float64)
    fourth = block_sum(square * square, BLOCKS).to(tl.float64)
    binade, step = float64_power(exponent), scale.to(tl.float64)
    squared = binade * binade
    vector = entry(SUM_SQ, total(signal.to(tl.float64) * squared))
    vector += entry(SUM_SQ_Q, total(quantised * (step * step)))
    vector += entry(SUM_SQ_ERR, total(noise.to(tl.float64) * squared))
    vector += entry(SUM_4TH, total(fourth * (squared * squared)))
    return vector, signal, noise


@triton.jit
def histogram_of(signal: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Bins of the blocks as a vector of 32."""
    SIZE: tl.constexpr = signal.shape[0] * signal.shape[1]
    place = tl.reshape(bins_of(signal, noise), (SIZE,))
    column = tl.arange(0, WIDTH)
    counted = tl.sum((place[:, None] == column[None, :]).to(tl.int32), axis=0)
    return tl.where(column >= BINS_AT, counted, 0).to(tl.float64)


@triton.jit
def quantize_rare_kernel(
    x_ptr: tl.tensor, x_scale_ptr: tl.tensor, offsets_ptr: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, partials_ptr: tl.tensor, blocks_ptr: tl.tensor, flags_ptr: tl.tensor,
    multiplier: tl.tensor, rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor,
    row_tiles: tl.tensor, slot: tl.tensor,
    x_stride_r: tl.tensor, x_stride_c: tl.tensor, x_scale_stride_r: tl.tensor, x_scale_stride_b: tl.tensor,
    codes_stride_r: tl.tensor, codes_stride_c: tl.tensor, scale_stride_r: tl.tensor, scale_stride_b: tl.tensor,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, CODES: tl.constexpr, STORE: tl.constexpr, STATS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """What quantize_kernel does, for the marked ones among CHUNK tiles and one layout."""
    column_tiles = tl.cdiv(columns, BLOCK)
    tiles = row_tiles * column_tiles
    begin = tl.program_id(0) * CHUNK
    near = begin + tl.arange(0, CHUNK)
    marked = tl.load(rare_ptr + near, mask=near < tiles, other=0)
    if tl.max(marked.to(tl.int32), axis=0) > 0:
        for index in range(begin, tl.minimum(begin + CHUNK, tiles)):
            if tl.load(rare_ptr + index) != 0:
                tile = index // column_tiles
                column_tile = index - tile * column_tiles
                segment, first, end = locate(tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS)
                owned = segment < segments
                place = (tl.cast(slot, tl.int64) * row_tiles + tile) * column_tiles + column_tile
                HIGH: tl.constexpr = TILE if BLOCKS == "col" else PIECE
                WIDE: tl.constexpr = PIECE if BLOCKS == "col" else BLOCK
                PIECES: tl.constexpr = BLOCK // PIECE if BLOCKS == "col" else TILE // PIECE
                down, across = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
                tile_amax = tl.zeros((1, 1), tl.int32)
                if BLOCKS == "tile":
                    for piece in range(PIECES):
                        row_1, column_1 = first + piece * PIECE + down, column_tile * BLOCK + across
                        x = load_tile(
                            x_ptr, x_scale_ptr, row_1, column_1, (row_1 < end) & (column_1 < columns),
                            x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_b, CODES, E4M3,
                        )  # fmt: skip
                        tile_amax = tl.maximum(tile_amax, magnitude_of_blocks(finite_magnitude(x), "tile"))
                vector, amax_seen = tl.zeros((WIDTH,), tl.float64), tl.zeros((1, 1), tl.int32)
                signal_seen, noise_seen = tl.zeros((1, 1), tl.float32), tl.zeros((1, 1), tl.float32)
                flags_seen = tl.zeros((HIGH,), tl.int32)
                for piece in range(PIECES):
                    if BLOCKS == "col":
                        row_1, column_1 = first + down, column_tile * BLOCK + piece * PIECE + across
                    else:
                        row_1, column_1 = first + piece * PIECE + down, column_tile * BLOCK + across
                    held = (row_1 < end) & (column_1 < columns)
                    x = load_tile(
                        x_ptr, x_scale_ptr, row_1, column_1, held,
                        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_b, CODES, E4M3,
                    )  # fmt: skip
                    magnitude = finite_magnitude(x)
                    if BLOCKS == "tile":
                        amax = tile_amax
                    else:
                        amax = magnitude_of_blocks(magnitude, BLOCKS)
                    scale = block_scale(amax, multiplier, E4M3, POW2)
                    ratio = divide(x, scale)
                    if STORE:
                        codes = encode(x, ratio, E4M3)
                        kept = scale
                        if BLOCKS != "row" and SLOTS > 0:
                            codes = tl.where(owned, codes, 0).to(tl.uint8)
                            kept = tl.where(owned, scale, 1.0)
                        at = row_1.to(tl.int64) * codes_stride_r + column_1.to(tl.int64) * codes_stride_c
                        tl.store(codes_ptr + at, codes, mask=held)
                        if BLOCKS == "row":
                            at = row_1.to(tl.int64) * scale_stride_r + column_tile * scale_stride_b
                            tl.store(scale_ptr + at, kept, mask=row_1 < end)
                        elif BLOCKS == "col":
                            at = tile.to(tl.int64) * columns + column_1
                            tl.store(scale_ptr + at, kept, mask=column_1 < columns)
                        else:
                            tl.store(scale_ptr + index + tl.zeros((1, 1), tl.int64), kept)
                    if STATS:
                        counts, flags = counts_of(x, ratio, held, E4M3)
                        sums, signal, noise = sums_of(x, ratio, amax, scale, BLOCKS, E4M3)
                        vector += counts + sums
                        amax_seen = tl.maximum(amax_seen, magnitude_of_blocks(magnitude, "tile"))
                        if BLOCKS == "tile":
                            signal_seen += signal
                            noise_seen += noise
                        else:
                            vector += histogram_of(signal, noise)
                        flags_seen = flags_seen | flags
                        if BLOCKS != "col":
                            row = first + piece * PIECE + tl.arange(0, HIGH)
                            at = (tl.cast(slot, tl.int64) * rows + row) * column_tiles + column_tile
                            tl.store(flags_ptr + at, flags.to(tl.uint8), mask=row < end)
                if STATS:
                    if BLOCKS == "tile":
                        vector += histogram_of(signal_seen, noise_seen)
                    if BLOCKS == "col":
                        row = first + tl.arange(0, HIGH)
                        at = (tl.cast(slot, tl.int64) * rows + row) * column_tiles + column_tile
                        tl.store(flags_ptr + at, flags_seen.to(tl.uint8), mask=row < end)
                    amax = total(amax_seen.to(tl.float32, bitcast=True))
                    vector += entry(AMAX, amax)
                    tl.store(partials_ptr + place * WIDTH + tl.arange(0, WIDTH), vector)
                    # Its blocks are in the histogram already.
                    at = blocks_ptr + place * (2 * TILE) + tl.arange(0, 2 * TILE)
                    tl.store(at, tl.zeros((2 * TILE,), tl.float32))
