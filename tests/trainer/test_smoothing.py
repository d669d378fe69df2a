"""Gradient smoothing against its formula in float64, over skipped steps, checkpoints and the plan's coming and going."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_safeguard.monitor.plan import PlanEntry, Target
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.trainer import Trainer
from fp8_safeguard.trainer.smoothing import GradientSmoothing

MakeTrainer = Callable[..., Trainer]
LAYER = "0"


def entry(value: Any = 0.1, layer: str = LAYER, **fields: Any) -> PlanEntry:
    fields = {"target": Target(), "action": "gradient_smoothing", "not_before_step": 0, **fields}
    return PlanEntry(layer=layer, value=value, decision_id="r-1", **fields)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    """Gives every parameter the step's gradient; what they are, copied."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_the_first_gradient_begins_it_and_the_others_follow_the_formula(model: nn.Sequential) -> None:
    smoothing, expected = GradientSmoothing(model), None
    for step in range(6):
        weight, *others = gradients(model, step)
        smoothing.smooth([entry()], step, updates=step)
        g = weight.double()
        expected = g if expected is None else 0.1 * expected + 0.9 * g
        assert torch.allclose(model[0].weight.grad.double(), expected, rtol=0, atol=1e-6)
        if step == 0:
            assert torch.equal(model[0].weight.grad, weight)
        untouched = [parameter.grad for parameter in model.parameters()][1:]
        assert all(map(torch.equal, untouched, others))


def test_a_skipped_step_leaves_the_memory_alone(model: nn.Sequential) -> None:
    skipping, plain = GradientSmoothing(model), GradientSmoothing(model)
    for step, updates in ((0, 0), (1, 1), (2, 1), (3, 1), (4, 2)):
        gradients(model, step)
        if step in (1, 2):
            # Not applied: nan never gets into what is remembered.
            model[0].weight.grad[0, 0] = float("nan")
        skipping.smooth([entry(0.5)], step, updates)
    got = model[0].weight.grad.clone()
    for step, updates in ((0, 0), (3, 1), (4, 2)):
        gradients(model, step)
        plain.smooth([entry(0.5)], step, updates)
    assert torch.equal(got, model[0].weight.grad)


def test_an_entry_that_goes_takes_its_memory_with_it(model: nn.Sequential) -> None:
    smoothing = GradientSmoothing(model)
    gradients(model, 0)
    smoothing.smooth([entry(expires_step=2)], 0, 0)
    assert set(smoothing.state(1)) == {LAYER}
    for step in (2, 3):
        weight, *_ = gradients(model, step)
        smoothing.smooth([entry(expires_step=2), entry(layer="1", not_before_step=3)], step, step)
        assert torch.equal(model[0].weight.grad, weight)
        assert set(smoothing.state(step + 1)) == ({"1"} if step == 3 else set())


@pytest.mark.parametrize(
    "strange",
    [
        entry(1.0),
        entry("e5m2"),
        entry(layer="nobody"),
        entry(target=Target(operand="dy", layout="row")),
        entry(target=Target(gemm="fprop")),
    ],
)
def test_what_cannot_be_carried_out_is_said_once(
    model: nn.Sequential, strange: PlanEntry, caplog: pytest.LogCaptureFixture
) -> None:
    smoothing = GradientSmoothing(model)
    with caplog.at_level(logging.WARNING, "fp8_safeguard"):
        for step in range(3):
            before = gradients(model, step)
            smoothing.smooth([strange, entry(action="bf16_fallback", value=None)], step, step)
            assert all(map(torch.equal, before, [p.grad for p in model.parameters() if p.grad is not None]))
    (said,) = caplog.messages
    assert "gradient_smoothing" in said
    assert "beta from 0 to below 1" in said


def smoothed(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, from_step: int = 1) -> str:
    """The trainer's plan smooths one of its layers from a step on."""
    layer = "blocks.0.attention.qkv"
    assert layer in dict(trainer.model.named_modules())
    entries = (entry(0.3, layer=layer, not_before_step=from_step),)
    monkeypatch.setattr(trainer.monitoring, "plan_entries", lambda: entries)
    return layer


def test_b99_a_resumed_run_goes_on_with_the_same_bits(
    make_trainer: MakeTrainer, tmp_path: Path, same_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first = make_trainer(), make_trainer()
    for trainer in (whole, first):
        smoothed(trainer, monkeypatch)
    whole.run(4)
    first.run(3)
    resumed = Trainer.load(first.save(tmp_path / "three.pt"))
    layer = smoothed(resumed, monkeypatch)
    resumed.run(4)
    assert same_state(whole, resumed)
    assert torch.equal(
        whole.smoothing.state(whole.updates)[layer], resumed.smoothing.state(resumed.updates)[layer]
    )


def test_a_checkpoint_of_before_smoothing_can_be_read(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(1)
    path = trainer.save(tmp_path / "one.pt")
    state = torch.load(path, weights_only=True)
    del state["smoothing"]
    torch.save(state, path)
    assert Trainer.load(path).smoothing.state(1) == {}


def test_a_pin_on_the_server_smooths_and_nothing_says_that_it_cannot(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import httpx2

    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/s.db")) as url:
        with make_trainer(server=url, run="r", lockstep=True, lockstep_seconds=20.0) as trainer:
            trainer.run(2)
            layer = "blocks.0.attention.qkv"
            pin = {"layer": layer, "action": "gradient_smoothing", "value": 0.1}
            answer = httpx2.put(f"{url}/api/v1/runs/r/pins", json=pin)
            assert answer.status_code == 200, answer.text
            trainer.run(5)
            assert set(trainer.smoothing.state(trainer.updates)) == {layer}
            assert httpx2.delete(f"{url}/api/v1/runs/r/pins", params={"layer": layer}).status_code == 200
            trainer.run(8)
            assert trainer.smoothing.state(trainer.updates) == {}
        states = {item["state"] for item in httpx2.get(f"{url}/api/v1/runs/r/decisions").json()["items"]}
    assert states == {"reverted"}
    assert "not applied" not in caplog.text
