"""What one guard's hooks share: the step in progress, its frame."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8_safeguard.hooks import bypass, forking, notices
from fp8_safeguard.hooks.accounts import Accounts
from fp8_safeguard.hooks.arrivals import norm_scalars
from fp8_safeguard.hooks.aside import aside
from fp8_safeguard.hooks.budget import Scope
from fp8_safeguard.hooks.buffer import Frame, Ring
from fp8_safeguard.hooks.clock import Clock, Discards, OwnOptimizers
from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.coverage import Coverage, coverage_rows
from fp8_safeguard.hooks.layers import ObservedLayer, Part, emulated, format_of, rows_of
from fp8_safeguard.hooks.norms import Norms
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.readable import capturing
from fp8_safeguard.hooks.recent import Recent
from fp8_safeguard.hooks.recompute import RowSampler
from fp8_safeguard.hooks.sample import Notes, SampleBuilder, StepRecord
from fp8_safeguard.hooks.scales import scale_scalars
from fp8_safeguard.hooks.scaling import LossScale
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.uses import unfinished

if TYPE_CHECKING:
    from fp8_safeguard.hooks.client import Client
    from fp8_safeguard.hooks.ranks import Ranks


class Session:
    """What every hook of one guard reads. Lives as long as the model's hooks or the guard, whichever is longer."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[ObservedLayer],
        options: Options,
        *,
        controls: Controls,
        client: Client | Ranks,
        builder: SampleBuilder,
        once: OnceLog,
        optimizer: Optimizer | None,
        coverage: Coverage,
    ) -> None:
        self.model = weakref.ref(model)
        self.layers = layers
        self.options = options
        self.controls = controls
        self.client = client
        self.builder = builder
        self.once = once
        self.coverage = coverage
        self.recent = Recent()
        self.clock = Clock()
        self.sampler = RowSampler()
        self.rotation = 0
        """Index of the layer whose weight gradient is recomputed next."""
        self.active = True
        self.paused = 0
        """Depth of nested `paused()` blocks."""
        self.frame: Frame | None = None
        """Where the step in progress is measured; None where it is not."""
        self.idle = False
        """Whether the step in progress is known not to be measured: hooks have nothing to do until its end."""
        self.samples = 0
        """Samples finished so far."""
        self.own_steps: int | None = None
        """Of an attempt with a parent, the steps it has produced itself so far; None without a parent."""
        self.last: StepRecord | None = None
        """The newest finished sample."""
        self.accounts = Accounts(
            [layer.name for layer in layers], options.every, options.overhead_budget, once
        )
        self.meter, self.budget = self.accounts.meter, self.accounts.budget
        self.lock = threading.RLock()
        """Threads may run one model at once: each of our sections has the frame and the layers for itself."""
        self._ours = OwnOptimizers(model, layers, optimizer)
        self.discards = Discards(layers, self._ours, once, self.on_endless)
        self._loss_scale = LossScale()
        self._norms = Norms(once)
        self._ring: Ring | None = None
        self._notes = Notes()
        self._pending: StepRecord | None = None
        self._picked: frozenset[int] = frozenset()
        self._wgrad_at: dict[str, int] = {}
        """Sample in which each layer's weight gradient was recomputed last, where not all layers are judged."""
        forking.watch(self)

    @property
    def spent_seconds(self) -> float:
        """Time inside our own code on the training thread; what a hook takes to see that it is idle is not in it."""
        return self.meter.host_seconds

    @property
    def measuring(self) -> bool:
        """Whether what passes by now is measured."""
        return self.frame is not None and not self.paused and self.active and not capturing()

    def touch(self) -> None:
        """A forward of the step in progress was seen: the first one opens the step. Never raises."""
        if self.clock.open and not self.clock.closing:
            return
        if capturing():
            notices.tell_replays(self.once)
            return
        with self.lock:
            begun = self.meter.begin()
            try:
                self._close_inner()
                if not self.clock.open:
                    self._open()
            except Exception as error:
                self.frame = None
                self._lose("the start of a step", error)
            finally:
                # Only now: a forward in another thread waits until the frame is there.
                self.clock.open = True
                self.meter.end(begun)
            self.idle = self.frame is None

    def scope(self, layer: ObservedLayer) -> Scope:
        """What the sample in progress measures of this layer."""
        return self.budget.scope(layer.name)

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
        with self.lock:
            begun = self.meter.begin()
            try:
                if not self.active or optimizer not in self._ours or capturing():
                    return
                if not self.clock.open:
                    notices.tell_no_forward(self.clock, self.once)
                    return
                self.discards.used()
                self._find_scale()
                bypass.note_gradients(self)
                if not self.clock.manual:
                    self.end_step(self.clock.step)
                    self.clock.ended_by_optimizer = True
            except Exception as error:
                self.once.failure("the end of a step", error)
            finally:
                self.meter.end(begun)

    def on_inner_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped inside the backward: that ends the step as soon as the backward is over."""
        try:
            clock = self.clock
            if clock.open and not clock.closing and not clock.manual and optimizer in self._ours:
                clock.closing, self.idle = True, False
                # Here every backward finds the gradients cleared.
                self.discards.remove()
        except Exception as error:
            self.once.failure("the end of a step", error)

    def on_endless(self) -> None:
        """Gradients go on and on being discarded: the optimizer is not waited for any longer."""
        if self.active and not self.paused and self.clock.open and not self.clock.manual:
            self.clock.closing, self.idle = True, False

    def step(self, n: int | None) -> None:
        """The trainer says that step n has just ended. Never raises."""
        with self.lock:
            begun = self.meter.begin()
            try:
                first, self.clock.manual = not self.clock.manual, True
                if first:
                    self.discards.remove()
                if first and not self.clock.open and self.clock.ended_by_optimizer:
                    # The optimizer has ended this very step already, under our own number.
                    self._renumber(self.clock.step - 1 if n is None else n)
                else:
                    self.end_step(self.clock.step if n is None else n)
                self.deliver()
            except Exception as error:
                self.once.failure("the end of a step", error)
            finally:
                self.meter.end(begun)

    def end_step(self, number: int) -> None:
        """Close the frame, count on, and let a waiting plan take effect."""
        frame, self.frame, self.idle, self.clock.closing = self.frame, None, False, False
        self.recent.clear()
        notes = self._notes
        if frame is not None or notes.values or notes.scalars or notes.found_scale is not None:
            self._notes = Notes()
        self.deliver()
        if frame is not None:
            if frame.filled and number % self.options.every == 0:
                try:
                    with aside():
                        self._pending = self._record(number, frame, notes)
                except Exception as error:
                    self._lose("the end of a step", error)
            for layer in self.layers:
                layer.leave()
        self._count_own(number)
        self.clock.end(number)
        self.controls.at_boundary(self.clock.step)
        self.accounts.end_step(sampled=frame is not None and bool(frame.filled), idle_hook=self._idle_hook)

    def deliver(self) -> None:
        """Hand the finished sample over: its number and its notes are final now. Never raises."""
        with self.lock:
            self._close_inner()
            record, self._pending = self._pending, None
            if record is None:
                self.client.step_is_final()
                return
            begun, since = self.meter.begin(), self.meter.now
            self.samples += 1
            record.coverage = coverage_rows(self)
            try:
                # While the sender sleeps: to let go of the last sample beside it takes this thread ten times as long.
                notices.tell_skipped(self.last, self.once)
                self.last = record
                self.client.submit(record)
            except Exception as error:
                self._lose("handing a sample over", error)
            finally:
                self.accounts.delivered(self.meter.now - since)
                self.meter.end(begun)

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
        self.lock = threading.RLock()
        self.controls.after_fork_in_child()

    def close(self) -> None:
        """Stop measuring for good."""
        self.active = False
        self.frame = None
        self.discards.remove()
        for layer in self.layers:
            layer.close()
        self.controls.restore()

    def due(self) -> bool:
        """Whether the clock's step is one to sample."""
        return self.budget.due(self.clock.step)

    def _open(self) -> None:
        self.deliver()
        self.clock.ended_by_optimizer = False
        self.accounts.open_step()
        if not self.active or not self.accounts.affords(self.clock.step, lambda: self.builder.flags.layers):
            return
        with aside():
            self.frame = self._buffers().acquire()
            if self.frame is None:
                self.client.count_dropped("the device is still copying earlier samples")
                return
            self._pick(self.frame)
            self._notes.found_scale = self._loss_scale.begin()

    def follow_scale(self) -> None:
        """A forward is measured: what the step holds is brought to the loss scale that its backward will have."""
        if self.frame is not None:
            scale = self._loss_scale.follow(self.frame, self.layers)
            self._notes.found_scale = self._notes.found_scale if scale is None else scale

    def _close_inner(self) -> None:
        """End the step whose optimizer stepped inside the backward, or is not waited for any longer."""
        inside = torch._C._current_graph_task_id() != -1
        if self.clock.closing and not inside and not self.discards.holds(self.clock):
            self.end_step(self.clock.step)
            self.clock.ended_by_optimizer = True

    def _lose(self, where: str, error: Exception) -> None:
        """Our own code failed and its sample is lost: count it, and let training go on."""
        self.once.failure(where, error)
        self.client.count_dropped(type(error).__name__)

    def _find_scale(self) -> None:
        scale = None if self.frame is None else self._loss_scale.find()
        self._notes.found_scale = self._notes.found_scale if scale is None else scale

    def _buffers(self) -> Ring:
        """The ring, made with the first sample: the model may have moved to its device after attach()."""
        model = self.model()
        parameter = None if model is None else next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device
        if self._ring is None or self._ring.device != device:
            self._ring = Ring(rows_of(self.layers), device)
        return self._ring

    def _record(self, number: int, frame: Frame, notes: Notes) -> StepRecord:
        notes.scalars.extend(unfinished(self.layers))
        notes.scalars.extend(scale_scalars(self.layers))
        notes.scalars.extend(norm_scalars(self.layers))
        notes.scalars.extend(self._norms.scalars(self.model()))
        notes.scalars.extend(self.discards.scalars())
        return StepRecord(
            step=number,
            snapshot=frame.snapshot(),
            filled=frozenset(frame.filled),
            marks=_marks(self.layers),
            notes=notes,
            plan_version=self.controls.plan.version,
            effective_step=self.controls.effective_step,
            overhead_ratio=self.accounts.sample_ratio(),
            sampling=self.budget.report(),
        )

    def _renumber(self, number: int) -> None:
        record = self._pending
        if record is not None:
            record.step = number
            if number % self.options.every:
                self._pending = None
        if self.own_steps == 1:
            self.builder.attempt = replace(self.builder.attempt, from_step=number)
        self.clock.end(number)
        self.controls.at_boundary(self.clock.step)

    def _count_own(self, number: int) -> None:
        """The first step of a child is where it begins, whatever number its parent's state had reached."""
        if self.own_steps is None or not self.clock.open:
            return
        self.own_steps += 1
        if self.own_steps == 1:
            self.builder.attempt = replace(self.builder.attempt, from_step=number)

    def _idle_hook(self) -> bool:
        """What a hook does in a step that is not sampled, to be timed."""
        if torch.compiler.is_compiling() or torch._C._is_tracing() or not torch.is_grad_enabled():
            return False
        return self.active and self.measuring

    def _pick(self, frame: Frame) -> None:
        """Choose the layers whose weight gradient is recomputed in this sample: each has its turn."""
        # A parameter that nobody was seen to multiply with has no turn.
        layers = [layer for layer in self.layers if layer.seen or not (layer.functional and self.samples)]
        count = min(self.options.recompute, len(layers))
        judged = [layer for layer in layers if self.scope(layer).judged]
        if len(judged) == len(layers):
            turn = [layers[(self.rotation + k) % len(layers)] for k in range(count)]
            self.rotation = (self.rotation + count) % max(1, len(layers))
        else:
            turn = sorted(judged, key=lambda layer: self._wgrad_at.get(layer.name, -1))[:count]
            self._wgrad_at.update({layer.name: self.samples for layer in turn})
        self._picked = frozenset(id(layer) for layer in turn)
        self.accounts.begin_sample([layer.name for layer in turn], on_device=frame.is_cuda)


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
