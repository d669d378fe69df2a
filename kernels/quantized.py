"""QuantizedTensor: FP8 codes, their block scales and what both mean."""

# Shapes: R rows, C columns, b a count of 128-blocks along that dimension (Rb, Cb).

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import BLOCK, get_format
from fp8_safeguard.kernels.errors import OperandError

_TRANSPOSED_LAYOUT = {"row": "col", "col": "row", "tile": "tile"}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """An FP8 tensor: `dequantize()` is data x scale, the scale shared by each block of `layout`."""

    data: Tensor
    """float8_e4m3fn or float8_e5m2, in the shape of the source whatever the layout."""
    scale: Tensor
    """float32 [..., R or Rb, C or Cb]: row [..., R, Cb], col [..., Rb, C], tile [..., Rb, Cb]."""
    layout: str
    """`row`: [1,128] blocks, `col`: [128,1], `tile`: [128,128]."""
    fmt: str
    """`e4m3` or `e5m2`."""
    offsets: Tensor | None = None
    """int32 [E+1] on a 2-D `col` or `tile` tensor whose blocks start anew at each expert's first row."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which stores bytes: it cannot read torch's FP8 tensors back."""
        parts = self.scale, self.layout, self.fmt, self.offsets
        return _unpickled, (self.data.view(torch.uint8), *parts)

    @property
    def shape(self) -> torch.Size:
        """Shape of the source tensor."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Data x scale, multiplied in float32 (float64 for a float64 result), rounded once to dtype."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.data.to(exact).mul_(self.expanded_scale())
        return values.to(dtype)

    def expanded_scale(self) -> Tensor:
        """The scale of every element, float32 in the shape of data."""
        scale = self.scale
        if self.layout != "row" and scale.dim() > 0:
            scale = scale.index_select(-2, self._block_of_row()) if self.data.dim() > 1 else scale
        if self.layout != "col":
            columns = self.data.shape[-1]
            scale = scale.repeat_interleave(BLOCK, dim=-1)[..., :columns]
        return scale

    def transpose(self) -> QuantizedTensor:
        """The same values with the last two dimensions swapped: exact, bytes and scales only move.

        A `row` tensor becomes a `col` one and the other way round; a `tile` tensor stays one, so one
        FP8 copy of a weight serves fprop and dgrad.
        """
        if self.data.dim() < 2:
            raise OperandError(f"transpose() needs two dimensions, this tensor has shape {list(self.shape)}")
        if self.offsets is not None:
            raise OperandError(
                "transpose() of a tensor split by expert: transpose each expert's rows by themselves"
            )
        # Codes move as bytes: float8 has few kernels on a CPU.
        data = self.data.view(torch.uint8).mT.contiguous().view(get_format(self.fmt).dtype)
        return QuantizedTensor(data, self.scale.mT.contiguous(), _TRANSPOSED_LAYOUT[self.layout], self.fmt)

    def _block_of_row(self) -> Tensor:
        """int64 [R]: which row block of `scale` each row belongs to."""
        rows = torch.arange(self.data.shape[-2], device=self.device)
        if self.offsets is None or self.offsets.shape[0] == 1:
            return rows // BLOCK
        starts, first_block = segment_blocks(self.offsets)
        segment = torch.bucketize(rows, starts, right=True) - 1
        return first_block[segment] + (rows - starts[segment]) // BLOCK


def _unpickled(
    codes: Tensor, scale: Tensor, layout: str, fmt: str, offsets: Tensor | None
) -> QuantizedTensor:
    return QuantizedTensor(codes.view(get_format(fmt).dtype), scale, layout, fmt, offsets)


def segment_blocks(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """First row and first row block of each expert, both int64 [E] (blocks restart at each expert)."""
    bounds = offsets.to(torch.int64)
    blocks = (bounds.diff() + BLOCK - 1) // BLOCK
    return bounds[:-1], blocks.cumsum(0) - blocks


def scale_shape(scales: Tensor, x: Tensor, layout: str) -> Tensor:
    """Scales of all matrices' row blocks with x's leading dimensions; a vector's have one dimension."""
    if x.dim() == 1:
        return scales.reshape(-1)
    row_blocks = x.shape[-2] if layout == "row" else -(-x.shape[-2] // BLOCK)
    return scales.reshape(*x.shape[:-2], row_blocks, scales.shape[1])
