"""Checkpoints: exact, atomic, healthy or marked."""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp8_safeguard.trainer import CheckpointError, ConfigError, OutlierDrift, TrainConfig, Trainer, checkpoint
from fp8_safeguard.trainer.checkpoint import VERSION

MakeTrainer = Callable[..., Trainer]
SameState = Callable[[Trainer, Trainer], bool]


def kept(folder: Path) -> list[tuple[int, bool]]:
    """(step, healthy) of the periodic checkpoints in a folder, read from their names alone."""
    paths = sorted(folder.glob("*.pt"))
    return [(int(path.name[5:13]), not path.name.endswith(".unhealthy.pt")) for path in paths]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(
    make_trainer: MakeTrainer, same_state: SameState, tmp_path: Path, precision: str
) -> None:
    straight = make_trainer(precision=precision)
    expected = straight.run(9)[4:]
    stopped = make_trainer(precision=precision)
    stopped.run(4)
    resumed = Trainer.load(stopped.save(tmp_path / "a.pt"))
    assert resumed.config == replace(stopped.config, attempt="1")
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
    with pytest.raises(CheckpointError, match=f"has version 99; this trainer reads version {VERSION}"):
        Trainer.load(cut)
    torch.save({"version": VERSION, "model": {}}, cut)
    with pytest.raises(CheckpointError, match="lacks ailments, attempt, config, corpus"):
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
    assert kept(tmp_path) == [(4, True), (6, True)]
    assert Trainer.load(checkpoint.latest(tmp_path)).step == 6
    assert Trainer.load(tmp_path).step == 6


def test_b102_poisoned_checkpoints_never_replace_healthy_ones(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=5, keep_checkpoints=2)
    trainer.run(12)
    handle = trainer.model.head.register_hook(lambda g: g * math.nan)
    trainer.run(26)
    # As many unhealthy ones as healthy ones stay, and none of them counts for the other kind.
    assert kept(tmp_path) == [(5, True), (10, True), (20, False), (25, False)]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010.pt"
    handle.remove()
    trainer.run(35)
    assert kept(tmp_path) == [(20, False), (25, False), (30, True), (35, True)]


def test_b102_a_state_is_unhealthy_for_every_reason_that_would_spoil_a_resume(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.run(2)
    assert trainer.ailments() == []
    norm = trainer.model.norm.gain
    with torch.no_grad():
        norm[0] = math.nan
    assert trainer.ailments() == ["1 parameters are not finite: norm.gain"]
    with torch.no_grad():
        norm[0] = 1.0
    moment = trainer.optimizer.state[norm]["exp_avg_sq"]
    moment[3] = math.inf
    assert trainer.ailments() == ["1 optimizer moments are not finite: norm.gain.exp_avg_sq"]
    state = checkpoint.read(trainer.save(tmp_path / "a.pt"))
    assert (state["healthy"], state["ailments"]) == (False, trainer.ailments())
    moment[3] = 0.0
    trainer.model.routers()["blocks.0.mlp.router"].bias_E[0] = -math.inf
    assert trainer.ailments() == ["1 parameters are not finite: blocks.0.mlp.router.bias_E"]


def test_b102_a_checkpoint_in_an_open_divergence_is_marked_and_the_mark_ends_with_it(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        checkpoint_dir=str(tmp_path), checkpoint_every=5, keep_checkpoints=9, divergence_nats=0.5
    )
    backward = trainer._backward
    monkeypatch.setattr(trainer, "_backward", lambda batch: backward(batch) + 4.0 * (10 <= trainer.step < 14))
    trainer.run(45)
    marked = [step for step, healthy in kept(tmp_path) if not healthy]
    assert marked[0] == 15
    assert marked == list(range(15, marked[-1] + 1, 5))
    assert marked[-1] < 45
    # A process that goes on from there knows of the divergence.
    reopened = Trainer.load(tmp_path / "step-00000015.unhealthy.pt")
    assert reopened.ailments() == checkpoint.read(tmp_path / "step-00000015.unhealthy.pt")["ailments"] != []


def test_health_after_a_skip_survives_the_resume(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(3)
    trainer.model.head.register_hook(lambda g: g * math.nan)
    trainer.run(5)
    resumed = Trainer.load(trainer.save(tmp_path / "a.pt"))
    assert resumed.ailments() == trainer.ailments() == ["the last 2 steps were skipped"]
    resumed.run(6)
    assert resumed.ailments() == []


def test_a_flipped_bit_is_found_and_the_next_older_healthy_file_named(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2).run(6)
    newest = tmp_path / "step-00000006.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Trainer.load(newest)
    assert f"{newest} cannot be read as a checkpoint: checksum of" in str(caught.value)
    assert str(caught.value).endswith(f"the next older healthy checkpoint is {tmp_path / 'step-00000004.pt'}")


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros", "header"])
def test_latest_passes_over_damaged_files_and_says_so(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2).run(6)
    newest = tmp_path / "step-00000006.pt"
    content = newest.read_bytes()
    newest.write_bytes(
        {
            "cut": content[: len(content) // 2],
            "empty": b"",
            "zeros": bytes(len(content)),
            "header": bytes(64) + content[64:],
        }[damage]
    )
    with caplog.at_level(logging.WARNING, logger="fp8_safeguard"):
        assert checkpoint.latest(tmp_path).name == "step-00000004.pt"
    assert f"{newest} is damaged" in caplog.text
    with pytest.raises(CheckpointError, match=r"next older healthy checkpoint is .*step-00000004\.pt"):
        Trainer.load(newest)


def test_rotation_keeps_the_newest_healthy_file_that_can_be_read(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer()
    for step in (5, 10, 15):
        trainer.save(checkpoint.periodic_path(tmp_path, step, healthy=True))
    (tmp_path / "step-00000015.pt").write_bytes(b"torn")
    checkpoint.rotate(tmp_path, 1)
    assert kept(tmp_path) == [(10, True), (15, True)]
    assert checkpoint.latest(tmp_path).name == "step-00000010.pt"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_cannot_run_code(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    state = checkpoint.read(make_trainer().save(tmp_path / "a.pt"))
    ran = tmp_path / "ran"
    torch.save({**state, "guard": Bomb(ran)}, tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(pickle.dumps({**state, "guard": Bomb(ran)}))
    for name in ("b.pt", "c.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
            Trainer.load(tmp_path / name)
    assert not ran.exists()


def test_what_a_killed_writer_left_behind_is_swept_up_once_it_is_old(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    old, young = tmp_path / ".step-00000001.pt.aa.tmp", tmp_path / ".step-00000002.pt.bb.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200.0,) * 2)
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=1).run(1)
    assert not old.exists()
    assert young.exists()


def test_a_full_disk_does_not_end_the_training(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2)
    trainer.run(3)
    save = torch.save

    def full(state: object, file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    trainer.run(5)
    assert "no checkpoint after step 4: [Errno 28] No space left on device" in caplog.text
    assert kept(tmp_path) == [(2, True)]
    monkeypatch.setattr(torch, "save", save)
    trainer.run(6)
    assert kept(tmp_path) == [(2, True), (6, True)]


def test_a_folder_without_a_healthy_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no healthy checkpoint"):
        checkpoint.latest(tmp_path)


def test_the_file_does_not_grow_with_the_steps(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(1)
    early = trainer.save(tmp_path / "a.pt").stat().st_size
    trainer.run(20)
    assert trainer.save(tmp_path / "b.pt").stat().st_size == pytest.approx(early, rel=0.01)
