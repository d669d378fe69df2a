"""Quantises and measures with one scale for all, or an amax floor."""

# Shapes: R rows, C columns, S segments of rows that no block crosses; Rb, Cb blocks along R, C.
# Vector code of torch: what blocks choose by themselves is what the compiled kernels are for. A scale that is given
# belongs to every block of every layout, so the codes are the same in all of them.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8_safeguard.kernels import reference
from fp8_safeguard.kernels.codes import BLOCK, NAN_CODE, CodeFormat, get_format
from fp8_safeguard.kernels.errors import KernelError, OperandError
from fp8_safeguard.kernels.precision import OperandFormat, ScaledFormat, require_scale
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH

_AT = {name: index for index, name in enumerate(COLUMNS)}


def finite_amax(x: Tensor) -> float:
    """Largest finite magnitude of x, 0.0 where there is none."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.detach())
    largest = max(-float(low), float(high))
    if largest == largest and largest != float("inf"):
        return largest
    finite = torch.nan_to_num(x.detach().float(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def resolved(x: Tensor, operand: OperandFormat) -> OperandFormat:
    """The operand's format for this tensor: with a scale for the whole of it, that of its amax unless it has one."""
    if operand.scaling == "block" or operand.tensor_scale is not None:
        return operand
    return ScaledFormat.of(operand, amax=finite_amax(x))


def given(
    x: Tensor, fmt: str, scale: str, multiplier: float, tensor_scale: float | Tensor | None, amax_floor: float
) -> OperandFormat | None:
    """What a caller wants beyond scales of the blocks' own amax; None where nothing. Raises KernelError."""
    if tensor_scale is None and not amax_floor:
        return None
    if x.device.type != "cpu":
        raise KernelError(
            f"a scale for a whole tensor, and an amax floor, work on a CPU only so far; x is on {x.device}: leave "
            "tensor_scale and amax_floor out (scaling='block')"
        )
    if isinstance(tensor_scale, Tensor):
        if tensor_scale.numel() != 1:
            raise OperandError(f"tensor_scale has shape {list(tensor_scale.shape)}: pass one number")
        tensor_scale = float(tensor_scale)
    require_scale("tensor_scale", tensor_scale)
    if tensor_scale is None:
        return OperandFormat(fmt=fmt, scale=scale, multiplier=multiplier, amax_floor=amax_floor)
    # The scale that is really used: a multiplier is in it already.
    return ScaledFormat(fmt=fmt, scale=scale, amax_floor=amax_floor, fixed_scale=tensor_scale)


