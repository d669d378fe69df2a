"""Triton: SwiGLU times routing probability, quantised, and its backward."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: R rows, F SwiGLU width, G = 2 F (gates, then ups), E experts. Elements are bytes wide as in x's dtype (b = 2 or 4).
# Row tiles are 128 rows where blocks of columns are wanted, else 32; column tiles are 128 wide.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK as BLOCK_SIZE
from fp8_safeguard.kernels.moe.routing import Produced, Wanted
from fp8_safeguard.kernels.moe.triton_plan import run, source, target
from fp8_safeguard.kernels.moe.triton_sums import plan_sum
from fp8_safeguard.kernels.moe.triton_tile import finish_tile, load_wide, place_tile, rounded, used_rows
from fp8_safeguard.kernels.triton_codes import RECIPROCAL_SEED
from fp8_safeguard.kernels.triton_launch import Launch
from fp8_safeguard.kernels.triton_quantize import BLOCK


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + e^-x), without overflow and without a division, whose branches would keep registers busy.

    The inverse of a number from 1 to 2: three Newton steps from a seed within 5.1 % reach the last bit.
    """
    one = tl.full(x.shape, 1.0, tl.float32)
    small = tl.exp(-tl.abs(x))
    whole = one + small
    inverse = (whole.to(tl.int32, bitcast=True) * -1 + RECIPROCAL_SEED).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        inverse = tl.fma(tl.fma(-whole, inverse, one), inverse, inverse)
    return tl.where(x >= 0, inverse, small * inverse)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    """x sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def swiglu_kernel(
    gate_up_ptr: tl.tensor, probability_ptr: tl.tensor, offsets_ptr: tl.tensor, bounds_ptr: tl.tensor,
    values_ptr: tl.tensor, row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, segments: tl.tensor, rows_per_segment: tl.tensor,
    experts: tl.tensor, stride: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    TILE: tl.constexpr, PROBABILITY: tl.constexpr, BOUNDED: tl.constexpr,
    VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """h = gate sigmoid(gate) up [probability], of one tile."""
    column_tiles = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) - tile * column_tiles
    segment, first, end = place_tile(
        tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS, ALIGNED
    )
    used = used_rows(bounds_ptr, experts, rows, BOUNDED)
    row_1 = first + tl.arange(0, TILE)[:, None]
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row_1 < end) & (column_1 < columns)
    read = held & (row_1 < used)
    gate = load_wide(gate_up_ptr, row_1, column_1, read, stride)
    up = load_wide(gate_up_ptr + columns, row_1, column_1, read, stride)
    value = silu(gate) * up
    if PROBABILITY:
        value *= tl.load(probability_ptr + row_1, mask=(row_1 < end) & (row_1 < used), other=0.0)
    finish_tile(
        rounded(value, values_ptr), row_1, column_1, held, end, segment < segments, tile, column_tile,
        values_ptr, row_codes_ptr, row_scale_ptr, block_codes_ptr, block_scale_ptr,
        rare_ptr, multiplier, plain_from, plain_to, columns,
        row_scale_stride_r, row_scale_stride_b, block_stride_r, block_stride_c,
        VALUES, ROW, BLOCKS, E4M3, POW2, SLOTS,
    )  # fmt: skip


@triton.jit
def swiglu_backward_kernel(
    dh_ptr: tl.tensor, gate_up_ptr: tl.tensor, probability_ptr: tl.tensor, dprobability_ptr: tl.tensor,
    offsets_ptr: tl.tensor, bounds_ptr: tl.tensor,
    values_ptr: tl.tensor, row_codes_ptr: tl.tensor, row_scale_ptr: tl.tensor,
    block_codes_ptr: tl.tensor, block_scale_ptr: tl.tensor,
    rare_ptr: tl.tensor, multiplier: tl.tensor, plain_from: tl.tensor, plain_to: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, width: tl.tensor,
    segments: tl.tensor, rows_per_segment: tl.tensor,
    experts: tl.tensor, stride: tl.tensor, dh_stride: tl.tensor,
    row_scale_stride_r: tl.tensor, row_scale_stride_b: tl.tensor, block_stride_r: tl.tensor, block_stride_c: tl.tensor,
    TILE: tl.constexpr, PROBABILITY: tl.constexpr, BOUNDED: tl.constexpr, EVEN: tl.constexpr,
    VALUES: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr,
    E4M3: tl.constexpr, POW2: tl.constexpr, SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """dgate or dup of one tile; the activation is computed again.

    Neighbouring programs take gates and ups of the same columns, so that what both read comes from memory once. EVEN:
    the width is a multiple of 128, so that a tile holds gates or ups alone. Otherwise a column says what it is.
    """
    column_tiles = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0) // column_tiles
    index = tl.program_id(0) - tile * column_tiles
    column_tile = index // 2 + (index % 2) * tl.cdiv(column_tiles, 2)
    segment, first, end = place_tile(
        tile, offsets_ptr, segments, rows, rows_per_segment, TILE, SLOTS, ALIGNED
    )
    used = used_rows(bounds_ptr, experts, rows, BOUNDED)
    row_1 = first + tl.arange(0, TILE)[:, None]
    read_row = (row_1 < end) & (row_1 < used)
    column_1 = column_tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    if PROBABILITY:  # noqa: SIM102
        if column_tile * BLOCK < width:
            # First and by itself: while a tile is quantised its registers are needed. The inputs stay in the cache.
            read = read_row & (column_1 < width)
            gate = load_wide(gate_up_ptr, row_1, column_1, read, stride)
            up = load_wide(gate_up_ptr + width, row_1, column_1, read, stride)
            dh = load_wide(dh_ptr, row_1, column_1, read, dh_stride)
            dprobability = tl.sum(dh * (silu(gate) * up), axis=1)
            row = first + tl.arange(0, TILE)
            at = column_tile.to(tl.int64) * rows + row
            tl.store(dprobability_ptr + at, dprobability, mask=row < end)
    if EVEN:
        of_gate = column_tile * BLOCK < width
        source_1 = column_1 - tl.where(of_gate, 0, width)
    else:
        of_gate = column_1 < width
        source_1 = tl.where(of_gate, column_1, column_1 - width)
    held = (row_1 < end) & (column_1 < columns)
    read = held & read_row
    gate = load_wide(gate_up_ptr, row_1, source_1, read, stride)
    dact = load_wide(dh_ptr, row_1, source_1, read, dh_stride)
    if PROBABILITY:
        dact *= tl.load(probability_ptr + row_1, mask=read_row, other=0.0)
    up = load_wide(gate_up_ptr + width, row_1, source_1, read & of_gate, stride)
    share = sigmoid(gate)
    dgate = dact * up * share * (1.0 + gate * (1.0 - share))
    finish_tile(
        rounded(tl.where(of_gate, dgate, dact * (gate * share)), values_ptr),
        row_1, column_1, held, end, segment < segments, tile, column_tile,
        values_ptr, row_codes_ptr, row_scale_ptr, block_codes_ptr, block_scale_ptr,
        rare_ptr, multiplier, plain_from, plain_to, columns,
        row_scale_stride_r, row_scale_stride_b, block_stride_r, block_stride_c,
        VALUES, ROW, BLOCKS, E4M3, POW2, SLOTS,
    )  # fmt: skip


def swiglu(
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None = None,
    *,
    aligned: bool = False,
) -> Produced:
    """silu(gate) * up [* probability of the row], quantised; rows behind the last offset give zeros.

    Moves 2 b bytes read for each element of the result, b written for the values and 1 for each layout of codes
    (scales: 1/32 of a byte): 6 F R for bf16 in two layouts without values.
    """
    launches, produced = plan_swiglu(gate_up_RG, probability_R, wanted, offsets, aligned)
    run(launches)
    return produced


def plan_swiglu(
    gate_up_RG: Tensor, probability_R: Tensor | None, wanted: Wanted, offsets: Tensor | None, aligned: bool
) -> tuple[list[Launch], Produced]:
    """The kernels of `swiglu` and what they fill."""
    gate_up_RG = source(gate_up_RG)
    rows, width = gate_up_RG.shape[0], gate_up_RG.shape[1] // 2
    out = target((rows, width), gate_up_RG, wanted, offsets, aligned=aligned)
    arguments = {
        "gate_up_ptr": gate_up_RG,
        "probability_ptr": gate_up_RG if probability_R is None else probability_R.contiguous(),
        "stride": gate_up_RG.stride(0),
        "PROBABILITY": probability_R is not None,
    }
    return out.launch(swiglu_kernel, out.row_tiles * out.column_tiles, arguments), out.produced


def swiglu_backward(
    dh_RF: Tensor,
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None = None,
    *,
    aligned: bool = False,
) -> tuple[Produced, Tensor | None]:
    """(dgate_up, quantised; dprobability [R] float32), the activation computed again.

    Moves 3 b bytes read for each element of dh, 2 b written for the values and 2 for each layout of codes; the
    probability's gradient is summed over column tiles of 128 in a fixed order.
    """
    launches, produced, dprobability_R = plan_swiglu_backward(
        dh_RF, gate_up_RG, probability_R, wanted, offsets, aligned
    )
    run(launches)
    return produced, dprobability_R


def plan_swiglu_backward(
    dh_RF: Tensor,
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None,
    aligned: bool,
) -> tuple[list[Launch], Produced, Tensor | None]:
    """The kernels of `swiglu_backward` and what they fill."""
    dh_RF, gate_up_RG = source(dh_RF), source(gate_up_RG)
    rows, width = dh_RF.shape
    out = target((rows, 2 * width), gate_up_RG, wanted, offsets, aligned=aligned)
    weighted = probability_R is not None
    partials = torch.empty((-(-width // BLOCK_SIZE), rows) if weighted else (0, 0), device=dh_RF.device)
    arguments = {
        "dh_ptr": dh_RF,
        "gate_up_ptr": gate_up_RG,
        "probability_ptr": dh_RF if probability_R is None else probability_R.contiguous(),
        "dprobability_ptr": partials if weighted else dh_RF,
        "width": width,
        "stride": gate_up_RG.stride(0),
        "dh_stride": dh_RF.stride(0),
        "PROBABILITY": weighted,
        "EVEN": width % BLOCK_SIZE == 0,
    }
    programs = out.row_tiles * out.column_tiles
    launches = out.launch(swiglu_backward_kernel, programs, arguments)
    if not weighted:
        return launches, out.produced, None
    last, dprobability_R = plan_sum(partials)
    return [*launches, last], out.produced, dprobability_R
