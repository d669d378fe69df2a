"""Routed experts as one differentiable function, recomputed up to the activation."""

# Shapes: T tokens, k experts of a token, E experts, R permuted rows, D model width, F SwiGLU width, G = 2 F.
# y = sum over a token's copies of (silu(gate) * up * probability) W_down^T with gate, up = x W_gate_up^T.
# The probability stands inside the activation, so the gradients of everything before need nothing from behind it:
# the backward computes gate and up again, and neither W_down's product nor the sum of the copies.

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels.dispatch import DEVICE_BACKENDS, gemm_backend_of
from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.grouped import expert_bounds
from fp8_safeguard.kernels.linear import fp8_grouped_linear
from fp8_safeguard.kernels.moe import expert_fused, expert_passes
from fp8_safeguard.kernels.moe.activation import swiglu
from fp8_safeguard.kernels.moe.expert_passes import Experts, Needs
from fp8_safeguard.kernels.moe.permute import combine, permute
from fp8_safeguard.kernels.moe.router import routing_map
from fp8_safeguard.kernels.moe.routing import ALIGNMENT, RoutingMap, spread
from fp8_safeguard.kernels.operands import check_together
from fp8_safeguard.kernels.passes import LinearCall
from fp8_safeguard.kernels.precision import LinearPrecision

_DEFAULT = LinearPrecision()


def fast_moe(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    route: Tensor | RoutingMap,
    weight_Tk: Tensor,
    *,
    precision: LinearPrecision = _DEFAULT,
    recompute: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Each token through its experts, weighted and summed: [T, D] in x's dtype, with gradients.

    x is [T, D], usually bfloat16; w_gate_up [E, 2F, D] and w_down [E, D, F] may be float32 master weights; `route`
    holds the expert ids [T, k] (-1: a copy that goes nowhere) or a map of them; weight is the float32 probability
    [T, k] of each copy. Equal in every bit, gradients of x, both weights and the probability included, to
    permute -> fp8_grouped_linear -> swiglu with the probability -> fp8_grouped_linear -> combine.
    With `recompute` only x, the weights and the routing are kept for the backward, which computes again up to the
    activation. `precision` and `backend` as in fp8_grouped_linear. Under torch.compile that chain runs, which is one graph,
    and what to recompute is the compiler's choice. OperandError unless tokens, experts and widths agree.
    """
    if isinstance(route, Tensor):
        route = routing_map(route, w_gate_up_EGD.shape[0], alignment=ALIGNMENT if x_TD.is_cuda else 1)
    if torch.compiler.is_compiling():
        return _chain(x_TD, w_gate_up_EGD, w_down_EDF, route, weight_Tk, precision, backend)
    y_TD: Tensor = FastMoEFunction.apply(  # type: ignore[no-untyped-call]
        x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk, route, precision, recompute, backend
    )
    return y_TD


class FastMoEFunction(torch.autograd.Function):
    """`apply(x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk, routing_map, precision, recompute, backend)`; see fast_moe."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_gate_up_EGD: Tensor,
        w_down_EDF: Tensor,
        weight_Tk: Tensor,
        route: RoutingMap,
        precision: LinearPrecision = _DEFAULT,
        recompute: bool = True,
        backend: str | None = None,
    ) -> Tensor:
        _check(x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk, route)
        ctx.call, ctx.route = _call(x_TD, route, precision, backend), route
        experts = _experts(ctx, x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk)
        keep = not recompute and any(ctx.needs_input_grad)
        y_TD: Tensor
        y_TD, ctx.waiting = _engine(experts).forward(experts, keep)
        ctx.save_for_backward(x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        experts = _experts(ctx, *ctx.saved_tensors)
        gradients = _engine(experts).backward(dy_TD, experts, ctx.waiting, Needs(*ctx.needs_input_grad[:4]))
        return (*gradients, None, None, None, None)


def _experts(ctx: Any, x_TD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, weight_Tk: Tensor) -> Experts:
    return Experts(
        x_TD=x_TD,
        w_gate_up_EGD=w_gate_up_EGD,
        w_down_EDF=w_down_EDF,
        weight_Tk=weight_Tk,
        route=ctx.route,
        call=ctx.call,
    )


def _chain(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    route: RoutingMap,
    weight_Tk: Tensor,
    precision: LinearPrecision,
    backend: str | None,
) -> Tensor:
    """The same from functions that are differentiable by themselves."""
    _check(x_TD, w_gate_up_EGD, w_down_EDF, weight_Tk, route)
    layer = partial(
        fp8_grouped_linear,
        offsets=route.offsets,
        precision=precision,
        alignment=route.alignment,
        backend=backend,
    )
    gate_up_RG = layer(permute(x_TD, route), w_gate_up_EGD)
    return combine(layer(swiglu(gate_up_RG, spread(weight_Tk, route)), w_down_EDF), route)


def _engine(experts: Experts) -> ModuleType:
    """Who computes: both give the same bits."""
    return expert_fused if expert_fused.usable(experts) else expert_passes


def _call(x_TD: Tensor, route: RoutingMap, precision: LinearPrecision, backend: str | None) -> LinearCall:
    """What both products share."""
    chosen = gemm_backend_of(x_TD.device, backend)
    on_device = chosen in DEVICE_BACKENDS
    # Checked, because kernels read the rows that a map made by hand claims to have.
    bounds = None if on_device else expert_bounds(route.offsets, route.rows, route.experts)
    return LinearCall(
        precision=precision, backend=chosen, offsets=route.offsets, bounds=bounds, alignment=route.alignment
    )


def _check(
    x_TD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, weight_Tk: Tensor, route: RoutingMap
) -> None:
    """Raise OperandError unless tokens, experts and widths agree."""
    shapes = f"x {list(x_TD.shape)}, w_gate_up {list(w_gate_up_EGD.shape)}, w_down {list(w_down_EDF.shape)}"
    if x_TD.dim() != 2 or w_gate_up_EGD.dim() != 3 or w_down_EDF.dim() != 3:
        raise OperandError(f"{shapes}: pass x [T, D], w_gate_up [E, 2F, D] and w_down [E, D, F]")
    experts, width, hidden = w_down_EDF.shape
    if w_gate_up_EGD.shape != (experts, 2 * hidden, width) or x_TD.shape[1] != width:
        raise OperandError(f"{shapes} do not fit: pass x [T, D], w_gate_up [E, 2F, D] and w_down [E, D, F]")
    check_together(x=x_TD, w_gate_up=w_gate_up_EGD, w_down=w_down_EDF, weight=weight_Tk)
    copies = route.position_Tk.shape
    if route.experts != experts or copies[0] != x_TD.shape[0] or weight_Tk.shape != copies:
        raise OperandError(
            f"the map is for {route.experts} experts and {list(copies)} copies, the weights for {experts} experts, x for "
            f"{x_TD.shape[0]} tokens and the probabilities for {list(weight_Tk.shape)} copies: all must agree"
        )
