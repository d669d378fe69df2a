"""Triton: quantises a tile that a fused kernel computed."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: R rows, C columns, E experts. A fused kernel computes one float32 tile of its result, rounded to the dtype of the
# values, and gives it to finish_tile: as quantize_kernel does, which reads its tile instead. Tiles that are not plain go
# through memory to the kernel of triton_rare.py: a branch for them here would spill registers.

import triton
import triton.language as tl

from fp8_safeguard.kernels.triton_codes import MAGNITUDE_MASK, plain_codes, plain_ratio, plain_scale
from fp8_safeguard.kernels.triton_quantize import (
    ALIGNMENT,
    magnitude_of_blocks,
    store_blocks,
    store_row,
    strangers,
)
from fp8_safeguard.kernels.triton_segments import locate


@triton.jit
def place_tile(
    tile: tl.tensor, offsets_ptr: tl.tensor, segments: tl.tensor, rows: tl.tensor, rows_per_segment: tl.tensor,
    TILE: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Segment of a row tile, its first row and the segment's end row."""
    segment, first, end = locate(tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS)
    if ALIGNED:
        # Changes nothing but what the compiler knows; it forgets tl.multiple_of of a scalar.
        first, end = first // ALIGNMENT * ALIGNMENT, end // ALIGNMENT * ALIGNMENT
    return segment, first, end


@triton.jit
def used_rows(bounds_ptr: tl.tensor, experts: tl.tensor, rows: tl.tensor, BOUNDED: tl.constexpr) -> tl.tensor:
    """Rows that belong to experts: those behind hold nothing that may be read."""
    used = rows
    if BOUNDED:
        used = tl.minimum(tl.load(bounds_ptr + experts), rows)
    return used


@triton.jit
def rounded(value: tl.tensor, like_ptr: tl.tensor) -> tl.tensor:
    """float32 numbers as the dtype behind a pointer holds them."""
    return value.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def load_wide(
    base_ptr: tl.tensor, row_1: tl.tensor, column_1: tl.tensor, read: tl.tensor, stride: tl.tensor
) -> tl.tensor:
    """A float32 tile of a matrix whose columns lie next to each other; 0 where not read."""
    at = row_1.to(tl.int64) * stride + column_1
    return tl.load(base_ptr + at, mask=read, other=0.0).to(tl.float32)


@triton.jit
def finish_tile(
    x: tl.tensor, row_1: tl.tensor, column_1: tl.tensor, held: tl.tensor, end: tl.tensor, owned: tl.tensor,
    tile: tl.tensor, column_tile: tl.tensor, values_ptr: tl.tensor,
    row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor, block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor, columns: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Write values, codes and scales of a tile; x is 0 outside the tensor.

    A tile that is not plain is written as values whether they are wanted or not: the rare kernel reads them.
    """
    column_tiles = tl.cdiv(columns, x.shape[1])
    at = row_1.to(tl.int64) * columns + column_1
    if VALUES:
        tl.store(values_ptr + at, x.to(values_ptr.dtype.element_ty), mask=held)
    if ROW or BLOCKS != "":
        place = tile.to(tl.int64) * column_tiles + column_tile
        raw = x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
        row_amax = magnitude_of_blocks(raw, "row")
        block_amax = row_amax
        if BLOCKS != "":
            block_amax = magnitude_of_blocks(raw, BLOCKS)
        tile_amax = tl.max(tl.max(row_amax, axis=1), axis=0)
        odd = strangers(block_amax, plain_from)
        if ROW:
            odd = tl.maximum(odd, strangers(row_amax, plain_from))
        if (tile_amax <= plain_to) & (odd == 0):
            tl.store(rare_ptr + place, 0)
            if ROW:
                scale = plain_scale(row_amax, multiplier, E4M3, POW2)
                codes = plain_codes(plain_ratio(x, scale, POW2), E4M3)
                store_row(
                    codes, scale, row_1, column_1, held, end, columns, column_tile, row_codes_ptr, row_scale_ptr,
                    row_scale_stride_r, row_scale_stride_b,
                )  # fmt: skip
            if BLOCKS != "":
                scale = plain_scale(block_amax, multiplier, E4M3, POW2)
                codes = plain_codes(plain_ratio(x, scale, POW2), E4M3)
                store_blocks(
                    codes, scale, row_1, column_1, held, columns, tile, place, owned,
                    block_codes_ptr, block_scale_ptr, block_stride_r, block_stride_c, BLOCKS, SLOTS,
                )  # fmt: skip
        else:
            tl.store(rare_ptr + place, 1)
            if not VALUES:
                tl.store(values_ptr + at, x.to(values_ptr.dtype.element_ty), mask=held)
