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


def guarded(
    session: Session, direction: str, layer: ObservedLayer, body: Callable[..., None], *arguments: Any
) -> None:
    """Run a measurement; time it, and keep its exceptions away from the training loop."""
    with session.lock:
        meter = session.meter
        begun = meter.begin_layer()
        try:
            with torch._C.DisableTorchFunction():
                # What no_grad() does, without its objects: this runs for every use of a weight.
                gradients = torch.is_grad_enabled()
                if gradients:
                    torch._C._set_grad_enabled(False)
                try:
                    modes = _without_modes()
                    if modes is None:
                        body(*arguments)
                    else:
                        with modes:
                            body(*arguments)
                finally:
                    if gradients:
                        torch._C._set_grad_enabled(True)
        except Exception as error:
            session.once.failure(direction, error, at=layer.name)
        finally:
            meter.end_layer(begun, layer.name)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """For our own tensors: without gradients, and outside the modes, the default device and the counters around us."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _without_modes() or contextlib.nullcontext():
        yield


def _without_modes() -> contextlib.AbstractContextManager[object] | None:
    """Outside the dispatch modes around us: selective checkpointing, for one, would keep our results as the model's.

    None where there are none.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else None
