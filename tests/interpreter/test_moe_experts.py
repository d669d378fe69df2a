"""Routed experts on Triton kernels alone: fused quantisation, recomputation and padding change no bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import LinearPrecision, OperandFormat
from fp8_safeguard.kernels.moe import (
    RoutingMap,
    expert_fused,
    expert_passes,
    fast_moe,
    permute,
    router,
    routing_map,
    triton_ops,
)

NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dprobability")
FORM = LinearPrecision(x=OperandFormat(scale="pow2"), dy=OperandFormat(multiplier=2.0))
# FP8 noise of three products in a row, against exact ones.
FP8_TOLERANCE = 0.1


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the operations of a device."""
    for module in (expert_fused, expert_passes, permute_module(), router):
        monkeypatch.setattr(module, "operations", lambda x: triton_ops)


def permute_module() -> object:
    """The module behind the function of the same name."""
    return __import__(permute.__module__, fromlist=["operations"])


def leaves(generator: torch.Generator) -> tuple[list[Tensor], Tensor, Tensor]:
    """x, both weights and probabilities, expert ids of which one expert has none, and dy."""
    x, dy = (torch.randn(20, 72, generator=generator).bfloat16() for _ in range(2))
    w_gate_up = torch.randn(3, 96, 72, generator=generator) / 8
    w_down = torch.randn(3, 72, 48, generator=generator) / 7
    ids = torch.rand(20, 2, generator=generator).topk(2, dim=-1).indices.int()
    return [x, w_gate_up, w_down, torch.rand(20, 2, generator=generator)], ids, dy


def results(tensors: list[Tensor], dy: Tensor, route: RoutingMap, *, recompute: bool) -> list[Tensor]:
    """y and every gradient."""
    own = [tensor.clone().requires_grad_() for tensor in tensors]
    y = fast_moe(*own[:3], route, own[3], precision=FORM, recompute=recompute, backend="triton")
    return [y.detach(), *torch.autograd.grad(y, own, dy)]


def exact_results(tensors: list[Tensor], ids: Tensor, dy: Tensor) -> list[Tensor]:
    """The same of every token through every expert, in float64, the weights of those not chosen 0."""
    x, w_gate_up, w_down, weight = (tensor.double().requires_grad_() for tensor in tensors)
    weight_TE = torch.zeros(len(x), len(w_down), dtype=torch.float64).scatter(1, ids.long(), weight)
    gate, up = torch.einsum("td,egd->teg", x, w_gate_up).chunk(2, dim=-1)
    y = torch.einsum("tef,edf,te->td", torch.nn.functional.silu(gate) * up, w_down, weight_TE)
    return [y.detach(), *torch.autograd.grad(y, (x, w_gate_up, w_down, weight), dy.double())]


def test_fused_experts_have_the_bits_of_the_unfused_ones(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, ids, dy = leaves(generator)
    padded, bare = (routing_map(ids, 3, alignment=alignment) for alignment in (16, 1))
    fused = results(tensors, dy, padded, recompute=True)
    monkeypatch.setattr(expert_fused, "usable", lambda experts: False)
    unfused = results(tensors, dy, bare, recompute=False)
    for name, a, b, wanted in zip(NAMES, fused, unfused, exact_results(tensors, ids, dy), strict=True):
        assert torch.equal(a, b), name
        assert (a.double() - wanted).norm() < FP8_TOLERANCE * wanted.norm(), name
    assert not any(gradient[2].any() for gradient in fused[2:4])


@pytest.mark.parametrize("recompute", [True, False])
def test_b39_no_tokens_at_all_give_zero_gradients_of_every_weight(
    recompute: bool, generator: torch.Generator
) -> None:
    """None arrive, or all that do go elsewhere: zeros, not None, so that ranks with tokens have something to add to."""
    tensors, ids, dy = leaves(generator)
    none = [tensors[0][:0], *tensors[1:3], tensors[3][:0]]
    for own, chosen, gradient in ((none, ids[:0], dy[:0]), (tensors, torch.full_like(ids, -1), dy)):
        found = results(own, gradient, routing_map(chosen, 3, alignment=16), recompute=recompute)
        assert [part.shape for part in found] == [own[0].shape, *(tensor.shape for tensor in own)]
        assert not any(part.any() for part in found)


def test_b20_an_empty_weight_shard_adds_nothing(generator: torch.Generator) -> None:
    tensors, ids, dy = leaves(generator)
    shard = [tensors[0], tensors[1][:, :0].clone(), tensors[2][:, :, :0].clone(), tensors[3]]
    found = results(shard, dy, routing_map(ids, 3, alignment=16), recompute=True)
    assert [part.shape for part in found] == [shard[0].shape, *(tensor.shape for tensor in shard)]
    assert not any(part.any() for part in found)
