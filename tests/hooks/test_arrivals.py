"""The weight's gradient as it arrives, however the trainer comes by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear

WIDTH = 16
Drive = Callable[[nn.Sequential], None]


def _batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, requires_grad=True)


def _poison(weight: torch.Tensor, *at: int) -> Any:
    """NaN in the gradients with these numbers, from 0; without any in all."""
    arrived: list[int] = []

    def spoil(dw: torch.Tensor) -> torch.Tensor:
        arrived.append(1)
        return dw * math.nan if not at or len(arrived) - 1 in at else dw

    return weight.register_hook(spoil)


def tied(model: nn.Sequential) -> None:
    model[1].weight = model[0].weight
    _poison(model[0].weight)
    model(_batch()).square().sum().backward()


def only_the_second_of_three_micro_batches(model: nn.Sequential) -> None:
    _poison(model[0].weight, 1)
    for _ in range(3):
        model(_batch()).square().sum().backward()


def frozen_and_unfrozen(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)
    model(_batch()).square().sum().backward()
    model[0].weight.requires_grad_(True)
    _poison(model[0].weight)
    model(_batch()).square().sum().backward()


def frozen_before_the_backward(model: nn.Sequential) -> None:
    y = model(_batch())
    model[1].weight.requires_grad_(False)
    _poison(model[0].weight)
    y.square().sum().backward()


def replaced_before_the_backward(model: nn.Sequential) -> None:
    _poison(model[0].weight)
    y = model(_batch())
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    y.square().sum().backward()


def a_retained_graph_whose_second_backward_is_bad(model: nn.Sequential) -> None:
    _poison(model[0].weight, 1)
    y = model(_batch()).square().sum()
    y.backward(retain_graph=True)
    y.backward()


def double_backward(model: nn.Sequential) -> None:
    x = _batch()
    y = model(x).sigmoid().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    _poison(model[0].weight)
    (y + dx.square().sum()).backward()


def autograd_grad_of_the_weights_is_no_arrival(model: nn.Sequential) -> None:
    handle = _poison(model[0].weight)
    torch.autograd.grad(model(_batch()).square().sum(), list(model.parameters()))
    handle.remove()
    _poison(model[0].weight)
    model(_batch()).square().sum().backward()


def functional_call(model: nn.Sequential) -> None:
    scaled = {name: weight * 1.5 for name, weight in model.named_parameters()}
    _poison(scaled["0.weight"])
    torch.func.functional_call(model, scaled, (_batch(),)).square().sum().backward()


def checkpointed(model: nn.Sequential) -> None:
    _poison(model[0].weight, 1)
    for _ in range(3):
        checkpoint(model, _batch(), use_reentrant=False).square().sum().backward()


def checkpointed_reentrant(model: nn.Sequential) -> None:
    _poison(model[0].weight, 1)
    for _ in range(3):
        checkpoint(model, _batch(), use_reentrant=True).square().sum().backward()


def a_hook_of_the_trainers_that_fails_first(model: nn.Sequential) -> None:
    def fail(dw: torch.Tensor) -> None:
        raise ValueError("the trainer's")

    handle = model[1].weight.register_hook(fail)
    with pytest.raises(ValueError, match="the trainer's"):
        model(_batch()).square().sum().backward()
    handle.remove()
    _poison(model[0].weight)
    model(_batch()).square().sum().backward()


def an_overflow_in_bfloat16(model: nn.Sequential) -> None:
    model.bfloat16()
    y = model[1](model[0](torch.full((4, WIDTH), 1e30).bfloat16()).detach())
    y.square().sum().backward()
    _poison(model[0].weight)
    model[0](_batch().bfloat16()).sum().backward()


def an_overflow_in_float16(model: nn.Sequential) -> None:
    model.half()
    (model[0](torch.full((4, WIDTH), 300.0).half()) * 300.0).sum().backward()


def no_tokens(model: nn.Sequential) -> None:
    model(torch.zeros(0, WIDTH)).sum().backward()
    _poison(model[0].weight)
    model(_batch()).square().sum().backward()


SCENARIOS: tuple[Drive, ...] = (
    tied, only_the_second_of_three_micro_batches, frozen_and_unfrozen, frozen_before_the_backward,
    replaced_before_the_backward, a_retained_graph_whose_second_backward_is_bad, double_backward,
    autograd_grad_of_the_weights_is_no_arrival, functional_call, checkpointed, checkpointed_reentrant,
    a_hook_of_the_trainers_that_fails_first, an_overflow_in_bfloat16, an_overflow_in_float16, no_tokens,
)  # fmt: skip
ALSO = {tied: {"1"}, an_overflow_in_bfloat16: {"1"}}
"""Layers whose gradient is bad besides the first one's."""

IMPOSSIBLE = [
    (Fp8Linear, each) for each in (double_backward, an_overflow_in_bfloat16, an_overflow_in_float16)
]
"""They have no second derivative, and scales of their own."""


def _model(kind: type[nn.Module] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH, WIDTH, bias=False) for _ in range(2)))


def _ends(model: nn.Sequential, drive: Drive) -> list[torch.Tensor]:
    torch.manual_seed(1)
    drive(model)
    left = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [*(tensor.detach().double().nan_to_num(7e7) for tensor in left), torch.get_rng_state()]


def _hooks_on(weight: torch.Tensor) -> int:
    """Hooks at the place where the weight's gradient arrives."""
    node: Any = torch.autograd.graph.get_gradient_edge(weight).node
    handle = node.register_prehook(lambda gradients: None)
    hooks = len(handle.hooks_dict_ref())
    handle.remove()
    return hooks - 1


@pytest.mark.parametrize(
    ("kind", "drive"),
    [
        (kind, drive)
        for kind in (nn.Linear, Fp8Linear)
        for drive in SCENARIOS
        if (kind, drive) not in IMPOSSIBLE
    ],
    ids=lambda given: given.__name__,
)
def test_a_bad_gradient_is_told_and_no_bit_changes(
    watch: Callable[..., Guard], kind: type[nn.Module], drive: Drive
) -> None:
    plain = _ends(_model(kind), drive)
    guard = watch(model := _model(kind))
    monitored = _ends(model, drive)
    assert all(map(torch.equal, plain, monitored))
    kept = [node for layer in guard._session.layers if (node := layer.step.node) is not None]
    guard.step(0)
    sample: Any = guard.last_sample()
    bad = {each["layer"] for each in sample["scalars"] if each["name"] == "wgrad_norm"}
    assert bad == {"0"} | ALSO.get(drive, set())
    guard.detach()
    assert not any(_hooks_on(weight) for weight in model.parameters() if weight.requires_grad)
    assert kept


@pytest.mark.parametrize("when", ["forward", "backward", "between"])
def test_a_guard_that_leaves_in_the_middle_leaves_nothing(watch: Callable[..., Guard], when: str) -> None:
    guard = watch(model := _model())
    kept = [torch.autograd.graph.get_gradient_edge(weight).node for weight in model.parameters()]

    def leave(*_: Any) -> None:
        guard.detach(timeout=0.1)

    if when == "forward":
        model[0].register_forward_hook(leave)
    elif when == "backward":
        model[1].weight.register_hook(leave)
    loss = model(_batch()).square().sum()
    if when == "between":
        leave()
    loss.backward()
    assert [_hooks_on(weight) for weight in model.parameters()] == [0, 0]
    assert kept
    assert not model[0].weight._backward_hooks
    assert all(layer.step.wgrad_norm is None for layer in guard._session.layers)
