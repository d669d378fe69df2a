"""Triton: tokens to expert rows, quantised, and back."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens, k copies of a token, R permuted rows, D model width, E experts. Elements are b bytes wide (bf16 2).
# Padding rows and rows behind the last expert have no source: they are written as zeros and never read.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK as BLOCK_SIZE
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted
from fp8_safeguard.kernels.moe.triton_plan import UNFUSED_FLOATS, run, source, target
from fp8_safeguard.kernels.moe.triton_sums import plan_sum
from fp8_safeguard.kernels.moe.triton_tile import finish_tile, load_wide, place_tile, rounded
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two
from fp8_safeguard.kernels.triton_quantize import BLOCK

TOKENS, COLUMNS = 8, 512
"""Tile of sum_copies."""


@triton.jit
def gather_kernel(
    x_ptr: tl.tensor, source_ptr: tl.tensor, offsets_ptr: tl.tensor,
    values_ptr: tl.tensor, row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor, stride: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    TILE: tl.constexpr, VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of x[source]."""
    column_tiles = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) - tile * column_tiles
    segment, first, end = place_tile(
        tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS, ALIGNED
    )
    row_1 = first + tl.arange(0, TILE)[:, None]
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < end) & (column_1 < columns)
    source_1 = tl.load(source_ptr + row_1, mask=row_1 < end, other=-1)
    x = load_wide(x_ptr, source_1, column_1, held & (source_1 >= 0), stride)
    finish_tile(
        x, row_1, column_1, held, end, segment < segments, tile, column_tile,
        values_ptr, row_codes_ptr, row_scale_ptr, block_codes_ptr, block_scale_ptr,
        rare_ptr, multiplier, plain_from, plain_to, columns,
        row_scale_stride_r, row_scale_stride_b, block_stride_r, block_stride_c,
        VALUES, ROW, BLOCKS, E4M3, POW2, SLOTS,
    )  # fmt: skip


@triton.jit
def sum_copies_kernel(
    y_ptr: tl.tensor, position_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    tokens: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    COPIES: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """out[t] = [weight[t, 0]] y[position[t, 0]] + ..., in slot order, in float32, rounded once."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    block = tl.program_id(0) // column_tiles
    token_1 = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    column_1 = (tl.program_id(0) - block * column_tiles) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = token_1 < tokens
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for slot in tl.static_range(COPIES):
        position_1 = tl.load(position_ptr + token_1 * COPIES + slot, mask=inside, other=-1)
        y = load_wide(y_ptr, position_1, column_1, (position_1 >= 0) & (column_1 < columns), stride)
        if WEIGHTED:
            y *= tl.load(weight_ptr + token_1 * COPIES + slot, mask=inside, other=0.0)
        if slot == 0:
            total = y
        else:
            total += y
    at = token_1.to(tl.int64) * columns + column_1
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside & (column_1 < columns))


@triton.jit
def combine_backward_kernel(
    dy_ptr: tl.tensor, y_ptr: tl.tensor, source_ptr: tl.tensor, position_ptr: tl.tensor, weight_ptr: tl.tensor,
    dweight_ptr: tl.tensor, offsets_ptr: tl.tensor,
    values_ptr: tl.tensor, row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor,
    stride: tl.tensor, y_stride: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    COPIES: tl.constexpr, LANES: tl.constexpr,
    TILE: tl.constexpr, VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of weight dy[source], and its rows' parts of dy . y. LANES is the power of two from COPIES up."""
    column_tiles = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) - tile * column_tiles
    segment, first, end = place_tile(
        tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS, ALIGNED
    )
    row_1 = first + tl.arange(0, TILE)[:, None]
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < end) & (column_1 < columns)
    source_1 = tl.load(source_ptr + row_1, mask=row_1 < end, other=-1)
    read = held & (source_1 >= 0)
    # First and by itself: while a tile is quantised its registers are needed. dy stays in the cache.
    dots = load_wide(dy_ptr, source_1, column_1, read, stride) * load_wide(
        y_ptr, row_1, column_1, read, y_stride
    )
    row = first + tl.arange(0, TILE)
    at = column_tile.to(tl.int64) * rows + row
    tl.store(dweight_ptr + at, tl.sum(dots, axis=1), mask=row < end)
    # Which of its token's copies a row is.
    lane_1 = tl.arange(0, LANES)[None, :]
    wanted = (source_1 >= 0) & (lane_1 < COPIES)
    at_1 = source_1 * COPIES + lane_1
    mine = tl.load(position_ptr + at_1, mask=wanted, other=-1) == row_1
    weight = tl.load(weight_ptr + at_1, mask=wanted & mine, other=0.0)
    dy = load_wide(dy_ptr, source_1, column_1, read, stride)
    finish_tile(
        rounded(dy * tl.sum(weight, axis=1, keep_dims=True), values_ptr),
        row_1, column_1, held, end, segment < segments, tile, column_tile,
        values_ptr, row_codes_ptr, row_scale_ptr, block_codes_ptr, block_scale_ptr,
        rare_ptr, multiplier, plain_from, plain_to, columns,
        row_scale_stride_r, row_scale_stride_b, block_stride_r, block_stride_c,
        VALUES, ROW, BLOCKS, E4M3, POW2, SLOTS,
    )  # fmt: skip


