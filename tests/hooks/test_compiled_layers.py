"""Our own layers in a compiled graph: plans switch them without another graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision, OperandFormat

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]

WIDTH = 64
OFFSETS = torch.tensor([0, 20, 20, 40], dtype=torch.int32)
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.layer = Fp8GroupedLinear(3, WIDTH, WIDTH) if grouped else Fp8Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        grouped = isinstance(self.layer, Fp8GroupedLinear)
        return x + (self.layer(x, OFFSETS) if grouped else self.layer(x)).relu()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(grouped) for grouped in (False, True, False))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def once(call: Callable[[Tensor], Tensor], model: nn.Module, seed: int) -> list[Tensor | None]:
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    y = call(x)
    y.square().mean().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [y.detach(), *gradients]


PLANS: list[dict[str, Any]] = [
    {"target": {"gemm": "fprop"}, "action": "bf16_fallback", "value": None},
    {"target": {"gemm": "dgrad"}, "action": "bf16_fallback", "value": None},
    {"target": {"gemm": "wgrad"}, "action": "bf16_fallback", "value": None},
    {"target": {"operand": "x", "layout": "row"}, "action": "scale_multiplier", "value": 0.25},
    {"target": {"operand": "dy", "layout": "row"}, "action": "format", "value": "e5m2"},
    {"target": {"layer": True}, "action": "scale_rounding", "value": "pow2"},
    {"target": {"layer": True}, "action": "bf16_fallback", "value": None},
]


def with_plan(guard: Guard, version: int, entries: list[dict[str, Any]]) -> None:
    """Let the plan come as a reply does, and take effect."""
    whole = [
        {
            "layer": f"blocks.{i}.layer",
            "decision_id": "d",
            "not_before_step": 0,
            "expires_step": None,
            **entry,
        }
        for entry in entries
        for i in (0, 1)
    ]
    guard._session.controls.receive({"version": version, "entries": whole})
    for _ in range(2):
        guard.step()


@pytest.mark.parametrize("by_block", [False, True])
def test_plans_take_effect_in_the_graph_that_there_is(by_block: bool, watch: Watch, read: Read) -> None:
    """Each precision gives the bits and the statistics of eager code, at the first step that runs with it."""
    torch.manual_seed(0)
    model = Blocks()
    eager = copy.deepcopy(model)
    guard, reference = (
        watch(m, mode="enforce", recompute=9, run=run) for m, run in ((model, "c"), (eager, "e"))
    )
    counter = CompileCounterWithBackend("eager" if by_block else "aot_eager")
    if by_block:
        for block in model.blocks:
            block.compile(fullgraph=True, backend=counter)
    call = model if by_block else torch.compile(model, fullgraph=True, backend=counter)
    graphs = []
    for version, entry in enumerate([None, *PLANS, None]):
        if version:
            for each in (guard, reference):
                with_plan(each, version, [] if entry is None else [entry])
        results = [once(c, m, version) for c, m in ((call, model), (eager, eager))]
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)  # type: ignore[arg-type]
        for each in (guard, reference):
            each.step()
        got, wanted = read(guard), read(reference)
        assert got.sample.slots == wanted.sample.slots
        assert got.stats == wanted.stats
        graphs.append(counter.frame_count)
    # By blocks: the first one's input and the others', the grouped layer's.
    assert set(graphs) == {2 if by_block else 1}
    assert guard._session.once.counts == {}


def test_a_backward_uses_the_precision_of_its_forward(watch: Watch) -> None:
    model = Fp8Linear(WIDTH, WIDTH)
    eager = copy.deepcopy(model)
    watch(model)
    coarse = LinearPrecision(dy=OperandFormat(fmt="e5m2"), wgrad="bf16")
    gradients = []
    for call, layer in ((torch.compile(model, backend="aot_eager"), model), (eager, eager)):
        x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
        y = call(x)
        layer.precision = coarse
        y.square().sum().backward()
        gradients.append(layer.weight.grad)
    assert torch.equal(*gradients)  # type: ignore[call-overload]


def test_an_evaluation_is_not_measured_but_runs_as_planned(watch: Watch, read: Read) -> None:
    model = Fp8Linear(WIDTH, WIDTH)
    guard = watch(model, mode="enforce")
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(40, WIDTH)
    with torch.no_grad():
        call(x)
    once(call, model, 1)
    # An eager evaluation in between tells its own forward's observer only.
    with torch.no_grad():
        model(x)
    once(call, model, 2)
    guard.step()
    assert read(guard)[" x row"].count == read(guard)[" dy row"].count == 2 * 40 * WIDTH
    graphs = counter.frame_count
    model.precision = replace(model.precision, fprop="bf16")
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert counter.frame_count == graphs


def test_a_copy_without_a_guard_and_a_detached_layer_keep_their_own_precision(watch: Watch) -> None:
    model = Fp8Linear(WIDTH, WIDTH)
    guard = watch(model)
    copied = copy.deepcopy(model)
    copied.precision = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")
    calls = [torch.compile(m, fullgraph=True, backend="eager") for m in (model, copied)]
    x = torch.randn(40, WIDTH)
    for _ in range(2):
        for call, layer in zip(calls, (model, copied), strict=True):
            assert torch.equal(call(x), layer(x))
        guard.detach()
        model.precision = LinearPrecision(x=OperandFormat(fmt="e5m2"))
