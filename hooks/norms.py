"""Largest and median gain of every norm, in each sample."""

# Shapes: M norms of one width, K channels.

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.readable import unreadable, version_of

GAIN_AMAX, GAIN_MEDIAN = "gain_amax", "gain_median"
"""Scalars of a norm, as samples carry them."""
MEDIAN_CHANNELS = 1024
"""Of a wider norm evenly spaced channels give the median: it moves with the bulk, not with a few."""
_NAMES = ("weight", "gain")


@dataclass(slots=True)
class _Norm:
    """One norm of the model, and what is known of its gain."""

    name: str
    module: weakref.ref[nn.Module]
    attribute: str
    centred: bool
    """Whether the gain is 1 + the weight."""
    version: int | None = None
    changed: bool = False

    def gain_K(self) -> Tensor | None:
        """The weight, if it can be read, and if it is trained or has changed since the first look."""
        module = self.module()
        weight = None if module is None else getattr(module, self.attribute, None)
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not weight.numel() or unreadable(weight):
            return None
        if not weight.requires_grad and not self._has_changed(weight):
            return None
        return weight.detach()

    def _has_changed(self, weight: Tensor) -> bool:
        version = version_of(weight)
        if self.version is None:
            self.version = version
        self.changed |= version != self.version
        return self.changed


@dataclass(slots=True)
class Norms:
    """The norms of a model: modules whose class is called so and that have a gain for each channel."""

    once: OnceLog
    found: list[_Norm] | None = field(default=None)

    def scalars(self, model: nn.Module | None) -> list[tuple[str, str, Tensor]]:
        """(module, name, value) of each norm; values stay on their device. Never raises."""
        if model is None:
            return []
        try:
            if self.found is None:
                self.found = list(_discover(model))
            with torch.no_grad():
                return list(self._measured())
        except Exception as error:
            self.once.failure("the gains of the norms", error)
            return []

    def _measured(self) -> Iterator[tuple[str, str, Tensor]]:
        alike: dict[tuple[object, ...], list[tuple[_Norm, Tensor]]] = {}
        for norm in self.found or ():
            gain_K = norm.gain_K()
            if gain_K is not None:
                alike.setdefault((gain_K.shape, gain_K.device, gain_K.dtype, norm.centred), []).append(
                    (norm, gain_K)
                )
        for (*_, centred), members in alike.items():
            # A few operations for all norms of one width, and none that waits for the device.
            gain_MK = torch.stack([gain_K for _, gain_K in members]).float()
            gain_MK = (gain_MK + 1.0 if centred else gain_MK).abs()
            some_MK = gain_MK[:, :: max(1, gain_MK.shape[1] // MEDIAN_CHANNELS)]
            largest_M, middle_M = gain_MK.amax(dim=1), some_MK.median(dim=1).values
            for at, (norm, _) in enumerate(members):
                yield norm.name, GAIN_AMAX, largest_M[at]
                yield norm.name, GAIN_MEDIAN, middle_M[at]


def _discover(model: nn.Module) -> Iterator[_Norm]:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "norm" not in kind.lower():
            continue
        for attribute in _NAMES:
            weight = getattr(module, attribute, None)
            if isinstance(weight, Tensor) and weight.dim() <= 1:
                # Megatron's and Gemma's parametrisation: a weight of 0 is a gain of 1.
                centred = bool(getattr(module, "zero_centered_gamma", False)) or kind.startswith("Gemma")
                yield _Norm(name, weakref.ref(module), attribute, centred)
                break
