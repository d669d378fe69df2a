"""FP8 number formats and block scales, bit for bit, in numpy.

E4M3 (the FN variant: no Inf, one NaN code per sign) and E5M2 follow "FP8 Formats for Deep Learning", Micikevicius et al.
2022, table 1. INT8 is the uniform grid of amax/127, kept for comparison only.

A value x of a block with scale s becomes q = RNE(clamp(x / s, +-max)), where x is a float32, s is a float32 and x / s is
one IEEE float32 division; the dequantised value is q * s. RNE is round to nearest, ties to even. NaN and +-Inf become the
NaN code in every format that has one: they are never masked. The saturation edge is the midpoint between the largest
finite value and the next one that the exponent would hold; a tie goes to the even mantissa, so E4M3 keeps 464 (it rounds
to 448) and E5M2 loses 61440.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
ScaleKind = Literal["fp32", "pow2"]

SCALE_FLOOR = 2.0**-149
"""The smallest positive float32: the floor of every scale, so that the scale itself flushes nothing."""

SCALE_CEILING = 2.0**127
"""The largest power of two in float32: where a multiplier would push a scale to Inf, it stops here."""

_NAN_CODE = 0x7F


class UnknownFormatError(ValueError):
    """A format name that is not one of the known ones."""


class ScaleError(ValueError):
    """A scale kind or multiplier that the quantisation contract does not define."""


@dataclass(frozen=True)
class Format:
    """One number format: its grid is fixed by its smallest normal and subnormal values."""

    name: str
    """Short name used in options and on the wire: e4m3, e5m2, int8."""
    max: float
    """Largest finite value; block scales map the block's amax onto it."""
    min_normal: float
    """Smallest normal value (INT8, a uniform grid, has none: 128, above its maximum)."""
    min_subnormal: float
    """Smallest positive value, and the spacing of the grid below `min_normal`."""
    saturation_edge: float
    """|x / s| beyond this edge would round past `max` if it were not clamped."""
    has_inf: bool
    """Whether the format has a code for infinity (quantisation never emits it)."""
    edge_saturates: bool = False
    """Whether the edge itself, a tie, goes past `max`: true where the mantissa of `max` is odd."""

    def saturates(self, ratio: FloatArray) -> NDArray[np.bool_]:
        """Where a finite scaled value x / s would round past the maximum without the clamp."""
        magnitude = np.abs(ratio)
        beyond = np.greater_equal if self.edge_saturates else np.greater
        return np.asarray(beyond(magnitude, self.saturation_edge))


E4M3 = Format("e4m3", 448.0, 2.0**-6, 2.0**-9, 464.0, has_inf=False)
E5M2 = Format("e5m2", 57344.0, 2.0**-14, 2.0**-16, 61440.0, has_inf=True, edge_saturates=True)
INT8 = Format("int8", 127.0, 128.0, 1.0, 127.5, has_inf=False, edge_saturates=True)

_FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, INT8)}


def get_format(name: str | Format) -> Format:
    """The format of that name; a Format is returned as it is. Raises UnknownFormatError."""
    if isinstance(name, Format):
        return name
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        raise UnknownFormatError(
            f"format {name!r} is not known; choose one of {', '.join(_FORMATS)}"
        ) from None


def round_to_format(x: ArrayLike, fmt: str | Format) -> FloatArray:
    """Nearest value of the format, clamped to +-max, ties to even; NaN and +-Inf give NaN. Any shape, float64."""
    fmt = get_format(fmt)
    values = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(values)
    magnitude = np.minimum(np.abs(np.where(finite, values, 0.0)), fmt.max)
    quantum = _spacing(magnitude, fmt)
    rounded = np.rint(magnitude / quantum) * quantum
    return np.where(finite, np.copysign(rounded, values), np.nan)


def _spacing(magnitude: FloatArray, fmt: Format) -> FloatArray:
    """Distance between neighbours of the grid at each magnitude: a power of two, so dividing by it is exact."""
    _, exponent = np.frexp(np.maximum(magnitude, fmt.min_normal))
    _, first = np.frexp(fmt.min_normal)
    spacing: FloatArray = np.ldexp(fmt.min_subnormal, exponent - first)
    return spacing


