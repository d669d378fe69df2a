"""Finds the training loop's steps: each ends with an optimizer step."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8_safeguard.hooks.errors import OptionError

if TYPE_CHECKING:
    from fp8_safeguard.hooks.layers import ObservedLayer


class Clock:
    """Numbers the steps. Own count from 0; from the first `step(n)` on, the trainer's numbers alone."""

    def __init__(self) -> None:
        self.step = 0
        """Number of the step in progress, or of the next one between two steps."""
        self.manual = False
        """Whether the trainer calls `step()` itself: the optimizer then ends no step."""
        self.open = False
        """Whether a forward of the step in progress was seen."""
        self.closing = False
        """Whether an optimizer has stepped inside the backward: the next forward begins another step."""
        self.ended_by_optimizer = False
        """Whether the last step's number may still be corrected by the trainer's first `step(n)`."""

    def end(self, number: int) -> None:
        """Step `number` has ended."""
        self.open = self.closing = False
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
    skips fires no hook at all, so that iteration merges into the next one (unless the trainer calls `step()`). One
    that runs inside the backward, for one parameter after the other, is told apart.
    """

    def __init__(
        self, on_step: Callable[[Optimizer], None], on_inner_step: Callable[[Optimizer], None]
    ) -> None:
        self._on_step = weakref.WeakMethod(on_step)
        self._on_inner_step = weakref.WeakMethod(on_inner_step)
        self._handle = register_optimizer_step_post_hook(self)
        _prune()
        _installed.append(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1
        on_step = (self._on_inner_step if inside else self._on_step)()
        if on_step is not None:
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


class OwnOptimizers:
    """Which optimizers update the observed layers: the one that was named, or those found to."""

    def __init__(self, model: nn.Module, layers: list[ObservedLayer], named: Optimizer | None) -> None:
        self._model, self._layers = weakref.ref(model), layers
        self._named = None if named is None else weakref.ref(named)
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __contains__(self, optimizer: Optimizer) -> bool:
        if self._named is not None:
            return self._named() is optimizer
        if optimizer not in self._found and self._updates_layers(optimizer):
            self._found.add(optimizer)
        return optimizer in self._found

    def _updates_layers(self, optimizer: Optimizer) -> bool:
        model = self._model()
        weights = [weight for layer in self._layers for weight in layer.trainable()]
        trained = [weight for weight in weights if weight.requires_grad]
        # With every observed weight frozen (adapters, norms, biases) any parameter of the model will do.
        return owns(optimizer, trained or ([] if model is None else list(model.parameters())))


def owns(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Whether the optimizer updates any of these parameters."""
    identities = {id(parameter) for parameter in parameters}
    return any(id(p) in identities for group in optimizer.param_groups for p in group["params"])
