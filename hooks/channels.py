"""Outlier channels of the layers that are looked at closely."""

# Shapes: T tokens, C channels of an operand.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8_safeguard.hooks.layers import ObservedLayer
    from fp8_safeguard.hooks.session import Session

OUTLIER = 16.0
"""A channel whose amax is so many times the median channel's: healthy activations reach 5 to 10."""


def note(session: Session, layer: ObservedLayer, operand: str, values_TC: Tensor) -> None:
    """Scalars `x_outlier_channels` (how many) and `x_outlier_ratio` (the largest over the median channel) of the layer.

    Of the first use in a step. They stay on their device.
    """
    scalars = session.notes().scalars
    count, ratio = f"{operand}_outlier_channels", f"{operand}_outlier_ratio"
    if values_TC.numel() == 0 or any((at, name) == (layer.name, count) for at, name, _ in scalars):
        return
    amax_C = values_TC.detach().abs().amax(dim=0).float()
    middle = amax_C.median()
    # Where most channels are dead nothing is an outlier among the others.
    alive = middle > 0
    scalars.append((layer.name, count, torch.where(alive, amax_C > OUTLIER * middle, False).sum()))
    scalars.append((layer.name, ratio, torch.where(alive, amax_C.amax() / middle, 0.0)))
