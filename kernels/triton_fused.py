"""Triton: what a quantisation call launches, and its results."""

# Shapes: B matrices, R rows (all leading dimensions together), C columns, E experts, b counts 128-blocks, S a TensorStats vector.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, CodeFormat
from fp8_safeguard.kernels.errors import OperandError, require_option
from fp8_safeguard.kernels.operands import check_options, check_source
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.triton_launch import Launch, as_bytes
from fp8_safeguard.kernels.triton_quantize import quantize_kernel
from fp8_safeguard.kernels.triton_rare import quantize_rare_kernel
from fp8_safeguard.kernels.triton_stats import sum_column_tiles_kernel, sum_row_tiles_kernel
from fp8_safeguard.kernels.triton_tiling import Tiling
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

BLOCK_LAYOUTS = ("", "col", "tile")
PLAIN_MULTIPLIER = 20
"""Binades that the multiplier of a plain tile may shift its scales by."""
TMA_BYTES = 16
"""Strides of a tensor that the tensor memory accelerator reads are multiples of it."""
PARTIAL_WIDTH = 32
RARE_CHUNK = 16
"""Tiles whose marks one program looks at."""


class Fused(NamedTuple):
    """What one read of a tensor gave."""

    row: QuantizedTensor | None
    block: QuantizedTensor | None
    """The `col` or `tile` tensor."""
    stats: Tensor | None
    """float64 [slots,S], with offsets [slots,E,S]: the row slot first, then the block slot."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which layouts, how, and whether codes and statistics are wanted."""

    row: bool = True
    blocks: str = ""
    """`col`, `tile` or none."""
    code_format: CodeFormat
    fmt: str
    scale: str = "fp32"
    multiplier: float = 1.0
    store: bool = True
    stats: bool = False
    aligned: bool = False
    """Whether every expert's first row is a multiple of 16."""
    k_major: bool = True
    """Store `col` codes transposed, as tensor cores read them; `.data` is then a view in the source's shape."""


def quantize_layouts(
    x: Tensor,
    *,
    row: bool = True,
    blocks: str = "",
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    stats: bool = False,
    store: bool = True,
    k_major: bool = True,
    aligned: bool = False,
    offsets: Tensor | None = None,
) -> Fused:
    """Quantise x in the row layout, in `col` or `tile` blocks, or both, and measure it, in one read.

    The same codes, scales and statistics as `quantize` and `tensor_stats`. Offsets (int32 [E+1]) stay on the
    device and are not checked: they start at 0, never fall and end at most at R. Rows behind the last offset are
    quantised in the row layout, give zero codes in the others, and are never measured. With offsets the block
    scales have R // 128 + E + 1 rows, the surplus ones 1. `aligned` says that R and every offset are multiples of 16, as the
    padding routing map makes them; without it codes are not stored transposed, which would go byte by byte. Without
    `store` only statistics are returned. Columns that are not a multiple of 16 are copied to one first: the kernel
    would load them one by one, and spill; the codes are then views of rows that long.
    """
    code_format = check_options("row", fmt, scale, multiplier)
    require_option("blocks", blocks, BLOCK_LAYOUTS)
    check_source(x, offsets)
    if aligned and offsets is not None and x.shape[0] % TMA_BYTES:
        raise OperandError(
            f"aligned experts end at {x.shape[0]} rows, not a multiple of 16: pad x, or leave `aligned` out"
        )
    if not (row or blocks):
        raise OperandError("no layout is wanted: pass row=True, or blocks='col' or 'tile'")
    request = Request(
        row=row, blocks=blocks, code_format=code_format, fmt=fmt, scale=scale, multiplier=multiplier,
        store=store, stats=stats, aligned=aligned, k_major=k_major and (aligned or offsets is None),
    )  # fmt: skip
    if stats and store and blocks and multiplier < 1.0:
        # Where numbers saturate, one kernel for all would spill registers: codes from one read, statistics from others.
        shared: dict[str, Any] = {
            "row": row, "blocks": blocks, "fmt": fmt, "scale": scale, "multiplier": multiplier, "offsets": offsets,
        }  # fmt: skip
        quantised = quantize_layouts(x, k_major=k_major, aligned=aligned, **shared)
        return quantised._replace(stats=quantize_layouts(x, stats=True, store=False, **shared).stats)
    padded = _padded(x)
    launches, result = plan(padded, request, offsets)
    for launch in launches:
        launch.run()
    return result if padded is x else _cut(result, x.shape[-1], padded.shape[-1])


