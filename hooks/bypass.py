"""What parameters alone say of weights that nobody was seen to multiply with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fp8_safeguard.hooks import operands, uses
from fp8_safeguard.hooks.arrivals import norm_of
from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.readable import unfit, unreadable

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

GRADIENT_AMAX, GRADIENT_NORM = "weight_gradient_amax", "weight_gradient_norm"
"""Scalars of a layer whose weight gets a gradient from a product that was not seen."""


def measure_weights(session: Session) -> None:
    """At the end of the model's forward: w of the layers that no call was seen of, in a step that is measured."""
    frame = session.frame
    for layer in _unseen(session) if frame is not None else ():
        guarded(session, "the forward", layer, _measure_weight, session, layer)


def note_gradients(session: Session) -> None:
    """At the optimizer's step, before anybody clears them: amax and norm of those layers' weight gradients.

    They stay on their device. Never raises.
    """
    if session.frame is None:
        return
    scalars = session.notes().scalars
    noted = {layer for layer, name, _ in scalars if name == GRADIENT_AMAX}
    for layer in _unseen(session):
        weight = layer.parameter()
        gradient = None if weight is None else weight.grad
        if gradient is not None and layer.name not in noted:
            guarded(session, "the end of a step", layer, _note, session, layer, gradient, scalars)


def _unseen(session: Session) -> Iterator[ObservedLayer]:
    """Layers that multiply, as far as one can tell, and were not counted in the sample in progress."""
    for layer in session.layers:
        multiplies = not layer.functional or layer.bypassed or layer.all_experts > 1
        embedding = isinstance(layer.module(), nn.Embedding | nn.EmbeddingBag)
        if layer.seen_at != session.samples and not layer.own and multiplies and not embedding:
            yield layer


def _measure_weight(session: Session, layer: ObservedLayer) -> None:
    weight, frame = layer.weight(), session.frame
    if weight is None or frame is None or unfit(weight):
        return
    state = layer.enter(frame)
    if not state.w_measured:
        operands.measure_weight(session, layer, weight, uses.FOREIGN.w)
        state.w_measured = True


def _note(
    session: Session, layer: ObservedLayer, gradient: Tensor, scalars: list[tuple[str, str, float | Tensor]]
) -> None:
    reason = unreadable(gradient)
    if reason:
        session.once.warning(
            f"gradient {reason}", "layer %s: its gradient is not reported: %s", layer.name, reason
        )
    if reason or gradient.numel() == 0:
        return
    scalars.append((layer.name, GRADIENT_AMAX, gradient.detach().abs().amax().float()))
    scalars.append((layer.name, GRADIENT_NORM, norm_of(gradient)))
