"""The demo's progress: bars on a terminal, plain lines elsewhere."""

import sys
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from fp8_safeguard.cli.demo_arms import ArmMessage

LINE_EVERY = 20
TITLES = {
    "protected": "FP8, fault, safeguard on",
    "healthy": "FP8, no fault",
    "unprotected": "FP8, fault, safeguard off",
    "bf16_with_fault": "BF16, fault",
}


class Progress(Protocol):
    """Shows what the arms report."""

    def __enter__(self) -> "Progress": ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, message: ArmMessage) -> None: ...


def make_progress(steps: int, fault_step: int) -> Progress:
    """The kind that fits standard output."""
    return BarProgress(steps, fault_step) if sys.stdout.isatty() else LineProgress(fault_step)


class LineProgress:
    """One line of key=value every LINE_EVERY steps of an arm."""

    def __init__(self, fault_step: int) -> None:
        self._fault_step = fault_step

    def __enter__(self) -> "LineProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, message: ArmMessage) -> None:
        """Print the message where it says something new."""
        if message.kind == "forked":
            print(f"step={message.step} the fault begins; three more runs start from here", flush=True)  # noqa: T201
        elif message.kind == "step" and message.step % LINE_EVERY == 0:
            fault = " fault=on" if message.step >= self._fault_step and message.arm != "healthy" else ""
            print(f"run={message.arm} step={message.step} loss={message.loss:.4f}{fault}", flush=True)  # noqa: T201


class BarProgress:
    """One bar for each arm, with its last loss."""

    def __init__(self, steps: int, fault_step: int) -> None:
        self._steps, self._fault_step = steps, fault_step
        self._tasks: dict[str, TaskID] = {}
        self._bars = Bars(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TimeElapsedColumn(),
            console=Console(),
        )

    def __enter__(self) -> "BarProgress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, message: ArmMessage) -> None:
        """Move the arm's bar; announce the fault above the bars."""
        if message.kind == "forked":
            self._bars.console.print(
                f"Step {message.step}: the last layer's outliers begin to grow; three more runs start from here."
            )
        if message.kind != "step":
            return
        if message.arm not in self._tasks:
            self._tasks[message.arm] = self._bars.add_task(
                TITLES[message.arm], total=self._steps, loss=message.loss
            )
        self._bars.update(self._tasks[message.arm], completed=message.step + 1, loss=message.loss)