def encode(x: ArrayLike, fmt: str | Format) -> NDArray[np.uint8]:
    """Codes of the clamped, rounded values. NaN and +-Inf give the NaN code with the input's sign.

    INT8 gives two's complement bytes and has no NaN code: a non-finite value raises ScaleError there.
    """
    fmt = get_format(fmt)
    values = round_to_format(x, fmt)
    invalid = np.isnan(values)
    if fmt is INT8:
        if invalid.any():
            raise ScaleError("int8 has no code for NaN or Inf; encode finite values or choose e4m3")
        return values.astype(np.int8).view(np.uint8)
    magnitude = np.abs(np.where(invalid, 0.0, values))
    codes = np.where(invalid, _NAN_CODE, _magnitude_code(magnitude, fmt)).astype(np.uint8)
    return codes | (np.signbit(np.asarray(x, dtype=np.float64)).astype(np.uint8) << np.uint8(7))


def _magnitude_code(magnitude: FloatArray, fmt: Format) -> FloatArray:
    """Sign-less code of a value on the grid: codes count the grid points upward from zero."""
    steps = fmt.min_normal / fmt.min_subnormal
    fraction, exponent = np.frexp(np.maximum(magnitude, fmt.min_normal))
    _, first = np.frexp(fmt.min_normal)
    normal = (exponent - first + 1) * steps + (2.0 * fraction - 1.0) * steps
    return np.where(magnitude < fmt.min_normal, magnitude / fmt.min_subnormal, normal)


def decode(codes: ArrayLike, fmt: str | Format) -> FloatArray:
    """Exact values of uint8 codes, in float64, same shape."""
    return _decode_table(get_format(fmt))[np.asarray(codes, dtype=np.uint8)]


@cache
def _decode_table(fmt: Format) -> FloatArray:
    codes = np.arange(256)
    if fmt is INT8:
        table = codes.astype(np.uint8).view(np.int8).astype(np.float64)
    else:
        table = _float_table(codes & 0x7F, fmt)
        table = np.where(codes & 0x80, -table, table)
    table.setflags(write=False)
    return table


def _float_table(magnitude_codes: NDArray[np.int64], fmt: Format) -> FloatArray:
    steps = int(fmt.min_normal / fmt.min_subnormal)
    exponent, mantissa = np.divmod(magnitude_codes, steps)
    normal = np.ldexp((steps + mantissa) * fmt.min_subnormal, np.maximum(exponent - 1, 0))
    table = np.where(exponent == 0, mantissa * fmt.min_subnormal, normal)
    table = np.where(table > fmt.max, np.nan, table)
    if fmt.has_inf:
        table = np.where((exponent == 0x7F // steps) & (mantissa == 0), np.inf, table)
    return table


def block_scale(
    amax: ArrayLike, fmt: str | Format = E4M3, kind: ScaleKind = "fp32", multiplier: float = 1.0
) -> NDArray[np.float32]:
    """Scale of each block from the largest finite magnitude in it. Float32, the shape of `amax`.

    - `fp32`: fl32(amax / max), one IEEE division of float32 values.
    - `pow2`: the smallest power of two >= amax / max, found on the bits and so never one off by rounding.
    - both are at least 2^-149.
    - then s' = s * multiplier, a power of two, floored in the same way. Below 1 it trades head-room for less underflow.
    - amax 0 (a block without a finite non-zero element) gives 1, whatever the multiplier.

    Raises ScaleError on another kind or multiplier, UnknownFormatError on another format.
    """
    fmt = get_format(fmt)
    amax32 = np.asarray(amax, dtype=np.float32)
    if kind == "fp32":
        scale = (amax32 / np.float32(fmt.max)).astype(np.float64)
    elif kind == "pow2":
        scale = _power_of_two_scale(amax32.astype(np.float64), fmt)
    else:
        raise ScaleError(f"scale {kind!r} is not known; choose fp32 or pow2")
    scaled = np.maximum(scale, SCALE_FLOOR) * check_multiplier(multiplier)
    return np.where(amax32 > 0, np.clip(scaled, SCALE_FLOOR, SCALE_CEILING), 1.0).astype(np.float32)


def _power_of_two_scale(amax: FloatArray, fmt: Format) -> FloatArray:
    """amax = f 2^e and max = g 2^h with f, g in [0.5, 1): 2^(e-h) if f <= g, else one more."""
    fraction, exponent = np.frexp(amax)
    max_fraction, max_exponent = np.frexp(fmt.max)
    scale: FloatArray = np.ldexp(1.0, exponent - max_exponent + (fraction > max_fraction))
    return scale


def check_multiplier(multiplier: float) -> float:
    """The multiplier, if it is a positive power of two within float32; ScaleError otherwise."""
    value = float(multiplier)
    if not (
        np.isfinite(value) and value > 0 and np.frexp(value)[0] == 0.5 and 2.0**-126 <= value <= 2.0**127
    ):
        raise ScaleError(
            f"multiplier {multiplier!r} is not a power of two between 2^-126 and 2^127; use 1.0 for no change"
        )
    return value
