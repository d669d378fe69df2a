"""Triton: which segment of rows a tile belongs to."""

# mypy: disable-error-code="untyped-decorator,import-untyped"

import triton
import triton.language as tl


@triton.jit
def tiles_of_segments(
    offsets_ptr: tl.tensor, segments: tl.tensor, rows: tl.tensor, TILE: tl.constexpr, SLOTS: tl.constexpr
) -> tl.tensor:
    """First row, end row and running tile count of each segment; slot `segments` holds the rows behind the last.

    Offsets stay on the device: every program reads them and counts for itself. SLOTS is a power of two above
    `segments`.
    """
    slot = tl.arange(0, SLOTS)
    start = tl.load(offsets_ptr + slot, mask=slot <= segments, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + slot + 1, mask=slot < segments, other=0).to(tl.int32)
    end = tl.where(slot == segments, rows, end)
    tiles = tl.where(slot <= segments, tl.cdiv(tl.maximum(end - start, 0), TILE), 0)
    return start, end, tl.cumsum(tiles, 0), tiles


@triton.jit
def pick(values: tl.tensor, index: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """values[index] of a vector; 0 beyond its end."""
    return tl.sum(tl.where(tl.arange(0, SLOTS) == index, values, 0), axis=0)


@triton.jit
def locate(
    tile: tl.tensor,
    offsets_ptr: tl.tensor,
    segments: tl.tensor,
    rows: tl.tensor,
    rows_per_segment: tl.tensor,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
) -> tl.tensor:
    """Segment of a row tile, the tile's first row and the segment's end row. Equal segments where SLOTS is 0.

    A tile beyond all segments gets an empty range.
    """
    if SLOTS == 0:
        tiles = tl.cdiv(rows_per_segment, TILE)
        segment = tile // tiles
        first = segment * rows_per_segment + (tile - segment * tiles) * TILE
        end = (segment + 1) * rows_per_segment
    else:
        starts, ends, counted, tiles = tiles_of_segments(offsets_ptr, segments, rows, TILE, SLOTS)
        segment = tl.sum(tl.where(counted <= tile, 1, 0), axis=0)
        before = pick(counted - tiles, segment, SLOTS)
        first = pick(starts, segment, SLOTS) + (tile - before) * TILE
        end = pick(ends, segment, SLOTS)
        first = tl.where(segment > segments, rows, first)
    return segment, first, end
