"""Exceptions in the middle of a step: the next one is clean, and a half one is marked."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Both = Callable[..., Guard]


class Fault(torch.autograd.Function):
    """The identity, until the gate is opened."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: dict[str, type[BaseException]]) -> torch.Tensor:
        ctx.gate = gate
        if "forward" in gate:
            raise gate.pop("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        if "backward" in ctx.gate:
            raise ctx.gate.pop("backward")
        return dy, None


class Faulty(nn.Module):
    """Two layers with a fault in between."""

    def __init__(self, kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.below, self.above = kind(8, 8), kind(8, 8)
        self.gate: dict[str, type[BaseException]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(Fault.apply(torch.tanh(self.below(x)), self.gate))


@pytest.mark.parametrize(
    ("kind", "error"),
    [(nn.Linear, torch.OutOfMemoryError), (Fp8Linear, RuntimeError), (nn.Linear, KeyboardInterrupt)],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_fails_marks_its_step_and_the_next_is_clean(
    both: Both, read: Read, kind: Any, error: type[BaseException], where: str
) -> None:
    readings, references = [], []

    def drive(model: Faulty) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            if step == 1:  # the trainer leaves the batch out and takes another
                model.gate[where] = error
                x = torch.randn(4, 8)
                references.append(weakref.ref(x))
                with pytest.raises(error):
                    model(x).square().sum().backward()
                del x
                optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.below._forward_hooks or getattr(model.below, "observer", None):
                readings.append(step)

    guard = both(lambda: Faulty(kind), drive, recompute=2)
    got = read(guard)
    assert [got[f"{layer} {part}"].rows for layer in ("below", "above") for part in ("x row", "dy row")] == [
        4
    ] * 4
    assert not got.sample.scalars
    assert readings == [0, 1, 2]
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize(
    ("where", "counts", "unfinished"), [("forward", [8, 4, 4, 4], 1), ("backward", [8, 4, 8, 8], 1)]
)
def test_the_step_with_the_fault_says_how_many_calls_got_no_gradient(
    watch: Watch, read: Read, kind: Any, where: str, counts: list[int], unfinished: int
) -> None:
    model = Faulty(kind)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.gate[where] = RuntimeError
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 8)).square().sum().backward()
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    got = read(guard)
    assert [
        got[f"{name} {part}"].rows for name in ("below", "above") for part in ("x row", "dy row")
    ] == counts
    assert got.sample.scalars == ({"layer": "below", "name": "unfinished_calls", "value": float(unfinished)},)


def test_a_step_that_never_ends_is_no_sample(watch: Watch, endpoint: Any) -> None:
    """The exception leaves the training loop, and the with-block."""
    model = Faulty()
    model.gate["backward"] = KeyboardInterrupt
    guard = watch(model, server=endpoint.url, run="broken")
    with pytest.raises(KeyboardInterrupt), guard:
        model(torch.randn(4, 8)).square().sum().backward()
    assert endpoint.samples == []
    assert not model.below._forward_hooks


def test_a_fault_of_ours_in_a_backward_is_not_the_trainings(
    both: Both, read: Read, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fp8_safeguard.hooks import judge, together

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("no gradient of ours")

    monkeypatch.setattr(judge, "dgrad", broken)
    monkeypatch.setattr(together.native_use, "fits", lambda *operands: False)

    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()

    guard = both(Faulty, drive)
    assert read(guard)["above dy row"].rows == 4
    assert sum("no gradient of ours" in r.message for r in caplog.records) == 1
