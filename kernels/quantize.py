"""Block-wise FP8 quantisation of any tensor, in three layouts."""

# Shapes: B matrices (all leading dimensions together), R rows, C columns, E experts; Rb, Cb blocks along R, C.

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from fp8_safeguard.kernels import reference
from fp8_safeguard.kernels.codes import CodeFormat
from fp8_safeguard.kernels.errors import OffsetsError
from fp8_safeguard.kernels.operands import as_matrices, check_options, check_source, offsets_list
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.stats import tensor_stats


@overload
def quantize(
    x: Tensor, *, layout: str = ..., fmt: str = ..., scale: str = ..., multiplier: float = ...,
    stats: Literal[False] = ..., offsets: Tensor | None = ...,
) -> QuantizedTensor: ...  # fmt: skip
@overload
def quantize(
    x: Tensor, *, layout: str = ..., fmt: str = ..., scale: str = ..., multiplier: float = ...,
    stats: Literal[True], offsets: Tensor | None = ...,
) -> tuple[QuantizedTensor, Tensor]: ...  # fmt: skip
def quantize(
    x: Tensor,
    *,
    layout: str = "row",
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    stats: bool = False,
    offsets: Tensor | None = None,
) -> QuantizedTensor | tuple[QuantizedTensor, Tensor]:
    """Quantise x to FP8 with one scale a block: q = RNE(clamp(x / s, +-max)), s = amax / max.

    x is a floating tensor of one or more dimensions; the last two are the matrix that is cut into blocks, the
    leading ones are matrices of their own (the 3-D weights of experts never share a block). float64 is rounded
    to float32 first. NaN and +-Inf become the NaN code and do not count for amax. With `stats` the second
    result is `tensor_stats` of the same arguments. `offsets` (int32 [E+1], x 2-D) makes `col` and `tile` blocks
    start anew at each expert's first row.
    """
    code_format = check_options(layout, fmt, scale, multiplier)
    check_source(x, offsets)
    source = x.detach()
    kept = None if layout == "row" else offsets
    if kept is None:
        codes, scales = _quantize_matrices(as_matrices(source), layout, code_format, scale, multiplier)
        codes, scales = codes.reshape(x.shape), _scale_shape(scales, x)
    else:
        codes, scales = _quantize_segments(source, kept, layout, code_format, scale, multiplier)
    result = QuantizedTensor(codes, scales, layout, fmt, kept)
    if not stats:
        return result
    measured = tensor_stats(
        source, layout=layout, fmt=fmt, scale=scale, multiplier=multiplier, offsets=offsets
    )
    return result, measured


def _quantize_matrices(
    x_BRC: Tensor, layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor]:
    """Codes [B,R,C] and scales [B,Rb,Cb] of matrices."""
    return reference.quantize_matrices(x_BRC.float(), layout, code_format, scale, multiplier)


def _quantize_segments(
    x_RC: Tensor, offsets: Tensor, layout: str, code_format: CodeFormat, scale: str, multiplier: float
) -> tuple[Tensor, Tensor]:
    """Codes [R,C] and scales [sum of row blocks, C or Cb] of rows split by expert."""
    bounds = offsets_list(offsets, x_RC.shape[0])
    if bounds[-1] != x_RC.shape[0]:
        raise OffsetsError(
            f"offsets end at {bounds[-1]} but x has {x_RC.shape[0]} rows: every row needs an expert to be "
            "quantised, so cut the padding off first"
        )
    parts = [
        _quantize_matrices(as_matrices(x_RC[start:end]), layout, code_format, scale, multiplier)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    codes = torch.cat([part[0][0].view(torch.uint8) for part in parts]).view(code_format.dtype)
    return codes, torch.cat([part[1][0] for part in parts])


def _scale_shape(scales_BRbCb: Tensor, x: Tensor) -> Tensor:
    """Scales with x's leading dimensions; a vector's scales have one dimension."""
    if x.dim() == 1:
        return scales_BRbCb.reshape(-1)
    return scales_BRbCb.reshape(*x.shape[:-2], *scales_BRbCb.shape[1:])
