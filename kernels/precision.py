"""How a linear layer's three GEMMs and their operands are quantised."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from fp8_safeguard.kernels.codes import SCALES, get_format, require_multiplier
from fp8_safeguard.kernels.errors import KernelError, require_option
from fp8_safeguard.monitor.formats import SCALE_CEILING, SCALE_FLOOR, block_scale

GEMM_PRECISIONS = ("fp8", "bf16")
OPERANDS = ("x", "w", "dy")
SCALINGS = ("block", "tensor", "delayed")
AMAX_CHOICES = ("max", "most_recent")
LONGEST_HISTORY = 65_536
"""Steps that an amax history can hold: it is kept, saved and searched for every operand of every layer."""
LARGEST_MARGIN = 64
"""Octaves that a margin can move a scale by, either way."""


def require_scale(name: str, scale: float | None) -> None:
    """Raise KernelError unless scale is None, or a number that a float32 scale can be."""
    if scale is not None and not (_is_number(scale) and SCALE_FLOOR <= scale <= SCALE_CEILING):
        raise KernelError(
            f"{name}={scale!r} is no scale: use a number from 2**-149 to 2**127, or None where no scale is known"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise KernelError(f"{name}={value!r} is not one of the whole numbers from {least} to {most}")


@dataclass(frozen=True, kw_only=True)
class OperandFormat:
    """How one operand becomes FP8, in every layout it is needed in."""

    fmt: str = "e4m3"
    """`e4m3` or `e5m2`."""
    scale: str = "fp32"
    """`fp32`: amax over the format's maximum; `pow2`: the next power of two up."""
    multiplier: float = 1.0
    """Power of two on the scale: below 1 trades head-room (saturation) for less underflow."""
    scaling: str = "block"
    """`block`: a scale for each block, from its own amax. `tensor`: one scale for the whole operand (all experts
    together), from its amax now. `delayed`: the same from the amax of earlier steps, which the layer keeps."""
    amax_history: int = 16
    """Steps that delayed scaling remembers."""
    amax_choice: str = "max"
    """`max` of the history or its `most_recent` amax, as Transformer Engine's recipe of that name has it."""
    margin: int = 0
    """Octaves of head-room, as in Transformer Engine's recipe: a scale for a whole operand is 2^margin times as large."""
    initial_scale: float | None = None
    """What delayed scaling multiplies codes by before it has seen an amax; None takes the operand's amax then."""
    amax_floor: float = 0.0
    """Smallest amax that a scale is made of; 0.0 is none. Found in the field as a guard against division by zero, where
    it flushes tiny gradients: scales are safe without it. Here to show what it does."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Whether each block's own amax decides its scale, which is what the fast kernels know. Not to be given."""

    def __post_init__(self) -> None:
        get_format(self.fmt)
        require_option("scale", self.scale, SCALES)
        require_multiplier(self.multiplier)
        require_option("scaling", self.scaling, SCALINGS)
        require_option("amax_choice", self.amax_choice, AMAX_CHOICES)
        _require_whole("amax_history", self.amax_history, 1, LONGEST_HISTORY)
        _require_whole("margin", self.margin, -LARGEST_MARGIN, LARGEST_MARGIN)
        require_scale("initial_scale", self.initial_scale)
        if not (_is_number(self.amax_floor) and 0 <= self.amax_floor < math.inf):
            raise KernelError(
                f"amax_floor={self.amax_floor!r} is no finite number from 0 on: use 0.0, which sets no floor"
            )
        if self.scaling == "block" and self.margin:
            raise KernelError(
                f"margin={self.margin} needs one scale for the whole operand: set scaling to 'tensor' or 'delayed', or "
                "use multiplier, which block scales take"
            )
        # Asked for at every use of a layer.
        object.__setattr__(self, "is_plain", self.scaling == "block" and not self.amax_floor)

    @property
    def tensor_scale(self) -> float | None:
        """The one scale of the operand, where it is known: of a ScaledFormat."""
        return None


@dataclass(frozen=True, kw_only=True)
class ScaledFormat(OperandFormat):
    """The format of one operand in one use of a layer: what its one scale is made of is known.

    Another format, multiplier or margin (`dataclasses.replace`) gives the scale that it would have had.
    """

    amax: float = 0.0
    """What the scale is made of: the operand's amax, or what its history says; 0.0 (nothing but zeros) gives 1."""
    fixed_scale: float | None = None
    """A scale that follows no amax (an initial one, one that is stuck); the multiplier still applies."""

    @classmethod
    def of(
        cls, operand: OperandFormat, *, amax: float = 0.0, fixed_scale: float | None = None
    ) -> ScaledFormat:
        """That operand's format with this amax or scale."""
        given: dict[str, Any] = {
            each.name: getattr(operand, each.name) for each in fields(OperandFormat) if each.init
        }
        return cls(**given, amax=amax, fixed_scale=fixed_scale)

    @cached_property
    def tensor_scale(self) -> float:
        """Dequantised values are codes times this; a float32.

        Transformer Engine's rule: amax / maximum x 2^margin, x multiplier, amax not below its floor.
        """
        amax = max(self.amax, self.amax_floor)
        if self.fixed_scale is not None:
            base = self.fixed_scale
        elif not amax:
            return 1.0
        else:
            kind = cast(Literal["fp32", "pow2"], self.scale)
            base = math.ldexp(float(block_scale(amax, self.fmt, kind)), self.margin)
        scaled = min(max(base * self.multiplier, SCALE_FLOOR), SCALE_CEILING)
        return float(np.float32(scaled))


@dataclass(frozen=True, kw_only=True)
class LinearPrecision:
    """Precision of a linear layer, GEMM by GEMM and operand by operand; FP8 throughout by default."""

    fprop: str = "fp8"
    """Y = X W^T: `fp8` or `bf16`."""
    dgrad: str = "fp8"
    """dX = dY W: `fp8` or `bf16`."""
    wgrad: str = "fp8"
    """dW = dY^T X: `fp8` or `bf16`."""
    x: OperandFormat = OperandFormat()
    """Activation."""
    w: OperandFormat = OperandFormat()
    """Weight."""
    dy: OperandFormat = OperandFormat()
    """Gradient of the output."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Whether every operand has scales of its blocks alone. Not to be given."""

    def __post_init__(self) -> None:
        for gemm in ("fprop", "dgrad", "wgrad"):
            require_option(gemm, getattr(self, gemm), GEMM_PRECISIONS)
        object.__setattr__(self, "is_plain", self.x.is_plain and self.w.is_plain and self.dy.is_plain)
