"""attach() and detach(): what they say, what they leave behind, what copies of the model do."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fp8_safeguard.hooks import AlreadyAttachedError, Guard, assembly, attach
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


class Two(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours = nn.Linear(8, 8), Fp8Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ours(torch.relu(self.plain(x)))


def traces(model: nn.Module) -> list[object]:
    """Everything on a model that somebody may have put there."""
    found: list[object] = []
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found += getattr(module, name).values()
        found += [module.observer] if getattr(module, "observer", None) is not None else []
        found += ["forward"] if "forward" in vars(module) else []
    return found


@pytest.mark.parametrize("server", [None, "http://127.0.0.1:9"])
def test_detach_removes_every_trace(server: str | None) -> None:
    model = Two()
    handler = signal.getsignal(signal.SIGTERM)
    threads, hooks = set(threading.enumerate()), len(torch_optimizer._global_optimizer_post_hooks)
    guard = attach(model, every=1, server=server)
    assert traces(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    guard.detach(timeout=0.1)
    guard.detach()
    assert traces(model) == []
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks
    assert signal.getsignal(signal.SIGTERM) == handler
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def test_b11_a_second_attach_is_refused_and_after_detach_it_works(
    watch: Watch, read: Read, train: Train
) -> None:
    model = Two()
    guard = attach(model, run="first", every=1)
    for part in (model, model.plain, model.ours, nn.Sequential(model)):
        with pytest.raises(AlreadyAttachedError, match=r"'first'.*detach\(\)"):
            attach(part)
    # What was refused has left nothing: the first guard counts each layer once.
    for _ in range(2):
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(guard)["plain x row"].count == read(guard)["ours dy row"].count == 4 * 8
    labels = [slot.label for slot in read(guard).sample.slots]
    assert len(labels) == len(set(labels)) > 0
    guard.detach()
    again = watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(again)["plain x row"].count == 4 * 8


def test_b11_a_failing_with_block_leaves_nothing_and_the_next_attach_counts_each_layer_once(
    watch: Watch, read: Read, train: Train
) -> None:
    model = Two()
    with pytest.raises(ZeroDivisionError), attach(model):
        raise ZeroDivisionError
    assert traces(model) == []
    guard = watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    labels = [slot.label for slot in read(guard).sample.slots]
    assert len(labels) == len(set(labels)) == 2 * 7
    assert read(guard)["ours x row"].count == read(guard)["plain dy row"].count == 4 * 8


def test_b11_two_models_report_apart(watch: Watch, read: Read, train: Train) -> None:
    models = [Two(), Two()]
    guards = [watch(model, run=f"run-{i}") for i, model in enumerate(models)]
    train(models[0], torch.optim.SGD(models[0].parameters(), 0.1))
    assert read(guards[0])["plain x row"].count == 32
    assert guards[1].last_sample() is None
    first = guards[0].last_sample()
    models[1](torch.full((3, 8), 2.0)).sum().backward()
    torch.optim.SGD(models[1].parameters(), 0.1).step()
    assert (read(guards[1])["plain x row"].count, read(guards[1])["plain x row"].amax) == (24, 2.0)
    assert guards[0].last_sample() == first
    assert [guard.run for guard in guards] == ["run-0", "run-1"]


def test_copies_of_the_model_work_and_report_nothing(watch: Watch, read: Read, train: Train) -> None:
    model = Two()
    guard = watch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    x = torch.randn(64, 8)
    for other in copies:
        assert other.ours.observer is None
        with torch.no_grad():
            other.plain.weight.zero_()
        assert torch.equal(other.plain(x), other.plain.bias.expand(64, 8))
        other(x).sum().backward()
    for shallow in (copy.copy(model.plain), copy.copy(model.ours)):
        shallow(x).sum().backward()
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    got = read(guard)
    assert got["plain x row"].count == got["ours dy row"].count == 4 * 8


def test_a_model_that_is_dropped_takes_the_guard_with_it() -> None:
    model = Two()
    session = weakref.ref(attach(model, server="http://127.0.0.1:9")._session)
    handlers = len(torch_optimizer._global_optimizer_post_hooks)
    assert session() is not None
    del model
    gc.collect()
    assert session() is None
    attach(nn.Linear(2, 2)).detach()
    assert len(torch_optimizer._global_optimizer_post_hooks) == handlers - 1


def test_a_guard_that_was_dropped_without_detach_leaves_the_optimizers_alone(
    watch: Watch, read: Read, train: Train
) -> None:
    """A notebook's cell that is run again; torch iterates over its global hooks while it calls them."""
    for _ in range(2):
        model = Two()
        attach(model)
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    model = Two()
    guard = watch(model)
    gc.collect()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert read(guard).sample.step == 1


