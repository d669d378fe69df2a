"""Finds the training loop's steps: each ends with an optimizer step."""

from __future__ import annotations

import numbers
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8_safeguard.hooks.errors import OptionError

_SCALER_STEP = GradScaler.step.__code__
# Between GradScaler.step and our hook lie the optimizer's own wrappers and the trainer's, if it has any.
_STACK_DEPTH = 24


class Clock:
    """Numbers the steps. Own count from 0; from the first `step(n)` on, the trainer's numbers alone."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the step in progress, or of the next one between two steps."""
        self.manual = False
        """Whether the trainer calls `step()` itself: the optimizer then ends no step."""
        self.open = False
        """Whether a forward of the step in progress was seen."""
        self.ended_by_optimizer = False
        """Whether the last step's number may still be corrected by the trainer's first `step(n)`."""

    def end(self, number: int) -> None:
        """Step `number` has ended."""
        self.open = False
        self.step = number + 1


def checked_step(n: int | None) -> int | None:
    """The step number, if it can be one."""
    if n is None:
        return None
    if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 0:
        raise OptionError(
            f"step is {n!r}: give the whole number, 0 or above, of the step that has just ended"
        )
    return int(n)


class OptimizerHook:
    """Global optimizer post-hook; holds its listener weakly and is silent without it.

    torch iterates over the hooks while it calls them, so a hook whose listener is gone cannot take itself off: the
    next one that comes or goes does it.

    A pre-hook would be wrong where the closure runs the forward inside `optimizer.step`; a step that GradScaler
    skips fires no hook at all, so that iteration merges into the next one (unless the trainer calls `step()`).
    """

    def __init__(self, on_step: Callable[[Optimizer], None]) -> None:
        self._on_step = weakref.WeakMethod(on_step)
        self._handle = register_optimizer_step_post_hook(self)
        _prune()
        _installed.append(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        on_step = self._on_step()
        # An optimizer that runs inside backward ends no step.
        if on_step is not None and torch._C._current_graph_task_id() == -1:
            on_step(optimizer)

    def remove(self) -> None:
        """Take the hook off, and those that have outlived their listeners."""
        self._handle.remove()
        _installed[:] = [hook for hook in _installed if hook is not self]
        _prune()


_installed: list[OptimizerHook] = []
"""Every hook that has not been taken off."""


def _prune() -> None:
    for hook in _installed:
        if hook._on_step() is None:
            hook._handle.remove()
    _installed[:] = [hook for hook in _installed if hook._on_step() is not None]


def owns(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether the optimizer updates any of these parameters."""
    identities = {id(parameter) for parameter in parameters}
    return any(id(p) in identities for group in optimizer.param_groups for p in group["params"])


def scaler_in_use() -> GradScaler | None:
    """The GradScaler whose `step` is on the stack: nothing else says that gradients are scaled."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_STACK_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _SCALER_STEP:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


def scale_of(scaler: GradScaler) -> Tensor | None:
    """A copy of its loss scale on its device: `get_scale()` would wait for it."""
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, Tensor) else None
