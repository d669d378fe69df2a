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
def row_scales(
    ptr: tl.tensor, row: tl.tensor, rows: tl.tensor, stride: tl.tensor, SHARED: tl.constexpr
) -> tl.tensor:
    """Scales of rows, SHARED of which have one in common. Loaded before a product, they come while it runs."""
    return tl.load(ptr + (row // SHARED).to(tl.int64) * stride, mask=row < rows, other=0.0)


@triton.jit
def column_scales(
    ptr: tl.tensor, first: tl.tensor, columns: tl.tensor, stride: tl.tensor, SHARED: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Scales of WIDTH columns: one number where they lie in one block of a tile-quantised weight."""
    if SHARED == DEPTH:
        scale = tl.load(ptr + (tl.where(first < columns, first, 0) // DEPTH).to(tl.int64) * stride)
    else:
        scale = row_scales(ptr, first + tl.arange(0, WIDTH), columns, stride, SHARED)
    return scale


@triton.jit
def promote(
    accumulator: tl.tensor, product: tl.tensor, a_scale: tl.tensor, b_scale: tl.tensor, B_ROWS: tl.constexpr
) -> tl.tensor:
    """Add one block's product times its scales: in one multiply-add an element where B has one scale a block."""
    if B_ROWS == DEPTH:
        accumulator += product * (a_scale * b_scale)[:, None]
    else:
        accumulator += product * (a_scale[:, None] * b_scale[None, :])
    return accumulator


@triton.jit
def columns_of(block_n: tl.tensor, FIRST: tl.constexpr, SECOND: tl.constexpr) -> tl.tensor:
    """First columns of a block's two products. Of 128 + 64, every other block is 64 + 128: neither then has two scales."""
    start = block_n * (FIRST + SECOND)
    odd = block_n % 2 if FIRST > SECOND and SECOND > 0 else 0
    return start + odd * SECOND, start + (1 - odd) * FIRST


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
        a_scale = row_scales(a_scale_ptr + block * a_scale_stride_k, row, m, a_scale_stride_m, A_ROWS)
        b_scale = column_scales(
            b_scale_ptr + block * b_scale_stride_k, block_n * BLOCK_N, n, b_scale_stride_n, B_ROWS, BLOCK_N
        )
        depth = block * DEPTH + tl.arange(0, DEPTH)
        a = load_operand(a_ptr, row, depth, m, 0, k, a_stride_m, a_stride_k, A_K_MAJOR, EVEN)
        b = load_operand(b_ptr, column, depth, n, 0, k, b_stride_n, b_stride_k, B_K_MAJOR, EVEN)
        accumulator = promote(accumulator, tl.dot(a, tl.trans(b)), a_scale, b_scale, B_ROWS)
    store_result(out_ptr, accumulator, row, column, m, n, out_stride, ACCUMULATE)


@triton.jit
def add_block(
    accumulator: tl.tensor, a: tl.tensor, a_scale: tl.tensor, b_desc: tl.tensor, b_scale_ptr: tl.tensor,
    row: tl.tensor, block: tl.tensor, first: tl.tensor, columns: tl.tensor, b_scale_stride: tl.tensor,
    B_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """accumulator plus a block of A times one of B, which the descriptor finds at a row of its own."""
    WIDTH: tl.constexpr = accumulator.shape[1]
    b_scale = column_scales(b_scale_ptr, first, columns, b_scale_stride, B_ROWS, WIDTH)
    b = b_desc.load([row, block * DEPTH])
    return promote(accumulator, tl.dot(a, tl.trans(b)), a_scale, b_scale, B_ROWS)


@triton.jit
def put_block(
    out_desc: tl.tensor, accumulator: tl.tensor, row: tl.tensor, column: tl.tensor, ACCUMULATE: tl.constexpr
) -> tl.tensor:
    """Write a block of the result, or add it to what is there; nothing is written outside."""
    if ACCUMULATE:
        accumulator += out_desc.load([row, column]).to(tl.float32)
    out_desc.store([row, column], accumulator.to(out_desc.dtype))


@triton.jit
def gemm_tma_kernel(
    a_desc: tl.tensor, b_desc: tl.tensor, b_second_desc: tl.tensor, out_desc: tl.tensor, out_second_desc: tl.tensor,
    a_scale_ptr: tl.tensor, b_scale_ptr: tl.tensor,
    m: tl.tensor, n: tl.tensor, k: tl.tensor,
    a_scale_stride_m: tl.tensor, a_scale_stride_k: tl.tensor, b_scale_stride_n: tl.tensor, b_scale_stride_k: tl.tensor,
    BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, GROUP_M: tl.constexpr, A_ROWS: tl.constexpr,
    B_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, SPECIALIZE: tl.constexpr,
) -> None:  # fmt: skip
    """All blocks of the result in turn (persistent), operands and result through the tensor memory accelerator.

    It fills what lies outside with zeros. A block is FIRST + SECOND columns wide: while one product runs, the other
    is scaled and added. 192 columns are what two warp groups hold of both without spilling.
    """
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, FIRST + SECOND)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZE
    ):
        block_m, block_n = block_of(tile, tiles_m, tiles_n, GROUP_M)
        row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        first, second = columns_of(block_n, FIRST, SECOND)
        accumulator = tl.zeros((BLOCK_M, FIRST), tl.float32)
        beside = tl.zeros((BLOCK_M, SECOND if SECOND > 0 else FIRST), tl.float32)
        for block in range(0, tl.cdiv(k, DEPTH)):
            a_scale = row_scales(a_scale_ptr + block * a_scale_stride_k, row, m, a_scale_stride_m, A_ROWS)
            b_scale_at = b_scale_ptr + block * b_scale_stride_k
            a = a_desc.load([block_m * BLOCK_M, block * DEPTH])
            accumulator = add_block(
                accumulator, a, a_scale, b_desc, b_scale_at, first, block, first, n, b_scale_stride_n, B_ROWS
            )
            if SECOND > 0:
                beside = add_block(
                    beside, a, a_scale, b_second_desc, b_scale_at, second, block, second, n, b_scale_stride_n, B_ROWS
                )  # fmt: skip
        put_block(out_desc, accumulator, block_m * BLOCK_M, first, ACCUMULATE)
        if SECOND > 0:
            put_block(out_second_desc, beside, block_m * BLOCK_M, second, ACCUMULATE)
