"""Faults of the real trainer are named by their cause, and a healthy run or another text by none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard import hooks
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide, observe
from fp8_safeguard.monitor.wire import parse_sample
from fp8_safeguard.trainer import Trainer
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.faults import KINDS
from fp8_safeguard.trainer.presets import PRESETS

BEFORE = 120
"""Steps of the common checkpoint: the model has learned some words, and its router has settled."""
HEALTHY = 8

CASES: Mapping[str, tuple[Mapping[str, Any], int, list[tuple[str, str | None]]]] = {
    "abrupt-outliers": ({}, 2, [("outlier-channels", "blocks.3.attention.qkv")]),
    "fast-drift": ({}, 8, [("outlier-channels", "blocks.3.attention.qkv")]),
    "dy-scale-stuck": (
        {},
        3,
        [("flushed-gradients", "blocks.3.mlp.experts.down"), ("stuck-scale", "blocks.3.mlp.experts.down")],
    ),
    "x-scale-too-small": ({}, 2, [("scale-too-small", "blocks.0.attention.qkv")]),
    "stale-inverse-scale": ({}, 2, [("stale-inverse-scale", "blocks.1.mlp.shared.gate_up")]),
    "expert-nan": ({}, 2, [("nonfinite-origin", "blocks.1.mlp.experts.gate_up")]),
    "norm-gain": ({}, 4, [("norm-gain", "blocks.1.mlp.shared.gate_up")]),
    "qk-gain": ({"layer": 1}, 4, [("qk-growth", "blocks.1.attention.qkv")]),
    "token-weights": ({}, 4, [("token-imbalance", "blocks.3.mlp.experts.down")]),
    "data-spike": ({}, 4, [("data-spike", None)]),
    "starved-expert": ({}, 9, [("starved-expert", "blocks.1.mlp.router")]),
    "dead-layer": ({}, 4, [("dead-layer", "blocks.1.mlp.shared.gate_up")]),
    "domain-shift": ({}, 12, []),
}
"""Values of each fault, samples with it, and the causes told, the first one first."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = Trainer(TrainConfig(**{**PRESETS["demo"], "run": "causes", "seed": 5, "lockstep": False}))
    trainer.run(BEFORE)
    return trainer.save(tmp_path_factory.mktemp("causes") / "before.pt")


@pytest.mark.parametrize("kind", CASES)
def test_a_fault_of_the_trainer_is_named(checkpoint: Path, kind: str) -> None:
    values, samples, expected = CASES[kind]
    fault = KINDS[kind].from_mapping({"start_step": BEFORE + HEALTHY, **values})
    trainer = Trainer.load(checkpoint, run=f"causes-{kind}", fault=fault)
    guard = hooks.attach(
        trainer.model,
        run="causes",
        every=1,
        spool_dir="",
        filter=lambda module, name: isinstance(module, Fp8Linear | Fp8GroupedLinear),
    )
    trainer.monitoring.guard = guard
    guard.load_state_dict({**guard.state_dict(), "step": trainer.step})
    state, told = PolicyState(), []
    for _ in range(HEALTHY + samples):
        trainer.run(trainer.step + 1)
        sample = guard.last_sample()
        assert sample is not None
        state, decisions = decide(state, observe([parse_sample(sample)]), PolicyConfig(run="causes"))
        if trainer.step <= BEFORE + HEALTHY:
            assert decisions == ()
        now = [lasting.said for lasting in state.trends.causes.values() if lasting.told]
        told += [(said["name"], said["layer"]) for said in now if (said["name"], said["layer"]) not in told]
    guard.detach()
    assert told == expected
