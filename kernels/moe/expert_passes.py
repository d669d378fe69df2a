"""The experts' forward and backward from the passes of linear layers."""

# Shapes: T tokens, k experts of a token, E experts, R permuted rows, D model width, F SwiGLU width, G = 2 F.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_safeguard.kernels import passes
from fp8_safeguard.kernels.layouts import quantize_layouts
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.permute import VALUES
from fp8_safeguard.kernels.moe.routing import ALIGNMENT, RoutingMap, spread
from fp8_safeguard.kernels.passes import Kept, LinearCall

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of x, w_gate_up, w_down and the probabilities."""


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    gate_up: bool
    down: bool
    weight: bool

    @property
    def hidden(self) -> bool:
        """Whether the backward goes through the activation."""
        return self.x or self.gate_up or self.weight


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What one layer computes with; nothing of it is computed by the layer."""

    x_TD: Tensor
    w_gate_up_EGD: Tensor
    w_down_EDF: Tensor
    weight_Tk: Tensor
    route: RoutingMap
    call: LinearCall
    """Of both products."""


class Hidden(NamedTuple):
    """Everything up to the activation."""

    x_RD: Tensor
    gate_up_RG: Tensor
    kept: Kept
    """Of the first product."""
    probability_R: Tensor
    h_RF: Tensor


class Waiting(NamedTuple):
    """What a forward that is not to be recomputed keeps for its backward."""

    hidden: Hidden
    kept: Kept
    """Of the second product."""


def forward(experts: Experts, keep: bool) -> tuple[Tensor, Waiting | None]:
    """y [T, D], and, if it is to be kept, what the backward would compute again."""
    call = experts.call if keep else replace(experts.call, needs_dx=False, needs_dw=False)
    hidden = _up_to_activation(experts, call)
    y_RD, kept, _ = passes.forward(hidden.h_RF, experts.w_down_EDF, None, call)
    y_TD: Tensor = operations(y_RD).sum_copies(y_RD, experts.route, None)
    return y_TD, Waiting(hidden, kept) if keep else None


def backward(dy_TD: Tensor, experts: Experts, waiting: Waiting | None, needs: Needs) -> Gradients:
    """The gradients that are needed."""
    gate_up_call = replace(experts.call, needs_dx=needs.x, needs_dw=needs.gate_up)
    down_call = replace(experts.call, needs_dx=needs.hidden, needs_dw=needs.down)
    if waiting is None:
        hidden = _up_to_activation(experts, gate_up_call)
        waiting = Waiting(hidden, _kept_input(hidden.h_RF, down_call))
    hidden, kept = waiting
    ops, route, dtype = operations(dy_TD), experts.route, experts.x_TD.dtype
    dy_RD = ops.gather(dy_TD, route, VALUES).values
    dh_RF, dw_down = passes.backward(dy_RD, hidden.h_RF, experts.w_down_EDF, kept, down_call, dtype)
    if dh_RF is None:
        return None, None, dw_down, None
    produced, dprobability_R = ops.swiglu_backward(
        dh_RF, hidden.gate_up_RG, hidden.probability_R, VALUES, route.offsets
    )
    dx_RD, dw_gate_up = passes.backward(
        produced.values, hidden.x_RD, experts.w_gate_up_EGD, hidden.kept, gate_up_call, dtype
    )
    dx_TD = None if dx_RD is None else ops.sum_copies(dx_RD, route, None)
    return dx_TD, dw_gate_up, dw_down, gathered(dprobability_R, route) if needs.weight else None


def gathered(value_R: Tensor, route: RoutingMap) -> Tensor:
    """value[position] [T, k], 0 for a copy that went nowhere; the transposed `spread`."""
    if not value_R.numel():
        return value_R.new_zeros(route.position_Tk.shape)
    return torch.where(route.position_Tk < 0, 0.0, value_R[route.position_Tk.clamp_min(0).long()])


def _up_to_activation(experts: Experts, call: LinearCall) -> Hidden:
    """Permute, first product, activation: what the backward repeats."""
    ops, route = operations(experts.x_TD), experts.route
    x_RD = ops.gather(experts.x_TD, route, VALUES).values
    gate_up_RG, kept, _ = passes.forward(x_RD, experts.w_gate_up_EGD, None, call)
    probability_R = spread(experts.weight_Tk, route)
    h_RF = ops.swiglu(gate_up_RG, probability_R, VALUES, route.offsets).values
    return Hidden(x_RD, gate_up_RG, kept, probability_R, h_RF)


def _kept_input(h_RF: Tensor, call: LinearCall) -> Kept:
    """h in columns, as the forward of the second product would have kept it for wgrad on a device."""
    if not (call.on_device() and call.needs_dw and call.precision.wgrad == "fp8"):
        return Kept()
    form, aligned = call.precision.x, call.alignment % ALIGNMENT == 0
    columns = quantize_layouts(
        h_RF, row=False, blocks="col", fmt=form.fmt, scale=form.scale, multiplier=form.multiplier,
        offsets=call.offsets, aligned=aligned,
    ).block  # fmt: skip
    return Kept(x=columns)
