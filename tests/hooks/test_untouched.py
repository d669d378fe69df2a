"""Training is bit for bit what it was without the monitor, and nothing outlives its step."""

from __future__ import annotations

import copy
import gc
import time
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


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_and_random_state_are_bit_equal(watch: Watch, kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(kind(96, 130, bias=True), nn.GELU(), nn.Dropout(0.5), kind(130, 40)).to(dtype)
    plain = copy.deepcopy(model)
    guard = watch(model, recompute=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    results = []
    for net in (plain, model):
        torch.manual_seed(4)
        x = torch.randn(2, 80, 96).to(dtype).requires_grad_()
        net(x).square().mean().backward()
        results.append([*(p.grad for p in net.parameters()), x.grad, torch.get_rng_state()])
    optimizer.step()
    assert guard.last_sample() is not None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_matmul_settings_are_neither_followed_nor_changed(watch: Watch, read: Read) -> None:
    model = nn.Linear(256, 64, bias=False)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ model.weight.detach().double().T
    torch.set_float32_matmul_precision("medium")
    try:
        y = model(x)
        y.sum().backward()
        optimizer.step()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    error = read(guard)[" fprop"].relative_error
    # What bfloat16 did to the result (1e-3), seen by a reference that is IEEE float32 (1e-6).
    assert error == pytest.approx(float((y.detach() - exact).norm() / exact.norm()), rel=1e-3)


@pytest.mark.parametrize("server", [None, "http://127.0.0.1:9"])
def test_b16_no_tensor_outlives_its_step(watch: Watch, server: str | None) -> None:
    """Whether samples are taken away or wait for a server that is not there."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Fp8Linear(8, 8))
    guard = watch(model, recompute=2, server=server)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gc.disable()  # whatever needs the collector to go away stays long enough to hurt
    try:
        counts = []
        for step in range(1, 51):
            with torch.no_grad():
                evaluated = model(torch.randn(4, 8))
            x = torch.randn(4, 8)
            y = model(x)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            refs = [weakref.ref(x), weakref.ref(y), weakref.ref(evaluated)]
            del x, y, evaluated
            assert [ref() for ref in refs] == [None, None, None]
            if step in (10, 50):
                until_built(guard)
                counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        assert counts[0] == counts[1]
    finally:
        gc.enable()


def until_built(guard: Guard) -> None:
    """Wait until the samples are no tensors any more."""
    client, end = guard._session.client, time.monotonic() + 30
    while client._inbox or client._busy:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_b16_a_forward_without_backward_is_freed(watch: Watch) -> None:
    model = nn.Linear(8, 8)
    watch(model)
    x = torch.randn(4, 8)
    y = model(x)
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_fault_of_ours_is_one_log_line_and_training_goes_on(
    watch: Watch, train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fp8_safeguard.hooks import operands, together

    def broken(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("kernel is broken")

    model = nn.Sequential(nn.Linear(8, 8), Fp8Linear(8, 8))
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for name in ("tensor_stats", "layout_stats"):
        monkeypatch.setattr(operands, name, broken)
    monkeypatch.setattr(operands.recompute, "weigh", broken)
    monkeypatch.setattr(together.native_use, "measure", broken)
    train(model, optimizer, 3)
    lines = [r.message for r in caplog.records if "kernel is broken" in r.message]
    assert len(lines) == len(set(lines)) == 2  # the forward and the backward
    assert guard.last_sample() is None


def test_a_gemm_is_not_recomputed_from_operands_that_have_been_overwritten(watch: Watch, read: Read) -> None:
    """Autocast saves a bfloat16 copy of x, so a residual that is added in place is legal."""
    model = nn.Linear(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    x.add_(y.detach())
    y.sum().backward()
    optimizer.step()
    assert read(guard).parts("") == {"x row", "x col", "w tile", "dy row", "dy col", "fprop"}
