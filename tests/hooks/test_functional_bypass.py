"""Weights that others multiply with past their module: found by function, or told from the parameter alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.monitor.stats import measure

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]
Watch = Callable[..., Guard]

WIDTH, WORDS = 8, 12
ALL_PARTS = {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"}


class Fused(torch.autograd.Function):
    """Like a fused linear and loss: the product is out of sight, the weight's gradient made here."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return (h @ w.t()).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        h, w = ctx.saved_tensors
        dy = 2 * gradient * (h @ w.t())
        return dy @ w, dy.t() @ h


class Language(nn.Module):
    """A body and a head whose product the model makes in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.output = nn.ModuleDict({"lm_head": nn.Linear(WIDTH, WORDS, bias=False)})

    @property
    def lm_head(self) -> nn.Linear:
        return self.output["lm_head"]

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        match self.how:
            case "module":
                return self.lm_head(h).square().sum()
            case "function":
                return F.linear(h, self.lm_head.weight).square().sum()
            case "forward":
                return self.lm_head.forward(h).square().sum()
            case "fused":
                return Fused.apply(h, self.lm_head.weight)
        return h


def loss_of(model: Language, x: Tensor) -> Tensor:
    out = model(x)
    # The loss function multiplies: no module's forward is in progress.
    return F.linear(out, model.lm_head.weight).square().sum() if model.how == "loss" else out


def drive(model: Language, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(model, torch.randn(5, WIDTH)).backward()
        if step + 1 < steps:
            optimizer.step()
        else:
            model.last_gradient = model.lm_head.weight.grad.clone()
            optimizer.step()


def scalars(guard: Guard) -> dict[str, float]:
    sample = guard.last_sample()
    assert sample is not None
    return {item["name"]: item["value"] for item in sample["scalars"] if item["layer"] == "output.lm_head"}


def rows(guard: Guard) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in guard.coverage()}


def ordinary_gradient(steps: int) -> Tensor:
    """Of the last step of the model that calls its head."""
    torch.manual_seed(0)
    model = Language("module")
    torch.manual_seed(1)
    drive(model, steps)
    return model.last_gradient


@pytest.mark.parametrize("how", ["function", "forward", "fused", "loss"])
def test_b14_a_bypassed_head_is_named_and_its_weight_and_gradient_are_reported(
    both: Both, read: Read, how: str
) -> None:
    """B14: nothing calls the head's forward; the first sample has no activation of it, invented or not."""
    guard = both(lambda: Language(how), lambda model: drive(model, 1))
    got = read(guard)
    assert got.parts("output.lm_head") == {"w tile"}
    torch.manual_seed(0)
    whole = measure(Language(how).lm_head.weight.detach().numpy(), layout="tile")
    np.testing.assert_allclose(got["output.lm_head w tile"].to_vector(), whole.to_vector(), rtol=1e-10)
    row = rows(guard)["output.lm_head"]
    assert row["status"] == "not observed"
    assert "never called" in row["reason"]
    gradient = ordinary_gradient(1)
    said = scalars(guard)
    assert said["weight_gradient_amax"] == pytest.approx(float(gradient.abs().max()), rel=1e-6)
    assert said["weight_gradient_norm"] == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@pytest.mark.parametrize("how", ["function", "forward"])
def test_b14_from_the_second_sample_on_a_bypassed_head_is_seen_by_function(
    both: Both, read: Read, how: str
) -> None:
    guard = both(lambda: Language(how), lambda model: drive(model, 3), recompute=3)
    got = read(guard)
    assert got.parts("output.lm_head") == ALL_PARTS
    assert got["output.lm_head x row"].count == 2 * 5 * WIDTH
    assert got["output.lm_head dy col"].count == 2 * 5 * WORDS
    row = rows(guard)["output.lm_head"]
    assert row["status"] == "adapted"
    assert "its weight is used without the module; seen by function" in row["reason"]
    assert scalars(guard) == {}
    plain = read(both(lambda: Language("module"), lambda model: drive(model, 3), recompute=3))
    for part in ("x row", "x col", "w tile", "dy row", "dy col"):
        expected = plain[f"output.lm_head {part}"].to_vector()
        np.testing.assert_allclose(got[f"output.lm_head {part}"].to_vector(), expected, rtol=1e-10)


@pytest.mark.parametrize("how", ["fused", "loss"])
def test_b14_a_product_out_of_sight_stays_not_observed_and_goes_on_being_told_of(
    both: Both, read: Read, how: str
) -> None:
    guard = both(lambda: Language(how), lambda model: drive(model, 4))
    assert read(guard).parts("output.lm_head") == {"w tile"}
    assert rows(guard)["output.lm_head"]["status"] == "not observed"
    gradient = ordinary_gradient(4)
    assert scalars(guard)["weight_gradient_amax"] == pytest.approx(float(gradient.abs().max()), rel=1e-5)