def _padded(x: Tensor) -> Tensor:
    """x itself, or a copy with zeros behind each row up to a multiple of 16 columns."""
    surplus = -x.shape[-1] % TMA_BYTES
    if not surplus or not x.numel():
        return x
    padded = x.new_zeros((*x.shape[:-1], x.shape[-1] + surplus))
    padded[..., : x.shape[-1]] = x.detach()
    return padded


def _cut(padded: Fused, columns: int, width: int) -> Fused:
    """The results of the first `columns` of `width`: the zeros behind them were counted, and changed nothing else."""
    row, block, stats = padded
    if stats is not None:
        zeros = (width - columns) * stats[..., COLUMNS.index("rows")]
        for name in ("count", "zeros"):
            stats[..., COLUMNS.index(name)] -= zeros
    if row is not None:
        row = replace(row, data=row.data[..., :columns])
    if block is not None:
        scale = block.scale[..., :columns] if block.layout == "col" else block.scale
        block = replace(block, data=block.data[..., :columns], scale=scale)
    return Fused(row, block, stats)


def plan(x: Tensor, request: Request, offsets: Tensor | None = None) -> tuple[list[Launch], Fused]:
    """The kernels to start, in order, and the tensors they fill."""
    if request.row and request.blocks and request.stats and not request.store:
        return _plan_apart(x, request, offsets)
    source = x.detach()
    source = source.float() if source.dtype == torch.float64 else source
    rows_each, columns = (1, x.shape[0]) if x.dim() == 1 else x.shape[-2:]
    x_RC = source.reshape(math.prod(x.shape[:-2]) * rows_each, columns)
    tiling = Tiling.of(x_RC, rows_each, request.blocks, request.stats, offsets)
    row = _empty_row(x, x_RC, request) if request.row and request.store else None
    block = _empty_block(x, x_RC, tiling, request, offsets) if request.blocks and request.store else None
    return _launches(x_RC, tiling, request, row, block, None)


def _plan_apart(x: Tensor, request: Request, offsets: Tensor | None) -> tuple[list[Launch], Fused]:
    """Statistics alone, one layout after the other: two small kernels, where one for both would spill registers."""
    segments = 1 if offsets is None else offsets.numel() - 1
    stats = torch.empty((2, segments, VECTOR_LENGTH), dtype=torch.float64, device=x.device)
    launches = []
    for slot, part in enumerate((replace(request, blocks=""), replace(request, row=False))):
        made, _ = plan(x, part, offsets)
        launches += [*made[:-1], replace(made[-1], arguments=made[-1].arguments | {"out_ptr": stats[slot]})]
    return launches, Fused(None, None, stats[:, 0] if offsets is None else stats)


def reblock(rows: QuantizedTensor, *, k_major: bool = True) -> QuantizedTensor:
    """`col` codes from `row` codes, the scales powers of two: the codes move to their new scale's exponent.

    Equal to quantize(rows.dequantize(), layout="col", scale="pow2"). Nothing is rounded but what falls below the
    smallest normal of its new block. Any dimension, offsets as in the row tensor's source: none.
    """
    if rows.layout != "row":
        raise OperandError(f"a {rows.layout!r} tensor cannot be re-blocked to 'col': pass a 'row' tensor")
    launches, result = plan_reblock(rows, k_major=k_major)
    for launch in launches:
        launch.run()
    assert result.block is not None
    return result.block


