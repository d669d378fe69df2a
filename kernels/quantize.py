"""Block-wise FP8 quantisation of any tensor, in three layouts."""

# Shapes: B matrices (all leading dimensions together), R rows, C columns, E experts; Rb, Cb blocks along R, C.

from __future__ import annotations

from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from fp8_safeguard.kernels import native, scaled
from fp8_safeguard.kernels.device import device_kernels
from fp8_safeguard.kernels.dispatch import implementation
from fp8_safeguard.kernels.errors import OffsetsError
from fp8_safeguard.kernels.operands import as_rows, check_options, check_source, offsets_list
from fp8_safeguard.kernels.quantized import QuantizedTensor, scale_shape
from fp8_safeguard.kernels.stats import measured_bounds, merge_stats, tensor_stats


@overload
def quantize(
    x: Tensor, *, layout: str = ..., fmt: str = ..., scale: str = ..., multiplier: float = ...,
    stats: Literal[False] = ..., offsets: Tensor | None = ..., tensor_scale: float | Tensor | None = ...,
    amax_floor: float = ...,
) -> QuantizedTensor: ...  # fmt: skip
@overload
def quantize(
    x: Tensor, *, layout: str = ..., fmt: str = ..., scale: str = ..., multiplier: float = ...,
    stats: Literal[True], offsets: Tensor | None = ..., tensor_scale: float | Tensor | None = ...,
    amax_floor: float = ...,
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
    tensor_scale: float | Tensor | None = None,
    amax_floor: float = 0.0,
) -> QuantizedTensor | tuple[QuantizedTensor, Tensor]:
    """Quantise x to FP8 with one scale a block: q = RNE(clamp(x / s, +-max)), s = amax / max.

    x is a floating tensor of one or more dimensions; the last two are the matrix that is cut into blocks, the
    leading ones are matrices of their own (the 3-D weights of experts never share a block). float64 is rounded
    to float32 first. NaN and +-Inf become the NaN code and do not count for amax. With `stats` the second
    result is `tensor_stats` of the same arguments. `offsets` (int32 [E+1], x 2-D) makes `col` and `tile` blocks
    start anew at each expert's first row. On a CPU they have to cover every row; a CUDA device does not read them
    back: they are not checked there, rows behind the last are zero codes, and the scales have R // 128 + E + 1 rows.
    `tensor_scale` is the scale of every block, whatever its amax: values beyond it saturate, tiny ones become zero
    (`multiplier` is not applied to it). `amax_floor` is what no block's amax counts for less than. Both work on a CPU.
    """
    if torch.compiler.is_compiling() and tensor_scale is None and not amax_floor:
        from fp8_safeguard.kernels import library

        return library.quantize(x, layout, fmt, scale, multiplier, stats, offsets)
    code_format = check_options(layout, fmt, scale, multiplier)
    check_source(x, offsets)
    operand = scaled.given(x, fmt, scale, multiplier, tensor_scale, amax_floor)
    device = device_kernels(x)
    if device is not None:
        return _on_device(device, x, layout, fmt, scale, multiplier, stats, offsets)
    source = x.detach()
    kept = None if layout == "row" else offsets
    x_RC, matrices = as_rows(source)
    bounds = matrices if kept is None else _covering(kept, x.shape[0])
    module = implementation(x)
    options = (layout, code_format, scale, multiplier)
    parts = measured_bounds(x_RC, matrices, layout, offsets) if stats else None
    vectors_S: Tensor | None = None
    if operand is not None:
        codes, scales = scaled.quantize_rows(x_RC, bounds, layout, operand)
    # One read gives codes and statistics where they are cut into the same blocks.
    elif module is native and parts is not None and parts[-1] == x_RC.shape[0]:
        codes, scales, vectors_S = native.measured_rows(x_RC, parts, *options)
    else:
        codes, scales = module.quantize_rows(x_RC, bounds, *options)
    scales = scales if kept is not None else scale_shape(scales, x, layout)
    result = QuantizedTensor(codes.reshape(x.shape), scales, layout, fmt, kept)
    if not stats:
        return result
    if vectors_S is None:
        return result, tensor_stats(
            source, layout=layout, fmt=fmt, scale=scale, multiplier=multiplier, offsets=offsets,
            tensor_scale=tensor_scale, amax_floor=amax_floor,
        )  # fmt: skip
    return result, vectors_S if offsets is not None else merge_stats(vectors_S)


def _covering(offsets: Tensor, rows: int) -> list[int]:
    """Expert offsets as integers, once they cover every row."""
    bounds = offsets_list(offsets, rows)
    if bounds[-1] != rows:
        raise OffsetsError(
            f"offsets end at {bounds[-1]} but x has {rows} rows: every row needs an expert to be quantised, so cut "
            "the padding off first"
        )
    return bounds


def _on_device(
    kernels: ModuleType,
    x: Tensor,
    layout: str,
    fmt: str,
    scale: str,
    multiplier: float,
    stats: bool,
    offsets: Tensor | None,
) -> QuantizedTensor | tuple[QuantizedTensor, Tensor]:
    """The same by Triton's kernels, in one read."""
    row, blocks = layout == "row", "" if layout == "row" else layout
    named = {"fmt": fmt, "scale": scale, "multiplier": multiplier, "stats": stats, "offsets": offsets}
    fused = kernels.quantize_layouts(x, row=row, blocks=blocks, **named)
    result: QuantizedTensor = fused.row if row else fused.block
    return (result, fused.stats[0]) if stats else result
