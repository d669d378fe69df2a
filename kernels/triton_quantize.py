"""Triton: one read gives row codes, column codes and TensorStats."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: R rows (all leading dimensions together), C columns, E experts, b counts 128-blocks, S a TensorStats vector.
# A tile is plain if its numbers are finite and its blocks neither very large, very small nor very different: the
# usual case. Any other tile is left, with a mark, to the kernel of triton_rare.py, which costs registers here.

import triton
import triton.language as tl

from fp8_safeguard.kernels.triton_codes import (
    MAGNITUDE_MASK,
    decode,
    plain_codes,
    plain_ratio,
    plain_scale,
)
from fp8_safeguard.kernels.triton_segments import locate
from fp8_safeguard.kernels.triton_stats import WIDTH, store_plain

BLOCK = tl.constexpr(128)
ALIGNMENT = tl.constexpr(16)
PLAIN_RANGE = tl.constexpr(40 << 23)
"""Binades between the largest and the smallest block of a plain tile, as float bits: fourth powers stay normal."""


@triton.jit
def load_tile(
    x_ptr: tl.tensor, x_scale_ptr: tl.tensor, row_1: tl.tensor, column_1: tl.tensor, held: tl.tensor,
    stride_r: tl.tensor, stride_c: tl.tensor, scale_stride_r: tl.tensor, scale_stride_b: tl.tensor,
    CODES: tl.constexpr, E4M3: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A float32 tile, 0 outside the tensor: of any float dtype, or of `row` codes times their scales."""
    row, column = row_1.to(tl.int64), column_1.to(tl.int64)
    at = row * stride_r + column * stride_c
    if CODES:
        codes = tl.load(x_ptr + at, mask=held, other=0)
        scale = tl.load(
            x_scale_ptr + row * scale_stride_r + (column // BLOCK) * scale_stride_b, mask=held, other=0.0
        )
        x = decode(codes, E4M3) * scale
    else:
        x = tl.load(x_ptr + at, mask=held, other=0.0).to(tl.float32)
    return x


@triton.jit
def magnitude_of_blocks(magnitude: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Largest magnitude of each block, its reduced axes kept."""
    if BLOCKS == "row":
        amax = tl.max(magnitude, axis=1, keep_dims=True)
    else:
        amax = tl.max(magnitude, axis=0, keep_dims=True)
        if BLOCKS == "tile":
            amax = tl.max(amax, axis=1, keep_dims=True)
    return amax


@triton.jit
def strangers(amax_bits: tl.tensor, least: tl.tensor) -> tl.tensor:
    """How many blocks are neither zero nor at least `least`."""
    outside = ((amax_bits > 0) & (amax_bits < least)).to(tl.int32)
    return tl.max(tl.max(outside, axis=1), axis=0)


@triton.jit
def store_row(
    codes: tl.tensor, scale: tl.tensor, row_1: tl.tensor, column_1: tl.tensor, held: tl.tensor, end: tl.tensor,
    columns: tl.tensor, column_tile: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor,
    scale_stride_r: tl.tensor, scale_stride_b: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Write codes and scales of a tile in the row layout."""
    row = row_1.to(tl.int64)
    tl.store(codes_ptr + row * columns + column_1, codes, mask=held)
    tl.store(scale_ptr + row * scale_stride_r + column_tile * scale_stride_b, scale, mask=row_1 < end)


@triton.jit
def store_blocks(
    codes: tl.tensor, scale: tl.tensor, row_1: tl.tensor, column_1: tl.tensor, held: tl.tensor,
    columns: tl.tensor, tile: tl.tensor, place: tl.tensor, owned: tl.tensor,
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, stride_r: tl.tensor, stride_c: tl.tensor,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write codes and scales of a tile in blocks. Rows that no segment owns become zeros, whatever lies there."""
    at = row_1.to(tl.int64) * stride_r + column_1.to(tl.int64) * stride_c
    if (SLOTS == 0) | owned:
        tl.store(codes_ptr + at, codes, mask=held)
    else:
        tl.store(codes_ptr + at, tl.zeros(codes.shape, tl.uint8), mask=held)
        scale = tl.full(scale.shape, 1.0, tl.float32)
    if BLOCKS == "col":
        tl.store(scale_ptr + tile.to(tl.int64) * columns + column_1, scale, mask=column_1 < columns)
    else:
        tl.store(scale_ptr + place + tl.zeros((1, 1), tl.int32), scale)


@triton.jit
def store_flags(
    flags: tl.tensor, flags_ptr: tl.tensor, slot: tl.tensor, rows: tl.tensor, first: tl.tensor, end: tl.tensor,
    column_tile: tl.tensor, column_tiles: tl.tensor, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write one byte a row: whether its part in this tile lives on, and whether it lost something."""
    row = first + tl.arange(0, TILE)
    at = (tl.cast(slot, tl.int64) * rows + row) * column_tiles + column_tile
    tl.store(flags_ptr + at, flags.to(tl.uint8), mask=row < end)


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor, x_scale_ptr: tl.tensor, offsets_ptr: tl.tensor,
    row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor, block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, partials_ptr: tl.tensor, blocks_ptr: tl.tensor, flags_ptr: tl.tensor,
    multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor, row_tiles: tl.tensor,
    x_stride_r: tl.tensor, x_stride_c: tl.tensor, x_scale_stride_r: tl.tensor, x_scale_stride_b: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor,
    block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    TILE: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr, CODES: tl.constexpr, STORE: tl.constexpr,
    STATS: tl.constexpr, SATURATES: tl.constexpr, E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """q = RNE(clamp(x / s)), s = amax / max, for the `row` layout and for `col` or `tile` blocks, of one tile.

    ROW and BLOCKS ("", "col" or "tile") say which layouts; STORE whether codes and scales are wanted (else only
    statistics are). CODES: x holds `row` codes with scales of their own (re-blocking). SATURATES: the multiplier is
    below 1, so that numbers beyond the format's maximum exist. ALIGNED: every segment starts and ends at a multiple of 16.
    """
    column_tiles = tl.cdiv(columns, BLOCK)
    pid = tl.program_id(0)
    tile = pid // column_tiles
    column_tile = pid - tile * column_tiles
    segment, first, end = locate(tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS)
    if ALIGNED:
        # Changes nothing but what the compiler knows; it forgets tl.multiple_of of a scalar.
        first, end = first // ALIGNMENT * ALIGNMENT, end // ALIGNMENT * ALIGNMENT
    owned = segment < segments
    row_1 = first + tl.arange(0, TILE)[:, None]
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < end) & (column_1 < columns)
    x = load_tile(
        x_ptr, x_scale_ptr, row_1, column_1, held,
        x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_b, CODES, E4M3,
    )  # fmt: skip
    valid = tl.maximum(tl.minimum(end - first, TILE), 0) * tl.minimum(columns - column_tile * BLOCK, BLOCK)
    padding = TILE * BLOCK - valid
    place = tile.to(tl.int64) * column_tiles + column_tile
    BLOCK_SLOT: tl.constexpr = 1 if ROW else 0
    block_place = place + BLOCK_SLOT * tl.cast(row_tiles, tl.int64) * column_tiles
    row_partial_ptr, block_partial_ptr = partials_ptr + place * WIDTH, partials_ptr + block_place * WIDTH
    row_blocks_ptr, block_blocks_ptr = blocks_ptr + place * (2 * TILE), blocks_ptr + block_place * (2 * TILE)

    raw = x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    row_amax = magnitude_of_blocks(raw, "row")
    block_amax = row_amax
    if BLOCKS != "":
        block_amax = magnitude_of_blocks(raw, BLOCKS)
    tile_amax = tl.max(tl.max(row_amax, axis=1), axis=0)
    least = tl.maximum(plain_from, tile_amax - PLAIN_RANGE)
    odd = strangers(block_amax, least)
    if ROW:
        odd = tl.maximum(odd, strangers(row_amax, least))
    if (tile_amax <= plain_to) & (odd == 0):
        tl.store(rare_ptr + place, 0)
        if ROW:
            scale = plain_scale(row_amax, multiplier, E4M3, POW2)
            ratio = plain_ratio(x, scale, POW2)
            codes = plain_codes(ratio, E4M3)
            if STORE:
                store_row(
                    codes, scale, row_1, column_1, held, end, columns, column_tile, row_codes_ptr, row_scale_ptr,
                    row_scale_stride_r, row_scale_stride_b,
                )  # fmt: skip
            if STATS:
                flags = store_plain(
                    x, ratio, codes, scale, tile_amax, valid, padding,
                    row_partial_ptr, row_blocks_ptr, "row", E4M3, SATURATES,
                )  # fmt: skip
                store_flags(flags, flags_ptr, 0, rows, first, end, column_tile, column_tiles, TILE)
        if BLOCKS != "":
            if STATS and ROW:
                # Read again, from the cache: holding the tile through the sums above would spill registers.
                x = load_tile(
                    x_ptr, x_scale_ptr, row_1, column_1, held,
                    x_stride_r, x_stride_c, x_scale_stride_r, x_scale_stride_b, CODES, E4M3,
                )  # fmt: skip
            scale = plain_scale(block_amax, multiplier, E4M3, POW2)
            ratio = plain_ratio(x, scale, POW2)
            codes = plain_codes(ratio, E4M3)
            if STORE:
                store_blocks(
                    codes, scale, row_1, column_1, held, columns, tile, place, owned,
                    block_codes_ptr, block_scale_ptr, block_stride_r, block_stride_c, BLOCKS, SLOTS,
                )  # fmt: skip
            if STATS:
                flags = store_plain(
                    x, ratio, codes, scale, tile_amax, valid, padding,
                    block_partial_ptr, block_blocks_ptr, BLOCKS, E4M3, SATURATES,
                )  # fmt: skip
                store_flags(flags, flags_ptr, BLOCK_SLOT, rows, first, end, column_tile, column_tiles, TILE)
    else:
        tl.store(rare_ptr + place, 1)
