"""What the observer of a linear layer is told, and that it changes nothing."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import Fp8Linear, fp8_grouped_linear, fp8_linear

pytestmark = pytest.mark.usefixtures("route")


class Recorder:
    """Keeps what a GemmObserver is told."""

    def __init__(self, wants: bool = True) -> None:
        self.wants = wants
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.grad_modes: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("fprop", "dgrad", "wgrad"):
            raise AttributeError(name)

        def record(*tensors: Any) -> None:
            self.calls[name] = tensors
            self.grad_modes.append(torch.is_grad_enabled())

        return record


def test_observer_sees_the_real_tensors_without_autograd(generator: torch.Generator) -> None:
    recorder = Recorder()
    module = Fp8Linear(64, 32, bias=True)
    module.observer = recorder
    module.input_gain = torch.full((64,), 2.0)
    x = torch.randn(10, 64, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(10, 32, generator=generator).bfloat16()
    with torch.no_grad():
        module.bias.fill_(3.0)
    y = module(x)
    y.backward(dy)
    assert set(recorder.calls) == {"fprop", "dgrad", "wgrad"}
    assert not any(recorder.grad_modes)
    seen_x, seen_w, seen_y, offsets = recorder.calls["fprop"]
    assert torch.equal(seen_x, x.detach() * 2)
    assert torch.equal(seen_w, module.weight.detach() / 2)
    assert offsets is None
    torch.testing.assert_close(seen_y.float() + 3.0, y.float(), rtol=2**-7, atol=0.02)
    assert torch.equal(recorder.calls["dgrad"][2] * 2, x.grad)
    assert torch.equal(recorder.calls["wgrad"][2] / 2, module.weight.grad)


def test_observer_that_does_not_want_is_not_called_and_frozen_gemms_are_none(
    generator: torch.Generator,
) -> None:
    silent = Recorder(wants=False)
    x = torch.randn(10, 64, generator=generator)
    w = torch.randn(32, 64, generator=generator, requires_grad=True)
    fp8_linear(x, w, stats=silent).sum().backward()
    assert silent.calls == {}
    awake = Recorder()
    fp8_linear(x, w, stats=awake).sum().backward()
    assert awake.calls["dgrad"][2] is None
    assert awake.calls["wgrad"][2] is not None


def test_observer_changes_no_bit(generator: torch.Generator) -> None:
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    x, w = torch.randn(10, 64, generator=generator), torch.randn(2, 32, 64, generator=generator)
    results = []
    for observer in (None, Recorder()):
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8_grouped_linear(x_leaf, w_leaf, offsets, stats=observer)
        y.square().sum().backward()
        results.append((y, x_leaf.grad, w_leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(observer.calls["fprop"][3], offsets)
