"""The ways to train that are compared: nothing, and our hooks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from overhead.workload import PLAIN, Size, Trainer
from torch import Tensor

from fp8_safeguard.hooks import Guard, attach


@dataclass
class Tally:
    """Tensors that were looked at in a sampled step, and their elements; one seen twice counts twice."""

    tensors: int = 0
    elements: int = 0

    def add(self, tensor: Tensor) -> None:
        """One more."""
        self.tensors += 1
        self.elements += tensor.numel()


@dataclass(frozen=True)
class Counters:
    """Seconds so far: CPU time where a cycle's own does not show it, and what our hooks account for."""

    spent: float = 0.0
    """Inside our code on the training thread, by the wall clock."""
    sender: float = 0.0
    """CPU time of our other threads; it is part of the cycles'."""
    elsewhere: float = 0.0
    """CPU time of child processes; it is not."""

    def since(self, before: Counters) -> Counters:
        """What has come since then."""
        return Counters(
            self.spent - before.spent, self.sender - before.sender, self.elsewhere - before.elsewhere
        )


@dataclass
class Plain:
    """That many steps a cycle and nothing that watches."""

    name: str
    dtype: str
    steps: int = 1
    size: Size = PLAIN
    trainer: Trainer = field(init=False)

    def begin(self) -> None:
        """Build the model."""
        self.trainer = Trainer(self.dtype, self.size)

    @property
    def turns(self) -> int:
        """A step each."""
        return self.steps

    def turn(self, index: int) -> None:
        """One step."""
        self.trainer.step()

    def counters(self) -> Counters:
        """What there is to count."""
        return Counters()

    def count(self) -> Tally:
        """What a step shows to what watches."""
        return Tally()

    def end(self) -> None:
        """Let the model go."""
        del self.trainer


@dataclass
class Observed(Plain):
    """The same with our hooks. What the sender does with a sample belongs to the step that gave it."""

    every: int = 1
    spool: str = ""
    guard: Guard = field(init=False)
    sender_seconds: float = 0.0
    """CPU time of our threads in the turns so far."""

    def begin(self) -> None:
        """Build the model and attach."""
        super().begin()
        self.guard = attach(self.trainer.model, every=self.every, run=self.name, spool_dir=self.spool)

    def turn(self, index: int) -> None:
        """One step, until its sample is in the spool if it has one."""
        before = _our_threads_seconds()
        super().turn(index)
        if index % self.every == 0:
            self.guard.flush(60)
        self.sender_seconds += _our_threads_seconds() - before

    def counters(self) -> Counters:
        """Of the guard and its threads."""
        return Counters(spent=self.guard.spent_seconds, sender=self.sender_seconds)

    def count(self) -> Tally:
        """Operands in the last sample: x, w and dy of every layer, whatever the number of layouts and GEMMs."""
        sample = self.guard.last_sample()
        if sample is None:
            raise RuntimeError(f"{self.name}: no sample was taken; the log of fp8_safeguard says why")
        counts = {
            (slot["layer"], slot["operand"]): count
            for slot, count in zip(sample["slots"], sample["columns"]["count"], strict=True)
            if "operand" in slot
        }
        return Tally(len(counts), sum(counts.values()))

    def end(self) -> None:
        """Detach."""
        self.guard.detach()
        del self.guard
        super().end()


def _our_threads_seconds() -> float:
    """CPU time of our threads that are alive."""
    ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("fp8-safeguard")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in ours if ident is not None)
