"""Bit-level element functions that compiled loops are built from."""

# Magnitudes travel as the int32 bits of |x| in float32: integer order is value order, and masks need no branch.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE_MASK = np.int32(0x7FFFFFFF)
SIGN_MASK = np.int32(-(2**31))

MAXIMUM, LAST_KEPT, MULTIPLIER, POWER_OF_TWO, QUANTUM_SHIFT, LEAST_EXPONENT = range(6)
"""Entries of `grid`, the float64 array that tells compiled code the format and the scale.

Quantum shift (23 - mantissa bits) and least exponent are float32 exponent fields, shifted left by 23.
"""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def exact(function: _Function) -> _Function:
    """Compile with every float operation rounded as written."""
    # Said out loud: a function without a fastmath option inherits it from whichever caller compiles it first.
    return _compile(function, False)


def reordered(function: _Function) -> _Function:
    """Compile with float sums in any order, which is what lets them use vectors."""
    return _compile(function, {"reassoc", "nsz", "contract"})


def _compile(function: _Function, fastmath: bool | set[str]) -> _Function:
    """Compile on first call, without the interpreter lock, and keep the code on disk where a folder allows it.

    Kept code includes the functions it calls, and their files are not watched: after an edit here, delete the
    *.nbi files of the other modules.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return cast(_Function, njit(cache=True, **options)(function))
    except (
        RuntimeError
    ):  # numba's "no locator available": neither the package nor the home folder is writable
        return cast(_Function, njit(**options)(function))


def instruction(function: Callable[..., Any]) -> Any:
    """A function that writes LLVM instructions itself."""
    return intrinsic(function)


@instruction
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with these int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@instruction
def bits_of(typing_context: Any, value: Any) -> Any:
    """The int32 bits of this float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@instruction
def fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@instruction
def wide_vectors(typing_context: Any) -> Any:
    """Let LLVM use 512-bit vectors in the calling function (by itself it stops at 256); speed only."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # llvmlite's own add() knows a fixed list of names; a string attribute is legal LLVM all the same.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


@instruction
def widened(typing_context: Any, bits: Any, shift: Any) -> Any:
    """int32 bits of x in float32 from a bfloat16 (uint16, shift 16) or float32 (int32, shift 0) pattern.

    numba itself would shift in 64 bits, which halves the vectors of every loop it stands in.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int32 = context.get_value_type(types.int32)
        pattern = builder.zext(arguments[0], int32) if bits.bitwidth < 32 else arguments[0]
        return builder.shl(pattern, arguments[1])

    return types.int32(bits, types.int32), generate


@exact
def magnitude(bits: Any, shift: Any) -> Any:
    """int32 bits of |x|, x as `widened` takes it."""
    return np.int32(widened(bits, shift) & MAGNITUDE_MASK)


@exact
def finite_or_zero(bits: Any) -> Any:
    """The magnitude, or 0 for NaN and Inf."""
    return np.int32(0) if bits >= INFINITY_BITS else np.int32(bits)


@exact
def quotient(x: Any, s: Any, inverse: Any) -> Any:
    """x / s as IEEE division rounds it, for s in the range of `divides_by_inverse`; inverse = fl(1 / s).

    The first residual step leaves x * inverse within one ulp, the second is then correctly rounded (Markstein,
    IBM J. Res. Dev. 34, 1990). The division instruction takes four times as long.
    """
    y = np.float32(x * inverse)
    y = fused(fused(np.float32(-y), s, x), inverse, y)
    return fused(fused(np.float32(-y), s, x), inverse, y)


@exact
def inverse_or_zero(s: Any, grid: Any) -> Any:
    """fl(1 / s) where `quotient` is exact for every x that does not round to zero, otherwise 0.

    Its residuals must be normal numbers down to x = s / 2^17, below which E5M2 too has only zero, and x / s, up to the
    maximum over the multiplier, must be finite.
    """
    inside = np.float32(2.0**-80) <= s <= np.float32(2.0**80) and grid[MULTIPLIER] >= 2.0**-100
    return np.float32(np.float32(1.0) / s) if inside else np.float32(0.0)


@exact
def magic(y: Any, quantum_shift: Any, least_exponent: Any) -> Any:
    """The float that, added to y and taken away again, rounds y to its format's grid with ties to even.

    It is 2^(e + 23 - mantissa bits), e being the exponent of y or the format's least one: subnormals round to the
    quantum of the smallest normals.
    """
    exponent = max(np.int32(bits_of(y) & INFINITY_BITS), least_exponent)
    return float_of(np.int32(exponent + quantum_shift))


@exact
def rounded(y: Any, big: Any) -> Any:
    """y on the grid that `big`, from magic(), stands for."""
    return np.float32(np.float32(y + big) - big)


@exact
def block_scale(amax_bits: Any, grid: Any) -> Any:
    """float32 scale of a block, as `reference.block_scales` defines it; amax as bits."""
    if amax_bits == 0:
        return np.float32(1.0)
    amax = float_of(np.int32(amax_bits))
    if grid[POWER_OF_TWO] != 0.0:
        scale = _power_of_two_scale(np.float64(amax), grid[MAXIMUM])
    else:
        scale = np.float64(np.float32(amax / np.float32(grid[MAXIMUM])))
    scale = max(scale, 2.0**-149) * grid[MULTIPLIER]
    return np.float32(min(max(scale, 2.0**-149), 2.0**127))


@exact
def _power_of_two_scale(amax: Any, maximum: Any) -> Any:
    """The smallest power of two at or above amax / maximum: mantissas decide, because a logarithm rounds."""
    fraction, exponent = math.frexp(amax)
    max_fraction, max_exponent = math.frexp(maximum)
    return math.ldexp(1.0, exponent - max_exponent + (1 if fraction > max_fraction else 0))