def test_an_observer_of_the_users_own_is_paused_and_comes_back(
    watch: Watch, read: Read, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine:
        wants = False

    mine, later = Mine(), Mine()
    model = nn.Sequential(Fp8Linear(8, 8), Fp8Linear(8, 8), Fp8Linear(8, 8))
    model[0].observer = model[1].observer = mine
    guard = watch(model)
    assert sum("observer of its own" in r.message for r in caplog.records) == 1
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(guard)["0 x row"].count == 4 * 8
    model[2].observer = later
    guard.detach()
    assert [layer.observer for layer in model] == [mine, mine, later]


def test_a_guard_that_nobody_keeps_goes_on_with_its_model(endpoint: Any, train: Train) -> None:
    model = Two()
    attach(model, every=1, server=endpoint.url)
    gc.collect()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    session = model.ours.observer.session
    session.finish(5)
    session.close()
    assert [s["step"] for s in endpoint.samples] == [0, 1]


def test_coverage_names_every_layer_and_parameter(watch: Watch, train: Train) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 8)
            self.body = Two()
            self.head = nn.Linear(8, 5)
            self.raw = nn.Parameter(torch.zeros(3, 8, 8))
            self.conv = nn.Conv1d(8, 8, 1)
            self.idle = nn.Linear(8, 8)
            self.lazy = nn.LazyLinear(3)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    model = Model()
    guard = watch(model, filter=lambda module, name: name != "head")
    before = {row["name"]: row for row in guard.coverage()}
    assert {name: row["status"] for name, row in before.items()} == {
        "body.plain": "observed", "body.ours": "observed", "idle": "observed",
        "head": "not observed", "embed.weight": "not observed", "raw": "not observed",
        "conv.weight": "not observed", "lazy": "not observed",
    }  # fmt: skip
    assert before["raw"]["shape"] == [3, 8, 8]
    assert "filter" in before["head"]["reason"]
    assert all(row["reason"] for row in before.values() if row["status"] == "not observed")
    train(model, torch.optim.SGD(model.body.parameters(), 0.1))
    guard.last_sample()
    after = {row["name"]: row for row in guard.coverage()}
    assert after["idle"]["status"] == "not observed"
    assert "registered, never called" in after["idle"]["reason"]
    assert after["body.plain"]["status"] == "observed"


def test_a_guard_says_what_it_is(watch: Watch, endpoint: Any, train: Train) -> None:
    model = Two()
    guard = watch(model, server=endpoint.url, run="mine", attempt="2")
    endpoint.answer = lambda body: (503, {})
    train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    assert not guard.flush(1)  # all are stored, and none arrives
    assert repr(guard) == (
        f"<Guard of run 'mine', attempt '2': 2 layers, next step 3, 3 samples, 3 waiting, server {endpoint.url}>"
    )
    guard.detach(timeout=0)
    assert "'2': detached, 2 layers" in repr(guard)
    assert "no server" in repr(watch(nn.Linear(2, 2)))


def test_a_model_without_a_layer_to_observe_is_said_and_coverage_explains(
    watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Embedding(3, 8), nn.Conv1d(3, 3, 1), nn.Linear(8, 8))
    guard = watch(model, filter=lambda module, name: False)
    (line,) = [r.message for r in caplog.records if "no layer" in r.message]
    assert "no layer of Sequential is observed" in line
    for name in ("nn.Linear", "Fp8Linear", "Fp8GroupedLinear", "Conv1D", "filter", "coverage()"):
        assert name in line
    assert {row["name"]: row["status"] for row in guard.coverage()} == {
        "0.weight": "not observed", "1.weight": "not observed", "2": "not observed",
    }  # fmt: skip
    guard.step()
    assert guard.last_sample() is None


def test_b11_a_model_of_the_same_class_under_the_same_run_keeps_a_file_of_its_own(
    endpoint: Any, watch: Watch, train: Train
) -> None:
    """A notebook's mistake: nobody's samples may disappear in the other's file."""
    models = [Two(), Two()]
    guards = [watch(model, server=endpoint.url, run="twice") for model in models]
    endpoint.answer = lambda body: (503, {})
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    for guard in guards:
        guard.last_sample()
        assert not guard.flush(0.3)
    assert [guard._session.client.waiting for guard in guards] == [2, 2]
    assert len({guard._session.client.place for guard in guards}) == 2


@pytest.mark.parametrize(("kernels", "levels"), [("numba", [logging.INFO]), ("native", [])])
def test_the_compilation_of_the_kernels_is_announced_where_there_is_one(
    watch: Watch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    levels: list[int],
) -> None:
    monkeypatch.setattr(assembly, "backend", lambda: kernels)
    caplog.set_level(logging.INFO, "fp8_safeguard")
    watch(nn.Linear(8, 8))
    lines = [r for r in caplog.records if "compiled in the first sampled step" in r.message]
    assert [r.levelno for r in lines] == levels


def test_importing_the_package_loads_neither_numba_nor_the_http_client() -> None:
    code = (
        "import sys, threading, fp8_safeguard.hooks; "
        "loaded = {'numba', 'httpx2', 'msgpack'} & set(sys.modules); "
        "assert not loaded, loaded; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
