"""Triton: each expert's rows with its own weight, offsets on the device."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens sorted by expert, N output features, K input features, E experts. Every result element is summed by
# one program in one order, so results do not vary. The host never learns the offsets.

import triton
import triton.language as tl

from fp8_safeguard.kernels.triton_gemm import (
    DEPTH,
    add_block,
    block_of,
    column_scales,
    columns_of,
    load_operand,
    promote,
    row_scales,
    store_result,
)
from fp8_safeguard.kernels.triton_segments import pick, tiles_of_segments


@triton.jit
def expert_block(
    tile: tl.tensor, offsets_ptr: tl.tensor, experts: tl.tensor, tokens: tl.tensor, tiles_n: tl.tensor,
    BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, SLOTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Expert, first row, end row and column block of a running number over the blocks of all experts' results."""
    starts, ends, counted, tiles = tiles_of_segments(offsets_ptr, experts, tokens, BLOCK_M, SLOTS)
    expert = tl.sum(tl.where(counted * tiles_n <= tile, 1, 0), axis=0)
    own = pick(tiles, expert, SLOTS)
    before = pick(counted, expert, SLOTS) - own
    block_m, block_n = block_of(tile - before * tiles_n, own, tiles_n, GROUP_M)
    return expert, pick(starts, expert, SLOTS) + block_m * BLOCK_M, pick(ends, expert, SLOTS), block_n


@triton.jit
def grouped_kernel(
    a: tl.tensor, b: tl.tensor, b_second: tl.tensor, out_ptr: tl.tensor, a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    tokens: tl.tensor, n: tl.tensor, k: tl.tensor, experts: tl.tensor,
    a_stride_m: tl.tensor, a_stride_k: tl.tensor,
    b_stride_e: tl.tensor, b_stride_n: tl.tensor, b_stride_k: tl.tensor, out_stride: tl.tensor,
    a_scale_stride_m: tl.tensor, a_scale_stride_k: tl.tensor,
    b_scale_stride_e: tl.tensor, b_scale_stride_n: tl.tensor, b_scale_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GROUP_M: tl.constexpr, A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr, A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN: tl.constexpr, SLOTS: tl.constexpr,
    TMA: tl.constexpr,
) -> None:  # fmt: skip
    """out[T,N]: every expert's rows of a[T,K] times its b[N,K]^T; zeros behind the last expert.

    A persistent loop over the blocks of all experts. TMA: a and b are descriptors, of [T,K] and of all experts' rows
    [E N, K]; a block may then read rows of the next expert, which are not stored. FIRST + SECOND columns as in
    gemm_tma_kernel; SECOND is 0 without TMA.
    """
    tiles_n = tl.cdiv(n, FIRST + SECOND)
    _, _, counted, _ = tiles_of_segments(offsets_ptr, experts, tokens, BLOCK_M, SLOTS)
    tiles = tl.max(counted, axis=0) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, start, end, block_n = expert_block(
            tile, offsets_ptr, experts, tokens, tiles_n, BLOCK_M, GROUP_M, SLOTS
        )
        row = start + tl.arange(0, BLOCK_M)
        first, second = columns_of(block_n, FIRST, SECOND)
        owner = expert.to(tl.int64)
        accumulator = tl.zeros((BLOCK_M, FIRST), tl.float32)
        beside = tl.zeros((BLOCK_M, SECOND if SECOND > 0 else FIRST), tl.float32)
        for block in range(0, tl.where(expert < experts, tl.cdiv(k, DEPTH), 0)):
            a_scale = row_scales(a_scale_ptr + block * a_scale_stride_k, row, end, a_scale_stride_m, A_ROWS)
            b_scale_at = b_scale_ptr + owner * b_scale_stride_e + block * b_scale_stride_k
            if TMA:
                a_codes = a.load([start, block * DEPTH])
                accumulator = add_block(
                    accumulator, a_codes, a_scale, b, b_scale_at, expert * n + first, block, first, n,
                    b_scale_stride_n, B_ROWS,
                )  # fmt: skip
                if SECOND > 0:
                    beside = add_block(
                        beside, a_codes, a_scale, b_second, b_scale_at, expert * n + second, block, second, n,
                        b_scale_stride_n, B_ROWS,
                    )  # fmt: skip
            else:
                depth = block * DEPTH + tl.arange(0, DEPTH)
                b_scale = column_scales(b_scale_at, first, n, b_scale_stride_n, B_ROWS, FIRST)
                a_codes = load_operand(a, row, depth, end, 0, k, a_stride_m, a_stride_k, A_K_MAJOR, EVEN)
                b_codes = load_operand(
                    b + owner * b_stride_e, first + tl.arange(0, FIRST), depth, n, 0, k, b_stride_n, b_stride_k,
                    B_K_MAJOR, EVEN,
                )  # fmt: skip
                accumulator = promote(
                    accumulator, tl.dot(a_codes, tl.trans(b_codes)), a_scale, b_scale, B_ROWS
                )
        store_result(out_ptr, accumulator, row, first + tl.arange(0, FIRST), end, n, out_stride, False)
        if SECOND > 0:
            store_result(out_ptr, beside, row, second + tl.arange(0, SECOND), end, n, out_stride, False)


