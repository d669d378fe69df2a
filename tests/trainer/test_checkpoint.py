"""Checkpoints: exact, atomic, healthy or marked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8_safeguard.trainer import CheckpointError, ConfigError, OutlierDrift, TrainConfig, Trainer, checkpoint

MakeTrainer = Callable[..., Trainer]
SameState = Callable[[Trainer, Trainer], bool]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    make_trainer: MakeTrainer, same_state: SameState, tmp_path: Path, precision: str
) -> None:
    straight = make_trainer(precision=precision)
    expected = straight.run(9)[4:]
    stopped = make_trainer(precision=precision)
    stopped.run(4)
    resumed = Trainer.load(stopped.save(tmp_path / "a.pt"))
    assert resumed.config == stopped.config
    assert same_state(resumed, stopped)
    assert [(r.step, r.loss, r.gradient_norm) for r in resumed.run(9)] == [
        (r.step, r.loss, r.gradient_norm) for r in expected
    ]
    assert same_state(resumed, straight)


def test_resume_continues_the_data_and_the_generator(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(3)
    torch.manual_seed(42)
    path = trainer.save(tmp_path / "a.pt")
    drawn = torch.rand(3)
    torch.manual_seed(0)
    resumed = Trainer.load(path)
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.position == trainer.position == 12
    batch = resumed.corpus.batch(resumed.position, 4)
    assert torch.equal(batch.tokens_NS, trainer.corpus.batch(12, 4).tokens_NS)
    assert not torch.equal(batch.tokens_NS, trainer.corpus.batch(0, 4).tokens_NS)


def test_a_checkpoint_after_skipped_steps_resumes_exactly(
    make_trainer: MakeTrainer, same_state: SameState, tmp_path: Path
) -> None:
    trainer = make_trainer()
    handle = trainer.model.head.register_hook(lambda g: g * math.nan)
    trainer.run(2)
    handle.remove()
    resumed = Trainer.load(trainer.save(tmp_path / "a.pt"))
    assert (resumed.step, resumed.updates, resumed.skipped_steps) == (2, 0, 2)
    trainer.run(5)
    resumed.run(5)
    assert same_state(trainer, resumed)


def test_arms_fork_from_one_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(3)
    path = trainer.save(tmp_path / "a.pt")
    healthy = [r.loss for r in trainer.run(7)]
    fault = OutlierDrift(start_step=5, initial_log2=19.0)
    arm = Trainer.load(path, run="arm", fault=fault)
    faulty = [r.loss for r in arm.run(7)]
    twin = Trainer.load(path, run="twin", precision="bf16", fault=fault)
    clean_twin = Trainer.load(path, run="clean", precision="bf16")
    assert (arm.config.run, arm.config.fault) == ("arm", fault)
    assert faulty[:2] == healthy[:2]
    assert faulty[2:] != healthy[2:]
    assert [r.loss for r in twin.run(7)] == [r.loss for r in clean_twin.run(7)]
    assert twin.model.linears()["blocks.0.attention.qkv"].precision.fprop == "bf16"


def test_a_fork_cannot_change_the_model(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = make_trainer().save(tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="layers cannot change"):
        Trainer.load(path, layers=3)


def test_a_crash_while_writing_leaves_the_old_file_and_no_litter(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    path = trainer.save(tmp_path / "a.pt")
    before = path.read_bytes()
    trainer.run(1)
    write = torch.save

    def crash(state: object, file: object) -> None:
        write(state, file)  # type: ignore[arg-type]
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_missing_or_foreign_file_is_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = make_trainer().save(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Trainer.load(tmp_path / "absent.pt")
    cut = tmp_path / "cut.pt"
    cut.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        Trainer.load(cut)
    torch.save({"version": 99}, cut)
    with pytest.raises(CheckpointError, match="has version 99; this trainer reads version 1"):
        Trainer.load(cut)
    torch.save({"version": 1, "model": {}}, cut)
    with pytest.raises(CheckpointError, match="lacks config, corpus"):
        Trainer.load(cut)


def test_another_text_under_the_same_name_is_refused(
    make_config: Callable[..., TrainConfig], text_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "words.txt"
    copy.write_bytes(text_file.read_bytes())
    path = Trainer(make_config(corpus=str(copy))).save(tmp_path / "a.pt")
    copy.write_bytes(text_file.read_bytes()[1:] + b".")
    with pytest.raises(CheckpointError, match="data position would mean nothing"):
        Trainer.load(path)


def test_the_token_never_reaches_the_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = make_trainer(token="very-secret-token").save(tmp_path / "a.pt")
    assert b"very-secret-token" not in path.read_bytes()
    assert Trainer.load(path).config.token is None


def test_periodic_checkpoints_keep_the_newest(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2, keep_checkpoints=2)
    trainer.run(7)
    assert [(step, healthy) for step, healthy, _ in checkpoint.listed(tmp_path)] == [(4, True), (6, True)]
    assert Trainer.load(checkpoint.latest(tmp_path)).step == 6


def test_b102_poisoned_checkpoints_never_replace_the_last_healthy_one(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=5, keep_checkpoints=2)
    trainer.run(12)
    trainer.model.head.register_hook(lambda g: g * math.nan)
    trainer.run(26)
    kept = [(step, healthy) for step, healthy, _ in checkpoint.listed(tmp_path)]
    assert kept == [(10, True), (20, False), (25, False)]
    assert Trainer.load(checkpoint.latest(tmp_path)).step == 10


def test_b102_a_model_with_nan_weights_is_unhealthy_even_if_no_step_was_skipped(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.norm.gain[0] = math.nan
    state = checkpoint.read(trainer.save(tmp_path / "a.pt"))
    assert state["healthy"] is False


def test_a_folder_without_a_healthy_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no healthy checkpoint"):
        checkpoint.latest(tmp_path)


def test_the_file_does_not_grow_with_the_steps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(1)
    early = trainer.save(tmp_path / "a.pt").stat().st_size
    trainer.run(20)
    assert trainer.save(tmp_path / "b.pt").stat().st_size == pytest.approx(early, rel=0.01)
