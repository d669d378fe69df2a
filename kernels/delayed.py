"""Delayed scaling: one scale an operand, from the amax of earlier steps."""

# A step of a layer begins with its first forward in training mode, outside of a backward, after an optimizer has stepped
# or the weight was written to. There, and nowhere else, the amax of the step before enters the history (the largest of
# all its uses: micro-batches, places that share the layer, repetitions under a checkpoint) and the scales change. A
# backward has the scales of its forward. In eval() nothing is recorded, and nothing changes.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8_safeguard.kernels.dispatch import logger
from fp8_safeguard.kernels.errors import KernelError, require_option
from fp8_safeguard.kernels.precision import (
    LONGEST_HISTORY,
    OPERANDS,
    LinearPrecision,
    OperandFormat,
    ScaledFormat,
    require_scale,
)
from fp8_safeguard.kernels.scaled import finite_amax

_VERSION = 1.0
"""Of the saved state."""


class _Operand:
    """What is remembered of one operand: finite numbers only."""

    def __init__(self) -> None:
        self.history: tuple[float, ...] = ()
        """Amax of completed steps, the newest last."""
        self.pending: float | None = None
        """Largest amax of the step in progress; None before its first use."""
        self.steps = 0
        """Steps that have entered the history so far."""
        self.held: float | None = None
        self.length = LONGEST_HISTORY
        """Steps that are remembered."""

    def seen(self) -> tuple[float, ...]:
        """The history with the step in progress."""
        return (*self.history, *(() if self.pending is None else (self.pending,)))[-self.length :]

    def end_step(self, length: int) -> None:
        """The step in progress becomes the newest of the history."""
        self.length = length
        self.steps += self.pending is not None
        self.history, self.pending = self.seen(), None


class DelayedScaling:
    """Amax histories and scales of one layer's operands. What is not known yet is None, never a number.

    An operand without a history is quantised by its `initial_scale` if it has one, else by its amax at that use; so is
    one whose history holds nothing but zeros. Amax of zero and non-finite values never make a scale.
    """

    def __init__(self) -> None:
        self._operands = {name: _Operand() for name in OPERANDS}
        self._mark: tuple[int, int] | None = None
        self.training = False
        """Whether the gradients of the latest forward count: in training mode they do."""
        self.recording = False
        """Whether its operands do: not where it repeats one inside a backward, whose gradients come only now."""
        self.in_use: LinearPrecision | None = None
        """The layer's precision with the scales of its latest pass: what an observer is shown was made with these."""

    def __getstate__(self) -> dict[str, Any]:
        """Steps are counted by each process: a copy begins with a new one."""
        return {**vars(self), "_mark": None, "in_use": None}

    def enter(self, weight: Tensor, precision: LinearPrecision, *, training: bool) -> None:
        """A forward of the layer begins; the first one of a step takes the step before into the history."""
        self.training = training
        self.recording = training and torch._C._current_graph_task_id() == -1
        if not self.recording:
            return
        _Steps.watch()
        mark = _Steps.count, 0 if weight.is_inference() else weight._version
        if mark != self._mark:
            self._mark = mark
            for name, operand in self._operands.items():
                operand.end_step(getattr(precision, name).amax_history)

    def known(self, name: str, operand: OperandFormat) -> OperandFormat:
        """The operand's format with the scale of this step; without one where only its amax can tell."""
        if operand.scaling == "block":
            return operand
        state = self._operands[name]
        if state.held is not None:
            return ScaledFormat.of(operand, fixed_scale=state.held)
        if operand.scaling == "tensor":
            return operand
        amax = _chosen(state.history[-operand.amax_history :], operand)
        if amax:
            return ScaledFormat.of(operand, amax=amax)
        if operand.initial_scale is not None and not state.history:
            return ScaledFormat.of(operand, fixed_scale=operand.initial_scale)
        return operand

    def used(self, name: str, x: Tensor, operand: OperandFormat, *, records: bool) -> OperandFormat:
        """The same for a use of x, whose amax is taken note of if it `records`: then there is always a scale."""
        needed = operand.scaling == "delayed" and records
        if operand.scaling == "block" or (operand.tensor_scale is not None and not needed):
            return operand
        amax = finite_amax(x)
        if needed:
            self.record(name, amax)
        return operand if operand.tensor_scale is not None else ScaledFormat.of(operand, amax=amax)

    def record(self, name: str, amax: float) -> None:
        """An operand's amax in the step in progress; one that is not finite is not taken in."""
        state = self._operands[_required(name)]
        if math.isfinite(amax) and amax >= 0:
            state.pending = max(amax, state.pending or 0.0)

    def history(self, name: str) -> tuple[float, ...]:
        """Amax of each step, the newest last, that of the step in progress included, no more
        than are remembered: a copy."""
        return self._operands[_required(name)].seen()

    def steps(self, name: str) -> int:
        """Steps whose amax has entered the operand's history."""
        return self._operands[_required(name)].steps

    def scale(self, name: str, operand: OperandFormat) -> float | None:
        """The scale that the operand's next step begins with; None where it is not known."""
        state = self._operands[_required(name)]
        if state.held is not None:
            return ScaledFormat.of(operand, fixed_scale=state.held).tensor_scale
        amax = _chosen(state.seen()[-operand.amax_history :], operand)
        return ScaledFormat.of(operand, amax=amax).tensor_scale if amax else None

    def hold(self, name: str, scale: float | None) -> None:
        """Keep an operand's scale where it is, whatever its amax: what a missed update does. None lets it go again.

        For operands whose scaling is `tensor` or `delayed`. Histories go on; the multiplier still applies.
        """
        require_scale("scale", scale)
        self._operands[_required(name)].held = scale

    def scalars(self) -> dict[str, float]:
        """`{operand}_scale` of the latest pass and `{operand}_history_amax` that it followed; nothing unknown."""
        found: dict[str, float] = {}
        for name in OPERANDS if self.in_use is not None else ():
            operand, state = getattr(self.in_use, name), self._operands[name]
            if operand.tensor_scale is None or (operand.scaling == "delayed" and not state.history):
                continue
            found[f"{name}_scale"] = operand.tensor_scale
            if operand.scaling == "delayed":
                found[f"{name}_history_amax"] = max(state.history[-operand.amax_history :])
        return found

    def state(self) -> Tensor:
        """Everything to go on from, float64 [n]: no longer than the histories are."""
        numbers = [_VERSION]
        for operand in self._operands.values():
            pending, seen = operand.pending, operand.seen()
            history = seen if pending is None else seen[:-1]
            numbers += [len(history), pending is not None, pending or 0.0, operand.steps, *history]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def load(self, state: Tensor, precision: LinearPrecision) -> None:
        """Take up what state() gave, for histories of the length that they have now: the newest steps are kept.

        Raises KernelError for what is no such state.
        """
        numbers: list[float] = state.tolist()
        if not numbers or numbers[0] != _VERSION:
            raise KernelError(
                f"an amax history of version {numbers[:1]} cannot be read, this one reads {_VERSION}: leave it out, and "
                "the layer begins with an unknown scale"
            )
        at, read = 1, {}
        for name in OPERANDS:
            length, has_pending, pending, steps = numbers[at : at + 4]
            operand = read[name] = _Operand()
            end = at + 4 + int(length)
            operand.length = getattr(precision, name).amax_history
            operand.history, operand.steps = tuple(numbers[at + 4 : end][-operand.length :]), int(steps)
            operand.pending = pending if has_pending else None
            at = end
        self._operands, self._mark, self.in_use = read, None, None

    def __bool__(self) -> bool:
        """Whether there is anything to save."""
        return any(operand.seen() for operand in self._operands.values())

    def pending(self) -> list[float]:
        """The step in progress by operand, 0.0 where nothing was seen."""
        return [operand.pending or 0.0 for operand in self._operands.values()]

    def merge(self, amax: Sequence[float]) -> None:
        """Take in what other ranks have seen in the step in progress, as `pending` gives it."""
        for name, value in zip(OPERANDS, amax, strict=True):
            if value:
                self.record(name, value)


