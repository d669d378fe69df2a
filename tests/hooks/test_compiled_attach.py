"""Graphs that were compiled before attach(), and CUDA graphs that are being captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard, HookError, session
from fp8_safeguard.hooks.readable import capturing
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[Tensor]]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Two(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.first, self.second = kind(8, 8), kind(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def wrapped(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model.compile(backend="eager")
    return model


def in_a_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x) * 2.0, backend="eager")


def in_part(model: Any) -> Callable[[Tensor], Tensor]:
    model.second.compile(backend="eager")
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("compiled", [wrapped, in_place, in_a_step, in_part])
@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_b01_a_guard_attached_after_the_first_compiled_call_is_not_deaf(
    compiled: Any, kind: Any, watch: Watch, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two(kind)
    call = compiled(model)
    call(torch.randn(3, 8))
    guard = watch(model)
    records = []
    for step in range(2):
        call(torch.randn(3, 8))
        guard.step(step)
        sample = read(guard).sample
        records += [(sample.step, s.layer) for s in sample.slots if s.operand == "x" and s.layout == "row"]
    assert records == [(0, "first"), (0, "second"), (1, "first"), (1, "second")]
    assert sum("after the first compiled call" in r.message for r in caplog.records) == 1


def test_b01_a_second_guard_is_heard_too(watch: Watch, read: Read) -> None:
    """The graphs of the first one report to hooks that are gone."""
    model = Two()
    call = wrapped(model)
    for run in ("a", "b"):
        guard = watch(model, run=run)
        call(torch.randn(3, 8)).sum().backward()
        guard.step()
        assert read(guard)["first dy row"].count == 3 * 8
        guard.detach()


def test_b01_nothing_is_said_and_nothing_thrown_away_before_the_first_call(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two()
    call = wrapped(model)
    watch(model)
    call(torch.randn(3, 8))
    assert "compiled call" not in caplog.text


def test_b01_where_compiling_again_is_forbidden_attach_says_so_and_leaves_no_trace(watch: Watch) -> None:
    model = Two()
    call = wrapped(model)
    call(x := torch.randn(3, 8))
    with torch._dynamo.config.patch(error_on_recompile=True):
        with pytest.raises(HookError, match=r"before the first compiled call"):
            watch(model)
        call(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(HookError, match="set_stance"):
            watch(model)
        call(x)
    assert not model.first._forward_hooks


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Pretend that the current CUDA stream is being captured, or is no more."""

    def pretend(captured: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: captured)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)

    return pretend


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_b24_nothing_of_ours_is_launched_while_a_cuda_graph_is_captured(
    backend: str | None, kind: Any, watch: Watch, read: Read, train: Train, capture: Any,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = Two(kind)
    guard = watch(model)
    call = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(call, optimizer)
    before = guard.last_sample()

    def forbidden(*arguments: object) -> None:
        raise AssertionError("a buffer was asked for during the capture")

    with monkeypatch.context() as patch:
        patch.setattr(session.Ring, "acquire", forbidden)
        capture(True)
        for _ in range(2):
            train(call, optimizer)
        capture(False)
    assert guard._session.clock.step == 1
    assert guard.last_sample() == before
    assert [r.message for r in caplog.records if "failed" in r.message] == []
    assert sum("CUDA graph is captured" in r.message for r in caplog.records) == 1
    train(call, optimizer)
    assert read(guard).sample.step == 1
    assert read(guard)["second dy row"].count == 4 * 8


def test_b24_a_capture_that_begins_inside_a_step_is_left_alone(
    watch: Watch, read: Read, capture: Any
) -> None:
    model = Two()
    guard = watch(model)
    y = model(torch.randn(3, 8))
    capture(True)
    assert capturing()
    model(y).sum().backward()
    capture(False)
    guard.step()
    assert read(guard).parts("first") == {"x row", "x col", "w tile", "fprop"}
    assert read(guard)["first x row"].count == 3 * 8


def test_b24_the_operators_are_kept_out_of_cuda_graphs() -> None:
    """Inductor cuts its graphs around such nodes: mode="reduce-overhead" goes on, and replays run the operators."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    from fp8_safeguard.hooks import operators

    graph = torch.fx.Graph()
    for operator in (operators.observe_forward, operators.observe_backward, operators.observe_frozen):
        assert is_cudagraph_unsafe_fx_node(graph.call_function(operator, ()))
