"""Gradient smoothing: an exponential mean of a layer's weight gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fp8_safeguard.monitor.plan import PlanEntry, is_finite_number

# Shapes: N outputs, K inputs of a weight; a grouped layer's has its experts in front.

logger = logging.getLogger("fp8_safeguard")

ACTION = "gradient_smoothing"
SEED_BETA = 0.1
"""The seed's value: `grad * 0.9 + prev * 0.1`."""


class GradientSmoothing:
    """g_s = beta g_s_prev + (1 - beta) g of the layers that a plan names, from the first gradient on.

    Nothing published says that it helps FP8 training: it is there to be measured. It belongs after the reduction over
    ranks and before clipping. A skipped step leaves its memory alone; without its entry a layer is forgotten.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights: dict[str, Tensor] = {
            name: weight
            for name, module in model.named_modules()
            if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        }
        self._kept: dict[str, Tensor] = {}
        """[.., N, K] of each smoothed layer, after the newest applied update."""
        self._pending: dict[str, Tensor] = {}
        """The same after the step in progress."""
        self._update: int | None = None
        """Number of the update that the pending ones are for."""
        self._refused: set[tuple[str, object]] = set()

    @torch.no_grad()
    def smooth(self, entries: Iterable[PlanEntry], step: int, updates: int) -> None:
        """Replace the gradients of the layers that entries in force at that step name.

        updates: how many updates were applied before; the same number twice means that one was skipped.
        """
        self._settle(updates)
        wanted = {entry.layer: beta for entry in entries if (beta := self._beta(entry, step)) is not None}
        self._kept = {layer: kept for layer, kept in self._kept.items() if layer in wanted}
        for layer, beta in wanted.items():
            grad = self._weights[layer].grad
            if grad is None:
                continue
            kept = self._kept.get(layer)
            smoothed = grad.clone() if kept is None else torch.lerp(kept, grad, 1.0 - beta)
            self._pending[layer] = smoothed
            grad.copy_(smoothed)
        self._update = updates

    def state(self, updates: int) -> dict[str, Tensor]:
        """The memory after `updates` updates, for a checkpoint."""
        self._settle(updates)
        return dict(self._kept)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; a layer that this model lacks is forgotten."""
        self._kept = {layer: kept.clone() for layer, kept in state.items() if layer in self._weights}
        self._pending, self._update = {}, None

    def _settle(self, updates: int) -> None:
        """What was pending counts once its update was applied."""
        if self._update is not None and updates > self._update:
            self._kept.update(self._pending)
        self._pending, self._update = {}, None

    def _beta(self, entry: PlanEntry, step: int) -> float | None:
        """The entry's beta if it is one of ours, in force, and can be carried out."""
        over = entry.expires_step is not None and step >= entry.expires_step
        if entry.action != ACTION or step < entry.not_before_step or over:
            return None
        of_weight = entry.target.operand is None and entry.target.gemm in (None, "wgrad")
        value = SEED_BETA if entry.value is None else entry.value
        if entry.layer in self._weights and of_weight and is_finite_number(value) and 0 <= float(value) < 1:
            return float(value)
        key = (entry.decision_id, entry.value)
        if key not in self._refused:
            self._refused.add(key)
            logger.warning(
                "plan entry %s of %s %s (beta %r) is not applied: it smooths the weight gradient of a layer of this model, "
                "with a beta from 0 to below 1",
                ACTION,
                entry.layer,
                entry.target.key,
                entry.value,
            )
        return None
