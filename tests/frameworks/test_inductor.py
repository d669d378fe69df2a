"""Under inductor: the bits of the unmonitored compiled model, one graph, every use once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.kernels import Fp8Linear
from fp8_safeguard.monitor.wire import columns_for, parse_sample

WIDTH = 32
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # What Inductor itself warns of when it is imported.
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]


@pytest.fixture
def watch() -> Iterator[Callable[..., Guard]]:
    guards: list[Guard] = []

    def start(model: nn.Module, run: str) -> Guard:
        guards.append(attach(model, every=1, recompute=9, run=run))
        return guards[-1]

    yield start
    for guard in guards:
        guard.detach(timeout=0.2)


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module], in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), kind(WIDTH, 2 * WIDTH), kind(2 * WIDTH, WIDTH)
        self.act: Callable[[Tensor], Tensor] = torch.relu_ if in_place else nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Blocks(nn.Module):
    """The first block's layers are used twice; with `recompute` each call is inside a checkpoint."""

    def __init__(
        self, kind: type[nn.Module] = nn.Linear, recompute: bool = False, in_place: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, in_place) for _ in range(2))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], *self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def plainly(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    outputs = [call(torch.randn(3, 17, WIDTH)) for _ in range(2)]
    for y in outputs:
        y.square().mean().backward()
    return [y.detach() for y in outputs]


def under_autocast(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(torch.randn(3, 17, WIDTH))
    y.float().square().mean().backward()
    return [y.detach()]


def counts(guard: Guard) -> dict[str, int]:
    document = guard.last_sample()
    assert document is not None
    sample = parse_sample(document)
    return {slot.label: columns_for(sample, i).count for i, slot in enumerate(sample.slots)}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "plain": (Blocks, plainly),
    "outputs changed in place": (lambda: Blocks(in_place=True), plainly),
    "autocast": (Blocks, under_autocast),
    "checkpoint": (lambda: Blocks(recompute=True), plainly),
    "our layers": (lambda: Blocks(Fp8Linear), plainly),
}


@pytest.mark.parametrize("case", CASES)
def test_every_use_counts_once_and_no_bit_changes(case: str, watch: Callable[..., Guard]) -> None:
    build, step = CASES[case]
    torch.manual_seed(0)
    model = build()
    eager, plain = copy.deepcopy(model), copy.deepcopy(model)
    guard, reference = watch(model, "compiled"), watch(eager, "eager")
    counter = CompileCounterWithBackend("inductor")
    compiled = [
        torch.compile(m, backend=b, fullgraph=True) for m, b in ((model, counter), (plain, "inductor"))
    ]
    calls = *compiled, eager
    for seed in (1, 2):
        results = []
        for call in calls:
            torch.manual_seed(seed)
            results.append(step(call))
        guard.step()
        reference.step()
        gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
        for got, wanted in zip(results[0] + gradients[0], results[1] + gradients[1], strict=True):
            assert torch.equal(got, wanted)
        assert counts(guard) == counts(reference)
    assert counter.frame_count == 1
    assert guard._session.once.counts == {}


def test_a_switch_of_precision_runs_in_the_graph_that_there_is(watch: Callable[..., Guard]) -> None:
    model = Fp8Linear(64, 64)
    watch(model, "switch")
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(40, 64)
    for fallback in (
        {},
        {"fprop": "bf16"},
        {"dgrad": "bf16", "wgrad": "bf16"},
        {"x": replace(model.precision.x, multiplier=0.5)},
    ):
        model.precision = replace(model.precision, **fallback)
        results = []
        for one in (call, model):
            leaf = x.clone().requires_grad_()
            model.zero_grad()
            one(leaf).square().sum().backward()
            results.append([leaf.grad, model.weight.grad])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 1
