"""Faults of FP8 codes and scales, after they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8_safeguard.kernels import QuantizedTensor, quantize
from fp8_safeguard.trainer.errors import ConfigError
from fp8_safeguard.trainer.faults.base import LinearFault, fp8_linears

# Shapes: E experts, N output features, K input features.

_NAN_CODE = 0x7F


@dataclass(frozen=True, kw_only=True)
class _Tampering(LinearFault):
    """A fault that changes the codes or scales that a GEMM multiplies. A GEMM in BF16 has none: it heals."""

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Put a fresh tamper on each linear concerned: it may count the calls of one step."""
        for module in self.linears(model, layers):
            module.tamper = self.tamper(step)

    def tamper(self, step: int) -> _Tamper:
        """What the linear's quantised operands go through at `step`."""
        raise NotImplementedError

    def restore(self, model: nn.Module) -> None:
        """Nothing is tampered with."""
        for module in fp8_linears(model):
            if isinstance(module.tamper, _Tamper):
                module.tamper = None


class _Tamper:
    """Changes quantised operands of some GEMMs."""

    def __call__(self, gemm: str, operand: str, quantised: QuantizedTensor) -> QuantizedTensor:
        """The operand as the GEMM gets it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StaleInverseScale(_Tampering):
    """fprop's result is computed with the inverse scale of an earlier step: `factor` times too large.

    A delayed-scaling kernel that reads the scale's inverse before it is updated. Operands and codes are healthy.
    """

    kind: ClassVar[str] = "stale-inverse-scale"
    endings: ClassVar[tuple[str, ...]] = ("gate_up",)

    layer: int | None = 1
    factor: float = 8.0
    """Scale that the result is computed with, over the scale that the codes were made with."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not 0.0 < self.factor < 2.0**64:
            yield f"fault.factor is {self.factor}; it must be above 0 and below 2^64"

    def tamper(self, step: int) -> _Tamper:
        """The same at every step."""
        return _Rescaled(self.factor)


@dataclass(frozen=True, kw_only=True)
class BadRank(_Tampering):
    """One rank's x has the top exponent bit of some of its elements set: they are `factor` times too large.

    Only that rank's FP8 operand is struck. In a run of one process, part `rank` of the step's micro-batches stands in
    for the rank.
    """

    kind: ClassVar[str] = "bad-rank"
    endings: ClassVar[tuple[str, ...]] = ("mlp.experts.gate_up",)

    layer: int | None = 1
    rank: int = 1
    """The rank, or the micro-batch, that is struck."""
    parts: int = 2
    """Micro-batches of a step, where the run is one process."""
    share: float = 0.01
    """Of the elements, drawn anew at each step."""
    factor: float = 256.0
    """One flip of the top exponent bit: 2^8."""
    seed: int = 0
    """Seed of the choice of elements."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not 0.0 < self.share <= 1.0:
            yield f"fault.share is {self.share}; it must be above 0 and at most 1"
        if self.rank < 0:
            yield f"fault.rank is {self.rank}; it must be at least 0"
        if not self.rank < self.parts:
            yield f"fault.rank is {self.rank}; of {self.parts} parts it can strike 0 to {self.parts - 1}"

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Only where the rank is this one, or stands in for it."""
        if not _distributed() or torch.distributed.get_rank() == self.rank:
            super().inject(model, layers, step)

    def tamper(self, step: int) -> _Tamper:
        """Counts the micro-batches of the step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        parts = 1 if _distributed() else self.parts
        return _FlippedBits(self.factor, self.share, generator, parts, 0 if _distributed() else self.rank)


@dataclass(frozen=True, kw_only=True)
class ExpertNaN(_Tampering):
    """One weight code of one expert is NaN in fprop, at every step: that expert gives NaN to all of its tokens."""

    kind: ClassVar[str] = "expert-nan"
    endings: ClassVar[tuple[str, ...]] = ("mlp.experts.gate_up",)

    layer: int | None = 1
    expert: int = 0
    """Index of the expert."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if self.expert < 0:
            yield f"fault.expert is {self.expert}; it must be at least 0"

    def linears(self, model: nn.Module, layers: int) -> Iterator[Any]:
        """ConfigError where there is no such expert."""
        for module in super().linears(model, layers):
            if self.expert >= module.num_experts:
                raise ConfigError(
                    f"fault.expert is {self.expert}; the model has experts 0 to {module.num_experts - 1}"
                )
            yield module

    def tamper(self, step: int) -> _Tamper:
        """The same at every step."""
        return _NaNCode(self.expert)


@dataclass(frozen=True, kw_only=True)
class IsolatedNaN(ExpertNaN):
    """The same at one step only."""

    kind: ClassVar[str] = "isolated-nan"

    def active(self, step: int) -> bool:
        """At that one step."""
        return step == self.start_step


@dataclass(frozen=True)
class _Rescaled(_Tamper):
    factor: float

    def __call__(self, gemm: str, operand: str, quantised: QuantizedTensor) -> QuantizedTensor:
        if (gemm, operand) != ("fprop", "x"):
            return quantised
        return replace(quantised, scale=quantised.scale * self.factor)


@dataclass
class _FlippedBits(_Tamper):
    factor: float
    share: float
    generator: torch.Generator
    parts: int
    part: int

    def __post_init__(self) -> None:
        self._calls: dict[str, int] = {}

    def __call__(self, gemm: str, operand: str, quantised: QuantizedTensor) -> QuantizedTensor:
        if operand != "x":
            return quantised
        call = self._calls.get(gemm, 0)
        self._calls[gemm] = call + 1
        if call % self.parts != self.part:
            return quantised
        values = quantised.dequantize()
        struck = torch.rand(values.shape, generator=self.generator) < self.share
        # A code has no room for it: the block's scale makes some, as it does for any large x.
        changed: Tensor = torch.where(struck, values * self.factor, values)
        return quantize(changed, layout=quantised.layout, fmt=quantised.fmt, offsets=quantised.offsets)


@dataclass(frozen=True)
class _NaNCode(_Tamper):
    expert: int

    def __call__(self, gemm: str, operand: str, quantised: QuantizedTensor) -> QuantizedTensor:
        if (gemm, operand) != ("fprop", "w"):
            return quantised
        codes_ENK = quantised.data.view(torch.uint8).clone()
        codes_ENK[self.expert, 0, 0] = _NAN_CODE
        return replace(quantised, data=codes_ENK.view(quantised.data.dtype))


def _distributed() -> bool:
    """Whether this is one process of several that train together."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return ready and torch.distributed.get_world_size() > 1