def gather(x_TD: Tensor, routing_map: RoutingMap, wanted: Wanted) -> Produced:
    """Rows [R, D] of the map: x[source], zero where there is none, quantised.

    Moves b bytes read for each element of the result (less where copies of a token meet in the cache; padding rows
    are not read), b written for the values and 1 for each layout of codes.
    """
    launches, produced = plan_gather(x_TD, routing_map, wanted)
    run(launches)
    return produced


def plan_gather(x_TD: Tensor, routing_map: RoutingMap, wanted: Wanted) -> tuple[list[Launch], Produced]:
    """The kernels of `gather` and what they fill."""
    x_TD = source(x_TD)
    shape = (routing_map.rows, x_TD.shape[1])
    out = target(shape, x_TD, wanted, routing_map.offsets, aligned=routing_map.aligned)
    arguments = {"x_ptr": x_TD, "source_ptr": routing_map.source_R, "stride": x_TD.stride(0)}
    return out.launch(gather_kernel, out.row_tiles * out.column_tiles, arguments), out.produced


def sum_copies(y_RD: Tensor, routing_map: RoutingMap, weight_Tk: Tensor | None) -> Tensor:
    """[T, D]: sum over the slots of [weight x] y[position], in slot order, in float32, rounded once to y's dtype.

    Moves k b bytes read and b written for each element of the result.
    """
    launch, y_TD = plan_sum_copies(y_RD, routing_map, weight_Tk)
    launch.run()
    return y_TD


def plan_sum_copies(y_RD: Tensor, routing_map: RoutingMap, weight_Tk: Tensor | None) -> tuple[Launch, Tensor]:
    """The kernel of `sum_copies` and what it fills."""
    y_RD = source(y_RD)
    (tokens, copies), columns = routing_map.position_Tk.shape, y_RD.shape[1]
    y_TD = torch.empty((tokens, columns), dtype=y_RD.dtype, device=y_RD.device)
    arguments = {
        "y_ptr": y_RD,
        "position_ptr": routing_map.position_Tk,
        "weight_ptr": y_RD if weight_Tk is None else weight_Tk.detach().contiguous(),
        "out_ptr": y_TD,
        "tokens": tokens,
        "columns": columns,
        "stride": y_RD.stride(0),
        "COPIES": copies,
        "WEIGHTED": weight_Tk is not None,
        "TOKENS": TOKENS,
        "COLUMNS": COLUMNS,
    }
    grid = (-(-tokens // TOKENS) * -(-columns // COLUMNS),)
    launch = Launch(
        kernel=sum_copies_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS
    )
    return launch, y_TD


def combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weight_Tk: Tensor, routing_map: RoutingMap, wanted: Wanted
) -> tuple[Produced, Tensor]:
    """(weight x dy[source] [R, D], quantised; gradient of the weights [T, k] float32, the dot products dy . y[position]).

    Moves 2 b bytes read for each element of the rows, b written for the values and 1 for each layout of codes. The
    dot products are added over column tiles of 128 in a fixed order.
    """
    launches, produced, dweight_Tk = plan_combine_backward(dy_TD, y_RD, weight_Tk, routing_map, wanted)
    run(launches)
    return produced, dweight_Tk


def plan_combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weight_Tk: Tensor, routing_map: RoutingMap, wanted: Wanted
) -> tuple[list[Launch], Produced, Tensor]:
    """The kernels of `combine_backward` and what they fill."""
    dy_TD, y_RD = source(dy_TD), source(y_RD)
    rows, columns = routing_map.rows, dy_TD.shape[1]
    copies = routing_map.position_Tk.shape[1]
    out = target((rows, columns), dy_TD, wanted, routing_map.offsets, aligned=routing_map.aligned)
    parts = torch.empty((-(-columns // BLOCK_SIZE), rows), dtype=torch.float32, device=dy_TD.device)
    arguments = {
        "dy_ptr": dy_TD,
        "y_ptr": y_RD,
        "source_ptr": routing_map.source_R,
        "position_ptr": routing_map.position_Tk,
        "weight_ptr": weight_Tk.detach().contiguous(),
        "dweight_ptr": parts,
        "stride": dy_TD.stride(0),
        "y_stride": y_RD.stride(0),
        "COPIES": copies,
        "LANES": next_power_of_two(copies),
    }
    launches = out.launch(combine_backward_kernel, out.row_tiles * out.column_tiles, arguments)
    last, dweight_Tk = plan_sum(parts, routing_map.position_Tk)
    return [*launches, last], out.produced, dweight_Tk
