"""Under torch.compile no function mode goes on: one graph stays one graph, and coverage says what is not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fp8_safeguard.hooks import Guard

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]

WIDTH = 8
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(F.linear(x, self.w)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.head


def drive(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        call(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reasons(guard: Guard) -> dict[str, str]:
    return {row["name"]: row["reason"] for row in guard.coverage() if row["status"] == "not observed"}


def test_a_compiled_model_is_one_graph_and_coverage_says_why_its_products_are_not_seen(
    watch: Watch, read: Read
) -> None:
    model, counter = Model(), CompileCounter()
    guard = watch(model, every=2)
    drive(model, torch.compile(model, backend=counter, fullgraph=True), 5)
    assert counter.frame_count == 1
    assert read(guard)["blocks.0.linear x row"].count == 4 * WIDTH
    said = reasons(guard)
    assert set(said) == {"head", "blocks.0.w", "blocks.1.w"}
    assert all("compiled" in reason for reason in said.values())


def test_compiled_blocks_are_not_compiled_again_for_the_model_around_them(watch: Watch, read: Read) -> None:
    """A mode on outside would be seen by the compiler: the products around compiled parts are left and named."""
    counts = []
    for observed in (False, True):
        torch._dynamo.reset()
        model, counter = Model(), CompileCounter()
        for block in model.blocks:
            block.compile(backend=counter)
        guard = watch(model, every=2) if observed else None
        drive(model, model, 5)
        counts.append(counter.frame_count)
    assert guard is not None
    assert counts == [2, 2]  # a batch needs no gradient, what the first block makes of it does
    assert read(guard)["blocks.1.linear x row"].count == 4 * WIDTH
    said = reasons(guard)
    assert set(said) == {"head", "blocks.0.w", "blocks.1.w"}
    assert "parts of its module are compiled" in said["head"]


def test_after_compiling_the_model_itself_is_seen_as_ever(watch: Watch, read: Read) -> None:
    model = Model()
    guard = watch(model)
    drive(model, torch.compile(model, backend="eager"), 2)
    drive(model, model, 2)
    assert reasons(guard) == {}
    assert read(guard)["head x row"].count == 4 * WIDTH
