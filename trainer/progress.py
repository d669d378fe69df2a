"""Progress of a run: a live bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fp8_safeguard.trainer.train import OnStep, StepReport


@contextmanager
def progress(
    until_step: int, *, start_step: int = 0, log_every: int = 10, stream: TextIO | None = None
) -> Iterator[OnStep]:
    """A callback for Trainer.run: a rich bar when `stream` (standard error) is a terminal, else key=value lines."""
    target = sys.stderr if stream is None else stream
    if not target.isatty():
        yield PlainLines(target, until_step=until_step, log_every=log_every)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=target)) as bar:
        yield _Bar(bar, bar.add_task("training", total=until_step, completed=start_step))


class PlainLines:
    """One line every `log_every` steps, at the last step, and at every skipped one."""

    def __init__(self, stream: TextIO, *, until_step: int, log_every: int) -> None:
        self._stream, self._until_step, self._log_every = stream, until_step, log_every

    def __call__(self, report: StepReport) -> None:
        completed = report.step + 1
        if report.skipped or completed % self._log_every == 0 or completed == self._until_step:
            self._stream.write(line(report) + "\n")
            self._stream.flush()


class _Bar:
    """Moves the bar and shows the newest numbers beside it."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def __call__(self, report: StepReport) -> None:
        text = f"loss {report.loss:.3f}  grad {report.gradient_norm:.2f}  {report.seconds:.2f} s/step"
        if report.fallbacks:
            text += f"  [yellow]{report.fallbacks} fallbacks[/yellow]"
        if report.skipped_steps:
            text += f"  [red]{report.skipped_steps} skipped[/red]"
        self._bar.update(self._task, completed=report.step + 1, description=text)


def line(report: StepReport) -> str:
    """A report as space-separated key=value pairs, the same keys in every line."""
    return (
        f"step={report.step + 1} loss={report.loss:.4f} gradient_norm={report.gradient_norm:.4g} "
        f"learning_rate={report.learning_rate:.3g} tokens={report.tokens} seconds={report.seconds:.3f} "
        f"fallbacks={report.fallbacks} skipped_steps={report.skipped_steps}"
    )
