"""The outlier drift: exact in BF16, in one layer, on its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fp8_safeguard.kernels import Fp8Linear
from fp8_safeguard.trainer import ConfigError, OutlierDrift, TrainConfig, Trainer
from fp8_safeguard.trainer.faults import outlier_channels
from fp8_safeguard.trainer.model import LanguageModel

MakeTrainer = Callable[..., Trainer]


def test_the_gain_follows_the_drift_in_powers_of_two_up_to_its_cap() -> None:
    fault = OutlierDrift(start_step=100)
    assert fault.gain_log2(99) is None
    for step in range(100, 160):
        drift = min(2.0**10 * 1.25 ** (step - 100), 2.0**19)
        gain = fault.gain_log2(step)
        assert isinstance(gain, int)
        assert abs(gain - math.log2(drift)) <= 0.5
    assert fault.gain_log2(100) == 10
    assert fault.gain_log2(128) == fault.gain_log2(10_000) == 19


@pytest.mark.parametrize(
    ("width", "expected"), [(128, [8]), (256, [8, 8]), (192, [8, 4]), (64, [4]), (130, [8, 1])]
)
def test_every_block_has_its_outliers(width: int, expected: list[int]) -> None:
    channels = outlier_channels(width, block=128, channels=8, seed=0)
    assert len(set(channels.tolist())) == len(channels) == sum(expected)
    assert torch.bincount(channels // 128).tolist() == expected
    assert int(channels.max()) < width


def test_the_seed_chooses_the_channels() -> None:
    def chosen(seed: int) -> set[int]:
        return set(outlier_channels(256, block=128, channels=8, seed=seed).tolist())

    assert chosen(0) == chosen(0) != chosen(1)


def test_only_the_last_blocks_norm_fed_linears_are_touched(make_config: Callable[..., TrainConfig]) -> None:
    model = LanguageModel(make_config())
    OutlierDrift(start_step=5).apply(model, 2, 4)
    assert all(module.input_gain is None for module in model.linears().values())
    OutlierDrift(start_step=5).apply(model, 2, 5)
    touched = [name for name, module in model.linears().items() if module.input_gain is not None]
    assert touched == [
        "blocks.1.attention.qkv",
        "blocks.1.mlp.shared.gate_up",
        "blocks.1.mlp.experts.gate_up",
    ]
    for name in touched:
        gain = model.linears()[name].input_gain
        assert gain is not None
        assert sorted(set(gain.tolist())) == [1.0, 1024.0]


def test_bf16_training_is_the_same_to_the_last_bit_with_the_fault(
    make_trainer: MakeTrainer, same_state: Callable[[Trainer, Trainer], bool]
) -> None:
    faulty = make_trainer(precision="bf16", fault=OutlierDrift(start_step=2, growth=8.0))
    clean = make_trainer(precision="bf16")
    assert [r.loss for r in faulty.run(9)] == [r.loss for r in clean.run(9)]
    assert same_state(faulty, clean)
    assert faulty.model.linears()["blocks.1.attention.qkv"].input_gain is not None


def test_fp8_training_is_the_same_before_the_fault_and_harmed_at_its_cap(make_trainer: MakeTrainer) -> None:
    fault = OutlierDrift(start_step=4, initial_log2=19.0)
    faulty, clean = make_trainer(fault=fault), make_trainer()
    losses, healthy = ([r.loss for r in t.run(6)] for t in (faulty, clean))
    assert losses[:4] == healthy[:4]
    assert losses[4] != healthy[4]


def test_the_flush_empties_the_ordinary_channels() -> None:
    """At 2^19 a block's other channels are below amax / 458752 and the GEMM no longer sees them."""
    torch.manual_seed(0)
    layer = Fp8Linear(128, 128)
    x = torch.randn(64, 128).to(torch.bfloat16)
    layer.requires_grad_(False)
    exact = x.double() @ layer.weight.double().T
    for exponent, low, high in ((0.0, 0.02, 0.05), (10.0, 0.02, 0.05), (19.0, 0.8, 1.1)):
        layer.input_gain = OutlierDrift(start_step=0, initial_log2=exponent).gain(128, 0)
        error = (layer(x).double() - exact).norm() / exact.norm()
        assert low <= error <= high


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"start_step": -1}, "start_step is -1"),
        ({"start_step": 0, "channels": 0}, "fault.channels is 0"),
        ({"start_step": 0, "channels": 129}, "it must be 1 to fault.block, 128"),
        ({"start_step": 0, "growth": 0.5}, "fault.growth is 0.5"),
        ({"start_step": 0, "initial_log2": 20.0}, "0 to 100, in this order"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OutlierDrift.from_mapping(values)


def test_plain_values_round_trip() -> None:
    fault = OutlierDrift(start_step=3, channels=4, seed=2)
    assert OutlierDrift.from_mapping(fault.to_mapping()) == fault
