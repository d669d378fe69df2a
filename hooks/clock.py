"""Finds the training loop's steps: each ends with an optimizer step."""

from __future__ import annotations

import numbers
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fp8_safeguard.hooks.errors import OptionError
from fp8_safeguard.hooks.notices import DISCARDED, TRAINER, tell_endless
from fp8_safeguard.hooks.readable import unreadable

if TYPE_CHECKING:
    from fp8_safeguard.hooks.layers import ObservedLayer
    from fp8_safeguard.hooks.once import OnceLog

PATIENCE = 8
"""Iterations whose gradients were discarded, beyond the most that any finished step has had, after which the optimizer is
no longer waited for: from then on each iteration is a step, so that a run that skips for ever goes on being seen."""
FIRST_PATIENCE = 128
"""The same before the optimizer's first step, while nobody knows how the loop treats its gradients."""


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
        """Whether the next forward begins another step: the optimizer has stepped inside the backward, or is given up."""
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

    A pre-hook would be wrong where the closure runs the forward inside `optimizer.step`. A step that GradScaler or
    the trainer itself skips fires no hook at all: that iteration merges into the next one, and `Discards` notices it.
    One that runs inside the backward, for one parameter after the other, is told apart.
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
        if optimizer in self._found:
            return True
        found = self._updates_layers(optimizer)
        if found:
            self._found.add(optimizer)
        return found

    def trains(self, weight: Tensor) -> bool:
        """Whether one of these may update the weight: where none was named any may turn out to."""
        named = None if self._named is None else self._named()
        return named is None or owns(named, [weight])

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


class Discards:
    """Notices iterations whose gradients were thrown away: cleared though no optimizer step has used them.

    It watches one weight. A gradient that arrives there after another one since the last optimizer step, and finds
    none to be added to, says that the other was discarded. Accumulation adds, however many micro-batches there are.
    Nothing is read, so nothing waits; every rank sees the same. Gradients cleared to zero instead of None are not told
    from accumulated ones, and a sharded weight's are somewhere else in between: there nothing is noticed.
    """

    def __init__(
        self, layers: list[ObservedLayer], ours: OwnOptimizers, once: OnceLog, on_endless: Callable[[], None]
    ) -> None:
        self._layers, self._ours, self._once = layers, ours, once
        self._on_endless = weakref.WeakMethod(on_endless)
        self._watched: ObservedLayer | None = None
        self._handles: list[RemovableHandle] = []
        self._arrived = self._alone = False
        self._usual: int | None = None
        """The most discards of any step that an optimizer step has ended in time; None before the first."""
        self._count = self._untold = self._vain = 0
        self._look(anew=True)

    @property
    def endless(self) -> bool:
        """Whether so much was discarded since the last optimizer step that there may be none any more."""
        return self._count >= (FIRST_PATIENCE if self._usual is None else PATIENCE + self._usual)

    def used(self) -> None:
        """An optimizer step has used the gradients. Another weight is watched where this one has none (any more)."""
        usual = self._usual or 0
        # A run that was stuck must not be waited for as long the next time; a loop that is like that is learned step by step.
        self._usual = usual + PATIENCE if self.endless else max(usual, self._count)
        self._count, self._arrived = 0, False
        weight = self._weight()
        if weight is None or weight.grad is None:
            self._look(anew=False)

    def scalars(self) -> list[tuple[str, str, float]]:
        """How many were noticed since this was asked last, if any, as a scalar of the training loop."""
        untold, self._untold = self._untold, 0
        return [(TRAINER, DISCARDED, float(untold))] if untold else []

    def remove(self) -> None:
        """Watch nothing any more."""
        self._unwatch()
        self._layers, self._count = [], 0

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._watched, self._handles, self._arrived = None, [], False

    def before(self) -> None:
        """A gradient is about to be added to the watched weight's, or `torch.autograd.grad` has asked for one.

        Of two threads' backwards both may find none: then none has arrived before either of them.
        """
        weight = self._weight()
        self._alone = self._arrived and weight is not None and weight.grad is None

    def after(self) -> None:
        """It has been added, or has become the weight's."""
        if self._alone:
            self._alone = False
            self._discard()
        self._arrived = True
        on_endless = self._on_endless()
        if self.endless and on_endless is not None:
            on_endless()

    def holds(self, clock: Clock) -> bool:
        """Whether the step goes on, though the optimizer is given up: the forward that asks is of the same iteration."""
        weight = self._weight()
        if not self.endless:
            return False
        if not self._arrived or weight is None or weight.grad is not None:
            return True
        self._discard()
        if _inside_step():
            clock.closing = False
            return True
        tell_endless(self._once)
        return False

    def _discard(self) -> None:
        self._arrived = False
        self._count += 1
        self._untold += 1

    def failed(self, error: Exception) -> None:
        """One of our hooks has failed."""
        self._once.failure("the backward", error)

    def _weight(self) -> Tensor | None:
        """The watched weight, as long as it is the one that its module has."""
        weight = None if self._watched is None else self._watched.parameter()
        hooks = None if weight is None else weight._backward_hooks
        return weight if hooks and self._handles[0].id in hooks else None

    def _look(self, *, anew: bool) -> None:
        """Watch the first weight that has a gradient, or `anew` may get one. After a search in vain the next waits longer."""
        self._unwatch()
        if self._vain & (self._vain - 1):
            self._vain += 1
            return
        try:
            found = next((each for each in self._layers if self._suits(each.parameter(), anew=anew)), None)
            self._vain = self._vain + 1 if found is None else 0
            if found is not None:
                self._watch(found)
        except Exception as error:
            self.failed(error)

    def _suits(self, weight: Tensor | None, *, anew: bool) -> bool:
        """Whether gradients are added up in its `grad`: not those of a sharded weight, or of one cut from another."""
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad or not weight.is_leaf:
            return False
        return (anew or weight.grad is not None) and not unreadable(weight) and self._ours.trains(weight)

    def _watch(self, layer: ObservedLayer) -> None:
        weight: Any = layer.parameter()
        self._handles.append(weight.register_hook(_Watch(self, self.before)))
        self._handles.append(weight.register_post_accumulate_grad_hook(_Watch(self, self.after)))
        self._watched = layer


class _Watch:
    """A hook on the watched weight. Never raises, changes nothing, and no copy of the weight takes it along."""

    __torch_unserializable__ = True

    def __init__(self, discards: Discards, tell: Callable[[], None]) -> None:
        self._discards, self._tell = discards, tell

    def __call__(self, _: Tensor) -> None:
        try:
            self._tell()
        except Exception as error:
            self._discards.failed(error)


_STEP_FILE = Optimizer.profile_hook_step.__code__.co_filename


def _inside_step() -> bool:
    """Whether this thread is inside an optimizer's `step`, whose closure may run any number of forwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _STEP_FILE:
            return True
        frame = frame.f_back
    return False
