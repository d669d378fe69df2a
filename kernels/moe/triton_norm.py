"""Triton: RMSNorm, quantised, and its backward."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens, D model width. Elements are b bytes wide (bf16 2, float32 4).

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.routing import Produced, Wanted
from fp8_safeguard.kernels.moe.triton_plan import UNFUSED_FLOATS, run, source, target
from fp8_safeguard.kernels.moe.triton_sums import plan_sum
from fp8_safeguard.kernels.moe.triton_tile import finish_tile, load_wide, place_tile, rounded
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two
from fp8_safeguard.kernels.triton_quantize import BLOCK

ROWS, CHUNK = 4, 1024
"""Rows whose squares a program adds, and columns it reads at a time."""
ROWS_OF_GAIN = 32
"""Rows whose part of the gain's gradient one program adds up: fixed, so that the result is."""
WIDEST = 16384
"""Columns of a row that fit into the registers of a program, with what the backward needs beside them."""


@triton.jit
def rstd_kernel(
    x_ptr: tl.tensor, rstd_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, stride: tl.tensor,
    epsilon: tl.tensor, ROWS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """1 / sqrt(mean x^2 + epsilon) of each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for start in range(0, columns, CHUNK):
        column_1 = start + tl.arange(0, CHUNK)[None, :]
        read = (row < rows)[:, None] & (column_1 < columns)
        x = load_wide(x_ptr, row[:, None], column_1, read, stride)
        squares += x * x
    mean = tl.div_rn(tl.sum(squares, axis=1), tl.zeros((ROWS,), tl.float32) + columns)
    one = tl.full((ROWS,), 1.0, tl.float32)
    tl.store(rstd_ptr + row, tl.div_rn(one, tl.sqrt_rn(mean + epsilon)), mask=row < rows)


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor, rstd_ptr: tl.tensor, gain_ptr: tl.tensor, offsets_ptr: tl.tensor,
    values_ptr: tl.tensor, row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor, stride: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    TILE: tl.constexpr, VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """y = x rstd gain, of one tile; the last tile first, whose rows are still in the cache."""
    column_tiles = tl.cdiv(columns, BLOCK)
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = index // column_tiles
    column_tile = index - tile * column_tiles
    segment, first, end = place_tile(
        tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS, ALIGNED
    )
    row_1 = first + tl.arange(0, TILE)[:, None]
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < end) & (column_1 < columns)
    x = load_wide(x_ptr, row_1, column_1, held, stride)
    rstd = tl.load(rstd_ptr + row_1, mask=row_1 < end, other=0.0)
    gain = tl.load(gain_ptr + column_1, mask=column_1 < columns, other=0.0).to(tl.float32)
    finish_tile(
        rounded(x * rstd * gain, values_ptr), row_1, column_1, held, end, segment < segments, tile, column_tile,
        values_ptr, row_codes_ptr, row_scale_ptr, block_codes_ptr, block_scale_ptr,
        rare_ptr, multiplier, plain_from, plain_to, columns,
        row_scale_stride_r, row_scale_stride_b, block_stride_r, block_stride_c,
        VALUES, ROW, BLOCKS, E4M3, POW2, SLOTS,
    )  # fmt: skip


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr: tl.tensor, x_ptr: tl.tensor, gain_ptr: tl.tensor, rstd_ptr: tl.tensor, dx_ptr: tl.tensor,
    dgain_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor, dy_stride: tl.tensor, stride: tl.tensor,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """n = x rstd; dx = (dy gain - n mean(dy gain n)) rstd; dgain = sum of dy n over ROWS rows, one after the other."""
    column = tl.arange(0, WIDE)
    inside = column < columns
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dgain = tl.zeros((WIDE,), tl.float32)
    width = tl.cast(columns, tl.float32)
    begin = tl.program_id(0) * ROWS
    for row in range(begin, tl.minimum(begin + ROWS, rows)):
        place = tl.cast(row, tl.int64)
        dy = tl.load(dy_ptr + place * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place * stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + place)
        normed = x * rstd
        dgain += dy * normed
        dnormed = dy * gain
        along = tl.div_rn(tl.sum(dnormed * normed, axis=0), width)
        dx = (dnormed - normed * along) * rstd
        tl.store(dx_ptr + place * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dgain_ptr + tl.program_id(0).to(tl.int64) * columns + column, dgain, mask=inside)


def rms_norm(x_TD: Tensor, gain_D: Tensor, epsilon: float, wanted: Wanted) -> tuple[Produced, Tensor]:
    """(x * rstd * gain, quantised; rstd [T] float32).

    Moves 2 b bytes read for each element (b where the rows are still in the L2 cache), b written for the values and 1
    for each layout of codes. `col` blocks need 128 rows at a time, which no program can hold whole.
    """
    launches, produced, rstd_T = plan_rms_norm(x_TD, gain_D, epsilon, wanted)
    run(launches)
    return produced, rstd_T


def plan_rms_norm(
    x_TD: Tensor, gain_D: Tensor, epsilon: float, wanted: Wanted
) -> tuple[list[Launch], Produced, Tensor]:
    """The kernels of `rms_norm` and what they fill."""
    x_TD = source(x_TD)
    rows, columns = x_TD.shape
    rstd_T = torch.empty((rows,), dtype=torch.float32, device=x_TD.device)
    shared = {"x_ptr": x_TD, "rstd_ptr": rstd_T, "stride": x_TD.stride(0)}
    sizes = {"rows": rows, "columns": columns, "epsilon": epsilon, "ROWS": ROWS, "CHUNK": CHUNK}
    first = Launch(
        kernel=rstd_kernel,
        grid=(-(-rows // ROWS),),
        arguments=shared | sizes,
        stages=1,
        options=UNFUSED_FLOATS,
    )
    out = target((rows, columns), x_TD, wanted)
    arguments = shared | {"gain_ptr": gain_D.detach().contiguous()}
    launches = out.launch(rms_norm_kernel, out.row_tiles * out.column_tiles, arguments)
    return [first, *launches], out.produced, rstd_T


def rms_norm_backward(dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, D] in x's dtype and of the gain [D] in the gain's.

    Moves 2 b bytes read and b written for each element, and 8 / 32 for the partial sums of the gain's gradient.
    """
    launches, dx_TD, dgain_D = plan_rms_norm_backward(dy_TD, x_TD, gain_D, rstd_T)
    run(launches)
    return dx_TD, dgain_D


def plan_rms_norm_backward(
    dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, rstd_T: Tensor
) -> tuple[list[Launch], Tensor, Tensor]:
    """The kernels of `rms_norm_backward` and what they fill."""
    dy_TD, x_TD = source(dy_TD), source(x_TD)
    rows, columns = x_TD.shape
    if columns > WIDEST:
        raise OperandError(
            f"rms_norm_backward of {columns} columns: at most {WIDEST} fit into a program; use the eager operation"
        )
    programs, wide = -(-rows // ROWS_OF_GAIN), max(next_power_of_two(columns), 128)
    dx_TD = torch.empty((rows, columns), dtype=x_TD.dtype, device=x_TD.device)
    parts = torch.empty((programs, columns), dtype=torch.float32, device=x_TD.device)
    arguments = {
        "dy_ptr": dy_TD,
        "x_ptr": x_TD,
        "gain_ptr": gain_D.detach().contiguous(),
        "rstd_ptr": rstd_T.contiguous(),
        "dx_ptr": dx_TD,
        "dgain_ptr": parts,
        "rows": rows,
        "columns": columns,
        "dy_stride": dy_TD.stride(0),
        "stride": x_TD.stride(0),
        "ROWS": ROWS_OF_GAIN,
        "WIDE": wide,
    }
    warps = min(max(wide // 1024, 1), 16)
    first = Launch(
        kernel=rms_norm_backward_kernel, grid=(programs,), arguments=arguments, warps=warps, stages=1,
        options=UNFUSED_FLOATS,
    )  # fmt: skip
    last, dgain_D = plan_sum(parts, dtype=gain_D.dtype)
    return [first, last], dx_TD, dgain_D