def test_a_head_that_is_bypassed_and_called_in_turns_counts_once_each_time(both: Both, read: Read) -> None:
    def turns(model: Language) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for how in ("function", "function", "module", "function", "module"):
            model.how = how
            loss_of(model, torch.randn(5, WIDTH)).backward()
            optimizer.step()

    guard = both(lambda: Language("function"), turns)
    got = read(guard)
    assert got.sample.step == 4
    assert got["output.lm_head x row"].count == 5 * WIDTH
    assert got["output.lm_head dy row"].count == 5 * WORDS


def test_a_product_beside_the_modules_own_calls_is_found_with_the_first_sample(
    both: Both, read: Read
) -> None:
    """Called as a module here, multiplied with there, as heads for several tokens ahead are: no use is missed."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"head": nn.Linear(WIDTH, WIDTH)})
            self.once = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            head = self.inner["head"]
            return F.linear(head(self.once(x)), head.weight)

    def steps(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(5, WIDTH)).square().sum().backward()
            optimizer.step()

    guard = both(Twice, steps, recompute=2)
    got = read(guard)
    assert got["inner.head x row"].count == got["inner.head dy row"].count == 2 * 2 * 5 * WIDTH
    assert got["once x row"].count == 2 * 5 * WIDTH
    status = {name: row["status"] for name, row in rows(guard).items()}
    assert status == {"inner.head": "adapted", "once": "observed"}


def test_another_threads_product_is_none_beside_the_modules_calls(watch: Watch, read: Read) -> None:
    """One thread stands between a layer's product and our hook while another goes through the whole model."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    between, through = threading.Event(), threading.Event()

    def stands(*_: Any) -> None:
        if threading.current_thread().name == "stands" and not between.is_set():
            between.set()
            assert through.wait(20)

    guard = watch(model, every=1)
    model[0].register_forward_hook(stands, prepend=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        model(torch.randn(5, WIDTH)).square().sum().backward()

    for _ in range(2):
        thread = threading.Thread(target=run, name="stands")
        thread.start()
        assert between.wait(20)
        run()
        through.set()
        thread.join(20)
        optimizer.step()
        assert read(guard)["0 x row"].count == read(guard)["0 dy row"].count == 2 * 5 * WIDTH
    assert rows(guard)["0"]["status"] == "observed"


def test_a_layer_that_is_called_late_is_still_seen_by_its_hook(both: Both, read: Read) -> None:
    def late(model: Language) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for how in ("idle", "idle", "module", "module"):
            model.how = how
            loss_of(model, torch.randn(5, WIDTH)).square().sum().backward()
            optimizer.step()

    guard = both(lambda: Language("idle"), late)
    assert read(guard)["output.lm_head x row"].count == 5 * WIDTH
    assert rows(guard)["output.lm_head"]["status"] in ("observed", "adapted")


def test_a_frozen_bypassed_head_has_no_gradient_to_tell_of(both: Both, read: Read) -> None:
    def build() -> Language:
        model = Language("loss")
        model.lm_head.requires_grad_(False)
        return model

    def once(model: Language) -> None:
        loss_of(model, torch.randn(5, WIDTH)).backward()
        torch.optim.SGD(model.parameters(), 1e-3).step()

    guard = both(build, once)
    assert read(guard).parts("output.lm_head") == {"w tile"}
    assert scalars(guard) == {}


def test_gradients_are_told_without_the_loss_scale(both: Both) -> None:
    def scaled(model: Language) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            scaler.scale(loss_of(model, torch.randn(5, WIDTH))).backward()
        scaler.step(optimizer)
        scaler.update()

    guard = both(lambda: Language("loss"), scaled)
    sample = guard.last_sample()
    assert sample is not None
    assert sample["run"]["loss_scale"] == 1024.0
    largest = float(ordinary_gradient(1).abs().max())
    assert scalars(guard)["weight_gradient_amax"] == pytest.approx(largest, rel=1e-6)


class Tied(nn.Module):
    """Multiplies with its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mix(self.wte(ids) + self.wpe(ids % 5))
        return h @ self.wte.weight.t()


def test_a_product_with_an_embedding_is_seen_and_a_mere_look_up_is_named(both: Both, read: Read) -> None:
    def once(model: Tied) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()

    guard = both(Tied, once, recompute=5)
    got = read(guard)
    assert got["wte.weight x row"].count == 5 * WIDTH
    assert got["wte.weight dy row"].count == 5 * WORDS
    assert got.parts("wte.weight") == ALL_PARTS
    said = rows(guard)
    assert said["wte.weight"]["status"] == "observed"
    assert (said["wpe.weight"]["status"], said["wpe.weight"]["reason"]) == (
        "not observed", "embedding: a look-up, no GEMM",
    )  # fmt: skip
    assert got.parts("wpe.weight") == set()
