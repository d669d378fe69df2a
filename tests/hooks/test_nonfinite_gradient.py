"""A gradient that is no number under a finite loss, and no scaler to notice it."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide, observe
from fp8_safeguard.monitor.wire import parse_sample


def _judged(guard: Guard, state: PolicyState) -> tuple[Any, PolicyState, tuple[Decision, ...]]:
    """The last sample, whose loss is finite, and what the policy makes of it."""
    sample: Any = guard.last_sample()
    assert math.isfinite(sample["run"]["loss"])
    config = PolicyConfig(run="r", mode="enforce")
    return sample, *decide(state, observe([parse_sample(sample)]), config)


def test_b96_a_nan_gradient_without_a_loss_scaler_is_counted_and_its_layer_falls_back(
    watch: Callable[..., Guard],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = watch(model, optimizer=optimizer, recompute=8)
    state, made, counted = PolicyState(), [], []
    for step in range(5):
        y = x = torch.randn(32, 64)
        for layer in model:
            y = layer(y)
            if layer is model[1] and step in (2, 3):
                y.register_hook(lambda dy: dy.index_fill(0, torch.tensor([0]), math.nan))
        loss = (y - x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        guard.log(loss=loss, gradient_norm=norm)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            # A trainer that skips such steps says where they end.
            optimizer.zero_grad()
        guard.step(step)
        optimizer.zero_grad()
        _, state, decisions = _judged(guard, state)
        made.append({(act.layer, act.action) for act in decisions})
        counted.append(state.trends.nonfinite_steps)
    assert counted == [0, 0, 1, 2, 2]
    assert made[:3] == [set()] * 3
    assert ("1", "bf16_fallback") in made[3]
    assert {layer for layer, _ in made[3]} == {"1"}


def _decided(
    guard: Guard, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> types.SimpleNamespace:
    """What the policy makes of so many steps that clip and log no gradient norm."""
    state = PolicyState()
    told = types.SimpleNamespace(made=[], counted=[], causes=[], sent=[])
    for step in range(steps):
        x = torch.randn(32, 64)
        loss = (model(x) - x).square().mean()
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        guard.log(loss=loss)
        if torch.isfinite(total):
            optimizer.step()
        guard.step(step)
        optimizer.zero_grad()
        sample, state, decisions = _judged(guard, state)
        told.made.append({(act.layer, act.target.gemm, act.action) for act in decisions})
        told.counted.append(state.trends.nonfinite_steps)
        told.causes.append({(each.said["name"], each.said["layer"]) for each in state.trends.causes.values()})
        told.sent.append([(each["layer"], each["name"], each["value"]) for each in sample["scalars"]])
    return told


def test_b96_a_nan_in_one_parameters_gradient_alone_names_its_layer_though_clipping_spreads_it(
    watch: Callable[..., Guard],
) -> None:
    """No operand of any GEMM holds it: it comes with the gradient of the weight, after the GEMM."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    calls = iter(range(100))

    def poison(dw: torch.Tensor) -> torch.Tensor:
        return dw.index_fill(0, torch.tensor([3]), math.nan) if next(calls) in (2, 3) else dw

    model[1].weight.register_hook(poison)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = _decided(watch(model, optimizer=optimizer), model, optimizer, 5)
    assert told.counted == [0, 0, 1, 2, 2]
    assert told.sent == [[], [], [("1", "wgrad_norm", "NaN")], [("1", "wgrad_norm", "NaN")], []]
    assert told.causes[:2] == [set()] * 2
    assert told.causes[2] == told.causes[3] == {("nonfinite-origin", "1")}
    assert told.made == [set(), set(), set(), {("1", "wgrad", "bf16_fallback")}, set()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_of_several_micro_batches_any_speaks_in_any_dtype(
    watch: Callable[..., Guard], dtype: torch.dtype, bad: int | None
) -> None:
    """Finite ones do not: squares of what a float16 holds lie beyond its range."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(dtype)
    arrived = itertools.count()
    model[0].weight.register_hook(lambda dw: dw.fill_(math.inf if next(arrived) == bad else 3e4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = watch(model, optimizer=optimizer)
    for _ in range(3):
        model(torch.randn(32, 64).to(dtype)).square().sum().backward()
    optimizer.step()
    guard.step(0)
    sample: Any = guard.last_sample()
    sent = [each["value"] for each in sample["scalars"]]
    assert sent == ([] if bad is None else ["Infinity"])


@pytest.mark.parametrize("bad", [0, 1])
def test_of_two_weights_cut_from_one_parameter_the_bad_one_is_named(
    watch: Callable[..., Guard], bad: int
) -> None:
    """As sharding keeps them: both gradients arrive at one place in the graph, each at an output of its own."""
    flat = nn.Parameter(torch.randn(2, 16, 16))
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    weights = flat.unbind()
    for layer, weight in zip(model, weights, strict=True):
        del layer.weight
        layer.weight = weight
    weights[bad].register_hook(lambda dw: dw * math.nan)
    guard = watch(model)
    model(torch.randn(4, 16)).square().sum().backward()
    guard.step(0)
    sample: Any = guard.last_sample()
    assert [(each["layer"], each["value"]) for each in sample["scalars"]] == [(str(bad), "NaN")]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_weight_cut_anew_for_each_forward_is_looked_at_in_each_backward(
    watch: Callable[..., Guard], bad: int
) -> None:
    flat = nn.Parameter(torch.randn(256))
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    del model[0].weight
    outputs, guard = [], None
    for forward in range(2):
        model[0].weight = weight = flat.view(16, 16)
        if forward == bad:
            weight.register_hook(lambda dw: dw * math.nan)
        guard = guard or watch(model)
        outputs.append(model(torch.randn(4, 16)).square().sum())
    for output in outputs:
        output.backward()
    assert guard is not None
    guard.step(0)
    sample: Any = guard.last_sample()
    assert [each["value"] for each in sample["scalars"]] == ["NaN"]


def test_a_place_that_outlives_the_step_keeps_no_hook_of_ours(watch: Callable[..., Guard]) -> None:
    """DDP keeps the places where gradients arrive; what waits there must not grow, nor measure other steps."""
    model = nn.Sequential(nn.Linear(8, 8))
    kept = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = watch(model, optimizer=optimizer, every=2)
    for step in range(6):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        guard.step(step)
        seen: list[Any] = []
        handle = kept.register_prehook(seen.append)
        assert list(handle.hooks_dict_ref()) == [handle.id]
        handle.remove()


class _SparseGradient(torch.autograd.Function):
    """x w^T whose weight gradient comes as a sparse tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return dy @ w, (dy.t() @ x).to_sparse()


class _SparseLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SparseGradient.apply(x, self.weight)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_sparse_gradient_is_read_by_what_it_stores(watch: Callable[..., Guard], bad: int | None) -> None:
    model = nn.Sequential(_SparseLinear(8, 8, bias=False))
    guard = watch(model)
    for batch in range(2):
        (model(torch.randn(4, 8)).sum() * (torch.inf if batch == bad else 1.0)).backward()
    assert model[0].weight.grad.is_sparse
    guard.step(0)
    sample: Any = guard.last_sample()
    assert [each["name"] for each in sample["scalars"]] == ([] if bad is None else ["wgrad_norm"])


def test_a_step_that_never_ends_keeps_no_handle_of_a_place_that_is_gone(watch: Callable[..., Guard]) -> None:
    flat = nn.Parameter(torch.randn(64))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    del model[0].weight
    model[0].weight = flat.view(8, 8)
    guard = watch(model)
    for _ in range(200):
        model[0].weight = flat.view(8, 8)
        model(torch.randn(4, 8)).sum().backward()
    assert len(guard._session.layers[0].step.arrivals) < 100
    waiting = []
    for _ in range(200):  # whose backwards are still to come: each place keeps its hook
        model[0].weight = weight = flat.view(8, 8)
        waiting.append(model(torch.randn(4, 8)).sum())
    weight.register_hook(lambda dw: dw * math.nan)
    first, *_, last = waiting
    for output in (last, first):
        output.backward()
    assert len(guard._session.layers[0].step.arrivals) >= 200
    guard.step(0)
    sample: Any = guard.last_sample()
    assert ("wgrad_norm", "NaN") in [(each["name"], each["value"]) for each in sample["scalars"]]
