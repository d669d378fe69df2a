"""Under torch.compile: one graph, the bits of the unmonitored one, and every use of a layer observed once."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8_safeguard.hooks import Guard, operands, together
from fp8_safeguard.monitor.stats import TensorStats, measure

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Call = Callable[[Tensor], Tensor]

WIDTH = 16
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """A residual block whose first output is changed in place, as selective checkpointing does not allow."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, number: int = 2, wrap: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wrap is not selective) for _ in range(number))
        self.wrap = wrap or (lambda block, x: block(x))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


class Shared(nn.Module):
    """One layer on its own output, and twice on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x)) + self.linear(x).sin() + self.linear(x).relu_()


class Conv1D(nn.Module):
    """As Hugging Face spells it: the weight is [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.nf = 3 * WIDTH
        self.weight, self.bias = (
            nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)),
            nn.Parameter(torch.ones(3 * WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(*x.shape[:-1], self.nf)


class WithNone(nn.Linear):
    """A layer that returns its bias beside the output, as Megatron's do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Odd(nn.Module):
    """Keyword input, a tuple as output, a transposed weight, a frozen layer below."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.conv, self.tuple = nn.Linear(WIDTH, WIDTH), Conv1D(), WithNone(3 * WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tuple(self.conv(self.frozen(input=x.detach())))[0].relu_()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def whole(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def keeping_products(ctx: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = functools.partial(create_selective_checkpoint_contexts, keeping_products)


def selective(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=CONTEXTS)


def once(call: Call) -> list[Any]:
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    y = call(x)
    y.square().mean().backward()
    return [y.detach(), x.grad]


def accumulated(call: Call) -> list[Any]:
    return once(call) + once(call)


def both_forwards_first(call: Call) -> list[Any]:
    outputs = [call(torch.randn(2, 9, WIDTH)) for _ in range(2)]
    for y in outputs:
        y.square().mean().backward()
    return [y.detach() for y in outputs]


def one_graph(model: nn.Module, backend: Any) -> Call:
    return torch.compile(model, fullgraph=True, backend=backend)


def by_block(model: nn.Module, backend: Any) -> Call:
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    return model


def counts(guard: Guard, read: Read) -> dict[str, tuple[int, float]]:
    """Elements of each slot, and a sum that no other elements have."""
    stats = read(guard).stats
    return {label: (s.count, s.metric("sum_sq")) for label, s in stats.items()}


# Each case: the model, one step, how it is compiled, and how many graphs it makes.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Call], list[Any]], Any, int]] = {
    "micro-batches": (Blocks, accumulated, one_graph, 1),
    "both forwards first": (Blocks, both_forwards_first, one_graph, 1),
    # The first block's input wants no gradient, the second's does.
    "block by block": (lambda: Blocks(3), both_forwards_first, by_block, 2),
    "shared": (Shared, once, one_graph, 1),
    "odd": (Odd, once, one_graph, 1),
    "checkpoint": (lambda: Blocks(wrap=whole), both_forwards_first, one_graph, 1),
    "checkpoint outside": (lambda: Blocks(wrap=whole), once, by_block, 1),
    "selective": (lambda: Blocks(1, selective), once, one_graph, 1),
}


@pytest.mark.parametrize(
    ("case", "backend"),
    [(case, "aot_eager") for case in CASES] + [("micro-batches", "eager"), ("shared", "eager")],
)
def test_every_use_counts_once_and_no_bit_changes(case: str, backend: str, watch: Watch, read: Read) -> None:
    build, step, compiled, graphs = CASES[case]
    torch.manual_seed(0)
    model = build()
    eager, plain = copy.deepcopy(model), copy.deepcopy(model)
    # Of dy the two backends' products may differ in the last bit, so sums are compared to rounding.
    guard, reference = (
        watch(m, recompute=9, run=name) for m, name in ((model, "compiled"), (eager, "eager"))
    )
    counter = CompileCounterWithBackend(backend)
    calls = compiled(model, counter), compiled(plain, backend), eager
    for seed in (1, 2):
        results = []
        for call in calls:
            torch.manual_seed(seed)
            results.append(step(call))
        guard.step()
        reference.step()
        gradients = [[p.grad for p in m.parameters() if p.requires_grad] for m in (model, plain)]
        for ours, theirs in zip(results[0] + gradients[0], results[1] + gradients[1], strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)
        got, wanted = counts(guard, read), counts(reference, read)
        assert got.keys() == wanted.keys()
        for label, (count, total) in wanted.items():
            assert got[label][0] == count, label
            assert got[label][1] == pytest.approx(total, rel=1e-4), label
        assert read(guard).sample.scalars == ()
    assert counter.frame_count == graphs
    assert guard._session.once.counts == {}


def test_operands_are_those_of_the_definition(watch: Watch, read: Read) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 130), Double())
    guard = watch(model)
    x = torch.randn(3, 70, 200) * torch.randn(3, 70, 200).exp()
    dy = torch.randn(3, 70, 130)
    torch.compile(model, backend="aot_eager")(x).backward(dy)
    guard.step()
    got = read(guard)
    values = {"x": x.reshape(-1, 200), "dy": 2 * dy.reshape(-1, 130), "w": model[0].weight.detach()}
    for operand, layout in (("x", "row"), ("x", "col"), ("dy", "row"), ("dy", "col"), ("w", "tile")):
        stats = got[f"0 {operand} {layout}"]
        wanted = measure(values[operand].numpy(), layout=layout)
        np.testing.assert_allclose(stats.to_vector(), wanted.to_vector(), rtol=1e-9, atol=0)


