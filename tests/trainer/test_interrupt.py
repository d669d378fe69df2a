"""SIGTERM and Ctrl-C: the step is finished, the checkpoint written, the way back said."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8_safeguard.trainer import StepReport, Trainer, checkpoint, run_interruptible
from fp8_safeguard.trainer.interrupt import StopSignals

MakeTrainer = Callable[..., Trainer]
SameState = Callable[[Trainer, Trainer], bool]


def send(number: int, at_step: int) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        if report.step == at_step:
            os.kill(os.getpid(), number)

    return on_step


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    make_trainer: MakeTrainer, same_state: SameState, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    folder = tmp_path / "a folder"
    trainer = make_trainer(checkpoint_dir=str(folder), checkpoint_every=100)
    stopped = run_interruptible(trainer, 9, send(number, 3))
    assert stopped is not None
    assert (stopped.exit_code, stopped.step, stopped.ailments) == (code, 4, ())
    assert stopped.checkpoint == folder / "step-00000004.pt"
    command = f"fp8-safeguard train --resume '{stopped.checkpoint}' --steps 9"
    assert stopped.resume_command == command
    assert shlex.split(command)[3] == str(stopped.checkpoint)
    assert stopped.message.splitlines() == [
        f"Stopped by {number.name} after 4 of 9 steps.",
        f"Checkpoint: {stopped.checkpoint}",
        f"Resume with: {command}",
    ]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    resumed, straight = Trainer.load(stopped.checkpoint), make_trainer()
    resumed.run(9)
    straight.run(9)
    assert same_state(resumed, straight)


def test_without_a_signal_nothing_is_said_or_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    assert run_interruptible(make_trainer(), 3, save=tmp_path / "a.pt") is None
    assert run_interruptible(make_trainer(), 3, send(signal.SIGTERM, 2), save=tmp_path / "a.pt") is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_folder_is_saved_where_the_caller_says(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    stopped = run_interruptible(make_trainer(), 9, send(signal.SIGTERM, 1), save=tmp_path / "a.pt")
    assert stopped is not None
    assert stopped.checkpoint == tmp_path / "a.pt"
    assert Trainer.load(tmp_path / "a.pt").step == 2
    nowhere = run_interruptible(make_trainer(), 9, send(signal.SIGTERM, 1))
    assert nowhere is not None
    assert (nowhere.checkpoint, nowhere.resume_command) == (None, None)
    assert nowhere.message.endswith("No checkpoint: give a checkpoint_dir, or --save, to keep the next run.")


def test_an_unhealthy_state_is_saved_but_not_the_one_to_resume(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(checkpoint_dir=str(tmp_path), checkpoint_every=2)
    trainer.run(2)
    trainer.model.head.register_hook(lambda g: g * float("nan"))
    stopped = run_interruptible(trainer, 9, send(signal.SIGTERM, 2))
    assert stopped is not None
    assert stopped.checkpoint == tmp_path / "step-00000002.pt"
    assert [(e.step, e.healthy) for e in checkpoint.listed(tmp_path)] == [(2, True), (3, False)]
    assert "That state is not healthy: the last 1 steps were skipped." in stopped.message


def test_outside_the_main_thread_the_block_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside = []

    def block() -> None:
        with StopSignals() as stop:
            inside.append((signal.getsignal(signal.SIGTERM), stop()))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert inside == [(before, False)]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


_TWICE = """
import os, signal
from fp8_safeguard.trainer.interrupt import StopSignals
number = signal.SIGINT
with StopSignals() as stop:
    os.kill(os.getpid(), number)
    assert stop()
    print("asked", flush=True)
    os.kill(os.getpid(), number)
    print("still here", flush=True)
"""


def test_the_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, b"asked\n")
    assert done.stderr == b""
