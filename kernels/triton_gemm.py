"""Triton: dense FP8 products, promoted to float32 every 128."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: M x N the result, K the summed dimension, b counts 128-blocks. D[M,N] = A[M,K] B[N,K]^T, each block of 128 of K
# summed by the tensor core, scaled and added in float32: Hopper's tensor core itself keeps about 14 bits.

import triton
import triton.language as tl

DEPTH = tl.constexpr(128)


@triton.jit
def block_of(tile: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Row and column block of a running number: GROUP_M row blocks walk the columns together."""
    width = GROUP_M * tiles_n
    group = tile // width
    first = group * GROUP_M
    high = tl.minimum(tiles_m - first, GROUP_M)
    rest = tile - group * width
    return first + rest % high, rest // high


@triton.jit
def load_operand(
    ptr: tl.tensor, row: tl.tensor, depth: tl.tensor, rows: tl.tensor, begin: tl.tensor, end: tl.tensor,
    stride_row: tl.tensor, stride_depth: tl.tensor, K_MAJOR: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Codes [rows, depth] of one block; depths outside begin to end (unless EVEN) are zero.

    Operands that are not K-major are read along their rows and turned on the way to the tensor core: the fused
    transpose, with no copy in memory.
    """
    if K_MAJOR:
        # A row outside gives a result that is not stored, so any row will do in its place: no mask.
        safe = tl.where(row < rows, row, 0).to(tl.int64)
        at = safe[:, None] * stride_row + depth[None, :]
        if EVEN:
            codes = tl.load(ptr + at)
        else:
            codes = tl.load(ptr + at, mask=((depth >= begin) & (depth < end))[None, :], other=0.0)
    else:
        at = depth.to(tl.int64)[:, None] * stride_depth + row[None, :]
        held = (row < rows)[None, :]
        if not EVEN:
            held = held & ((depth >= begin) & (depth < end))[:, None]
        codes = tl.trans(tl.load(ptr + at, mask=held, other=0.0))
    return codes


@triton.jit
def promote(
    accumulator: tl.tensor, product: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor, a_stride: tl.tensor, b_stride: tl.tensor,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add one block's product times its scales: in one multiply-add an element where B has one scale a block."""
    a_scale = tl.load(a_scale_ptr + (row // A_ROWS).to(tl.int64) * a_stride, mask=row < rows, other=0.0)
    if B_ROWS == DEPTH and product.shape[1] == DEPTH:
        b_scale = tl.load(b_scale_ptr + (tl.min(column, axis=0) // DEPTH).to(tl.int64) * b_stride)
        accumulator += product * (a_scale * b_scale)[:, None]
    else:
        b_scale = tl.load(
            b_scale_ptr + (column // B_ROWS).to(tl.int64) * b_stride, mask=column < columns, other=0.0
        )
        accumulator += product * (a_scale[:, None] * b_scale[None, :])
    return accumulator


@triton.jit
def store_result(
    out_ptr: tl.tensor, accumulator: tl.tensor, row: tl.tensor, column: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    stride: tl.tensor, ACCUMULATE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write a block of the result, or add it to what is there, rounded once."""
    at = out_ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    held = (row < rows)[:, None] & (column < columns)[None, :]
    if ACCUMULATE:
        accumulator += tl.load(at, mask=held, other=0.0).to(tl.float32)
    tl.store(at, accumulator.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def gemm_kernel(
    a_ptr: tl.tensor, b_ptr: tl.tensor, out_ptr: tl.tensor, a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor,
    m: tl.tensor, n: tl.tensor, k: tl.tensor,
    a_stride_m: tl.tensor, a_stride_k: tl.tensor, b_stride_n: tl.tensor, b_stride_k: tl.tensor, out_stride: tl.tensor,
    a_scale_stride_m: tl.tensor, a_scale_stride_k: tl.tensor, b_scale_stride_n: tl.tensor, b_scale_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr, EVEN: tl.constexpr, ACCUMULATE: tl.constexpr,
) -> None:  # fmt: skip
    """One block of the result, operands by pointers with any strides. A_ROWS, B_ROWS: rows that share a scale."""
    block_m, block_n = block_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(0, tl.cdiv(k, DEPTH)):
        depth = block * DEPTH + tl.arange(0, DEPTH)
        a = load_operand(a_ptr, row, depth, m, 0, k, a_stride_m, a_stride_k, A_K_MAJOR, EVEN)
        b = load_operand(b_ptr, column, depth, n, 0, k, b_stride_n, b_stride_k, B_K_MAJOR, EVEN)
        accumulator = promote(
            accumulator, tl.dot(a, tl.trans(b)), row, column, m, n,
            a_scale_ptr + block * a_scale_stride_k, b_scale_ptr + block * b_scale_stride_k,
            a_scale_stride_m, b_scale_stride_n, A_ROWS, B_ROWS,
        )  # fmt: skip
    store_result(out_ptr, accumulator, row, column, m, n, out_stride, ACCUMULATE)


@triton.jit
def gemm_tma_kernel(
    a_desc: tl.tensor, b_desc: tl.tensor, out_desc: tl.tensor, a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor,
    m: tl.tensor, n: tl.tensor, k: tl.tensor,
    a_scale_stride_m: tl.tensor, a_scale_stride_k: tl.tensor, b_scale_stride_n: tl.tensor, b_scale_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr, SPECIALIZE: tl.constexpr,
) -> None:  # fmt: skip
    """All blocks of the result in turn (persistent), operands and result through the tensor memory accelerator.

    It fills what lies outside with zeros, and does not write there.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZE
    ):
        block_m, block_n = block_of(tile, tiles_m, tiles_n, GROUP_M)
        row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(0, tl.cdiv(k, DEPTH)):
            a = a_desc.load([block_m * BLOCK_M, block * DEPTH])
            b = b_desc.load([block_n * BLOCK_N, block * DEPTH])
            accumulator = promote(
                accumulator, tl.dot(a, tl.trans(b)), row, column, m, n,
                a_scale_ptr + block * a_scale_stride_k, b_scale_ptr + block * b_scale_stride_k,
                a_scale_stride_m, b_scale_stride_n, A_ROWS, B_ROWS,
            )  # fmt: skip
        if ACCUMULATE:
            accumulator += out_desc.load([block_m * BLOCK_M, block_n * BLOCK_N]).to(tl.float32)
        out_desc.store([block_m * BLOCK_M, block_n * BLOCK_N], accumulator.to(out_desc.dtype))