def test_sampling_pauses_and_evaluation_make_no_graph(watch: Watch, read: Read) -> None:
    model = Blocks(1)
    guard = watch(model, every=4)
    counter = CompileCounterWithBackend("eager")
    call = torch.compile(model, fullgraph=True, backend=counter)
    steps = []
    for number in range(40):
        once(call)
        if number == 20:
            with guard.paused():
                once(call)
        if number in (0, 8):
            with torch.no_grad():
                call(torch.randn(5, 9, WIDTH))
        if number == 0:
            graphs = counter.frame_count
        guard.step(number)
        steps.append(guard.last_sample()["step"])  # type: ignore[index]
        assert read(guard)["blocks.0.up x row"].count == 2 * 9 * WIDTH
    assert steps == [number // 4 * 4 for number in range(40)]
    # One with gradients and one without.
    assert counter.frame_count == graphs == 2


def test_a_changing_number_of_rows_is_one_graph(watch: Watch, read: Read) -> None:
    model = Blocks(1)
    guard = watch(model)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 5, 9):
        call(torch.randn(rows, 7, WIDTH)).sum().backward()
        guard.step()
        assert read(guard)["blocks.0.down dy row"].count == rows * 7 * WIDTH
    assert counter.frame_count == 1


def test_detach_leaves_graphs_without_us_and_a_copy_reports_nothing(watch: Watch, read: Read) -> None:
    model = Blocks(1)
    guard = watch(model)
    copied = copy.deepcopy(model)
    counter = CompileCounterWithBackend("eager")
    once(torch.compile(copied, fullgraph=True, backend=counter))
    once(call := torch.compile(model, fullgraph=True, backend=counter))
    in_flight = call(torch.randn(2, 9, WIDTH, requires_grad=True))
    guard.step()
    graphs = counter.frame_count
    guard.detach()
    assert read(guard)["blocks.0.up x row"].count == 2 * 2 * 9 * WIDTH
    in_flight.sum().backward()
    for _ in range(3):
        once(call)
    # The hooks are gone, which the compiler guards: it traces once more, without them.
    assert counter.frame_count == graphs + 1
    named = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert [name for name in named if "observe" in name] == ["fp8_safeguard.observe_forward.default"] * 2


