"""Tokens to their experts' rows and back."""

# Shapes: T tokens, k experts of a token, R permuted rows, D their columns.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted

VALUES = Wanted()
"""The result alone."""


def permute(x_TD: Tensor, routing_map: RoutingMap) -> Tensor:
    """x[source] [R, D] in x's dtype, exact zeros on padding rows, with gradients.

    The backward sums each token's copies in slot order, in float32, rounded once. OperandError unless x is [T, D]
    with the tokens of the map.
    """
    _require_tokens("x", x_TD, routing_map)
    x_RD: Tensor = _Permute.apply(x_TD, routing_map)  # type: ignore[no-untyped-call]
    return x_RD


def permute_quantize(x_TD: Tensor, routing_map: RoutingMap, wanted: Wanted) -> Produced:
    """What `permute` gives, quantised and measured as `wanted`; without gradients. OperandError as there.

    Codes equal quantize(permute(x)), the `col` ones with offsets=routing_map.offsets. Statistics are per expert,
    [slots, E, S], and leave the padding rows out. On CUDA one kernel permutes and quantises; statistics are read
    from the values it wrote, as for every fused operation here. A CPU does one after the other.
    """
    _require_tokens("x", x_TD, routing_map)
    produced: Produced = operations(x_TD).gather(x_TD.detach(), routing_map, wanted)
    return unpadded(produced, routing_map, x_TD.shape[1])


def combine(y_RD: Tensor, routing_map: RoutingMap, weight_Tk: Tensor | None = None) -> Tensor:
    """[T, D]: the sum of [weight x] y[position] over each token's copies, with gradients.

    Products and sums are float32, in slot order, rounded once to y's dtype. Leave the weight out where the activation
    has already applied it (`swiglu` with a probability). OperandError unless rows and weights are the map's.
    """
    if y_RD.dim() != 2 or y_RD.shape[0] != routing_map.rows:
        raise OperandError(
            f"y has shape {list(y_RD.shape)}, the map has {routing_map.rows} rows: pass [rows, width]"
        )
    if weight_Tk is not None and weight_Tk.shape != routing_map.position_Tk.shape:
        raise OperandError(
            f"weight has shape {list(weight_Tk.shape)}, the map is for {list(routing_map.position_Tk.shape)} copies"
        )
    y_TD: Tensor = _Combine.apply(y_RD, weight_Tk, routing_map)  # type: ignore[no-untyped-call]
    return y_TD


def unpadded(produced: Produced, routing_map: RoutingMap, columns: int) -> Produced:
    """The same with padding rows taken out of the statistics."""
    if produced.stats is None:
        return produced
    return produced._replace(stats=routing_map.without_padding(produced.stats, columns))


class _Permute(torch.autograd.Function):
    """rows[source]; its backward is a gather as well, which is faster than index_add and sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, routing_map: RoutingMap) -> Tensor:
        ctx.routing_map = routing_map
        values: Tensor = operations(x_TD).gather(x_TD, routing_map, VALUES).values
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None]:
        return operations(dy_RD).sum_copies(dy_RD, ctx.routing_map, None), None


class _Combine(torch.autograd.Function):
    """The weighted sum of each token's copies."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weight_Tk: Tensor | None, routing_map: RoutingMap) -> Tensor:
        ctx.routing_map = routing_map
        ctx.save_for_backward(*(() if weight_Tk is None else (y_RD, weight_Tk)))
        y_TD: Tensor = operations(y_RD).sum_copies(y_RD, routing_map, weight_Tk)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        ops = operations(dy_TD)
        if not ctx.saved_tensors:
            return ops.gather(dy_TD, ctx.routing_map, VALUES).values, None, None
        y_RD, weight_Tk = ctx.saved_tensors
        produced, dweight_Tk = ops.combine_backward(dy_TD, y_RD, weight_Tk, ctx.routing_map, VALUES)
        return produced.values, dweight_Tk.to(weight_Tk.dtype), None


def _require_tokens(name: str, x_TD: Tensor, routing_map: RoutingMap) -> None:
    """Raise OperandError unless x has the map's tokens."""
    tokens = routing_map.position_Tk.shape[0]
    if x_TD.dim() != 2 or x_TD.shape[0] != tokens:
        raise OperandError(
            f"{name} has shape {list(x_TD.shape)}, the map has {tokens} tokens: pass [tokens, width]"
        )
