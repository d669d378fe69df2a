"""Inputs of the MoE tests, and every gradient of one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import fp8_grouped_linear
from fp8_safeguard.kernels.moe import RoutingMap, combine, permute, spread, swiglu
from fp8_safeguard.kernels.precision import LinearPrecision

BF16 = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")


class MoeInputs(NamedTuple):
    """One layer's tensors."""

    x_TD: Tensor
    w_gate_up_EGD: Tensor
    w_down_EDF: Tensor
    expert_Tk: Tensor
    weight_Tk: Tensor
    dy_TD: Tensor


@pytest.fixture
def precisions() -> dict[str, LinearPrecision]:
    return {"fp8": LinearPrecision(), "bf16": BF16}


@pytest.fixture
def make_inputs() -> Callable[..., MoeInputs]:
    """Random tensors; the experts of `avoid` get no token."""

    def make(
        tokens: int = 150,
        width: int = 96,
        hidden: int = 72,
        experts: int = 5,
        top_k: int = 2,
        avoid: tuple[int, ...] = (3,),
    ) -> MoeInputs:
        generator = torch.Generator().manual_seed(tokens + width + hidden + experts)
        order_TE = torch.rand(tokens, experts, generator=generator)
        order_TE[:, list(avoid)] = -1.0
        weight_Tk = torch.rand(tokens, top_k, generator=generator)
        return MoeInputs(
            torch.randn(tokens, width, generator=generator).bfloat16(),
            torch.randn(experts, 2 * hidden, width, generator=generator) / width**0.5,
            torch.randn(experts, width, hidden, generator=generator) / hidden**0.5,
            order_TE.topk(top_k, dim=-1).indices.int()
            if tokens
            else torch.zeros(0, top_k, dtype=torch.int32),
            weight_Tk / weight_Tk.sum(dim=-1, keepdim=True),
            torch.randn(tokens, width, generator=generator).bfloat16(),
        )

    return make


@pytest.fixture
def plain() -> Callable[..., Tensor]:
    """The chain that fast_moe fuses, each step a differentiable function of its own."""

    def run(
        x_TD: Tensor,
        w_gate_up_EGD: Tensor,
        w_down_EDF: Tensor,
        route: RoutingMap,
        weight_Tk: Tensor,
        precision: LinearPrecision,
    ) -> Tensor:
        x_RD = permute(x_TD, route)
        gate_up_RG = fp8_grouped_linear(x_RD, w_gate_up_EGD, route.offsets, precision=precision)
        h_RF = swiglu(gate_up_RG, spread(weight_Tk, route))
        return combine(fp8_grouped_linear(h_RF, w_down_EDF, route.offsets, precision=precision), route)

    return run


@pytest.fixture
def results() -> Callable[..., list[Tensor]]:
    """y and the gradients of x, both weights and the probabilities."""

    def of(layer: Callable[..., Tensor], inputs: MoeInputs, weight_Tk: Tensor | None = None) -> list[Tensor]:
        leaves = [
            tensor.clone().requires_grad_()
            for tensor in (*inputs[:3], inputs.weight_Tk if weight_Tk is None else weight_Tk)
        ]
        y_TD = layer(*leaves)
        y_TD.backward(inputs.dy_TD)
        assert all(leaf.grad is not None for leaf in leaves)
        return [y_TD.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]

    return of
