"""Torch side of the FP8 formats: dtypes, bit layout, options."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fp8_safeguard.kernels.errors import KernelError, UnknownOptionError
from fp8_safeguard.monitor import formats

BLOCK = 128
"""Elements along a blocked dimension."""

LAYOUTS = ("row", "col", "tile")
SCALES = ("fp32", "pow2")

NAN_CODE = 0x7F
"""NaN and +-Inf take this code in both formats, with their sign bit."""


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """What encoding needs to know of an FP8 format beyond its limits."""

    limits: formats.Format
    """Maximum, saturation edge and the like, defined once for all packages."""
    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal value; subnormals share its quantum."""
    bias: int

    @cached_property
    def maximum(self) -> float:
        """Largest finite value."""
        return self.limits.max

    @cached_property
    def last_kept(self) -> float:
        """Largest float32 ratio x / s that rounds to the maximum or below; beyond it a value saturates."""
        edge = self.limits.saturation_edge
        if not self.limits.edge_saturates:
            return edge
        return float(np.nextafter(np.float32(edge), np.float32(0.0)))


E4M3 = CodeFormat(limits=formats.E4M3, dtype=torch.float8_e4m3fn, mantissa_bits=3, min_exponent=-6, bias=7)
E5M2 = CodeFormat(limits=formats.E5M2, dtype=torch.float8_e5m2, mantissa_bits=2, min_exponent=-14, bias=15)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def get_format(name: str) -> CodeFormat:
    """The format of that name, or UnknownOptionError."""
    if name not in FORMATS:
        raise UnknownOptionError("fmt", name, tuple(FORMATS))
    return FORMATS[name]


def require_multiplier(multiplier: float) -> None:
    """Raise KernelError unless multiplier is a power of two from 2^-126 to 2^127.

    Other values would round the scale a second time.
    """
    number = isinstance(multiplier, int | float)
    if not (number and 2.0**-126 <= multiplier <= 2.0**127 and math.frexp(multiplier)[0] == 0.5):
        raise KernelError(
            f"multiplier={multiplier!r} is not a power of two between 2**-126 and 2**127: "
            "use for example 0.5, 1.0 (no change) or 2.0"
        )
