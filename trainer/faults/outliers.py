"""Function-preserving outlier channels: slow, fast, abrupt, and late."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fp8_safeguard.trainer.faults.base import Fault, block_prefix, fp8_linears

# The linears that read the two norms of a block, by the end of their names.
NORM_FED = ("attention.qkv", "mlp.shared.gate_up", "mlp.experts.gate_up")


@dataclass(frozen=True, kw_only=True)
class OutlierDrift(Fault):
    """A few channels of one layer grow step by step, and its weights shrink to match.

    What a network does that has learned a growing norm gain: x becomes x * m and the weight column w / m, so that
    x w^T is what it was. In BF16 nothing changes, not one bit, since every m is a power of two. In block-wise FP8
    the other channels of the block fall under amax / 458752 and are flushed to zero once m passes about 2^17.5.
    """

    kind: ClassVar[str] = "outlier-drift"

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

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not 1 <= self.channels <= self.block:
            yield f"fault.channels is {self.channels}; it must be 1 to fault.block, {self.block}"
        if not self.growth >= 1.0:
            yield f"fault.growth is {self.growth}; it must be at least 1 (the outliers never shrink)"
        if not 0.0 <= self.initial_log2 <= self.maximum_log2 <= 100.0:
            yield (
                f"fault.initial_log2 is {self.initial_log2} and fault.maximum_log2 {self.maximum_log2}; they must be "
                "0 to 100, in this order (beyond that float32 overflows)"
            )

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

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Set `input_gain` of the faulty linears to what it is at `step`."""
        prefix = self.prefix(layers)
        for name, module in model.named_modules():
            if name.startswith(prefix) and name.endswith(NORM_FED):
                module.input_gain = self.gain(module.in_features, step)

    def prefix(self, layers: int) -> str:
        """What the names of the faulty linears begin with."""
        return block_prefix(self.layer, layers)

    def restore(self, model: nn.Module) -> None:
        """No linear has a gain."""
        for module in fp8_linears(model):
            module.input_gain = None


@dataclass(frozen=True, kw_only=True)
class SlowDrift(OutlierDrift):
    """The same at 12 % a step: some 45 steps until it does harm."""

    kind: ClassVar[str] = "slow-drift"

    growth: float = 1.12


@dataclass(frozen=True, kw_only=True)
class FastDrift(OutlierDrift):
    """The same at 25 % a step: some 25 steps until it does harm."""

    kind: ClassVar[str] = "fast-drift"


@dataclass(frozen=True, kw_only=True)
class AbruptOutliers(OutlierDrift):
    """The same at its largest at once: harm in the same step."""

    kind: ClassVar[str] = "abrupt-outliers"

    initial_log2: float = 19.0
    growth: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LateDivergence(OutlierDrift):
    """Outliers that grow slowly in every block together: nothing stands out, and the loss goes late and for good.

    The manner of Apertus (technical report, appendix D): a stable FP8 run whose loss and gradient norm rise after a
    long time, and which only BF16 put right. That took 3 * 10^11 tokens; here the end of it is played in 80 steps.
    """

    kind: ClassVar[str] = "late-divergence"

    initial_log2: float = 12.0
    growth: float = 1.05

    def prefix(self, layers: int) -> str:
        """Every block."""
        return "blocks."


def outlier_channels(width: int, *, block: int, channels: int, seed: int) -> Tensor:
    """int64: `channels` random channels of every block of `width`; a short last block gets its share, rounded up."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for start in range(0, width, block):
        size = min(block, width - start)
        count = math.ceil(channels * size / block)
        chosen.append(start + torch.randperm(size, generator=generator)[:count])
    return torch.cat(chosen)
