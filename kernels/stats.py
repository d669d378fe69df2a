"""TensorStats of a tensor as if it were quantised, without keeping codes."""

# Shapes: B matrices, R rows, C columns, E experts, S the length of a TensorStats vector (13 columns + 16 bins).

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels import reference
from fp8_safeguard.kernels.operands import as_matrices, check_options, check_source, offsets_list


def tensor_stats(
    x: Tensor,
    *,
    layout: str = "row",
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    offsets: Tensor | None = None,
) -> Tensor:
    """TensorStats of x in that layout: float64 [S], the 13 columns and then the 16 histogram bins.

    x may have any floating dtype (FP8 too, measured as the values it holds) and any shape of one or more
    dimensions; blocks never cross the matrices of leading dimensions. With `offsets` (int32 [E+1], x 2-D) the
    result is [E,S], one vector an expert, its `col` and `tile` blocks starting at the expert's first row; rows
    behind the last offset are not measured. Never raises on NaN, Inf or an empty tensor.
    """
    code_format = check_options(layout, fmt, scale, multiplier)
    check_source(x, offsets)
    source = x.detach()
    if offsets is None:
        return reference.stats_of_matrices(
            as_matrices(source).float(), layout, code_format, scale, multiplier
        )
    bounds = offsets_list(offsets, x.shape[0])
    parts = [
        reference.stats_of_matrices(
            as_matrices(source[start:end]).float(), layout, code_format, scale, multiplier
        )
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.stack(parts) if parts else torch.zeros(0, 29, dtype=torch.float64, device=x.device)
