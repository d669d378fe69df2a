"""Triton: TensorStats while a tile is quantised, summed in a fixed order."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Partials are float64 [slots, row tiles, column tiles, 32]: the 13 columns of TensorStats, three unused, 16 bins. Blocks
# are float32 [slots, row tiles, column tiles, 2, blocks]: signal and noise of each block, in units of the tile's binade.
# No atomics: the same input gives the same bits, whatever order the programs ran in.

import triton
import triton.language as tl

from fp8_safeguard.kernels.reference import SQNR_RATIO_EDGES
from fp8_safeguard.kernels.triton_codes import decode, exponent_of, power_of_two
from fp8_safeguard.kernels.triton_segments import locate, pick, tiles_of_segments
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

WIDTH = tl.constexpr(32)
BINS_AT = tl.constexpr(16)
LENGTH = tl.constexpr(VECTOR_LENGTH)
USED = tl.constexpr(len(COLUMNS))
EDGES = tl.constexpr(SQNR_RATIO_EDGES)
INNER_EDGES = tl.constexpr(len(SQNR_RATIO_EDGES))

COUNT = tl.constexpr(COLUMNS.index("count"))
ZEROS = tl.constexpr(COLUMNS.index("zeros"))
UNDERFLOW = tl.constexpr(COLUMNS.index("underflow"))
SATURATED = tl.constexpr(COLUMNS.index("saturated"))
NAN = tl.constexpr(COLUMNS.index("nan"))
INF = tl.constexpr(COLUMNS.index("inf"))
ROWS = tl.constexpr(COLUMNS.index("rows"))
ROWS_FLUSHED = tl.constexpr(COLUMNS.index("rows_flushed"))
AMAX = tl.constexpr(COLUMNS.index("amax"))
SUM_SQ = tl.constexpr(COLUMNS.index("sum_sq"))
SUM_SQ_Q = tl.constexpr(COLUMNS.index("sum_sq_q"))
SUM_SQ_ERR = tl.constexpr(COLUMNS.index("sum_sq_err"))
SUM_4TH = tl.constexpr(COLUMNS.index("sum_4th"))

ALIVE = tl.constexpr(1)
"""Flag of a row's part in one column tile: some element is not a zero code."""
LOST = tl.constexpr(2)
"""Flag of a row's part: some non-zero element became zero."""


