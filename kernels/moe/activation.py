"""SwiGLU, with the routing probability inside it."""

# Shapes: R rows, F SwiGLU width, G = 2 F.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.permute import VALUES, unpadded
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted
from fp8_safeguard.kernels.operands import check_together


def swiglu(gate_up: Tensor, probability: Tensor | None = None) -> Tensor:
    """silu(gate) * up [* probability] in float32, [..., F] in the input's dtype, with gradients.

    gate_up [..., 2F] holds gate and up as its two halves; probability [...] is float32, one a row. Applied here, the
    routing probability needs no pass of its own, and its gradient needs nothing from behind the activation. Only
    gate_up and the probability are kept for the backward. OperandError for an odd width, or unless there is one
    probability a row. (Shazeer 2020, GLU variants improve transformers.)
    """
    _check(gate_up, probability)
    flat = (
        gate_up if gate_up.dim() == 2 else gate_up.reshape(math.prod(gate_up.shape[:-1]), gate_up.shape[-1])
    )
    flat_probability = (
        probability if probability is None or probability.dim() == 1 else probability.reshape(-1)
    )
    h_RF: Tensor = _SwiGLU.apply(flat, flat_probability)  # type: ignore[no-untyped-call]
    return h_RF if gate_up.dim() == 2 else h_RF.reshape(*gate_up.shape[:-1], h_RF.shape[1])


def swiglu_quantize(
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    routing_map: RoutingMap | None = None,
) -> Produced:
    """What `swiglu` gives of [R, 2F], quantised and measured as `wanted`, as `permute_quantize`; without gradients.

    With a routing map, `col` blocks start anew at each expert, rows behind the last one are zero, and statistics are
    [slots, E, S] without the padding rows.
    """
    _check(gate_up_RG, probability_R)
    if gate_up_RG.dim() != 2:
        raise OperandError(f"gate_up has shape {list(gate_up_RG.shape)}: pass [rows, 2 width]")
    offsets = None if routing_map is None else routing_map.offsets
    probability = None if probability_R is None else probability_R.detach()
    aligned = routing_map is not None and routing_map.aligned
    produced: Produced = operations(gate_up_RG).swiglu(
        gate_up_RG.detach(), probability, wanted, offsets, aligned=aligned
    )
    return produced if routing_map is None else unpadded(produced, routing_map, gate_up_RG.shape[1] // 2)


class _SwiGLU(torch.autograd.Function):
    """The activation; its backward computes the halves again rather than keeping them in float32."""

    @staticmethod
    def forward(ctx: Any, gate_up_RG: Tensor, probability_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up_RG, probability_R)
        values: Tensor = operations(gate_up_RG).swiglu(gate_up_RG, probability_R, VALUES, None).values
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_RF: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up_RG, probability_R = ctx.saved_tensors
        ops = operations(gate_up_RG)
        produced, dprobability_R = ops.swiglu_backward(dh_RF, gate_up_RG, probability_R, VALUES, None)
        if dprobability_R is not None:
            dprobability_R = dprobability_R.to(probability_R.dtype)
        return produced.values, dprobability_R


def _check(gate_up: Tensor, probability: Tensor | None) -> None:
    """Raise OperandError unless the last dimension is two halves and there is one probability a row."""
    check_together(gate_up=gate_up, probability=probability)
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        raise OperandError(
            f"gate_up has shape {list(gate_up.shape)}: its last dimension must be two equal halves"
        )
    if probability is not None and probability.shape != gate_up.shape[:-1]:
        raise OperandError(
            f"probability has shape {list(probability.shape)}, gate_up {list(gate_up.shape)}: pass one a row"
        )