def quantize_rows(
    x_RC: Tensor, bounds: Sequence[int], layout: str, operand: OperandFormat
) -> tuple[Tensor, Tensor]:
    """Codes [R,C] and float32 scales of all row blocks, as the kernels' functions of that name; operand not plain."""
    code_format, scale = get_format(operand.fmt), _scale_of(x_RC, operand)
    if scale is None:
        return reference.quantize_rows(
            x_RC, list(bounds), layout, code_format, operand.scale, operand.multiplier, operand.amax_floor
        )
    row_blocks = x_RC.shape[0]
    if layout != "row":
        row_blocks = sum(-(-(end - start) // BLOCK) for start, end in pairwise(bounds))
    column_blocks = x_RC.shape[1] if layout == "col" else -(-x_RC.shape[1] // BLOCK)
    scales = torch.full((row_blocks, column_blocks), scale, dtype=torch.float32, device=x_RC.device)
    return _codes(x_RC.float(), scale, code_format), scales


def round_trip_rows(x_RC: Tensor, bounds: Sequence[int], layout: str, operand: OperandFormat) -> Tensor:
    """Codes times scales, float32 [R,C]; rows outside the segments are unspecified."""
    code_format, scale = get_format(operand.fmt), _scale_of(x_RC, operand)
    if scale is None:
        return reference.round_trip_rows(
            x_RC, list(bounds), layout, code_format, operand.scale, operand.multiplier, operand.amax_floor
        )
    codes_RC = _codes(x_RC.float(), scale, code_format)
    return _values(codes_RC, operand.fmt).mul_(torch.tensor(scale, dtype=torch.float32))


def stats_of_rows(x_RC: Tensor, bounds: Sequence[int], layout: str, operand: OperandFormat) -> Tensor:
    """TensorStats vectors of the segments, float64 [S,29]."""
    return layout_stats_of_rows(x_RC, bounds, (layout,), operand)[0]


def layout_stats_of_rows(
    x_RC: Tensor, bounds: Sequence[int], layouts: Sequence[str], operand: OperandFormat
) -> Tensor:
    """The same of several layouts, float64 [layouts,S,29]."""
    scale = _scale_of(x_RC, operand)
    if scale is None:
        options = get_format(operand.fmt), operand.scale, operand.multiplier, operand.amax_floor
        found = [reference.stats_of_rows(x_RC, list(bounds), layout, *options) for layout in layouts]
        return torch.stack(found)
    vectors = torch.zeros((len(layouts), len(bounds) - 1, VECTOR_LENGTH), dtype=torch.float64, device="cpu")
    for segment, (start, end) in enumerate(pairwise(bounds)):
        if end > start and x_RC.shape[1]:
            vectors[:, segment] = _stats(x_RC[start:end].float(), layouts, operand.fmt, scale)
        else:
            vectors[:, segment, _AT["rows"]] = end - start
    return vectors


def _scale_of(x_RC: Tensor, operand: OperandFormat) -> float | None:
    """The one scale of all blocks; None where they differ."""
    operand = resolved(x_RC, operand)
    if operand.tensor_scale is not None:
        return operand.tensor_scale
    if finite_amax(x_RC) > operand.amax_floor:
        return None
    # Every block lies below the floor, which then decides alone.
    return ScaledFormat.of(operand, amax=0.0).tensor_scale


def _codes(x_RC: Tensor, scale: float, code_format: CodeFormat) -> Tensor:
    """Codes [R,C] of float32 x: RNE(clamp(x / s)), and the NaN code with its sign for what is not finite."""
    # The scale as a tensor: torch divides by a Python number through its reciprocal.
    ratio_RC = x_RC / torch.tensor(scale, dtype=torch.float32)
    codes_RC = ratio_RC.clamp_(-code_format.maximum, code_format.maximum).to(code_format.dtype)
    if _is_finite(x_RC):
        return codes_RC
    bits_RC = codes_RC.view(torch.uint8)
    marked_RC = torch.where(torch.isfinite(x_RC), bits_RC, (bits_RC & 0x80) | NAN_CODE)
    return marked_RC.view(code_format.dtype)


def _is_finite(x: Tensor) -> bool:
    """Whether all of x is: a NaN is the smallest and the largest of all."""
    return not x.numel() or all(math.isfinite(float(value)) for value in torch.aminmax(x))


@cache
def _table(fmt: str) -> Tensor:
    """float32 [256]: the value of each code; a look-up takes a fifth of torch's own conversion."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(get_format(fmt).dtype).float()


def _values(codes_RC: Tensor, fmt: str) -> Tensor:
    """What the codes stand for, float32 [R,C]."""
    index = codes_RC.view(torch.uint8).flatten().to(torch.int32)
    return _table(fmt).index_select(0, index).view(codes_RC.shape)


def _stats(x_RC: Tensor, layouts: Sequence[str], fmt: str, scale: float) -> Tensor:
    """TensorStats of a float32 matrix under that scale, float64 [layouts,29]; the histogram alone depends on a layout.

    Counts are exact. Sums are of float32 in units of a power of two near amax, within 1e-6 of theirs.
    """
    code_format = get_format(fmt)
    nan, inf, finite_R = 0, 0, None
    if not _is_finite(x_RC):
        finite_RC, nan = torch.isfinite(x_RC), int(torch.isnan(x_RC).sum())
        inf, finite_R = int((~finite_RC).sum()) - nan, finite_RC.all(dim=1)
        x_RC = torch.where(finite_RC, x_RC, 0.0)
    amax = float(x_RC.abs().max())
    unit = math.ldexp(1.0, math.frexp(amax)[1]) if amax else 1.0
    ratio_RC = x_RC / torch.tensor(scale, dtype=torch.float32)
    saturated = 0
    if float(ratio_RC.abs().max()) > code_format.last_kept:
        saturated = int(torch.count_nonzero(ratio_RC.abs() > code_format.last_kept))
    codes_RC = ratio_RC.clamp_(-code_format.maximum, code_format.maximum).to(code_format.dtype)
    q_RC = _values(codes_RC, fmt)
    filled, kept = int(torch.count_nonzero(x_RC)), int(torch.count_nonzero(q_RC))
    # In float64 where the quotients would not be normal numbers.
    exact = (
        torch.float32 if 2.0**-126 < unit < 2.0**126 and 2.0**-60 < scale / unit < 2.0**60 else torch.float64
    )
    x_RC = x_RC.to(exact) / torch.tensor(unit, dtype=torch.float64).to(exact)
    values_RC = q_RC.to(exact) * torch.tensor(scale / unit, dtype=torch.float64).to(exact)
    squares_RC = x_RC.square()
    errors_RC = (x_RC - values_RC).square_()
    vectors = torch.zeros((len(layouts), VECTOR_LENGTH), dtype=torch.float64, device="cpu")
    for name, value in {
        "count": x_RC.numel(),
        # What is not finite has no zero code, though its stand-in has.
        "zeros": x_RC.numel() - kept - nan - inf,
        "underflow": filled - kept,
        "saturated": saturated,
        "nan": nan,
        "inf": inf,
        "rows": x_RC.shape[0],
        "rows_flushed": _flushed(x_RC, q_RC, finite_R) if kept < filled else 0,
        "amax": amax,
        "sum_sq": _total(squares_RC) * unit * unit,
        "sum_sq_q": _total(values_RC.square_()) * unit * unit,
        "sum_sq_err": _total(errors_RC) * unit * unit,
        "sum_4th": _total(squares_RC.square()) * unit * unit * unit * unit,
    }.items():
        vectors[:, _AT[name]] = value
    for index, layout in enumerate(layouts):
        vectors[index, len(COLUMNS) :] = reference.histogram_of(squares_RC[None], errors_RC[None], layout)
    return vectors


def _total(values_RC: Tensor) -> float:
    """The sum of all, rows in their own precision, the rows' sums in float64."""
    return float(values_RC.sum(dim=1).double().sum())


def _flushed(x_RC: Tensor, q_RC: Tensor, finite_R: Tensor | None) -> int:
    """Rows with a non-zero element of which every element went to zero; what is not finite does not."""
    flushed_R = (q_RC.abs().amax(dim=1) == 0) & (x_RC.abs().amax(dim=1) > 0)
    return int((flushed_R if finite_R is None else flushed_R & finite_R).sum())
