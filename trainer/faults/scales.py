"""Faults of scales: too large, too small, stuck, or floored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import nn

from fp8_safeguard.kernels import LinearPrecision, OperandFormat
from fp8_safeguard.trainer.faults.base import LinearFault

# What a linear's operand was before the fault. Weak: a fault keeps no model alive, and is frozen itself.
_BEFORE: WeakKeyDictionary[nn.Module, tuple[LinearFault, OperandFormat]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _ScaleFault(LinearFault):
    """A fault of how one operand is configured. It is set once: a plan may put it right afterwards."""

    operand: ClassVar[str] = "dy"

    def formed(self, operand: OperandFormat) -> OperandFormat:
        """The operand with the fault."""
        raise NotImplementedError

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Change the configured precision of the linears that have not got the fault yet."""
        for module in self.linears(model, layers):
            if module not in _BEFORE:
                before = getattr(module.precision, self.operand)
                _BEFORE[module] = (self, before)
                module.precision = _with(module.precision, self.operand, self.formed(before))

    def restore(self, model: nn.Module) -> None:
        """Give each linear the operand that it had."""
        for module in self.struck(model):
            module.precision = _with(module.precision, self.operand, _BEFORE.pop(module)[1])

    def struck(self, model: nn.Module) -> list[Any]:
        """The linears that have got it."""
        return [module for module in model.modules() if module in _BEFORE and _BEFORE[module][0] == self]


def _with(precision: LinearPrecision, operand: str, form: OperandFormat) -> LinearPrecision:
    changes: dict[str, Any] = {operand: form}
    return replace(precision, **changes)


@dataclass(frozen=True, kw_only=True)
class FlushedGradients(_ScaleFault):
    """An amax floor that is harmless for activations and flushes gradients, which are smaller.

    `scale = max(amax, epsilon) / 448` in code whose loss is scaled by 1e-8. Our gradients are not: scales are free of
    any unit, so that the same is a floor of epsilon / gradient_scale under ours.
    """

    kind: ClassVar[str] = "flushed-gradients"

    epsilon: float = 1e-4
    """The floor under a block's amax."""
    gradient_scale: float = 1e-8
    """Size of that code's gradients over ours."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        for name in ("epsilon", "gradient_scale"):
            if not 0.0 < getattr(self, name) <= 1.0:
                yield f"fault.{name} is {getattr(self, name)}; it must be above 0 and at most 1"

    def formed(self, operand: OperandFormat) -> OperandFormat:
        """With the floor."""
        return replace(operand, amax_floor=self.epsilon / self.gradient_scale)


@dataclass(frozen=True, kw_only=True)
class StuckScale(_ScaleFault):
    """dy's delayed scale is never updated: it stays what it was set to at first, and dy is far smaller."""

    kind: ClassVar[str] = "dy-scale-stuck"

    scale_log2: int = 0
    """log2 of the scale; the recipe `seed` begins with 1."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not -100 <= self.scale_log2 <= 100:
            yield f"fault.scale_log2 is {self.scale_log2}; it must be -100 to 100"

    def formed(self, operand: OperandFormat) -> OperandFormat:
        """With delayed scaling."""
        return replace(operand, scaling="delayed")

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Hold the scale, too."""
        super().inject(model, layers, step)
        for module in self.linears(model, layers):
            module.scaling.hold(self.operand, 2.0**self.scale_log2)

    def restore(self, model: nn.Module) -> None:
        """Let it go."""
        for module in self.struck(model):
            module.scaling.hold(self.operand, None)
        super().restore(model)


@dataclass(frozen=True, kw_only=True)
class _MisfitScale(_ScaleFault):
    """One scale for the whole tensor, off by a power of two."""

    factor_log2: int
    """log2 of the scale over what the amax asks for."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not -100 <= self.factor_log2 <= 100:
            yield f"fault.factor_log2 is {self.factor_log2}; it must be -100 to 100"

    def formed(self, operand: OperandFormat) -> OperandFormat:
        """With that multiplier."""
        return replace(operand, scaling="tensor", multiplier=2.0**self.factor_log2)


@dataclass(frozen=True, kw_only=True)
class GradientScaleTooLarge(_MisfitScale):
    """dy's scale is 2^16 too large: everything is flushed."""

    kind: ClassVar[str] = "dy-scale-too-large"

    factor_log2: int = 16


@dataclass(frozen=True, kw_only=True)
class GradientScaleTooSmall(_MisfitScale):
    """dy's scale is 256 times too small: nearly everything saturates."""

    kind: ClassVar[str] = "dy-scale-too-small"

    factor_log2: int = -8


@dataclass(frozen=True, kw_only=True)
class ActivationScaleTooSmall(_MisfitScale):
    """x's scale is 16 times too small: what is large saturates."""

    kind: ClassVar[str] = "x-scale-too-small"
    operand: ClassVar[str] = "x"

    factor_log2: int = -4