def enter(scaling: DelayedScaling, weight: Tensor, precision: LinearPrecision, *, training: bool) -> None:
    """DelayedScaling.enter, as a function."""
    scaling.enter(weight, precision, training=training)


def merge_amax(scalings: Iterable[DelayedScaling], group: Any = None) -> None:
    """Give every rank of a process group the largest amax of any, so that their scales stay equal. One collective.

    Without it each rank follows its own data. To be called by all ranks, for the same layers in the same order, after
    the backward of a step and before the next forward.
    """
    scalings = list(scalings)
    pending = torch.tensor([scaling.pending() for scaling in scalings], dtype=torch.float64, device="cpu")
    if not scalings:
        return
    torch.distributed.all_reduce(pending, torch.distributed.ReduceOp.MAX, group=group)
    for scaling, amax in zip(scalings, pending.tolist(), strict=True):
        scaling.merge(amax)


def report_state(layer: str, what: str) -> None:
    """Say that a checkpoint and a layer do not have the same state: training goes on."""
    logger.warning("amax histories of %s: %s", layer or "the layer", what)


def _chosen(history: Sequence[float], operand: OperandFormat) -> float:
    """The amax that a scale follows; 0.0 where the history says nothing."""
    if not history:
        return 0.0
    return max(history) if operand.amax_choice == "max" else history[-1]


def _required(name: str) -> str:
    require_option("operand", name, OPERANDS)
    return name


class _Steps:
    """Optimizer steps of this process. Weights that are frozen, or sharded, do not show them."""

    count = 0
    _handle: Any = None

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        hooks = None if cls._handle is None else cls._handle.hooks_dict_ref()
        if hooks is None or cls._handle.id not in hooks:
            cls._handle = register_optimizer_step_post_hook(cls._count)

    @classmethod
    def _count(cls, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        cls.count += 1
