"""Every kind of fault: what it does, to whom, and that it goes without a trace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels.delayed import DelayedScaling
from fp8_safeguard.trainer import ConfigError, TrainConfig, Trainer
from fp8_safeguard.trainer.data import Batch
from fp8_safeguard.trainer.faults import (
    KINDS,
    DataSpike,
    DomainShift,
    Fault,
    LateDivergence,
    NormGain,
    SlowDrift,
    TokenWeights,
    fault_from_mapping,
)
from fp8_safeguard.trainer.model import LanguageModel

MakeConfig = Callable[..., TrainConfig]
MakeTrainer = Callable[..., Trainer]
Same = Callable[[Trainer, Trainer], bool]
Healthy = Callable[[str, int], tuple[list[float], Trainer]]
ONLY_FP8 = [kind for kind, fault in KINDS.items() if fault.harms == "fp8"]
BOTH = [kind for kind, fault in KINDS.items() if fault.harms == "both"]
# Faults of a model of two blocks of narrow linears: where a default is for more, or too little to show at once.
SMALL: dict[str, dict[str, Any]] = {
    "outlier-drift": {"initial_log2": 19.0},
    "slow-drift": {"initial_log2": 19.0},
    "fast-drift": {"initial_log2": 19.0},
    "late-divergence": {"initial_log2": 19.0},
    "bad-rank": {"rank": 0, "parts": 1},
}
HARMLESS_AT_ONCE = ("isolated-nan", "starved-expert")


def small(kind: str, start_step: int, **changes: Any) -> Fault:
    return fault_from_mapping({"kind": kind, "start_step": start_step, **SMALL.get(kind, {}), **changes})


def forget_scales(trainer: Trainer) -> None:
    """What delayed scaling remembers is no weight."""
    for module in trainer.model.linears().values():
        module.scaling = DelayedScaling()


@pytest.fixture(scope="module")
def healthy(text_file: Path) -> Healthy:
    """The losses of a run without a fault, and its trainer after so many steps: nothing may go on with it."""

    @functools.cache
    def run(precision: str, steps: int) -> tuple[list[float], Trainer]:
        trainer = Trainer(TrainConfig.tiny(corpus=str(text_file), precision=precision))
        return [report.loss for report in trainer.run(steps)], trainer

    return run


def test_the_kinds_of_the_paper_are_there() -> None:
    assert len(ONLY_FP8) == 14
    assert sorted(BOTH) == [
        "data-spike", "dead-layer", "norm-gain", "qk-gain", "starved-expert", "token-weights",
    ]  # fmt: skip
    assert [kind for kind, fault in KINDS.items() if fault.harms == "neither"] == ["domain-shift"]


@pytest.mark.parametrize("kind", KINDS)
def test_plain_values_round_trip_through_a_config(kind: str) -> None:
    fault = small(kind, 3)
    assert type(fault) is KINDS[kind]
    assert fault.to_mapping()["kind"] == kind
    config = TrainConfig(fault=fault)
    assert TrainConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"start_step": 1, "kind": "drift"}, "fault.kind is 'drift'; known kinds are outlier-drift, slow-drift"),
        ({"start_step": 1, "kind": ["x"]}, r"fault.kind is \['x'\]; known kinds are"),
        ({"kind": "qk-gain"}, "fault.start_step is missing"),
        ({"start_step": 1, "kind": "qk-gain", "factr": 2.0}, r"fault.factr is unknown \(did you mean 'factor'"),
        ({"start_step": "1", "kind": "qk-gain"}, "fault.start_step is '1'; it must be of type int"),
        ({"start_step": 1, "kind": "qk-gain", "factor": 7.0}, "it must be a power of two"),
        ({"start_step": 1, "kind": "norm-gain", "norm": "norm"}, "it must be mlp_norm or attention_norm"),
        ({"start_step": 1, "kind": "norm-gain", "channels": 0}, "fault.channels is 0"),
        ({"start_step": 1, "kind": "data-spike", "steps": 0}, "fault.steps is 0; it must be at least 1"),
        ({"start_step": 1, "kind": "token-weights", "decades": 0.0}, "fault.decades is 0.0; it must be above 0"),
        ({"start_step": 1, "kind": "expert-nan", "expert": -1}, "fault.expert is -1; it must be at least 0"),
        ({"start_step": 1, "kind": "bad-rank", "rank": 2}, "of 2 parts it can strike 0 to 1"),
        ({"start_step": 1, "kind": "bad-rank", "share": 0.0}, "fault.share is 0.0"),
        ({"start_step": 1, "kind": "stale-inverse-scale", "factor": 0.0}, "fault.factor is 0.0"),
        ({"start_step": 1, "kind": "flushed-gradients", "epsilon": 2.0}, "fault.epsilon is 2.0"),
        ({"start_step": 1, "kind": "dy-scale-too-large", "factor_log2": 101}, "it must be -100 to 100"),
        ({"start_step": 1, "kind": "dy-scale-too-large", "layer": "all"}, "fault.layer is 'all'; it must be of type int"),
    ],
)  # fmt: skip
def test_a_fault_that_cannot_be_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fault_from_mapping(values)


@pytest.mark.parametrize("kind", ["qk-gain", "stale-inverse-scale", "fast-drift"])
def test_a_block_that_the_model_has_not_is_named(kind: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(fault=small(kind, 0, layer=2))
    with pytest.raises(ConfigError, match=r"fault.layer is 2; the model has blocks 0 to 1"):
        trainer.run(1)


@pytest.mark.parametrize("kind", ["starved-expert", "expert-nan"])
def test_an_expert_that_the_model_has_not_is_named(kind: str, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(fault=small(kind, 0, expert=4))
    with pytest.raises(ConfigError, match=r"fault.expert is 4; the model has experts 0 to 3"):
        trainer.run(1)


@pytest.mark.parametrize("kind", ONLY_FP8)
def test_in_bf16_a_fault_of_fp8_changes_no_bit(
    kind: str, make_trainer: MakeTrainer, healthy: Healthy, same_state: Same
) -> None:
    faulty, (losses, clean) = make_trainer(precision="bf16", fault=small(kind, 1)), healthy("bf16", 3)
    assert [r.loss for r in faulty.run(3)] == losses
    forget_scales(faulty)
    assert same_state(faulty, clean)


@pytest.mark.parametrize("kind", ONLY_FP8)
def test_in_fp8_a_fault_of_fp8_does_its_harm(
    kind: str, make_trainer: MakeTrainer, healthy: Healthy, same_state: Same
) -> None:
    """Not before its start; from then on weights differ, and after the isolated NaN they are only a step behind."""
    faulty = make_trainer(fault=small(kind, 1))
    for steps, same in ((1, True), (2, False)):
        faulty.run(steps)
        assert same_state(faulty, healthy("fp8", steps)[1]) is same


@pytest.mark.parametrize("kind", BOTH)
def test_a_control_hurts_bf16_too(kind: str, make_trainer: MakeTrainer, healthy: Healthy) -> None:
    losses = [r.loss for r in make_trainer(precision="bf16", fault=small(kind, 1)).run(2)]
    first, second, _ = healthy("bf16", 3)[0]
    assert losses[0] == first
    assert losses[1] != second


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_goes_without_a_trace(kind: str, make_config: MakeConfig) -> None:
    """Before its start again, as after a rollback: parameters, buffers and the loss of a batch, bit for bit."""
    config, fault = make_config(), small(kind, 4)
    model = LanguageModel(config)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))

    def shown() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model.loss(tokens, tokens.roll(1, 1))
        torch.autograd.backward(loss)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        # What delayed scaling remembers is no weight.
        kept = [v.clone() for name, v in model.state_dict().items() if not name.endswith("_extra_state")]
        return [loss.detach(), *gradients, *kept]

    before = shown()
    for step in (4, 5):
        fault.apply(model, config.layers, step)
    fault.apply(model, config.layers, 3)
    after = shown()
    assert len(after) == len(before)
    assert all(map(torch.equal, before, after))
    precisions = {module.precision for module in model.linears().values()}
    assert len(precisions) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_within_a_fault_goes_on_bit_for_bit(
    kind: str, make_trainer: MakeTrainer, same_state: Same, tmp_path: Path
) -> None:
    unbroken = make_trainer(fault=small(kind, 1))
    unbroken.run(2)
    resumed = Trainer.load(unbroken.save(tmp_path / "checkpoint.pt"))
    assert [r.loss for r in resumed.run(3)] == pytest.approx(
        [r.loss for r in unbroken.run(3)], rel=0, nan_ok=True
    )
    forget_scales(resumed)
    forget_scales(unbroken)
    assert same_state(resumed, unbroken)


def test_late_divergence_is_in_every_block_and_late(make_config: MakeConfig) -> None:
    model, fault = LanguageModel(make_config()), LateDivergence(start_step=0)
    fault.apply(model, 2, 0)
    assert sum(module.input_gain is not None for module in model.linears().values()) == 6
    first = next(step for step in range(400) if (fault.gain_log2(step) or 0) >= 17.4)
    earlier = next(step for step in range(400) if (SlowDrift(start_step=0).gain_log2(step) or 0) >= 17.4)
    assert earlier < 60 < first < 100


def test_token_weights_span_their_decades_and_have_mean_one() -> None:
    batch = Batch(
        tokens_NS=torch.zeros(64, 64, dtype=torch.int64), targets_NS=torch.zeros(64, 64, dtype=torch.int64)
    )
    fault = TokenWeights(start_step=2, decades=6.0)
    assert fault.batch(batch, 1) is batch
    weights = fault.batch(batch, 2).weights_NS
    assert weights is not None
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-6)
    assert math.log10(float(weights.max() / weights.min())) == pytest.approx(6.0, abs=0.05)
    again, next_one = fault.batch(batch, 2).weights_NS, fault.batch(batch, 3).weights_NS
    assert again is not None
    assert next_one is not None
    assert torch.equal(weights, again)
    assert not torch.equal(weights, next_one)
    # Log-uniform: as many in each decade.
    decades = (weights / weights.max()).log10().floor().clamp(min=-6)
    assert all(abs(int((decades == -d).sum()) - 4096 / 6) < 100 for d in range(1, 7))


def test_weights_count_each_tokens_loss_as_much(make_config: MakeConfig) -> None:
    model = LanguageModel(make_config())
    tokens = torch.arange(32).view(2, 16)
    weights = torch.zeros(2, 16)
    weights[1, 3] = 32.0
    alone = -model(tokens).log_softmax(-1)[1, 3, 7]
    assert float(model.loss(tokens, torch.full_like(tokens, 7), weights).detach()) == pytest.approx(
        float(alone.detach()), rel=1e-5
    )
    whole = Batch(tokens_NS=tokens, targets_NS=tokens, weights_NS=weights)
    parts = [part.weights_NS for part in whole.split(1)]
    assert parts[0] is not None
    assert parts[1] is not None
    assert torch.equal(torch.cat([parts[0], parts[1]]), weights)


def test_a_data_spike_is_random_bytes_for_its_steps(make_trainer: MakeTrainer) -> None:
    fault = DataSpike(start_step=5, steps=2)
    batch = Batch(
        tokens_NS=torch.zeros(64, 64, dtype=torch.int64), targets_NS=torch.zeros(64, 64, dtype=torch.int64)
    )
    assert fault.batch(batch, 4) is fault.batch(batch, 7) is batch
    found = fault.batch(batch, 5)
    counts = torch.bincount(found.tokens_NS.flatten(), minlength=256)
    assert len(counts) == 256
    # 16 are expected of each: chi-squared of 255 degrees stays below 330 in 99.9 %.
    assert float(((counts - 16.0) ** 2 / 16.0).sum()) < 330
    assert torch.equal(found.tokens_NS[:, 1:], found.targets_NS[:, :-1])
    assert not torch.equal(found.tokens_NS, fault.batch(batch, 6).tokens_NS)


def test_a_shift_of_domain_reads_the_other_text(tmp_path: Path) -> None:
    text = bytes(range(97, 123)) * 40
    (tmp_path / "other.txt").write_bytes(text)
    fault = DomainShift(start_step=3, corpus=str(tmp_path / "other.txt"))
    batch = Batch(
        tokens_NS=torch.zeros(2, 16, dtype=torch.int64), targets_NS=torch.zeros(2, 16, dtype=torch.int64)
    )
    assert fault.batch(batch, 2) is batch
    first, second = fault.batch(batch, 3), fault.batch(batch, 4)
    for row in (*first.tokens_NS, *second.tokens_NS):
        assert bytes(row.tolist()) in text
    assert not torch.equal(first.tokens_NS, second.tokens_NS)


def test_a_gain_is_raised_once_and_training_goes_on_from_there(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(fault=NormGain(start_step=2, layer=1, channels=4))
    trainer.run(2)
    gain = trainer.model.get_parameter("blocks.1.mlp_norm.gain")
    before = gain.detach().clone()
    trainer.run(3)
    ratio = gain.detach() / before
    assert int((ratio > 100).sum()) == 4
    trainer.run(5)
    assert float((gain.detach() / before).max()) < 200


def test_qk_gain_shows_in_the_bound_of_the_logits(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(fault=fault_from_mapping({"kind": "qk-gain", "start_step": 0, "layer": 0}))
    before = trainer.model.attentions()["blocks.0.attention"].logit_scalars()["qk_logit_max"]
    assert before == pytest.approx(math.sqrt(16))
    trainer.run(1)
    after = {name: a.logit_scalars()["qk_logit_max"] for name, a in trainer.model.attentions().items()}
    assert after["blocks.0.attention"] == pytest.approx(64 * before, rel=0.01)
    assert after["blocks.1.attention"] == pytest.approx(before, rel=0.01)


def test_a_starved_expert_gets_nothing_and_a_dead_layer_gives_nothing(make_config: MakeConfig) -> None:
    model = LanguageModel(make_config())
    small("starved-expert", 0, layer=0, expert=2).apply(model, 2, 0)
    small("dead-layer", 0, layer=1).apply(model, 2, 0)
    outputs: list[torch.Tensor] = []
    model.get_submodule("blocks.1.mlp").register_forward_hook(lambda _m, _i, output: outputs.append(output))
    model(torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0)))
    router = model.routers()["blocks.0.mlp.router"]
    assert int(router.load_E[2]) == 0
    assert router.load_scalars()["load_min"] == 0.0
    assert int(router.load_E.sum()) == 4 * 16 * 2
    assert not outputs[0].any()
