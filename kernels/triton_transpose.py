"""Triton: turns a tile-quantised weight when dgrad asks for it."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: B matrices (experts), N rows, K columns. Tiles are square, so only bytes and scales move: exact, and half the
# memory of keeping both copies.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.triton_launch import Launch, as_bytes

TILE = 128


@triton.jit
def transpose_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    stride_b: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor, out_stride_b: tl.tensor, out_stride_k: tl.tensor,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of bytes of one matrix, turned on its way."""
    tiles_k = tl.cdiv(columns, TILE)
    tiles = tl.cdiv(rows, TILE) * tiles_k
    pid = tl.program_id(0)
    matrix = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    row = (tile // tiles_k) * TILE + tl.arange(0, TILE)
    column = (tile % tiles_k) * TILE + tl.arange(0, TILE)
    held = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * stride_n + column.to(tl.int64)[None, :] * stride_k
    bytes_nk = tl.load(x_ptr + matrix * stride_b + at, mask=held, other=0)
    to = column.to(tl.int64)[:, None] * out_stride_k + row[None, :]
    tl.store(out_ptr + matrix * out_stride_b + to, tl.trans(bytes_nk), mask=tl.trans(held))


def transpose_tiles(w: QuantizedTensor) -> QuantizedTensor:
    """w [N,K] or [B,N,K] in tiles with its last two dimensions swapped: equal to w.transpose(), in one kernel."""
    if w.layout != "tile" or w.data.dim() not in (2, 3):
        raise OperandError(
            f"a {w.layout!r} tensor of shape {list(w.shape)} is not a tile-quantised weight: pass [N,K] or [B,N,K] of "
            "layout 'tile'"
        )
    launch, turned = plan_transpose(w)
    launch.run()
    return turned


def plan_transpose(w: QuantizedTensor) -> tuple[Launch, QuantizedTensor]:
    """The kernel and the tensor it fills."""
    data = w.data if w.data.dim() == 3 else w.data[None]
    matrices, rows, columns = data.shape
    out = torch.empty((matrices, columns, rows), dtype=w.data.dtype, device=w.device)
    arguments = {
        "x_ptr": as_bytes(data),
        "out_ptr": as_bytes(out),
        "rows": rows,
        "columns": columns,
        "stride_b": data.stride(0),
        "stride_n": data.stride(1),
        "stride_k": data.stride(2),
        "out_stride_b": out.stride(0),
        "out_stride_k": out.stride(1),
        "TILE": TILE,
    }
    tiles = matrices * -(-rows // TILE) * -(-columns // TILE)
    launch = Launch(kernel=transpose_kernel, grid=(tiles,), arguments=arguments, stages=1)
    turned = out if w.data.dim() == 3 else out[0]
    return launch, QuantizedTensor(turned, w.scale.mT.contiguous(), "tile", w.fmt)
