"""The weight gradient as it arrives: whether it is a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.layers import ObservedLayer, StepState
from fp8_safeguard.hooks.readable import unreadable
from fp8_safeguard.monitor.nonfinite import WGRAD_NORM

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_MANY = 64


def watch(session: Session, layer: ObservedLayer, state: StepState, node: Any) -> None:
    """Have each gradient that arrives at this place in the graph measured, until the step ends.

    There and not at the optimizer's step: clipping spreads one NaN over all gradients.
    """
    before, state.node = state.node, node
    if node is None or node is before or not session.scope(layer).judged:
        return
    parameter = layer.parameter()
    output = 0 if parameter is None or parameter.is_leaf else parameter.output_nr
    # A weight that is cut anew for each forward has a place for each, and all their backwards may be still to come.
    state.arrivals.append(node.register_prehook(_Arrival(session, layer, state, output)))
    many = len(state.arrivals)
    if many >= _MANY and not many & (many - 1):
        # A step that never ends must not collect the handles of places that are gone.
        state.arrivals[:] = [each for each in state.arrivals if each.hooks_dict_ref() is not None]


def norm_scalars(layers: Iterable[ObservedLayer]) -> Iterator[tuple[str, str, Tensor]]:
    """(layer, `wgrad_norm`, L2 norm) of the step's weight gradients, on their device; a sample carries what is not finite."""
    for layer in layers:
        if layer.step.wgrad_norm is not None:
            yield layer.name, WGRAD_NORM, layer.step.wgrad_norm


def norm_of(gradient: Tensor) -> Tensor:
    """L2 norm, float32 [] on the gradient's device; float64 of a float64 one."""
    values = gradient.detach()
    if values.is_cpu and values.dtype == torch.float32 and values.is_contiguous():
        # Half of what vector_norm() takes, and on a CPU that is the training's time.
        flat = values.view(-1)
        return torch.dot(flat, flat).sqrt_()
    # In a dtype wide enough: the norm of a float16 gradient may lie beyond its range.
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    norm: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return norm


class _Arrival:
    """Hook of the node that adds a gradient to a weight's: after every hook on the weight, before the sum."""

    __slots__ = ("layer", "output", "session", "state")

    def __init__(self, session: Session, layer: ObservedLayer, state: StepState, output: int) -> None:
        self.session, self.layer, self.state, self.output = session, layer, state, output

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Never raises; the gradient stays as it is."""
        session, gradient = self.session, gradients[self.output]
        if gradient is not None and session.measuring and self.state.frame is session.frame:
            guarded(session, "the backward", self.layer, self._note, gradient)

    def _note(self, gradient: Tensor) -> None:
        if gradient.layout is torch.sparse_coo:
            gradient = gradient._values()
        if unreadable(gradient) or not gradient.numel():
            return
        norm, before = norm_of(gradient), self.state.wgrad_norm
        # Of several micro-batches the largest; maximum() passes a NaN on.
        self.state.wgrad_norm = norm if before is None else torch.maximum(before, norm)
