"""Triton: each expert's rows with its own weight, offsets on the device."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens sorted by expert, N output features, K input features, E experts. Every result element is summed by
# one program in one order, so results do not vary. The host never learns the offsets.

import triton
import triton.language as tl

from fp8_safeguard.kernels.triton_gemm import DEPTH, block_of, load_operand, promote, store_result
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
    a: tl.tensor, b: tl.tensor, out_ptr: tl.tensor, a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    tokens: tl.tensor, n: tl.tensor, k: tl.tensor, experts: tl.tensor,
    a_stride_m: tl.tensor, a_stride_k: tl.tensor,
    b_stride_e: tl.tensor, b_stride_n: tl.tensor, b_stride_k: tl.tensor, out_stride: tl.tensor,
    a_scale_stride_m: tl.tensor, a_scale_stride_k: tl.tensor,
    b_scale_stride_e: tl.tensor, b_scale_stride_n: tl.tensor, b_scale_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """out[T,N]: every expert's rows of a[T,K] times its b[N,K]^T; zeros behind the last expert.

    A persistent loop over the blocks of all experts. TMA: a and b are descriptors, of [T,K] and of all experts' rows
    [E N, K]; a block may then read rows of the next expert, which are not stored.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    _, _, counted, _ = tiles_of_segments(offsets_ptr, experts, tokens, BLOCK_M, SLOTS)
    tiles = tl.max(counted, axis=0) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, first, end, block_n = expert_block(
            tile, offsets_ptr, experts, tokens, tiles_n, BLOCK_M, GROUP_M, SLOTS
        )
        row = first + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        owner = expert.to(tl.int64)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, tl.where(expert < experts, tl.cdiv(k, DEPTH), 0)):
            depth = block * DEPTH + tl.arange(0, DEPTH)
            if TMA:
                a_codes = a.load([first, block * DEPTH])
                b_codes = b.load([expert * n + block_n * BLOCK_N, block * DEPTH])
            else:
                a_codes = load_operand(a, row, depth, end, 0, k, a_stride_m, a_stride_k, A_K_MAJOR, EVEN)
                b_codes = load_operand(
                    b + owner * b_stride_e, column, depth, n, 0, k, b_stride_n, b_stride_k, B_K_MAJOR, EVEN
                )
            accumulator = promote(
                accumulator, tl.dot(a_codes, tl.trans(b_codes)), row, column, end, n,
                a_scale_ptr + block * a_scale_stride_k,
                b_scale_ptr + owner * b_scale_stride_e + block * b_scale_stride_k,
                a_scale_stride_m, b_scale_stride_n, A_ROWS, B_ROWS,
            )  # fmt: skip
        store_result(out_ptr, accumulator, row, column, end, n, out_stride, False)


@triton.jit
def grouped_wgrad_kernel(
    dy: tl.tensor, x: tl.tensor, out_ptr: tl.tensor, dy_scale_ptr: tl.tensor, x_scale_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    tokens: tl.tensor, n: tl.tensor, k: tl.tensor, experts: tl.tensor,
    dy_stride_n: tl.tensor, dy_stride_t: tl.tensor, x_stride_k: tl.tensor, x_stride_t: tl.tensor,
    out_stride_e: tl.tensor, out_stride_n: tl.tensor, dy_scale_stride: tl.tensor, x_scale_stride: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, DY_K_MAJOR: tl.constexpr,
    X_K_MAJOR: tl.constexpr, SPLIT: tl.constexpr, ACCUMULATE: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """out[E,N,K]: every expert's dy[T,N]^T x[T,K], summed over its tokens; exact zeros for an expert without any.

    SPLIT: the operands' blocks start anew at each expert's first token, else every 128 tokens of the whole. TMA:
    operands are descriptors of their transposed storage [N,T] and [K,T], and SPLIT. The tokens of the last, ragged
    block that belong to the next expert are set to zero.
    """
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
            if TMA:
                dy_codes = dy.load([block_m * BLOCK_M, origin + block * DEPTH])
                x_codes = x.load([block_n * BLOCK_N, origin + block * DEPTH])
                if origin + (block + 1) * DEPTH > end:
                    held = (token < end)[None, :]
                    dy_codes = zero_outside(dy_codes, held)
                    x_codes = zero_outside(x_codes, held)
            else:
                dy_codes = load_operand(
                    dy, row, token, n, start, end, dy_stride_n, dy_stride_t, DY_K_MAJOR, False
                )
                x_codes = load_operand(
                    x, column, token, k, start, end, x_stride_k, x_stride_t, X_K_MAJOR, False
                )
            at = (scale_block + block).to(tl.int64)
            accumulator = promote(
                accumulator, tl.dot(dy_codes, tl.trans(x_codes)), row, column, n, k,
                dy_scale_ptr + at * dy_scale_stride, x_scale_ptr + at * x_scale_stride, 1, 1, 1, 1,
            )  # fmt: skip
        owner = out_ptr + tl.cast(expert, tl.int64) * out_stride_e
        store_result(owner, accumulator, row, column, n, k, out_stride_n, ACCUMULATE)


@triton.jit
def zero_outside(codes: tl.tensor, held: tl.tensor) -> tl.tensor:
    """Codes with zeros where held is false: a NaN code times zero would not be zero."""
    bits = codes.to(tl.uint8, bitcast=True)
    return tl.where(held, bits, 0).to(tl.uint8).to(codes.dtype, bitcast=True)