def test_nothing_is_kept_beyond_the_backward(watch: Watch) -> None:
    model = Blocks(1)
    guard = watch(model, recompute=9)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    y = call(x)
    uses = [use for layer in guard._session.layers for use in layer.step.uses.values()]
    kept = [weakref.ref(use.x_TK) for use in uses]
    assert len(kept) == 2
    del uses
    y.sum().backward()
    assert [layer.step.uses for layer in guard._session.layers] == [{}, {}]
    del y
    assert [reference() for reference in kept] == [None, None]


def test_the_input_that_waits_for_the_backward_is_a_copy(watch: Watch, read: Read) -> None:
    """A compiled graph writes over its own buffers, which no version counter tells."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    guard = watch(model, recompute=2)
    call = torch.compile(model, backend="eager")
    y = call(x := torch.randn(9, WIDTH))
    (use,) = guard._session.layers[0].step.uses.values()
    assert torch.equal(use.x_TK, x)
    assert use.x_TK.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    y.sum().backward()
    guard.step()
    assert read(guard)["1 wgrad"].relative_error < 0.1


def test_a_fault_of_ours_is_one_line_and_training_goes_on(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("kernel is broken")

    model = Blocks(1)
    plain = copy.deepcopy(model)
    guard = watch(model)
    for owner in (operands, together.native_use):
        monkeypatch.setattr(owner, "measure", broken)
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        results = []
        for one in (call, plain):
            torch.manual_seed(3)
            results.append(once(one))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        guard.step()
    assert sum("kernel is broken" in r.message for r in caplog.records) == 1


def test_transforms_of_torch_func_and_export_are_left_alone(watch: Watch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    watch(model)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    x = torch.randn(5, WIDTH)
    wanted = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["0.weight"]
    got = torch.compile(
        lambda p, x: torch.func.vmap(torch.func.grad(loss), (None, 0))(p, x), backend="aot_eager"
    )(parameters, x)["0.weight"]
    assert torch.allclose(got, wanted)
    graph = torch.export.export(model, (x,)).graph
    assert not [node for node in graph.nodes if "observe" in str(node.target)]


def test_layers_that_are_called_outside_any_trace_are_observed_as_ever(watch: Watch, read: Read) -> None:
    """torch traces no forward of its own containers: with .compile() each layer is a graph, and our hooks are none."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model.compile(backend="aot_eager")
    model(torch.randn(9, WIDTH))
    guard = watch(model)
    for _ in range(2):
        model(torch.randn(9, WIDTH)).sum().backward()
        guard.step()
        for layer in ("0", "2"):
            assert read(guard)[f"{layer} x row"].count == read(guard)[f"{layer} dy row"].count == 9 * WIDTH


def test_names_are_those_without_the_compilers_wrappers(watch: Watch, read: Read) -> None:
    model = nn.Sequential(Block(True), nn.Embedding(3, WIDTH))
    model[0].up = torch.compile(model[0].up, backend="eager")  # type: ignore[assignment]
    wrapper = torch.compile(model, backend="eager")
    guard = watch(wrapper)
    assert [row["name"] for row in guard.coverage()] == ["0.up", "0.down", "1.weight"]
    model[0](torch.randn(9, WIDTH)).sum().backward()
    guard.step()
    assert read(guard)["0.up dy row"].count == 9 * 2 * WIDTH
    assert all(row["status"] == "observed" for row in guard.coverage()[:2])


def test_merged_over_micro_batches_equals_the_whole(watch: Watch, read: Read) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    guard = watch(model)
    call = torch.compile(model, backend="aot_eager")
    inputs = [torch.randn(9, WIDTH) for _ in range(3)]
    for x in inputs:
        call(x).sum().backward()
    guard.step()
    wanted = TensorStats.merge(measure(x.numpy(), layout="row") for x in inputs)
    got = read(guard)["0 x row"]
    assert (got.count, got.zeros, got.underflow) == (wanted.count, wanted.zeros, wanted.underflow)
    assert read(guard)["0 w tile"].count == WIDTH * WIDTH
