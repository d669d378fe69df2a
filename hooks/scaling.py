"""Follows a GradScaler's loss scale, through skipped steps too."""

# Shapes: R rows of a frame, V = 29 TensorStats entries.

from __future__ import annotations

import sys
import weakref
from types import FrameType

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import GRADIENT_PARTS, ObservedLayer
from fp8_safeguard.monitor.stats import COLUMNS

SCALE_POWER = {"amax": 1, "sum_sq": 2, "sum_sq_q": 2, "sum_sq_err": 2, "sum_4th": 4}
"""How each column grows with a loss scale; block metrics do not depend on it."""

_STEP = GradScaler.step.__code__
# Between GradScaler.step and our hook lie the optimizer's own wrappers and the trainer's, if it has any.
_STACK_DEPTH = 24


class LossScale:
    """What a GradScaler that was seen at work multiplies the loss by.

    A step that it skips calls no hook. But its `update` begins new records, so that the next forward can tell: what
    was measured under the old scale is then brought to the new one, and the iteration stays part of the step. Before
    the first step that a scaler lets through nobody knows of it.
    """

    def __init__(self) -> None:
        self._scaler: weakref.ref[GradScaler] | None = None
        self._records: object = None
        self._scale: Tensor | None = None

    def begin(self) -> Tensor | None:
        """A sampled step begins: the scale that its first backward will have, as far as it is known."""
        scaler = None if self._scaler is None else self._scaler()
        self._records, self._scale = _records(scaler), None if scaler is None else scale_of(scaler)
        return self._scale

    def find(self) -> Tensor | None:
        """The optimizer has just stepped: the scale of the scaler that called it, if one did."""
        scaler = _in_use()
        if scaler is None:
            return None
        self._scaler = weakref.ref(scaler)
        return scale_of(scaler)

    def follow(self, frame: Frame, layers: list[ObservedLayer]) -> Tensor | None:
        """A forward of the step begins: the new scale, where the scaler has moved on since the last one."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None or self._scale is None or _records(scaler) is self._records:
            return None
        before, after = self._scale, self.begin()
        if after is not None:
            _rescale(frame, layers, after / before)
        return after


def scale_of(scaler: GradScaler) -> Tensor | None:
    """A copy of its loss scale on its device: `get_scale()` would wait for it."""
    scale = getattr(scaler, "_scale", None)
    return scale.detach().clone() if isinstance(scale, Tensor) else None


def _in_use() -> GradScaler | None:
    """The GradScaler whose `step` is on the stack: nothing else says that gradients are scaled."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_STACK_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _STEP:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


def _records(scaler: GradScaler | None) -> object:
    """What the scaler knows of this iteration's optimizers: another object after each `update`."""
    return getattr(scaler, "_per_optimizer_states", None)


def _rescale(frame: Frame, layers: list[ObservedLayer], factor: Tensor) -> None:
    """Multiply what the frame holds of gradients, as if their loss had been multiplied by that factor; never waits."""
    values_RV = frame.values
    rows = torch.tensor(
        [row for layer in layers for part in GRADIENT_PARTS for row in _rows(layer, int(part))]
    )
    if values_RV.device.type == "cuda":
        # A copy from pageable memory would wait for the device.
        rows = rows.pin_memory().to(values_RV.device, non_blocking=True)
    factor = factor.to(values_RV.device, torch.float64, non_blocking=True).reshape(())
    scaled_RV = values_RV[rows]
    variants = frame.variants_of({layer.rows[part] for layer in layers for part in GRADIENT_PARTS})
    for vectors in (scaled_RV, *variants):
        for name, power in SCALE_POWER.items():
            for _ in range(power):  # a power of two stays exact
                vectors[:, COLUMNS.index(name)] *= factor
    values_RV[rows] = scaled_RV


def _rows(layer: ObservedLayer, part: int) -> range:
    first = layer.rows[part]
    return range(first, first + layer.all_experts)
