"""The experts' forward and backward on a device, every quantisation fused into what comes before."""

# Shapes: T tokens, k experts of a token, E experts, R permuted rows, D model width, F SwiGLU width, G = 2 F.
# x, h, dy and dgate_up leave the operation that makes them as FP8 codes, in rows and columns at once: none of them is
# written in BF16 and read again. The same bits as expert_passes, which quantises each of them by itself.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8_safeguard.kernels.grouped import grouped_gemm_nt, grouped_gemm_wgrad
from fp8_safeguard.kernels.layouts import quantize_layouts
from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.moe.expert_passes import Experts, Gradients, Needs, gathered
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.routing import Produced, Wanted, spread
from fp8_safeguard.kernels.passes import LinearCall
from fp8_safeguard.kernels.precision import OperandFormat
from fp8_safeguard.kernels.quantized import QuantizedTensor

OUTPUTS = (torch.bfloat16, torch.float32)
"""Dtypes that the products are written in."""


class Hidden(NamedTuple):
    """Everything up to the activation, as FP8 where it is an operand."""

    x: Produced
    w_gate_up: QuantizedTensor
    gate_up_RG: Tensor
    probability_R: Tensor
    h: Produced


class Waiting(NamedTuple):
    """What a forward that is not to be recomputed keeps for its backward."""

    hidden: Hidden
    w_down: QuantizedTensor


def usable(experts: Experts) -> bool:
    """Whether the layer can run here: on Triton, in FP8 throughout, in dtypes that the products write."""
    precision = experts.call.precision
    dtypes = (experts.x_TD.dtype, experts.w_gate_up_EGD.dtype, experts.w_down_EDF.dtype)
    return (
        experts.call.backend == "triton"
        and {precision.fprop, precision.dgrad, precision.wgrad} == {"fp8"}
        and all(dtype in OUTPUTS for dtype in dtypes)
    )


def forward(experts: Experts, keep: bool) -> tuple[Tensor, Waiting | None]:
    """y [T, D], and, if it is to be kept, what the backward would compute again."""
    hidden = _up_to_activation(experts, h_row=True, x_columns=keep, h_columns=keep)
    w_down = _tiles(experts.w_down_EDF, experts.call)
    y_RD = _multiply(hidden.h, w_down, experts)
    y_TD: Tensor = operations(y_RD).sum_copies(y_RD, experts.route, None)
    return y_TD, Waiting(hidden, w_down) if keep else None


def backward(dy_TD: Tensor, experts: Experts, waiting: Waiting | None, needs: Needs) -> Gradients:
    """The gradients that are needed."""
    if waiting is None:
        hidden = _up_to_activation(experts, h_row=False, x_columns=needs.gate_up, h_columns=needs.down)
        waiting = Waiting(hidden, _tiles(experts.w_down_EDF, experts.call))
    hidden, w_down = waiting
    ops, route, form = operations(dy_TD), experts.route, experts.call.precision.dy
    dy = ops.gather(dy_TD, route, _wanted(form, row=needs.hidden, columns=needs.down))
    dw_down = _wgrad(dy, hidden.h, experts, experts.w_down_EDF.dtype) if needs.down else None
    if not needs.hidden:
        return None, None, dw_down, None
    dh_RF = _multiply(dy, _turned(w_down), experts)
    dgate_up, dprobability_R = ops.swiglu_backward(
        dh_RF, hidden.gate_up_RG, hidden.probability_R, _wanted(form, row=needs.x, columns=needs.gate_up),
        route.offsets, aligned=route.aligned,
    )  # fmt: skip
    dw_gate_up = dx_TD = None
    if needs.gate_up:
        dw_gate_up = _wgrad(dgate_up, hidden.x, experts, experts.w_gate_up_EGD.dtype)
    if needs.x:
        dx_TD = ops.sum_copies(_multiply(dgate_up, _turned(hidden.w_gate_up), experts), route, None)
    return dx_TD, dw_gate_up, dw_down, gathered(dprobability_R, route) if needs.weight else None


def _up_to_activation(experts: Experts, *, h_row: bool, x_columns: bool, h_columns: bool) -> Hidden:
    """Permute, first product, activation: what the backward repeats."""
    ops, route, form = operations(experts.x_TD), experts.route, experts.call.precision.x
    x = ops.gather(experts.x_TD, route, _wanted(form, row=True, columns=x_columns))
    w_gate_up = _tiles(experts.w_gate_up_EGD, experts.call)
    gate_up_RG = _multiply(x, w_gate_up, experts)
    probability_R = spread(experts.weight_Tk, route)
    h = Produced(None, None, None, None)
    if h_row or h_columns:
        wanted = _wanted(form, row=h_row, columns=h_columns)
        h = ops.swiglu(gate_up_RG, probability_R, wanted, route.offsets, aligned=route.aligned)
    return Hidden(x, w_gate_up, gate_up_RG, probability_R, h)


def _wanted(form: OperandFormat, *, row: bool, columns: bool) -> Wanted:
    """Codes only."""
    return Wanted(
        values=False, row=row, blocks="col" if columns else "", fmt=form.fmt, scale=form.scale,
        multiplier=form.multiplier,
    )  # fmt: skip


def _multiply(a: Produced, b: QuantizedTensor, experts: Experts) -> Tensor:
    """a times each expert's b transposed, [R, N] in x's dtype."""
    assert a.row is not None
    call, offsets = experts.call, experts.route.offsets
    return grouped_gemm_nt(
        a.row, b, offsets, experts.x_TD.dtype, alignment=call.alignment, backend=call.backend
    )


def _wgrad(dy: Produced, x: Produced, experts: Experts, dtype: torch.dtype) -> Tensor:
    """dy transposed times x, expert by expert, in dtype."""
    assert dy.block is not None
    assert x.block is not None
    call, offsets = experts.call, experts.route.offsets
    return grouped_gemm_wgrad(
        dy.block, x.block, offsets, dtype, alignment=call.alignment, backend=call.backend
    )


def _tiles(w_ENK: Tensor, call: LinearCall) -> QuantizedTensor:
    """The weight in tiles."""
    form = call.precision.w
    tiles = quantize_layouts(
        w_ENK, row=False, blocks="tile", fmt=form.fmt, scale=form.scale, multiplier=form.multiplier
    ).block
    assert tiles is not None
    return tiles


def _turned(w: QuantizedTensor) -> QuantizedTensor:
    """Each expert's tiles transposed, which is exact."""
    if not w.data.is_cuda:
        return w.transpose()
    transposed: QuantizedTensor = compiled_module("triton_transpose").transpose_tiles(w)
    return transposed
