"""Runs our own code aside of the training: timed, and never raising."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8_safeguard.hooks.layers import ObservedLayer

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_NOTHING = contextlib.nullcontext()


def guarded(
    session: Session, direction: str, layer: ObservedLayer, body: Callable[..., None], *arguments: Any
) -> None:
    """Run a measurement; time it, and keep its exceptions away from the training loop."""
    with session.lock:
        begun = session.meter.begin_layer()
        try:
            with torch._C.DisableTorchFunction(), _without_gradients(), _without_modes():
                body(*arguments)
        except Exception as error:
            session.once.failure(direction, error, at=layer.name)
        finally:
            session.meter.end_layer(begun, layer.name)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """For our own tensors: without gradients, and outside the modes, the default device and the counters around us."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _without_modes():
        yield


def _without_gradients() -> contextlib.AbstractContextManager[object]:
    """Where nothing is recorded: a backward mostly is such a place, and need not be made one."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _without_modes() -> contextlib.AbstractContextManager[object]:
    """Outside the dispatch modes around us: selective checkpointing, for one, would keep our results as the model's."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING
