"""Whether a state is fit to continue from: finite, applied, not diverging."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SMOOTHING = 0.9
"""Share of the old level that one step keeps: the level follows the loss within about ten steps."""


@dataclass(kw_only=True)
class LossLevel:
    """The smoothed training loss, and the lowest that it has been."""

    now: float | None = None
    """Smoothed loss, nats; None before the first step."""
    lowest: float | None = None
    """Lowest value of `now` so far."""

    def add(self, loss: float) -> None:
        """Take in the loss of an applied step; one that is not finite says nothing about the level."""
        if math.isfinite(loss):
            self.now = loss if self.now is None else _SMOOTHING * self.now + (1.0 - _SMOOTHING) * loss
            self.lowest = self.now if self.lowest is None else min(self.lowest, self.now)

    def rise(self) -> float:
        """Nats by which the level stands above its lowest."""
        return 0.0 if self.now is None or self.lowest is None else self.now - self.lowest

    def to_mapping(self) -> dict[str, float | None]:
        """Plain values, for a checkpoint."""
        return {"now": self.now, "lowest": self.lowest}


def nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors with a NaN or inf in them."""
    return [name for name, t in named if t is not None and not bool(torch.isfinite(t).all())]


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that hold a NaN or inf, in definition order."""
    return nonfinite(model.state_dict().items())


def nonfinite_moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of optimizer moments that hold a NaN or inf, as `parameter.moment`."""
    return nonfinite(_moments(optimizer, model))


def _moments(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        entry: Mapping[str, object] = optimizer.state.get(parameter, {})
        for moment, value in entry.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"{name}.{moment}", value


def not_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What of the weights and of the optimizer holds a NaN or inf, in words."""
    kinds = {
        "parameters": nonfinite_parameters(model),
        "optimizer moments": nonfinite_moments(optimizer, model),
    }
    return [f"{len(names)} {kind} are not finite: {names[0]}" for kind, names in kinds.items() if names]


def ailments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: LossLevel,
    *,
    skipped_in_a_row: int,
    divergence_nats: float,
) -> list[str]:
    """What makes this state unfit to continue from, in words; empty if it is healthy."""
    found = not_finite(model, optimizer)
    if skipped_in_a_row:
        found.append(f"the last {skipped_in_a_row} steps were skipped")
    if level.rise() > divergence_nats:
        found.append(
            f"the smoothed loss is {level.now:.3f}, {level.rise():.3f} nats above its lowest: more than "
            f"divergence_nats {divergence_nats:g}"
        )
    return found