def plan_reblock(rows: QuantizedTensor, *, k_major: bool = True) -> tuple[list[Launch], Fused]:
    """The kernel of `reblock` and the tensor it fills."""
    x = rows.data
    rows_each, columns = (1, x.shape[0]) if x.dim() == 1 else x.shape[-2:]
    x_RC = x.reshape(math.prod(x.shape[:-2]) * rows_each, columns)
    request = Request(
        row=False, blocks="col", code_format=check_options("col", rows.fmt, "pow2", 1.0), fmt=rows.fmt,
        scale="pow2", k_major=k_major,
    )  # fmt: skip
    tiling = Tiling.of(x_RC, rows_each, request.blocks, request.stats, None)
    block = _empty_block(x, x_RC, tiling, request, None)
    scale_Rb = rows.scale.reshape(x_RC.shape[0], -(-columns // BLOCK))
    return _launches(as_bytes(x_RC), tiling, request, None, block, scale_Rb)


def _empty_row(x: Tensor, x_RC: Tensor, request: Request) -> QuantizedTensor:
    """Codes like x; scales stored by block, rows next to each other, as the GEMM reads them."""
    rows, columns = x_RC.shape
    data = torch.empty(x.shape, dtype=request.code_format.dtype, device=x.device)
    blocks = -(-columns // BLOCK)
    scale = torch.empty((blocks, rows), dtype=torch.float32, device=x.device).t()
    shape = (blocks,) if x.dim() == 1 else (*x.shape[:-1], blocks)
    return QuantizedTensor(data, scale.view(shape), "row", request.fmt)


def _empty_block(
    x: Tensor, x_RC: Tensor, tiling: Tiling, request: Request, offsets: Tensor | None
) -> QuantizedTensor:
    """Codes in x's shape, stored transposed for `col` where wanted, and the scales of all row blocks."""
    rows, columns = x_RC.shape
    if request.blocks == "col" and request.k_major and rows and columns:
        pitch = -(-rows // TMA_BYTES) * TMA_BYTES
        store = torch.empty((columns, pitch), dtype=torch.uint8, device=x.device)
        data = store[:, :rows].t().view(x.shape).view(request.code_format.dtype)
    else:
        data = torch.empty(x.shape, dtype=request.code_format.dtype, device=x.device)
    column_blocks = columns if request.blocks == "col" else -(-columns // BLOCK)
    scale = torch.empty((tiling.row_tiles, column_blocks), dtype=torch.float32, device=x.device)
    if offsets is None:
        row_blocks = () if x.dim() == 1 else (*x.shape[:-2], -(-x.shape[-2] // BLOCK))
        scale = scale.view(*row_blocks, column_blocks)
    return QuantizedTensor(data, scale, request.blocks, request.fmt, offsets)


def _launches(
    x_RC: Tensor,
    tiling: Tiling,
    request: Request,
    row: QuantizedTensor | None,
    block: QuantizedTensor | None,
    scale_Rb: Tensor | None,
) -> tuple[list[Launch], Fused]:
    """The quantising kernel, then, for statistics, the two that sum what it wrote."""
    (rows, columns), none = x_RC.shape, x_RC
    column_tiles = -(-columns // BLOCK)
    slots = int(request.row) + int(bool(request.blocks))
    grid = (tiling.row_tiles * column_tiles,)
    rare = torch.empty(grid, dtype=torch.uint8, device=x_RC.device)
    partials, blocks, flags = none, none, none
    if request.stats:
        grid_of_slots = (slots, tiling.row_tiles, column_tiles)
        partials = torch.empty((*grid_of_slots, PARTIAL_WIDTH), dtype=torch.float64, device=x_RC.device)
        blocks = torch.empty((*grid_of_slots, 2, tiling.tile), dtype=torch.float32, device=x_RC.device)
        flags = torch.empty((slots, rows, column_tiles), dtype=torch.uint8, device=x_RC.device)
    row_scale_Rb = row.scale.reshape(rows, column_tiles) if row else None
    block_RC = block.data.reshape(rows, columns) if block else None
    arguments = {
        "x_ptr": x_RC,
        "x_scale_ptr": none if scale_Rb is None else scale_Rb,
        "offsets_ptr": tiling.offsets,
        "row_codes_ptr": as_bytes(row.data) if row else none,
        "row_scale_ptr": none if row_scale_Rb is None else row_scale_Rb,
        "block_codes_ptr": none if block_RC is None else as_bytes(block_RC),
        "block_scale_ptr": block.scale if block else none,
        "rare_ptr": rare,
        "partials_ptr": partials,
        "blocks_ptr": blocks,
        "flags_ptr": flags,
        "multiplier": request.multiplier,
        **_plain_bounds(request),
        "rows": rows,
        "columns": columns,
        "segments": tiling.segments,
        "rows_per_segment": tiling.rows_per_segment,
        "row_tiles": tiling.row_tiles,
        **_strides("x", x_RC, "r", "c"),
        **_strides("x_scale", scale_Rb, "r", "b"),
        **_strides("row_scale", row_scale_Rb, "r", "b"),
        **_strides("block", block_RC, "r", "c"),
        "TILE": tiling.tile,
        "ROW": request.row,
        "BLOCKS": request.blocks,
        "CODES": scale_Rb is not None,
        "STORE": request.store,
        "STATS": request.stats,
        "E4M3": request.fmt == "e4m3",
        "POW2": request.scale == "pow2",
        "SATURATES": request.multiplier < 1.0,
        "SLOTS": tiling.slots,
        "ALIGNED": request.aligned,
    }
    warps = 4 if tiling.tile < BLOCK else 8
    launches = [Launch(kernel=quantize_kernel, grid=grid, arguments=arguments, warps=warps, stages=1)]
    launches += _rare(arguments, request, tiling, column_tiles)
    stats = None
    if request.stats:
        tile_slot = slots - 1 if request.blocks == "tile" else -1
        sums, stats = _sums(x_RC, tiling, slots, tile_slot, partials, blocks, flags)
        launches += sums
    return launches, Fused(row, block, stats)


def _plain_bounds(request: Request) -> dict[str, int]:
    """Bits of the amax between which a block is plain: scale and reciprocal are then normal floats."""
    shift = int(math.log2(request.multiplier))
    if abs(shift) > PLAIN_MULTIPLIER:
        return {"plain_from": 0, "plain_to": -1}
    max_exponent = int(math.log2(request.code_format.maximum))
    least, most = max_exponent - 124 - min(shift, 0), 60 - max(shift, 0)
    return {"plain_from": (least + 127) << 23, "plain_to": (most + 127) << 23}


def _rare(arguments: dict[str, Any], request: Request, tiling: Tiling, column_tiles: int) -> list[Launch]:
    """For each layout the kernel that takes the tiles that are not plain; usually it finds none."""
    wanted = quantize_rare_kernel.arg_names
    tiles = tiling.row_tiles * column_tiles
    layouts = (["row"] if request.row else []) + ([request.blocks] if request.blocks else [])
    launches = []
    for slot, layout in enumerate(layouts):
        name = "row" if layout == "row" else "block"
        own = {
            "codes_ptr": arguments[f"{name}_codes_ptr"],
            "scale_ptr": arguments[f"{name}_scale_ptr"],
            "codes_stride_r": arguments["columns"] if name == "row" else arguments["block_stride_r"],
            "codes_stride_c": 1 if name == "row" else arguments["block_stride_c"],
            "scale_stride_r": arguments["row_scale_stride_r"],
            "scale_stride_b": arguments["row_scale_stride_b"],
            "slot": slot,
            "BLOCKS": layout,
            "CHUNK": RARE_CHUNK,
        }
        shared = {name: value for name, value in arguments.items() if name in wanted}
        launches.append(
            Launch(
                kernel=quantize_rare_kernel,
                grid=(-(-tiles // RARE_CHUNK),),
                arguments=shared | own,
                warps=8,
                stages=1,
            )
        )
    return launches


def _strides(name: str, tensor: Tensor | None, *axes: str) -> dict[str, int]:
    """Stride arguments of a matrix; of an absent one, zeros."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}


def _sums(
    x_RC: Tensor,
    tiling: Tiling,
    slots: int,
    tile_slot: int,
    partials: Tensor,
    blocks: Tensor,
    flags: Tensor,
) -> tuple[list[Launch], Tensor]:
    """The two summing kernels and their result [slots,S] or [slots,E,S]."""
    split = tiling.slots > 0
    segments = tiling.segments if split else 1
    sums = torch.empty((slots, tiling.row_tiles, PARTIAL_WIDTH), dtype=torch.float64, device=x_RC.device)
    out = torch.empty((slots, segments, VECTOR_LENGTH), dtype=torch.float64, device=x_RC.device)
    shared = {
        "offsets_ptr": tiling.offsets,
        "rows": x_RC.shape[0],
        "segments": tiling.segments,
        "row_tiles": tiling.row_tiles,
        "TILE": tiling.tile,
        "SLOTS": tiling.slots,
    }
    by_row_tile = Launch(
        kernel=sum_column_tiles_kernel,
        grid=(tiling.row_tiles, slots),
        arguments={
            **shared,
            "partials_ptr": partials,
            "blocks_ptr": blocks,
            "flags_ptr": flags,
            "sums_ptr": sums,
            "rows_per_segment": tiling.rows_per_segment,
            "column_tiles": partials.shape[2],
            "tile_slot": tile_slot,
            "CHUNK": 4,
        },
    )
    by_segment = Launch(
        kernel=sum_row_tiles_kernel,
        grid=(segments, slots),
        arguments={**shared, "sums_ptr": sums, "out_ptr": out, "CHUNK": 64},
    )
    return [by_row_tile, by_segment], out if split else out[:, 0]
