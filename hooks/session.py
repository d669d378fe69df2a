"""What one guard's hooks share: the step in progress, its frame."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks import forking
from fp8_safeguard.hooks.buffer import Frame, Ring
from fp8_safeguard.hooks.client import Client
from fp8_safeguard.hooks.clock import Clock, owns, scale_of, scaler_in_use
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.layers import ObservedLayer, Part, emulated, format_of, rows_of
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.recompute import RowSampler
from fp8_safeguard.hooks.sample import Notes, SampleBuilder, StepRecord
from fp8_safeguard.hooks.settings import Options


class Session:
    """What every hook of one guard reads. Lives as long as the model's hooks or the guard, whichever is longer."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[ObservedLayer],
        options: Options,
        *,
        controls: Controls,
        client: Client,
        builder: SampleBuilder,
        once: OnceLog,
        optimizer: Optimizer | None,
    ) -> None:
        self.model = weakref.ref(model)
        self.layers = layers
        self.options = options
        self.controls = controls
        self.client = client
        self.builder = builder
        self.once = once
        self.clock = Clock()
        self.sampler = RowSampler()
        self.rotation = 0
        """Index of the layer whose weight gradient is recomputed next."""
        self.active = True
        self.paused = 0
        """Depth of nested `paused()` blocks."""
        self.frame: Frame | None = None
        """Where the step in progress is measured; None where it is not."""
        self.samples = 0
        """Samples finished so far."""
        self.own_steps: int | None = None
        """Of an attempt with a parent, the steps it has produced itself so far; None without a parent."""
        self.last: StepRecord | None = None
        """The newest finished sample."""
        self.spent_seconds = 0.0
        """Time inside our own code on the training thread."""
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._scaler: weakref.ref[GradScaler] | None = None
        self._ring: Ring | None = None
        self._notes = Notes()
        self._pending: StepRecord | None = None
        self._picked: frozenset[int] = frozenset()
        self._begun = self._since = time.perf_counter()
        self._spent_before = 0.0
        forking.watch(self)

    @property
    def measuring(self) -> bool:
        """Whether what passes by now is measured."""
        return self.frame is not None and not self.paused and self.active

    def touch(self) -> None:
        """A forward of the step in progress was seen: the first one opens the step. Never raises."""
        if self.clock.open:
            return
        try:
            self._open()
        except Exception as error:
            self.frame = None
            self._lose("the start of a step", error)

    def picks_wgrad(self, layer: ObservedLayer) -> bool:
        """Whether it is this layer's turn to have its weight gradient recomputed."""
        return id(layer) in self._picked

    def notes(self) -> Notes:
        """Where a value logged now belongs: the step in progress, or the one that has just ended."""
        if self.clock.open or not self.clock.ended_by_optimizer:
            return self._notes
        # The step that has just ended was perhaps not sampled: then nobody will read them.
        return Notes() if self._pending is None else self._pending.notes

    def on_optimizer_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped: that ends the step, unless the trainer counts or the optimizer is not ours."""
        try:
            if not self.active or not self._is_ours(optimizer):
                return
            if not self.clock.open:
                self._miss_forward()
                return
            self._find_scale()
            if not self.clock.manual:
                self.end_step(self.clock.step)
                self.clock.ended_by_optimizer = True
        except Exception as error:
            self.once.failure("the end of a step", error)

    def step(self, n: int | None) -> None:
        """The trainer says that step n has just ended. Never raises."""
        try:
            first, self.clock.manual = not self.clock.manual, True
            if first and not self.clock.open and self.clock.ended_by_optimizer:
                # The optimizer has ended this very step already, under our own number.
                self._renumber(self.clock.step - 1 if n is None else n)
            else:
                self.end_step(self.clock.step if n is None else n)
            self.deliver()
        except Exception as error:
            self.once.failure("the end of a step", error)

    def end_step(self, number: int) -> None:
        """Close the frame, count on, and let a waiting plan take effect."""
        start = time.perf_counter()
        frame, self.frame = self.frame, None
        notes, self._notes = self._notes, Notes()
        self.deliver()
        if frame is not None:
            if frame.filled and number % self.options.every == 0:
                try:
                    self._pending = self._record(number, frame, notes)
                except Exception as error:
                    self._lose("the end of a step", error)
            for layer in self.layers:
                layer.leave()
        self._count_own(number)
        self.clock.end(number)
        self.controls.at_boundary(self.clock.step)
        self.spent_seconds += time.perf_counter() - start

    def deliver(self) -> None:
        """Hand the finished sample over: its number and its notes are final now. Never raises."""
        record, self._pending = self._pending, None
        if record is None:
            return
        self.samples += 1
        self.last = record
        for layer in self.layers:
            layer.seen = layer.seen or not record.filled.isdisjoint(layer.rows)
        try:
            self.client.submit(record)
        except Exception as error:
            self._lose("handing a sample over", error)

    def flush(self, timeout: float) -> bool:
        """Wait for at most that many seconds until everything has arrived."""
        self.deliver()
        return self.client.flush(timeout)

    def finish(self, timeout: float, *, clean: bool = False) -> None:
        """Send what there is, for at most that many seconds, and stop sending. The server is told of a clean end."""
        self.deliver()
        self.client.close(timeout, clean=clean)

    def before_fork(self) -> None:
        """Nothing of the training thread's can be under way."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """A data-loader worker, or another child: the parent reports, and its threads' locks are not here to open."""
        self.active = False
        self.frame = None
        self.controls.after_fork_in_child()

    def close(self) -> None:
        """Stop measuring for good."""
        self.active = False
        self.frame = None
        for layer in self.layers:
            layer.leave()
        self.controls.restore()

    def due(self) -> bool:
        """Whether the clock's step is one to sample."""
        return self.clock.step % self.options.every == 0

    def _open(self) -> None:
        self.deliver()
        self.clock.open = True
        self.clock.ended_by_optimizer = False
        if not self.active or not self.due() or not self._affordable():
            return
        self.frame = self._buffers().acquire()
        if self.frame is None:
            self.client.count_dropped("the device is still copying earlier samples")
            return
        self._pick()
        # A step that GradScaler will skip ends without a trace of it: note the scale that it begins with.
        scaler = None if self._scaler is None else self._scaler()
        self._notes.found_scale = None if scaler is None else scale_of(scaler)

    def _lose(self, where: str, error: Exception) -> None:
        """Our own code failed and its sample is lost: count it, and let training go on."""
        self.once.failure(where, error)
        self.client.count_dropped(type(error).__name__)

    def _miss_forward(self) -> None:
        """Our optimizer stepped without a forward: the second one of a step, or one that nobody could see."""
        if not self.clock.ended_by_optimizer and not self.clock.manual:
            self.once.warning(
                "no forward",
                "an optimizer step without a forward of any observed layer: torch.compile, or layers called past "
                "their modules, hide it; nothing is measured in such steps",
            )

    def _find_scale(self) -> None:
        if self.frame is None:
            return
        scaler = scaler_in_use()
        if scaler is not None:
            self._scaler = weakref.ref(scaler)
            self._notes.found_scale = scale_of(scaler)

    def _buffers(self) -> Ring:
        """The ring, made with the first sample: the model may have moved to its device after attach()."""
        model = self.model()
        parameter = None if model is None else next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        if self._ring is None or self._ring.device != device:
            self._ring = Ring(rows_of(self.layers), device)
        return self._ring

    def _record(self, number: int, frame: Frame, notes: Notes) -> StepRecord:
        now = time.perf_counter()
        elapsed, spent = now - self._since, self.spent_seconds - self._spent_before
        self._since, self._spent_before = now, self.spent_seconds
        return StepRecord(
            step=number,
            snapshot=frame.snapshot(),
            filled=frozenset(frame.filled),
            marks=_marks(self.layers),
            notes=notes,
            plan_version=self.controls.plan.version,
            effective_step=self.controls.effective_step,
            overhead_ratio=min(1.0, spent / elapsed) if elapsed > 0 else 0.0,
        )

    def _renumber(self, number: int) -> None:
        record = self._pending
        if record is not None:
            record.step = number
            if number % self.options.every:
                self._pending = None
        if self.own_steps == 1:
            self._begin_with(number)
        self.clock.end(number)
        self.controls.at_boundary(self.clock.step)

    def _count_own(self, number: int) -> None:
        """The first step of a child is where it begins, whatever number its parent's state had reached."""
        if self.own_steps is None or not self.clock.open:
            return
        self.own_steps += 1
        if self.own_steps == 1:
            self._begin_with(number)

    def _begin_with(self, number: int) -> None:
        self.builder.attempt = replace(self.builder.attempt, from_step=number)

    def _pick(self) -> None:
        """Choose the layers whose weight gradient is recomputed in this sample: each has its turn."""
        count = min(self.options.recompute, len(self.layers))
        turn = [self.layers[(self.rotation + k) % len(self.layers)] for k in range(count)]
        self.rotation = (self.rotation + count) % max(1, len(self.layers))
        self._picked = frozenset(id(layer) for layer in turn)

    def _affordable(self) -> bool:
        """Whether the budget allows this sample: what was spent so far, over the time since attach()."""
        budget = self.options.overhead_budget
        if budget is None or not self.samples:
            return True
        if self.spent_seconds <= budget * (time.perf_counter() - self._begun):
            return True
        self.once.warning(
            "overhead budget",
            "sampling takes more than overhead_budget=%g of the time: samples are left out",
            budget,
        )
        return False

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if self._optimizer is not None:
            return self._optimizer() is optimizer
        weights = [weight for layer in self.layers for weight in layer.trainable()]
        trained = [weight for weight in weights if weight.requires_grad]
        model = self.model()
        # With every observed weight frozen (adapters, norms, biases) any parameter of the model will do.
        return owns(optimizer, trained or ([] if model is None else list(model.parameters())))


def _marks(layers: list[ObservedLayer]) -> dict[int, dict[str, Any]]:
    """Fields of the slots, by first row, that depend on the precision of the step's forward."""
    marks: dict[int, dict[str, Any]] = {}
    for layer in layers:
        precision = layer.step.precision
        for part in Part if precision is not None else ():
            assert precision is not None
            fmt = format_of(precision, part)
            mark: dict[str, Any] = {} if fmt == "e4m3" else {"fmt": fmt}
            if emulated(precision, part) is not None:
                mark["emulated"] = True
            if mark:
                marks[layer.row(part)] = mark
    return marks
