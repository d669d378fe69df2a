"""What goes wrong around the monitor, or is unusual about the model, does not reach the training loop."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from fp8_safeguard.hooks import Guard, session
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


def parametrized(module: nn.Module) -> nn.Module:
    return torch.nn.utils.parametrizations.spectral_norm(module)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "reparametrize", [parametrized, torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm]
)
@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_a_weight_that_is_computed_is_left_alone_and_coverage_says_so(
    watch: Watch, read: Read, train: Train, reparametrize: Any, kind: Any
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        # Looking for layers must not read the convolution's weight either.
        return nn.Sequential(reparametrize(kind(8, 8)), nn.Linear(8, 6), parametrized(nn.Conv1d(1, 4, 3)))

    plain, model = build(), build()
    guard = watch(model)
    for net in (plain, model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            y = net[1](net[0](torch.randn(4, 8)))
            net[2](y.unsqueeze(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if net is model:
                guard.coverage()
    assert all(torch.equal(a, plain.state_dict()[name]) for name, a in model.state_dict().items())
    assert read(guard).parts("0") == set()
    assert read(guard).sample.step == 2
    rows = {row["name"]: row for row in guard.coverage()}
    assert rows["0"]["status"] == "not observed"
    assert "its weight is computed" in rows["0"]["reason"]
    assert rows["0"]["shape"] == [8, 8]
    assert not [name for name in rows if name.startswith("0.")]


def test_an_optimizer_of_parametrized_layers_ends_the_step(watch: Watch, read: Read, train: Train) -> None:
    model = nn.Sequential(parametrized(nn.Linear(8, 8)), nn.Linear(8, 8).requires_grad_(False))
    guard = watch(model)
    train(model, torch.optim.SGD(model[0].parameters(), 0.1), 2)
    assert read(guard).sample.step == 1


def test_a_layer_that_is_parametrized_after_attach_keeps_its_numbers(watch: Watch, train: Train) -> None:
    model = nn.Linear(8, 8)
    plain = parametrized(copy.deepcopy(model))
    watch(model)
    parametrized(model)
    model.load_state_dict(plain.state_dict())
    for net in (plain, model):
        torch.manual_seed(1)
        train(net, torch.optim.SGD(net.parameters(), 0.1), 3)
    assert all(torch.equal(a, plain.state_dict()[name]) for name, a in model.state_dict().items())


def test_an_optimizer_of_pruned_weights_ends_the_step(watch: Watch, read: Read, train: Train) -> None:
    model = prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)
    guard = watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert read(guard).sample.step == 1
    assert read(guard)[" w tile"].zeros == 32


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_no_thread_to_be_had_costs_samples_and_nothing_else(
    watch: Watch,
    endpoint: Any,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model = kind(8, 8)
    guard = watch(model, server=endpoint.url, run="r")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        train(model, optimizer, 2)
        guard.step()
        train(model, optimizer)
        guard.step()
        train(model, optimizer)
        assert guard.last_sample()["step"] == 2
        model(torch.ones(4, 8)).sum().backward()
    guard.step()
    assert guard.flush(10)
    assert [(s["step"], s["dropped"]) for s in endpoint.samples] == [(3, 3)]
    assert sum("can't start new thread" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_no_memory_for_the_statistics_costs_samples_and_nothing_else(
    watch: Watch,
    read: Read,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory for the ring")

    model = kind(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(session, "Ring", full)
        train(model, optimizer, 2)
    train(model, optimizer)
    assert (read(guard).sample.step, read(guard).sample.dropped) == (2, 2)
    assert sum("no memory for the ring" in r.message for r in caplog.records) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_model_can_be_traced_while_it_is_observed(watch: Watch, read: Read, train: Train) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    guard = watch(model)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), model(x))
    guard.step()
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    guard.step()
    assert read(guard)["0 x row"].count == 4 * 8
