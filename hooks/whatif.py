"""Measures what other formats, scales and blocks would do to a GEMM."""

# Shapes: T tokens, N output features, K input features, R sampled rows, D the summed dimension, M columns of a
# result, V = 29 TensorStats entries. L leading dimensions, none for a dense layer.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.hooks import recompute
from fp8_safeguard.kernels import LinearPrecision, OperandFormat, round_trip
from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.monitor.slots import GEMM_OPERANDS
from fp8_safeguard.monitor.whatifs import PLAIN as PLAIN
from fp8_safeguard.monitor.whatifs import VARIANTS, Variant

MX_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Form:
    """How one operand becomes what a GEMM multiplies."""

    operand: OperandFormat
    blocks: str = ""
    """Empty: the layout that the GEMM reads. `128x128`, `tensor`: blocks of that shape. `1x32`: MXFP8, along the
    summed dimension, with power-of-two scales. `bf16`: no FP8 at all."""


_FIELD = {
    "format": "fmt",
    "scale_rounding": "scale",
    "scale_multiplier": "multiplier",
    "margin": "margin",
    "amax_history": "amax_history",
}
_OF_WHOLE_OPERANDS = ("margin", "amax_history")
"""Actions that mean nothing to block scales."""


Forms = Mapping[str, tuple[Form, Form]]
"""Forms of a GEMM's two operands, in the order of GEMM_OPERANDS, by variant."""


def plain(gemm: str, precision: LinearPrecision) -> dict[str, tuple[Form, Form]]:
    """What is configured, and nothing else."""
    return {PLAIN: _forms(VARIANTS[PLAIN], gemm, precision)}


def alternatives(gemm: str, precision: LinearPrecision) -> dict[str, tuple[Form, Form]]:
    """What is configured, and every variant that would change something about it."""
    found = plain(gemm, precision)
    for name, variant in VARIANTS.items():
        forms = _forms(variant, gemm, precision)
        if forms != found[PLAIN]:
            found[name] = forms
    return found


def _forms(variant: Variant, gemm: str, precision: LinearPrecision) -> tuple[Form, Form]:
    left, right = (
        form_of(variant, operand, getattr(precision, operand)) for operand, _ in GEMM_OPERANDS[gemm]
    )
    return left, right


def form_of(variant: Variant, operand: str, configured: OperandFormat) -> Form:
    """How a variant quantises that operand."""
    if variant.action is None or variant.operand not in (None, operand):
        return Form(configured)
    if variant.action in _FIELD:
        if variant.action in _OF_WHOLE_OPERANDS and configured.scaling == "block":
            return Form(configured)
        value = int(variant.value or 0) if variant.action in _OF_WHOLE_OPERANDS else variant.value
        change: dict[str, Any] = {_FIELD[variant.action]: value}
        return Form(replace(configured, **change))
    if variant.action == "bf16_fallback":
        return Form(configured, "bf16")
    return _in_blocks(str(variant.value), configured)


def _in_blocks(blocks: str, configured: OperandFormat) -> Form:
    """The operand with scales from its amax now, in blocks of that shape: no history, margin or floor is in them.

    An operand with block scales is `block` already, one with a scale for the whole is `tensor`, and `fresh` is for those.
    """
    if blocks == ("block" if configured.is_plain else "tensor") or (
        blocks == "fresh" and configured.is_plain
    ):
        return Form(configured)
    unaided = configured
    if not configured.is_plain:
        unaided = OperandFormat(fmt=configured.fmt, scale=configured.scale)
    return Form(unaided, {"block": "", "fresh": "tensor"}.get(blocks, blocks))


def coarsest(forms: tuple[Form, Form]) -> str:
    """Format that a result of these operands is judged by."""
    return "e5m2" if any(form.operand.fmt == "e5m2" and form.blocks != "bf16" for form in forms) else "e4m3"


Quantiser = Callable[[Form], Tensor]


def fprop(x_TK: Tensor, w_NK: Tensor, rows: Tensor, forms: Forms) -> dict[str, Tensor]:
    """float64 [V] by variant: Y = X W^T of the sampled rows from operands in those forms, against the exact one."""
    exact_RN = recompute.matmul(x_TK[rows], w_NK.mT)
    return compared(
        exact_RN, forms, _rows_of(x_TK, rows), lambda form: formed(w_NK, "tile", form, depth=-1).mT
    )


def dgrad(
    dy_TN: Tensor,
    w_NK: Tensor,
    rows: Tensor,
    forms: Forms,
    gain_K: Tensor | None = None,
) -> dict[str, Tensor]:
    """float64 [V] by variant: dX = dY W of the sampled rows, times the layer's input gain if it has one."""
    exact_RK = recompute.matmul(dy_TN[rows], w_NK)
    return compared(
        exact_RK, forms, _rows_of(dy_TN, rows), lambda form: formed(w_NK, "tile", form, depth=-2), gain=gain_K
    )