@triton.jit
def add_tokens(
    accumulator: tl.tensor, dy_codes: tl.tensor, dy_scale: tl.tensor, x: tl.tensor, x_scale_ptr: tl.tensor,
    first: tl.tensor, token: tl.tensor, held: tl.tensor, columns: tl.tensor, RAGGED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """accumulator plus a block of tokens; of a RAGGED one only those that are held."""
    WIDTH: tl.constexpr = accumulator.shape[1]
    x_scale = column_scales(x_scale_ptr, first, columns, 1, 1, WIDTH)
    x_codes = x.load([first, token])
    if RAGGED:
        x_codes = zero_outside(x_codes, held)
    return promote(accumulator, tl.dot(dy_codes, tl.trans(x_codes)), dy_scale, x_scale, 1)


@triton.jit
def add_both(
    accumulator: tl.tensor, beside: tl.tensor, dy: tl.tensor, x: tl.tensor, x_second: tl.tensor,
    dy_scale_ptr: tl.tensor, x_scale_ptr: tl.tensor, first_row: tl.tensor, first: tl.tensor, second: tl.tensor,
    token: tl.tensor, end: tl.tensor, n: tl.tensor, k: tl.tensor, SECOND: tl.constexpr, RAGGED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Both parts of a block of the result plus a block of tokens, through the tensor memory accelerator."""
    dy_scale = column_scales(dy_scale_ptr, first_row, n, 1, 1, accumulator.shape[0])
    dy_codes = dy.load([first_row, token])
    held = (token + tl.arange(0, DEPTH) < end)[None, :]
    if RAGGED:
        dy_codes = zero_outside(dy_codes, held)
    accumulator = add_tokens(accumulator, dy_codes, dy_scale, x, x_scale_ptr, first, token, held, k, RAGGED)
    if SECOND > 0:
        beside = add_tokens(beside, dy_codes, dy_scale, x_second, x_scale_ptr, second, token, held, k, RAGGED)
    return accumulator, beside


@triton.jit
def grouped_wgrad_tma_kernel(
    dy: tl.tensor, x: tl.tensor, x_second: tl.tensor, out_ptr: tl.tensor, dy_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor, offsets_ptr: tl.tensor,
    tokens: tl.tensor, n: tl.tensor, k: tl.tensor, experts: tl.tensor,
    out_stride_e: tl.tensor, out_stride_n: tl.tensor, dy_scale_stride: tl.tensor, x_scale_stride: tl.tensor,
    BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GROUP_M: tl.constexpr,
    ACCUMULATE: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """out[E,N,K]: every expert's dy[T,N]^T x[T,K], summed over its tokens; exact zeros for an expert without any.

    dy and x are descriptors of their transposed storage [N,T] and [K,T], whose blocks start anew at each expert's first
    token, a multiple of 16. Only the last block of an expert can be ragged. Its tokens that belong to the next expert are
    set to zero, which takes the codes through registers: hence outside the loop, and before it, while sums need none.
    """
    tiles_n, tiles_k = tl.cdiv(n, BLOCK_M), tl.cdiv(k, FIRST + SECOND)
    each = tiles_n * tiles_k
    starts, ends, counted, tiles = tiles_of_segments(offsets_ptr, experts, tokens, DEPTH, SLOTS)
    for tile in tl.range(tl.program_id(0), experts * each, tl.num_programs(0)):
        expert = tile // each
        block_m, block_n = block_of(tile - expert * each, tiles_n, tiles_k, GROUP_M)
        first_row = block_m * BLOCK_M
        first, second = columns_of(block_n, FIRST, SECOND)
        start, end = pick(starts, expert, SLOTS), pick(ends, expert, SLOTS)
        scale_block = pick(counted - tiles, expert, SLOTS).to(tl.int64)
        accumulator = tl.zeros((BLOCK_M, FIRST), tl.float32)
        beside = tl.zeros((BLOCK_M, SECOND if SECOND > 0 else FIRST), tl.float32)
        whole = tl.maximum(end - start, 0) // DEPTH
        if start + whole * DEPTH < end:
            at = scale_block + whole
            accumulator, beside = add_both(
                accumulator, beside, dy, x, x_second, dy_scale_ptr + at * dy_scale_stride,
                x_scale_ptr + at * x_scale_stride, first_row, first, second, start + whole * DEPTH, end, n, k,
                SECOND, True,
            )  # fmt: skip
        for block in range(0, whole):
            at = scale_block + block
            accumulator, beside = add_both(
                accumulator, beside, dy, x, x_second, dy_scale_ptr + at * dy_scale_stride,
                x_scale_ptr + at * x_scale_stride, first_row, first, second, start + block * DEPTH, end, n, k,
                SECOND, False,
            )  # fmt: skip
        owner = out_ptr + tl.cast(expert, tl.int64) * out_stride_e
        row = first_row + tl.arange(0, BLOCK_M)
        store_result(owner, accumulator, row, first + tl.arange(0, FIRST), n, k, out_stride_n, ACCUMULATE)
        if SECOND > 0:
            store_result(owner, beside, row, second + tl.arange(0, SECOND), n, k, out_stride_n, ACCUMULATE)


@triton.jit
def grouped_wgrad_kernel(
    dy_ptr: tl.tensor, x_ptr: tl.tensor, out_ptr: tl.tensor, dy_scale_ptr: tl.tensor, x_scale_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    tokens: tl.tensor, n: tl.tensor, k: tl.tensor, experts: tl.tensor,
    dy_stride_n: tl.tensor, dy_stride_t: tl.tensor, x_stride_k: tl.tensor, x_stride_t: tl.tensor,
    out_stride_e: tl.tensor, out_stride_n: tl.tensor, dy_scale_stride: tl.tensor, x_scale_stride: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, DY_K_MAJOR: tl.constexpr,
    X_K_MAJOR: tl.constexpr, SPLIT: tl.constexpr, ACCUMULATE: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """The same by pointers, with any strides; unless SPLIT, blocks are those of every 128 tokens of the whole."""
    tiles_n, tiles_k = tl.cdiv(n, BLOCK_M), tl.cdiv(k, BLOCK_N)
    each = tiles_n * tiles_k
    starts, ends, counted, tiles = tiles_of_segments(offsets_ptr, experts, tokens, DEPTH, SLOTS)
    for tile in tl.range(tl.program_id(0), experts * each, tl.num_programs(0)):
        expert = tile // each
        block_m, block_n = block_of(tile - expert * each, tiles_n, tiles_k, GROUP_M)
        row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        start, end = pick(starts, expert, SLOTS), pick(ends, expert, SLOTS)
        if SPLIT:
            scale_block, origin = pick(counted - tiles, expert, SLOTS), start
        else:
            scale_block = start // DEPTH
            origin = scale_block * DEPTH
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, tl.where(end > start, tl.cdiv(end - origin, DEPTH), 0)):
            token = origin + block * DEPTH + tl.arange(0, DEPTH)
            dy_codes = load_operand(
                dy_ptr, row, token, n, start, end, dy_stride_n, dy_stride_t, DY_K_MAJOR, False
            )
            x_codes = load_operand(
                x_ptr, column, token, k, start, end, x_stride_k, x_stride_t, X_K_MAJOR, False
            )
            product = tl.dot(dy_codes, tl.trans(x_codes))
            # Behind the product: no registers are left for them while the operands are turned.
            at = (scale_block + block).to(tl.int64)
            dy_scale = row_scales(dy_scale_ptr + at * dy_scale_stride, row, n, 1, 1)
            x_scale = row_scales(x_scale_ptr + at * x_scale_stride, column, k, 1, 1)
            accumulator = promote(accumulator, product, dy_scale, x_scale, 1)
        owner = out_ptr + tl.cast(expert, tl.int64) * out_stride_e
        store_result(owner, accumulator, row, column, n, k, out_stride_n, ACCUMULATE)


@triton.jit
def zero_outside(codes: tl.tensor, held: tl.tensor) -> tl.tensor:
    """Codes with zeros where held is false: a NaN code times zero would not be zero."""
    bits = codes.to(tl.uint8, bitcast=True)
    return tl.where(held, bits, 0).to(tl.uint8).to(codes.dtype, bitcast=True)
