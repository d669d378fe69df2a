"""Attempts: a new one for every resume, never the same twice, a tree that says what is current."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8_safeguard.trainer import CheckpointError, ConfigError, Trainer, attempts, checkpoint
from fp8_safeguard.trainer.attempts import Attempt

MakeTrainer = Callable[..., Trainer]


def tree(trainer: Trainer) -> tuple[str, str | None, int]:
    return trainer.attempt.id, trainer.attempt.parent, trainer.attempt.from_step


def test_a_resume_is_a_child_of_the_attempt_that_was_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    assert tree(trainer) == ("0", None, 0)
    trainer.run(3)
    child = Trainer.load(trainer.save(tmp_path / "a.pt"))
    assert tree(child) == ("1", "0", 3)
    assert child.config.attempt == "1"
    child.run(5)
    assert tree(Trainer.load(child.save(tmp_path / "b.pt"))) == ("2", "1", 5)


def test_two_resumes_from_one_checkpoint_are_two_attempts(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run(2)
    path = trainer.save(tmp_path / "a.pt")
    assert [tree(Trainer.load(path)) for _ in range(3)] == [("1", "0", 2), ("2", "0", 2), ("3", "0", 2)]


def test_attempts_that_begin_at_once_never_share_an_id(tmp_path: Path) -> None:
    def begin(_: int) -> Attempt:
        path, parent = tmp_path / "a.pt", Attempt(id="0")
        return attempts.child(path, "r", parent, 7, wanted=None, checkpoint_dir=None)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(begin, range(40)))
    assert sorted(int(a.id) for a in found) == list(range(1, 41))
    assert sorted(a.number for a in found) == list(range(1, 41))


def test_runs_whose_names_look_like_numbers_are_kept_apart(tmp_path: Path) -> None:
    def begin(run: str) -> str:
        return attempts.child(tmp_path / "a.pt", run, Attempt(id="0"), 1, wanted=None, checkpoint_dir=None).id

    assert [begin(run) for run in ("r", "r.1", "r.1.2", "r", "r.1", "1")] == ["1", "1", "1", "2", "2", "1"]


def test_an_id_of_ones_own_is_taken_but_not_the_parents(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    path = make_trainer(attempt="7").save(tmp_path / "a.pt")
    assert Trainer.load(path, attempt="restart-1").attempt.id == "restart-1"
    # Somebody has that one by now, so that it would mix two histories.
    assert Trainer.load(path, attempt="restart-1").attempt.id == "2"
    with pytest.raises(
        ConfigError, match=r"attempt is '7', which wrote .*a\.pt: a resumed run needs another id"
    ):
        Trainer.load(path, attempt="7")


def test_a_number_that_an_ancestor_has_as_its_id_is_passed_over(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    path = make_trainer(attempt="1").save(tmp_path / "a.pt")
    assert [tree(Trainer.load(path)) for _ in range(2)] == [("2", "1", 0), ("3", "1", 0)]


def test_a_fork_begins_anew_under_its_own_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path / "a"), checkpoint_every=2)
    trainer.run(2)
    resumed = Trainer.load(tmp_path / "a")
    resumed.run(4)
    fork = Trainer.load(tmp_path / "a", run="fork")
    assert tree(fork) == ("0", None, 0)
    fork.run(6)
    assert fork.config.checkpoint_dir is None
    assert [entry.step for entry in checkpoint.listed(tmp_path / "a")] == [2, 4]
    with pytest.raises(
        CheckpointError, match="keeps the checkpoints of run 'tiny': give run 'fork' a folder"
    ):
        Trainer.load(tmp_path / "a", run="fork", checkpoint_dir=str(tmp_path / "a"))


def test_a_folder_keeps_the_checkpoints_of_one_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(run="a", checkpoint_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match="keeps the checkpoints of run 'a': give run 'b' a folder"):
        make_trainer(run="b", checkpoint_dir=str(tmp_path))


def test_a_second_start_from_the_beginning_is_another_attempt_and_spares_the_first(
    make_trainer: MakeTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2, "keep_checkpoints": 1}
    make_trainer(**folder).run(4)
    with caplog.at_level(logging.WARNING, logger="fp8_safeguard"):
        again = make_trainer(**folder)
    assert tree(again) == ("1", None, 0)
    assert "has seen attempt 0 of run tiny already: this start from the beginning is attempt 1" in caplog.text
    # Nothing of its own yet: what there is to resume is the first attempt's.
    assert checkpoint.latest(tmp_path).name == "step-00000004.pt"
    again.run(2)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "step-00000002.attempt-1.pt",
        "step-00000004.pt",
    ]
    assert checkpoint.latest(tmp_path).name == "step-00000002.attempt-1.pt"


def test_what_a_rewind_has_abandoned_is_not_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2, keep_checkpoints=3).run(6)
    rewound = Trainer.load(tmp_path / "step-00000002.pt")
    # The newest attempt has nothing of its own, and step 6 is not in its past.
    assert checkpoint.latest(tmp_path).name == "step-00000002.pt"
    rewound.run(4)
    assert checkpoint.latest(tmp_path).name == "step-00000004.attempt-1.pt"
    assert checkpoint.latest(tmp_path, attempt=0).name == "step-00000006.pt"
    resumed = Trainer.load(tmp_path)
    assert tree(resumed) == ("2", "1", 4)
    resumed.run(8)
    assert {path.name for path in tmp_path.glob("*.pt")} >= {"step-00000004.pt", "step-00000006.pt"}


def test_a_resume_counts_its_parents_checkpoints_as_its_own(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=1, keep_checkpoints=2).run(3)
    for step in (4, 5, 6):
        Trainer.load(tmp_path).run(step)
    assert [(entry.attempt, entry.step) for entry in checkpoint.listed(tmp_path)] == [(2, 5), (3, 6)]


def test_a_note_that_a_crash_has_cut_is_a_used_number_and_no_more(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2).run(4)
    (tmp_path / ".attempts" / "tiny.1.json").write_bytes(b'{"run": "ti')
    assert checkpoint.latest(tmp_path).name == "step-00000004.pt"
    assert tree(Trainer.load(tmp_path)) == ("2", "0", 4)


def test_a_folder_that_takes_no_note_gives_a_random_id(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = make_trainer().save(tmp_path / "archive" / "a.pt")
    create = attempts.create_durably

    def guarded(target: Path, content: bytes) -> None:
        if "archive" in target.parts:
            raise OSError(errno.EROFS, "Read-only file system")
        create(target, content)

    monkeypatch.setattr(attempts, "create_durably", guarded)
    first, second = Trainer.load(path), Trainer.load(path, checkpoint_dir=str(tmp_path / "new"))
    assert first.attempt.id.startswith("1-")
    assert second.attempt.id.startswith("1-")
    assert first.attempt.id != second.attempt.id
    assert caplog.text.count("takes no file (Read-only file system)") == 2
    assert tree(second)[1:] == ("0", 0)
    with pytest.raises(CheckpointError, match=r"checkpoint_dir '.*archive' takes no file: Read-only"):
        make_trainer(checkpoint_dir=str(tmp_path / "archive"))