def wgrad(
    dy_TN: Tensor,
    x_TK: Tensor,
    features: Tensor,
    forms: Forms,
    gain_K: Tensor | None = None,
) -> dict[str, Tensor]:
    """float64 [V] by variant: dW = dY^T X of the sampled output features, over the layer's input gain if it has one."""
    exact_RK = recompute.matmul(dy_TN[:, features].mT, x_TK)

    def left(form: Form) -> Tensor:
        if form.blocks == "128x128":
            return formed(dy_TN, "col", form, depth=-2)[:, features].mT
        amax = finite_amax(dy_TN) if form.blocks == "tensor" else None
        return formed(dy_TN[:, features], "col", form, depth=-2, amax=amax).mT

    gain = None if gain_K is None else 1.0 / gain_K
    return compared(exact_RK, forms, left, lambda form: formed(x_TK, "col", form, depth=-2), gain=gain)


def compared(
    exact: Tensor,
    forms: Forms,
    left: Quantiser,
    right: Quantiser,
    *,
    gain: Tensor | None = None,
    compare: Callable[[Tensor, Tensor], Tensor] = recompute.compare,
) -> dict[str, Tensor]:
    """The products left(form) [L, R, D] x right(form) [L, D, M] against the exact [L, R, M], by variant.

    The right operand is the large one: one form of it is held at a time, those of the left one all.
    """
    exact = exact if gain is None else exact * gain
    lefts: dict[Form, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    for form in dict.fromkeys(second for _, second in forms.values()):
        right_DM = right(form)
        for name, (first, second) in forms.items():
            if second != form:
                continue
            if first not in lefts:
                lefts[first] = left(first)
            actual = recompute.matmul(lefts[first], right_DM)
            if first.blocks == second.blocks == "bf16":
                actual = actual.to(torch.bfloat16).to(exact.dtype)
            vectors[name] = compare(exact, actual if gain is None else actual * gain)
    return {name: vectors[name] for name in forms}


def _rows_of(x_TC: Tensor, rows: Tensor) -> Quantiser:
    """The sampled rows of an operand that its GEMM reads in rows."""

    def left(form: Form) -> Tensor:
        if form.blocks == "128x128":
            return formed(x_TC, "row", form, depth=-1)[rows]
        amax = finite_amax(x_TC) if form.blocks == "tensor" else None
        return formed(x_TC[rows], "row", form, depth=-1, amax=amax)

    return left


def formed(x: Tensor, layout: str, form: Form, *, depth: int, amax: Tensor | None = None) -> Tensor:
    """x [L, R, C] in that form and back, float32. `depth` is the summed dimension, -1 or -2.

    `amax` is the operand's that x is a part of, for a form with one scale for the whole; otherwise x's own.
    """
    if form.blocks == "bf16":
        return x.to(torch.bfloat16).float()
    if form.blocks == "tensor":
        return _in_one_block(x, finite_amax(x) if amax is None else amax, form.operand)
    if form.blocks == "1x32":
        return _in_mx(x, form.operand) if depth == -1 else _in_mx(x.mT, form.operand).mT
    return round_trip(x, "tile" if form.blocks == "128x128" else layout, form.operand)


def finite_amax(x: Tensor) -> Tensor:
    """[L, 1, 1] in x's dtype: the largest finite magnitude of each matrix."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-2], 1, 1)
    finite, both = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), (-2, -1)
    return torch.maximum(finite.amax(dim=both, keepdim=True), -finite.amin(dim=both, keepdim=True))


def _in_mx(x: Tensor, operand: OperandFormat) -> Tensor:
    """Blocks of 32 along the last dimension: a row of 32 is a block of its own.

    MXFP8 as `kernels.mx_round_trip` has it, but for blocks whose values all lie below 2^-118.
    """
    columns = -(-x.shape[-1] // MX_BLOCK) * MX_BLOCK
    blocks = _padded(x, columns).reshape(-1, MX_BLOCK)
    values = round_trip(blocks, "row", OperandFormat(fmt=operand.fmt, scale="pow2"))
    return values.reshape(*x.shape[:-1], columns)[..., : x.shape[-1]]


def _in_one_block(x: Tensor, amax: Tensor, operand: OperandFormat) -> Tensor:
    """`round_trip` with one scale for each matrix: every block of 128 holds its amax, and 127 elements."""
    elements, inner = x.shape[-2] * x.shape[-1], BLOCK - 1
    blocks = -(-elements // inner)
    flat = _padded(x.flatten(-2), blocks * inner).reshape(*x.shape[:-2], blocks, inner)
    last = amax.to(x.dtype).expand(*x.shape[:-2], blocks, 1)
    values = round_trip(torch.cat([flat, last], dim=-1), "row", operand)
    return values[..., :inner].flatten(-2)[..., :elements].reshape(x.shape)


def _padded(x: Tensor, columns: int) -> Tensor:
    """x with zeros behind its last column."""
    missing = columns - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