@triton.jit
def block_sum(values: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Sum over each block of the tile, kept as [rows, 1], [1, columns] or [1, 1]."""
    if BLOCK == "row":
        summed = tl.sum(values, axis=1, keep_dims=True)
    elif BLOCK == "col":
        summed = tl.sum(values, axis=0, keep_dims=True)
    else:
        summed = tl.sum(tl.sum(values, axis=1, keep_dims=True), axis=0, keep_dims=True)
    return summed


@triton.jit
def total(values: tl.tensor) -> tl.tensor:
    """Sum of all elements, as a scalar."""
    return tl.sum(tl.sum(values, axis=1), axis=0)


@triton.jit
def float64_power(exponent: tl.tensor) -> tl.tensor:
    """2^exponent as float64."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def bins_of(signal: tl.tensor, noise: tl.tensor) -> tl.tensor:
    """Place of each block's SQNR bin in a vector of 32; 0 for a block without signal, which is not counted."""
    bins = tl.zeros(signal.shape, tl.int32) + BINS_AT
    for edge in tl.static_range(INNER_EDGES):
        bins += (signal >= noise * EDGES[edge]).to(tl.int32)
    return tl.where(signal > 0, bins, 0)


@triton.jit
def store_plain(
    x: tl.tensor, ratio: tl.tensor, codes: tl.tensor, scale: tl.tensor, tile_amax_bits: tl.tensor,
    valid: tl.tensor, padding: tl.tensor, partial_ptr: tl.tensor, blocks_ptr: tl.tensor,
    BLOCK: tl.constexpr, E4M3: tl.constexpr, SATURATES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write what one layout of a plain tile adds to the statistics, and return the flags of its rows.

    Sums are float32 in units of the tile's binade, so that 1e-30 sums as 1 does; an element's error has one rounding.
    Elements outside the tensor were loaded as 0, so they only have to be taken off the zeros. What does not depend on
    the layout is computed the same way for both, for the compiler to do it once.
    """
    SIZE: tl.constexpr = x.shape[0] * x.shape[1]
    # 464 is a tie that goes down to 448, 61440 one that goes past 57344: the last kept ratio is just below it.
    LAST_KEPT: tl.constexpr = 464.0 if E4M3 else 61439.99609375
    # First, so that the ratios need not be held.
    if SATURATES:
        saturated = total((tl.abs(ratio) > LAST_KEPT).to(tl.int32))
        tl.store(partial_ptr + SATURATED, saturated.to(tl.float64))
    else:
        tl.store(partial_ptr + SATURATED, 0.0)
    value = decode(codes, E4M3)
    nonzero = tl.sum((x != 0).to(tl.int32), axis=1)
    alive = tl.sum((value != 0).to(tl.int32), axis=1)
    survivors = tl.sum(alive, axis=0)
    exponent = exponent_of(tile_amax_bits)
    unit = power_of_two(-exponent)
    units = x * unit
    scale_units = scale * unit
    error = tl.fma(-value, scale_units, units)
    square = units * units
    signal, noise = block_sum(square, BLOCK), block_sum(error * error, BLOCK)
    BLOCKS: tl.constexpr = x.shape[1] if BLOCK == "col" else x.shape[0]
    if BLOCK == "row":
        at = tl.arange(0, BLOCKS)[:, None]
    elif BLOCK == "col":
        at = tl.arange(0, BLOCKS)[None, :]
    else:
        at = tl.zeros((1, 1), tl.int32)
    tl.store(blocks_ptr + at, signal)
    tl.store(blocks_ptr + BLOCKS + at, noise)
    binade = float64_power(exponent)
    squared = binade * binade
    tl.store(partial_ptr + COUNT, valid.to(tl.float64))
    tl.store(partial_ptr + ZEROS, (-survivors - padding).to(tl.float64) + SIZE)
    tl.store(partial_ptr + UNDERFLOW, (tl.sum(nonzero, axis=0) - survivors).to(tl.float64))
    tl.store(partial_ptr + NAN, 0.0)
    tl.store(partial_ptr + INF, 0.0)
    tl.store(partial_ptr + AMAX, tile_amax_bits.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(partial_ptr + SUM_SQ, 0.0)
    tl.store(partial_ptr + SUM_SQ_ERR, 0.0)
    quantised = total(block_sum(value * value, BLOCK) * scale_units * scale_units)
    tl.store(partial_ptr + SUM_SQ_Q, quantised.to(tl.float64) * squared)
    tl.store(partial_ptr + SUM_4TH, total(square * square).to(tl.float64) * (squared * squared))
    tl.store(partial_ptr + BINS_AT + tl.arange(0, BINS_AT), tl.zeros((BINS_AT,), tl.float64))
    return tl.where(alive > 0, ALIVE, 0) + tl.where(nonzero > alive, LOST, 0)


@triton.jit
def sum_column_tiles_kernel(
    partials_ptr: tl.tensor, blocks_ptr: tl.tensor, flags_ptr: tl.tensor, offsets_ptr: tl.tensor, sums_ptr: tl.tensor,
    rows: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor,
    tile_slot: tl.tensor,
    TILE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Partials and blocks of one row of tiles to one vector [32], with its rows and flushed rows.

    `tile_slot` is the slot whose tiles are one block each.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    _, first, end = locate(tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS)
    row = first + tl.arange(0, TILE)
    inside = row < end
    column = tl.arange(0, WIDTH)
    block = tl.arange(0, TILE)
    blocks = tl.where(slot == tile_slot, 1, TILE)
    place = (slot * row_tiles + tile).to(tl.int64)
    sums, amax = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    square, error = tl.zeros((CHUNK,), tl.float64), tl.zeros((CHUNK,), tl.float64)
    counts = tl.zeros((TILE, WIDTH), tl.int32)
    flags = tl.zeros((TILE,), tl.int32)
    flags_of_row = flags_ptr + (slot.to(tl.int64) * rows + row) * column_tiles
    for start in range(0, column_tiles, CHUNK):
        part = start + tl.arange(0, CHUNK)
        held = part < column_tiles
        at = (place * column_tiles + part) * WIDTH
        known = (column < USED) | (column >= BINS_AT)
        values = tl.load(
            partials_ptr + at[:, None] + column[None, :],
            mask=held[:, None]
            & known[None, :]
            & (column != ROWS)[None, :]
            & (column != ROWS_FLUSHED)[None, :],
            other=0.0,
        )
        sums, amax = sums + tl.sum(values, axis=0), tl.maximum(amax, tl.max(values, axis=0))
        largest = tl.load(partials_ptr + at + AMAX, mask=held, other=0.0).to(tl.float32)
        binade = float64_power(exponent_of(largest.to(tl.int32, bitcast=True)))
        from_block = blocks_ptr + ((place * column_tiles + part) * (2 * TILE))[:, None] + block[None, :]
        wanted = held[:, None] & (block < blocks)[None, :]
        signal = tl.load(from_block, mask=wanted, other=0.0)
        noise = tl.load(from_block + TILE, mask=wanted, other=0.0)
        square += tl.sum(signal.to(tl.float64), axis=1) * (binade * binade)
        error += tl.sum(noise.to(tl.float64), axis=1) * (binade * binade)
        bins = bins_of(signal, noise)
        counts += tl.sum((bins[:, :, None] == column[None, None, :]).to(tl.int32), axis=0)
        seen = tl.load(flags_of_row[:, None] + part[None, :], mask=inside[:, None] & held[None, :], other=0)
        alive = tl.max((seen & ALIVE).to(tl.int32), axis=1)
        flags = flags | alive | tl.max((seen & LOST).to(tl.int32), axis=1)
    flushed = tl.sum((inside & (flags == LOST)).to(tl.int32), axis=0).to(tl.float64)
    measured = tl.sum(inside.to(tl.int32), axis=0).to(tl.float64)
    sums = tl.where(column == AMAX, amax, sums)
    sums += tl.where(column >= BINS_AT, tl.sum(counts, axis=0).to(tl.float64), 0.0)
    sums += tl.where(column == SUM_SQ, tl.sum(square, axis=0), 0.0)
    sums += tl.where(column == SUM_SQ_ERR, tl.sum(error, axis=0), 0.0)
    sums += tl.where(column == ROWS, measured, 0.0)
    sums += tl.where(column == ROWS_FLUSHED, flushed, 0.0)
    tl.store(sums_ptr + place * WIDTH + column, sums)


@triton.jit
def sum_row_tiles_kernel(
    sums_ptr: tl.tensor, offsets_ptr: tl.tensor, out_ptr: tl.tensor,
    rows: tl.tensor, segments: tl.tensor, row_tiles: tl.tensor,
    TILE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Vectors of the row tiles of one segment (of all tiles where SLOTS is 0) to one TensorStats vector [29]."""
    segment, slot = tl.program_id(0), tl.program_id(1)
    begin, stop = 0, row_tiles
    if SLOTS > 0:
        _, _, counted, tiles = tiles_of_segments(offsets_ptr, segments, rows, TILE, SLOTS)
        stop = pick(counted, segment, SLOTS)
        begin = stop - pick(tiles, segment, SLOTS)
    column = tl.arange(0, WIDTH)
    sums, amax = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    for start in range(begin, stop, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        at = sums_ptr + (slot * row_tiles + tile).to(tl.int64)[:, None] * WIDTH + column[None, :]
        values = tl.load(at, mask=(tile < stop)[:, None], other=0.0)
        sums, amax = sums + tl.sum(values, axis=0), tl.maximum(amax, tl.max(values, axis=0))
    sums = tl.where(column == AMAX, amax, sums)
    to = tl.where(column < BINS_AT, column, column - BINS_AT + USED)
    here = out_ptr + (slot * tl.num_programs(0) + segment) * LENGTH + to
    tl.store(here, sums, mask=(column < USED) | (column >= BINS_AT))
