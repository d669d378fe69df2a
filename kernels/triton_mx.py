"""Triton: MXFP8, blocks of 32 with E8M0 scales, for comparison."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: R rows (all leading dimensions together), C columns, b counts 32-blocks. A what-if format: the scale is a power of
# two by our contract (rounded up, so that nothing saturates), within E8M0's 2^-127 to 2^127.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.mx import MX_BLOCK, MxTensor
from fp8_safeguard.kernels.operands import check_source
from fp8_safeguard.kernels.triton_codes import block_scale, divide, encode, finite_magnitude
from fp8_safeguard.kernels.triton_launch import Launch, as_bytes

ROWS, COLUMNS = 32, 128

LEAST_BITS = tl.constexpr(1 << 22)
"""2^-127, E8M0's smallest scale, is a float32 subnormal: written as bits, since a shifted exponent would give 0."""


@triton.jit
def mx_kernel(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    stride_r: tl.tensor, stride_c: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr,
) -> None:  # fmt: skip
    """Codes and scale bytes of a tile, seen as one block a line."""
    tiles_c = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // tiles_c
    lines = tl.arange(0, ROWS * (COLUMNS // BLOCK))[:, None]
    row = (tile * ROWS + lines // (COLUMNS // BLOCK)).to(tl.int64)
    block = (tl.program_id(0) - tile * tiles_c) * (COLUMNS // BLOCK) + lines % (COLUMNS // BLOCK)
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    held = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * stride_r + column.to(tl.int64) * stride_c, mask=held, other=0.0).to(tl.float32)
    amax = tl.max(finite_magnitude(x), axis=1, keep_dims=True)
    scale = block_scale(amax, 1.0, E4M3, True)
    bits = tl.maximum(scale.to(tl.int32, bitcast=True), LEAST_BITS)
    codes = encode(x, divide(x, bits.to(tl.float32, bitcast=True)), E4M3)
    tl.store(codes_ptr + row * columns + column, codes, mask=held)
    blocks = tl.cdiv(columns, BLOCK)
    tl.store(
        scale_ptr + row * blocks + block, (bits >> 23).to(tl.uint8), mask=(row < rows) & (block < blocks)
    )


def quantize_mx(x: Tensor, *, fmt: str = "e4m3") -> MxTensor:
    """MXFP8 of x [..., C]. NaN and Inf become the NaN code and do not count for the scale, as in `quantize`."""
    check_source(x, None)
    launch, result = plan_mx(x.detach(), fmt)
    launch.run()
    return result


def plan_mx(x: Tensor, fmt: str) -> tuple[Launch, MxTensor]:
    """The kernel and the tensor it fills."""
    code_format = get_format(fmt)
    source = x.float() if x.dtype == torch.float64 else x
    columns = x.shape[-1]
    x_RC = source.reshape(x.numel() // max(columns, 1), columns)
    blocks = -(-columns // MX_BLOCK)
    data = torch.empty(x.shape, dtype=code_format.dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], blocks), dtype=torch.uint8, device=x.device)
    arguments = {
        "x_ptr": x_RC,
        "codes_ptr": as_bytes(data),
        "scale_ptr": scale,
        "rows": x_RC.shape[0],
        "columns": columns,
        "stride_r": x_RC.stride(0),
        "stride_c": x_RC.stride(1),
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "BLOCK": MX_BLOCK,
        "E4M3": fmt == "e4m3",
    }
    grid = (-(-x_RC.shape[0] // ROWS) * -(-columns // COLUMNS),)
    return Launch(kernel=mx_kernel, grid=grid, arguments=arguments, stages=1), MxTensor(data, scale)
