"""A numerical fault that harms FP8 and leaves BF16 exactly alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.trainer.errors import ConfigError

# The linears that read the two norms of a block, by the end of their names.
NORM_FED = ("attention.qkv", "mlp.shared.gate_up", "mlp.experts.gate_up")


@dataclass(frozen=True, kw_only=True)
class OutlierDrift:
    """A few channels of one layer grow step by step, and its weights shrink to match.

    What a network does that has learned a growing norm gain: x becomes x * m and the weight column w / m, so that
    x w^T is what it was. In BF16 nothing changes, not one bit, since every m is a power of two. In block-wise FP8
    the other channels of the block fall under amax / 458752 and are flushed to zero once m passes about 2^17.5.
    """

    start_step: int
    """First step with outliers (the step that this number of completed steps precedes)."""
    layer: int = -1
    """Index of the block; negative counts from the last."""
    channels: int = 8
    """Outlier channels of every block."""
    block: int = 128
    """Channels of one quantisation block."""
    initial_log2: float = 10.0
    """log2 of the gain at start_step."""
    growth: float = 1.25
    """Factor from one step to the next, before rounding to a power of two."""
    maximum_log2: float = 19.0
    """log2 of the largest gain."""
    seed: int = 0
    """Seed of the choice of channels."""

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> OutlierDrift:
        """The inverse of to_mapping; ConfigError names an unknown or missing key."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown or "start_step" not in values:
            wrong = f"fault.{unknown[0]} is unknown" if unknown else "fault.start_step is missing"
            raise ConfigError(f"{wrong}; a fault takes start_step and optionally {', '.join(sorted(known))}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    def gain_log2(self, step: int) -> int | None:
        """log2 of the gain at `step`, a whole number so that it is exact in BF16; None before the start."""
        if step < self.start_step:
            return None
        drift = self.initial_log2 + (step - self.start_step) * math.log2(self.growth)
        return round(min(drift, self.maximum_log2))

    def gain(self, width: int, step: int) -> Tensor | None:
        """float32 [width]: the gain of each channel at `step`, 1 on ordinary ones; None before the start."""
        exponent = self.gain_log2(step)
        if exponent is None:
            return None
        gain_K = torch.ones(width)
        gain_K[outlier_channels(width, block=self.block, channels=self.channels, seed=self.seed)] = (
            2.0**exponent
        )
        return gain_K

    def apply(self, model: torch.nn.Module, layers: int, step: int) -> None:
        """Set `input_gain` of the faulty block's linears to what it is at `step`; called before each forward."""
        prefix = f"blocks.{self.layer % layers}."
        for name, module in model.named_modules():
            if name.startswith(prefix) and name.endswith(NORM_FED):
                gain_K = self.gain(module.in_features, step)
                module.input_gain = gain_K


def outlier_channels(width: int, *, block: int, channels: int, seed: int) -> Tensor:
    """int64: `channels` random channels of every block of `width`; a short last block gets its share, rounded up."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for start in range(0, width, block):
        size = min(block, width - start)
        count = math.ceil(channels * size / block)
        chosen.append(start + torch.randperm(size, generator=generator)[:count])
    return torch.cat(chosen)


def _check(fault: OutlierDrift) -> None:
    if fault.start_step < 0:
        raise ConfigError(f"fault.start_step is {fault.start_step}; it must be at least 0")
    if not 1 <= fault.channels <= fault.block:
        raise ConfigError(f"fault.channels is {fault.channels}; it must be 1 to fault.block, {fault.block}")
    if not fault.growth >= 1.0:
        raise ConfigError(
            f"fault.growth is {fault.growth}; it must be at least 1 (the outliers never shrink)"
        )
    if not 0.0 <= fault.initial_log2 <= fault.maximum_log2 <= 100.0:
        raise ConfigError(
            f"fault.initial_log2 is {fault.initial_log2} and fault.maximum_log2 {fault.maximum_log2}; they must be "
            "0 to 100, in this order (beyond that float32 overflows)"
        )
