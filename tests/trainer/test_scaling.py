"""The trainer's scalings: delayed ones are saved, restored and forked with everything else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.kernels import LinearPrecision, OperandFormat
from fp8_safeguard.trainer import ConfigError, TrainConfig, Trainer
from fp8_safeguard.trainer.model import operand_format

Make = Callable[..., TrainConfig]
DELAYED = {"scaling": "delayed", "amax_history": 4}


def losses(trainer: Trainer, until_step: int) -> list[float]:
    return [report.loss for report in trainer.run(until_step)]


def histories(trainer: Trainer) -> dict[str, tuple[float, ...]]:
    return {
        f"{name} {operand}": module.scaling.history(operand)
        for name, module in trainer.model.linears().items()
        for operand in ("x", "w", "dy")
    }


def test_presets_are_the_two_recipes() -> None:
    """The seed's: delayed scaling from a scale of 1.0 and the amax of 1024 steps. Ling's: blocks."""
    seed = operand_format(TrainConfig.preset("seed"))
    assert seed == OperandFormat(scaling="delayed", amax_history=1024, initial_scale=1.0)
    assert operand_format(TrainConfig.preset("ling")) == OperandFormat()


def test_every_linear_has_the_configured_scaling(make_config: Make) -> None:
    with Trainer(make_config(**DELAYED, margin=1)) as trainer:
        operand = OperandFormat(scaling="delayed", amax_history=4, margin=1)
        wanted = LinearPrecision(x=operand, w=operand, dy=operand)
        assert {module.precision for module in trainer.model.linears().values()} == {wanted}


def test_b99_a_resumed_run_goes_on_with_the_scales_that_it_had(tmp_path: Path, make_config: Make) -> None:
    """Bit for bit: every loss and every history of 4 more steps, after 6 of a history of 4."""
    with Trainer(make_config(**DELAYED, micro_batches=2)) as trainer:
        losses(trainer, 6)
        path = trainer.save(tmp_path / "at-6.pt")
        wanted, after = losses(trainer, 10), histories(trainer)
    with Trainer.load(path) as resumed:
        assert losses(resumed, 10) == wanted
        assert histories(resumed) == after
    assert all(len(history) == 4 for history in after.values())


def test_b99_a_fork_with_another_length_keeps_the_newest(tmp_path: Path, make_config: Make) -> None:
    with Trainer(make_config(**DELAYED)) as trainer:
        losses(trainer, 5)
        path, before = trainer.save(tmp_path / "at-5.pt"), histories(trainer)
    with Trainer.load(path, run="shorter", amax_history=2) as fork:
        assert histories(fork) == {place: history[-2:] for place, history in before.items()}
    with Trainer.load(path, run="blocks", scaling="block") as fork:
        assert not any(histories(fork).values())
        assert all(loss > 0 for loss in losses(fork, 6))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scaling": "column"}, "must be one of block, tensor, delayed"),
        ({"amax_history": 0}, "amax_history is 0; it must be 1 to 65536"),
        ({"scaling": "tensor", "margin": 100}, "margin is 100; it must be -64 to 64"),
        ({"margin": 1}, "scaling is 'block', which has none"),
        ({"scaling": "tensor", "initial_scale": 1.0}, "only 'delayed' begins with one"),
        ({"scaling": "delayed", "initial_scale": 0.0}, "initial_scale is 0.0; it must be above 0"),
        ({"scaling": "delayed", "initial_scale": "one"}, "must be a number or None"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainConfig(**changes)
