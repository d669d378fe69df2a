"""Stops training at a step boundary on SIGTERM or Ctrl-C, checkpoint first."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fp8_safeguard.trainer.train import OnStep, Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A run that a signal has ended before its last step."""

    signal: signal.Signals
    """Which one."""
    step: int
    """Completed steps."""
    until_step: int
    """Steps that there should have been."""
    checkpoint: Path | None
    """Where to resume from; None where nothing says where a checkpoint may go."""
    ailments: tuple[str, ...] = ()
    """What was wrong with the state at the end: then `checkpoint` is an older, healthy one."""

    @property
    def exit_code(self) -> int:
        """What the process ends with: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + int(self.signal)

    @property
    def resume_command(self) -> str | None:
        """The command that continues."""
        if self.checkpoint is None:
            return None
        path = shlex.quote(str(self.checkpoint))
        return f"fp8-safeguard train --resume {path} --steps {self.until_step}"

    @property
    def message(self) -> str:
        """What happened, and how to go on."""
        told = [f"Stopped by {self.signal.name} after {self.step} of {self.until_step} steps."]
        if self.ailments:
            told.append(f"That state is not healthy: {'; '.join(self.ailments)}.")
        if self.checkpoint is None:
            told.append("No checkpoint: give a checkpoint_dir, or --save, to keep the next run.")
        else:
            told += [f"Checkpoint: {self.checkpoint}", f"Resume with: {self.resume_command}"]
        return "\n".join(told)


class StopSignals:
    """Inside the block, SIGTERM and SIGINT only ask to stop; the second one ends the process at once.

    Outside the main thread, where Python lets nobody handle signals, it never asks.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that has come."""
        self._previous: dict[signal.Signals, Any] = {}
        self._inside = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.received is not None

    def __enter__(self) -> Self:
        self._inside = True
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False
        for number, previous in self._previous.items():
            # A monitor that was attached inside the block stands before us and calls us; it stays.
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing is logged here: the handler may interrupt a write to the same stream.
        if self._inside and self.received is None:
            self.received = signal.Signals(number)
            return
        previous = self._previous.get(signal.Signals(number))
        if not self._inside and callable(previous):
            previous(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def run_interruptible(
    trainer: Trainer, until_step: int, on_step: OnStep | None = None, *, save: Path | None = None
) -> Interruption | None:
    """Trainer.run that a signal stops after the step in progress, with a checkpoint, samples sent; None if it did not.

    The checkpoint goes to the run's checkpoint_dir, without one to `save`. The trainer is closed after a signal.
    """
    with StopSignals() as stop:
        trainer.run(until_step, on_step, stop=stop)
        if trainer.step >= until_step:
            return None
        # The signal may have come to another rank first: all of them stop together.
        received = trainer.replicas.largest(stop.received or 0)
        checkpoint = trainer.save_at_stop(save)
        ailments = tuple(trainer.ailments())
        trainer.close(finished=False)
    return Interruption(
        signal=signal.Signals(received),
        step=trainer.step,
        until_step=until_step,
        checkpoint=checkpoint,
        ailments=ailments,
    )
