"""TensorStats of a tensor as if it were quantised, without keeping codes."""

# Shapes: B matrices, R rows, C columns, E experts, S the length of a TensorStats vector (13 columns + 16 bins).

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels import native, scaled
from fp8_safeguard.kernels.device import device_kernels
from fp8_safeguard.kernels.dispatch import implementation
from fp8_safeguard.kernels.operands import as_rows, check_options, check_source, offsets_list
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

_AMAX = COLUMNS.index("amax")

LAYOUT_PAIR = ("row", "col")
"""What `layout_stats` measures, in this order."""


def tensor_stats(
    x: Tensor,
    *,
    layout: str = "row",
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    offsets: Tensor | None = None,
    tensor_scale: float | Tensor | None = None,
    amax_floor: float = 0.0,
) -> Tensor:
    """TensorStats of x in that layout: float64 [S], the 13 columns and then the 16 histogram bins.

    x may have any floating dtype (FP8 too, measured as the values it holds) and any shape of one or more
    dimensions; blocks never cross the matrices of leading dimensions. With `offsets` (int32 [E+1], x 2-D) the
    result is [E,S], one vector an expert, its `col` and `tile` blocks starting at the expert's first row; rows
    behind the last offset are not measured. Never raises on NaN, Inf or an empty tensor. A CUDA device does not read
    the offsets back, so they are not checked there. `tensor_scale` and `amax_floor` as for quantize().
    """
    if torch.compiler.is_compiling() and tensor_scale is None and not amax_floor:
        from fp8_safeguard.kernels import library

        compiled: Tensor = library.tensor_stats(x.detach(), layout, fmt, scale, multiplier, offsets)
        return compiled
    code_format = check_options(layout, fmt, scale, multiplier)
    check_source(x, offsets)
    operand = scaled.given(x, fmt, scale, multiplier, tensor_scale, amax_floor)
    device = device_kernels(x)
    if device is not None:
        row, blocks = layout == "row", "" if layout == "row" else layout
        named = {"fmt": fmt, "scale": scale, "multiplier": multiplier, "offsets": offsets}
        measured: Tensor = device.quantize_layouts(
            x, row=row, blocks=blocks, stats=True, store=False, **named
        ).stats
        return measured[0]
    x_RC, matrices = as_rows(x.detach())
    bounds = measured_bounds(x_RC, matrices, layout, offsets)
    vectors_S: Tensor
    if operand is not None:
        vectors_S = scaled.stats_of_rows(x_RC, bounds, layout, operand)
    else:
        vectors_S = implementation(x).stats_of_rows(x_RC, bounds, layout, code_format, scale, multiplier)
    return vectors_S if offsets is not None else merge_stats(vectors_S)


def layout_stats(
    x: Tensor,
    *,
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    offsets: Tensor | None = None,
    tensor_scale: float | Tensor | None = None,
    amax_floor: float = 0.0,
) -> Tensor:
    """TensorStats of x in the row layout and in the col layout, from one read: float64 [2,S], with offsets [2,E,S].

    Equal to `tensor_stats` of the two: counts and histogram exactly, sums but for their last bits. Arguments, errors
    and what a CUDA device does not check are those of it.
    """
    if torch.compiler.is_compiling() and tensor_scale is None and not amax_floor:
        from fp8_safeguard.kernels import library

        return torch.stack(
            [
                library.tensor_stats(x.detach(), layout, fmt, scale, multiplier, offsets)
                for layout in LAYOUT_PAIR
            ]
        )
    code_format = check_options("row", fmt, scale, multiplier)
    check_source(x, offsets)
    operand = scaled.given(x, fmt, scale, multiplier, tensor_scale, amax_floor)
    device = device_kernels(x)
    if device is not None:
        named = {"fmt": fmt, "scale": scale, "multiplier": multiplier, "offsets": offsets}
        measured: Tensor = device.quantize_layouts(
            x, row=True, blocks="col", stats=True, store=False, **named
        ).stats
        return measured
    x_RC, matrices = as_rows(x.detach())
    bounds = measured_bounds(x_RC, matrices, "col", offsets)
    module, options = implementation(x), (code_format, scale, multiplier)
    if operand is not None:
        pair = scaled.layout_stats_of_rows(x_RC, bounds, LAYOUT_PAIR, operand)
    elif module is native:
        pair = native.layout_stats_of_rows(x_RC, bounds, LAYOUT_PAIR, *options)
    else:
        pair = torch.stack([module.stats_of_rows(x_RC, bounds, layout, *options) for layout in LAYOUT_PAIR])
    if offsets is not None:
        return pair
    return pair[:, 0] if len(bounds) == 2 else torch.stack([merge_stats(vectors_S) for vectors_S in pair])


def measured_bounds(x_RC: Tensor, matrices: list[int], layout: str, offsets: Tensor | None) -> list[int]:
    """First rows of the parts that get a vector each, and where the last one ends."""
    if offsets is not None:
        return offsets_list(offsets, x_RC.shape[0])
    # Rows are blocks of their own in `row`, so matrices need not be told apart.
    return [0, x_RC.shape[0]] if layout == "row" else matrices


def merge_stats(vectors_S: Tensor) -> Tensor:
    """TensorStats [S] of parts [..., S] quantised as they were: sums, the maximum for amax (NaN wins)."""
    parts = vectors_S.reshape(-1, VECTOR_LENGTH)
    if len(parts) == 1:
        return parts[0]
    merged = parts.sum(dim=0)
    merged[_AMAX] = parts[:, _AMAX].max() if len(parts) else 0.0
    return merged
