"""Quantises a tensor in several layouts at once, in one read."""

# Shapes: R rows (all leading dimensions together), C columns, E experts, S the length of a TensorStats vector.

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_safeguard.kernels import compiled, native
from fp8_safeguard.kernels.codes import BLOCK, CodeFormat
from fp8_safeguard.kernels.device import device_kernels
from fp8_safeguard.kernels.dispatch import implementation
from fp8_safeguard.kernels.errors import OperandError, require_option
from fp8_safeguard.kernels.operands import as_rows, check_options, check_source, offsets_list
from fp8_safeguard.kernels.quantize import quantize
from fp8_safeguard.kernels.quantized import QuantizedTensor, scale_shape
from fp8_safeguard.kernels.stats import merge_stats
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

BLOCK_LAYOUTS = ("", "col", "tile")
ALIGNMENT = 16
"""Rows that `aligned` experts are padded to a multiple of."""


class Layouts(NamedTuple):
    """What one read of a tensor gave."""

    row: QuantizedTensor | None
    block: QuantizedTensor | None
    """The `col` or `tile` tensor."""
    stats: Tensor | None
    """float64 [slots,S], with offsets [slots,E,S]: the row slot first, then the block slot."""


def quantize_layouts(
    x: Tensor,
    *,
    row: bool = True,
    blocks: str = "",
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
    stats: bool = False,
    offsets: Tensor | None = None,
    aligned: bool = False,
) -> Layouts:
    """Quantise x in the row layout, in `col` or `tile` blocks, or both, and measure what was wanted.

    Codes, scales and statistics are those of `quantize` and `tensor_stats`. With offsets (int32 [E+1], x 2-D) blocks
    start anew at each expert; rows behind the last one are quantised in the row layout, give zero codes in the others,
    and are never measured. The block scales then have R // 128 + E + 1 rows, known without reading the offsets, the
    surplus ones 1. `aligned` promises that R and every offset are multiples of 16, as the padding routing map makes
    them: a device then stores `col` codes the way its matrix units read them. Offsets are checked on a CPU only: a
    device does not wait to read them back. Raises OperandError for a source or a wish that cannot be served,
    UnknownOptionError for an option that does not exist, OffsetsError for offsets that do not fit.
    """
    code_format = check_options("row", fmt, scale, multiplier)
    require_option("blocks", blocks, BLOCK_LAYOUTS)
    check_source(x, offsets)
    if not (row or blocks):
        raise OperandError("no layout is wanted: pass row=True, or blocks='col' or 'tile'")
    if aligned and offsets is not None and x.shape[0] % ALIGNMENT:
        raise OperandError(
            f"aligned experts end at {x.shape[0]} rows, not a multiple of {ALIGNMENT}: pad x, or leave `aligned` out"
        )
    device = device_kernels(x)
    if device is not None:
        return Layouts(*device.quantize_layouts(
            x, row=row, blocks=blocks, fmt=fmt, scale=scale, multiplier=multiplier, stats=stats, offsets=offsets,
            aligned=aligned,
        ))  # fmt: skip
    x_RC, matrices = as_rows(x.detach())
    bounds = matrices if offsets is None else offsets_list(offsets, x_RC.shape[0])
    layouts = (["row"] if row else []) + ([blocks] if blocks else [])
    module, options = implementation(x), (code_format, scale, multiplier)
    if module is native:
        parts: list[Part] = native.layouts_of_rows(x_RC, bounds, layouts, *options, stats)
    else:
        parts = [_one_layout(module, x_RC, bounds, layout, options, stats) for layout in layouts]
    found, vectors = {}, []
    for layout, (codes, scales, vectors_S) in zip(layouts, parts, strict=True):
        if offsets is not None:
            codes, scales = _with_padding(module, x_RC, bounds, layout, options, codes, scales)
        kept = None if layout == "row" else offsets
        scales = scales if kept is not None else scale_shape(scales, x, layout)
        found[layout] = QuantizedTensor(codes.reshape(x.shape), scales, layout, fmt, kept)
        vectors.append(vectors_S if offsets is not None else merge_stats(vectors_S))
    return Layouts(found.get("row"), found.get(blocks), torch.stack(vectors) if stats else None)


def reblock(rows: QuantizedTensor) -> QuantizedTensor:
    """`col` codes from `row` codes whose scales are powers of two, without the tensor they came from.

    Equal to quantize(rows.dequantize(), layout="col", scale="pow2"): codes keep their significand and move to their new
    scale's exponent, so nothing is rounded but what falls below the smallest normal of its new block. Any dimensions.
    Raises OperandError for another layout, and on a CPU for scales that are no powers of two, where codes would be
    rounded a second time; a device does not wait to look.
    """
    if rows.layout != "row":
        raise OperandError(f"a {rows.layout!r} tensor cannot be re-blocked to 'col': pass a 'row' tensor")
    device = device_kernels(rows.data)
    if device is not None:
        moved: QuantizedTensor = device.reblock(rows)
        return moved
    if rows.device.type == "cpu" and not bool((rows.scale.frexp().mantissa == 0.5).all()):
        raise OperandError(
            "re-blocking would round codes a second time: scales are no powers of two; quantise with scale='pow2'"
        )
    return quantize(rows.dequantize(), layout="col", fmt=rows.fmt, scale="pow2")


Part = tuple[Tensor, Tensor, Tensor]
"""Codes [R,C], scales, and the segments' statistics [S,29], without segments where nobody wants any."""


def _one_layout(
    module: ModuleType,
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    options: tuple[CodeFormat, str, float],
    stats: bool,
) -> Part:
    """The reference measures in a pass of its own."""
    if stats and module is compiled:
        return compiled.measured_rows(x_RC, bounds, layout, *options)
    codes, scales = module.quantize_rows(x_RC, bounds, layout, *options)
    vectors_S = (
        module.stats_of_rows(x_RC, bounds, layout, *options) if stats else x_RC.new_zeros(0, VECTOR_LENGTH)
    )
    return codes, scales, vectors_S


def _with_padding(
    module: ModuleType,
    x_RC: Tensor,
    bounds: list[int],
    layout: str,
    options: tuple[CodeFormat, str, float],
    codes: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of all rows: those behind the last expert, and as many row blocks as there can be."""
    rows, last = x_RC.shape[0], bounds[-1]
    code_bytes = _longer(codes.view(torch.uint8), rows)
    if layout != "row":
        code_bytes[last:] = 0
        filled = _longer(scales, rows // BLOCK + len(bounds))
        filled[scales.shape[0] :] = 1.0
        return code_bytes.view(codes.dtype), filled
    scales = _longer(scales, rows)
    if last < rows:
        padding = module.quantize_rows(x_RC[last:], [0, rows - last], layout, *options)
        code_bytes[last:], scales[last:] = padding[0].view(torch.uint8), padding[1]
    return code_bytes.view(codes.dtype), scales


def _longer(matrix: Tensor, rows: int) -> Tensor:
    """The matrix with so many rows; itself if it has them already."""
    if matrix.shape[0] == rows:
        return matrix
    longer = matrix.new_empty(rows, matrix.shape[1])
    longer[: matrix.shape[0]] = matrix
    return longer
