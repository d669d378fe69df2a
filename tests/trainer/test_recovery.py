"""Rollback: to the newest healthy checkpoint, past the data, a limited number of times."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.trainer import RecoveryError, StepReport, Trainer, checkpoint

MakeTrainer = Callable[..., Trainer]


def poison_gradient(trainer: Trainer, when: Callable[[], bool]) -> None:
    """Make the head's gradient NaN in the steps that `when` accepts."""
    trainer.model.head.register_hook(lambda g: g * math.nan if when() else g)


def poison_weight(trainer: Trainer, step: int) -> Callable[[StepReport], None]:
    """A callback that makes one weight NaN at the end of the step before `step`, once."""
    done: list[bool] = []

    def on_step(report: StepReport) -> None:
        if report.step + 1 == step and not done:
            done.append(True)
            with torch.no_grad():
                trainer.model.head[0, 0] = math.nan

    return on_step


@pytest.fixture
def make_recovering(make_trainer: MakeTrainer, tmp_path: Path) -> MakeTrainer:
    def make(**changes: object) -> Trainer:
        folder = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 5}
        return make_trainer(**{**folder, "recover": True, **changes})

    return make


def test_b102_the_rollback_target_is_the_last_checkpoint_before_the_nan(
    make_recovering: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_recovering(max_recoveries=2)
    first = trainer.attempt.id
    # From step 12 on every gradient is NaN, whatever the data: no rollback can help.
    poison_gradient(trainer, lambda: trainer.step >= 12)
    seen: list[tuple[str, int]] = []
    with caplog.at_level(logging.WARNING, logger="fp8_safeguard"), pytest.raises(RecoveryError) as caught:
        trainer.run(60, lambda report: seen.append((trainer.attempt.id, report.step)))
    kept = [(e.attempt, e.step, e.healthy) for e in checkpoint.listed(tmp_path / "kept")]
    # 5 and 10 are the only healthy ones; 15 and 20 of each attempt are marked, of those the newest three stay.
    assert [entry for entry in kept if entry[2]] == [(0, 5, True), (0, 10, True)]
    assert [entry for entry in kept if not entry[2]] == [(1, 20, False), (2, 15, False), (2, 20, False)]
    assert "step-00000015.unhealthy.pt is marked unhealthy" in caplog.text
    assert "step-00000020.unhealthy.pt is marked unhealthy" in caplog.text
    assert seen == [
        *((first, n) for n in range(20)),
        *(("1", n) for n in range(10, 20)),
        *(("2", n) for n in range(10, 20)),
    ]
    assert caplog.text.count(f"Rollback 1 of 2, to {tmp_path / 'kept' / 'step-00000010.pt'}") == 1
    said = str(caught.value)
    assert "failed again after 20 steps: 8 steps in a row were skipped (skip_limit 8)" in said
    assert f"The last healthy checkpoint is {tmp_path / 'kept' / 'step-00000010.pt'}" in said
    assert Trainer.load(tmp_path / "kept").step == 10


def test_a_nan_weight_rolls_back_at_once_and_training_goes_on(make_recovering: MakeTrainer) -> None:
    trainer = make_recovering()
    reports = trainer.run(20, poison_weight(trainer, 12))
    assert [report.step for report in reports] == [*range(13), *range(10, 20)]
    assert (trainer.step, trainer.updates, trainer.skipped_steps) == (20, 20, 0)
    assert (trainer.attempt.id, trainer.attempt.parent, trainer.attempt.from_step) == ("1", "0", 10)
    assert trainer.ailments() == []


def test_a_frozen_weight_whose_moment_overflowed_is_found_at_the_next_checkpoint(
    make_recovering: MakeTrainer,
) -> None:
    trainer = make_recovering()

    def on_step(report: StepReport) -> None:
        if report.step == 11 and trainer.attempt.number == 0:
            trainer.optimizer.state[trainer.model.head]["exp_avg_sq"][0, 0] = math.inf

    reports = trainer.run(20, on_step)
    # An infinite second moment makes every later update zero: no loss will ever show it.
    assert not any(report.skipped for report in reports)
    assert [report.step for report in reports] == [*range(15), *range(10, 20)]


def test_the_data_that_lost_the_run_is_passed_over(
    make_recovering: MakeTrainer,
    make_trainer: MakeTrainer,
    same_state: Callable[[Trainer, Trainer], bool],
    tmp_path: Path,
) -> None:
    trainer = make_recovering()
    drawn: list[int] = []
    # The sequences from the 48th to the 79th are the killers: those of steps 12 to 19.
    poison_gradient(trainer, lambda: 48 <= trainer.position < 80)
    trainer.run(22, lambda _: drawn.append(trainer.position))
    assert drawn == [*range(4, 81, 4), *range(84, 129, 4)]
    by_hand = make_trainer()
    by_hand.run(10)
    by_hand.position = 80
    by_hand.run(22)
    assert same_state(trainer, by_hand)
    resumed = Trainer.load(tmp_path / "kept")
    assert (resumed.step, resumed.position) == (20, 120)
    resumed.run(22)
    assert same_state(resumed, by_hand)


def test_progress_forgives_earlier_rollbacks(make_recovering: MakeTrainer) -> None:
    trainer = make_recovering(max_recoveries=1, checkpoint_every=2, skip_limit=1)
    # Three failures, each with healthy checkpoints after the one before.
    poison_gradient(trainer, lambda: trainer.position in {20, 40, 60})
    trainer.run(20)
    assert trainer.attempt.number == 3
    assert trainer.attempt.parent == "2"


def test_single_skips_are_no_loss(make_recovering: MakeTrainer) -> None:
    trainer = make_recovering(checkpoint_every=2, skip_limit=2)
    poison_gradient(trainer, lambda: trainer.position in {20, 28, 36})
    assert sum(report.skipped for report in trainer.run(14)) == 3
    assert trainer.attempt.number == 0


def test_without_a_healthy_checkpoint_there_is_nothing_to_go_back_to(make_recovering: MakeTrainer) -> None:
    trainer = make_recovering(skip_limit=3)
    poison_gradient(trainer, lambda: True)
    with pytest.raises(
        RecoveryError, match=r"failed after 3 steps: 3 steps in a row .* no healthy checkpoint"
    ):
        trainer.run(10)


def test_without_recover_the_loss_of_the_run_is_said_once_and_training_goes_on(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(skip_limit=2)
    poison_gradient(trainer, lambda: trainer.step >= 1)
    assert trainer.run(6)[-1].skipped_steps == 5
    assert caplog.text.count("run tiny is lost: 2 steps in a row were skipped (skip_limit 2)") == 1


def test_the_server_sees_the_rollback_as_a_rewind(make_recovering: MakeTrainer, tmp_path: Path) -> None:
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'm.db'}", port=0)
    with running_server(settings) as url:
        with make_recovering(server=url, run="r", lockstep=True, lockstep_seconds=20.0) as trainer:
            reports = trainer.run(15, poison_weight(trainer, 12))
        attempts = httpx2.get(f"{url}/api/v1/runs/r/attempts").json()["items"]
        series = httpx2.get(f"{url}/api/v1/runs/r/series", params={"metric": "loss"}).json()
        asked = {"layer": "trainer", "metric": "skipped_steps"}
        skipped = httpx2.get(f"{url}/api/v1/runs/r/series", params=asked).json()
    assert [(a["id"], a["parent"], a["from_step"]) for a in attempts] == [("0", None, 0), ("1", "0", 10)]
    assert series["steps"] == list(range(15))
    assert series["values"] == pytest.approx([r.loss for r in (*reports[:10], *reports[13:])])
    assert skipped["values"] == [0.0] * 15
