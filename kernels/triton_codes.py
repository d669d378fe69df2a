"""Triton: block scales, exact quotients, FP8 codes."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Block tensors keep their reduced axes with size 1, so that a scale broadcasts against its tile.
# Annotations stay unquoted and name tl only: Triton evaluates them when it compiles.

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
NAN_CODE = tl.constexpr(0x7F)
SIGN_OF_CODE = tl.constexpr(0x80)
SCALE_CEILING = tl.constexpr(2.0**127)
LIFT = tl.constexpr(2.0**64)
LIFT_EXPONENT = tl.constexpr(64)
RECIPROCAL_OF_POWER = tl.constexpr(254 << 23)
"""Less the bits of a normal power of two: those of its inverse."""
RECIPROCAL_SEED = tl.constexpr(0x7EF311C3)
"""Less the bits of a float: within 5.1 % of its inverse; three Newton steps reach the last bit."""
BOUND_OF_SCALE = tl.constexpr(2.0**64)


@triton.jit
def finite_magnitude(x: tl.tensor) -> tl.tensor:
    """Bits of |x| of a float32 tile, 0 where x is NaN or Inf: they order as the numbers do."""
    magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK
    return tl.where(magnitude < INFINITY_BITS, magnitude, 0)


@triton.jit
def is_finite(x: tl.tensor) -> tl.tensor:
    """Where a float32 tile is neither NaN nor Inf."""
    return (x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK) < INFINITY_BITS


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent as float32, exact from -149 (subnormals) to 127."""
    normal = (exponent + 127) << 23
    subnormal = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 23)
    return tl.where(exponent >= -126, normal, subnormal).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(bits: tl.tensor) -> tl.tensor:
    """Exponent of the float32 with those (positive) bits; subnormals share that of the smallest normal."""
    return tl.maximum(bits >> 23, 1) - 127


@triton.jit
def block_scale(
    amax_bits: tl.tensor, multiplier: tl.tensor, E4M3: tl.constexpr, POW2: tl.constexpr
) -> tl.tensor:
    """float32 scales by the contract, from the bits of the largest finite magnitude of each block."""
    MAXIMUM: tl.constexpr = 448.0 if E4M3 else 57344.0
    MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 15
    floor = tl.full((1, 1), 1, tl.int32).to(tl.float32, bitcast=True)
    amax = amax_bits.to(tl.float32, bitcast=True)
    if POW2:
        # Subnormals have no leading one to read the exponent from, so they are lifted first.
        lifted = amax_bits < (1 << 23)
        bits = tl.where(lifted, amax * LIFT, amax).to(tl.int32, bitcast=True)
        power = (bits >> 23) - 127 - MAX_EXPONENT - tl.where(lifted, LIFT_EXPONENT, 0)
        # Both maxima are 1.75 x 2^n: a larger mantissa needs the next power.
        power += tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        base = power_of_two(tl.maximum(power, -149))
    else:
        base = tl.div_rn(amax, MAXIMUM)
    scaled = tl.maximum(base, floor) * multiplier
    scaled = tl.minimum(tl.maximum(scaled, floor), SCALE_CEILING)
    return tl.where(amax_bits > 0, scaled, 1.0)


@triton.jit
def divide(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """x / scale for any numbers, one IEEE division; NaN where x is not finite."""
    return tl.where(is_finite(x), tl.div_rn(x, scale), float("nan"))


@triton.jit
def plain_scale(
    amax_bits: tl.tensor, multiplier: tl.tensor, E4M3: tl.constexpr, POW2: tl.constexpr
) -> tl.tensor:
    """block_scale of plain blocks, in a few instructions and no division.

    amax / 448 is one rounded product and one exact remainder: equal to the IEEE division for every mantissa
    (tested on all 2^23).
    """
    MAXIMUM: tl.constexpr = 448.0 if E4M3 else 57344.0
    MAX_EXPONENT: tl.constexpr = 8 if E4M3 else 15
    if POW2:
        power = (amax_bits >> 23) - MAX_EXPONENT + tl.where((amax_bits & 0x7FFFFF) > 0x600000, 1, 0)
        scale = (power << 23).to(tl.float32, bitcast=True)
    else:
        # Of 1.75 x 2^n the inverse has the same mantissa for both formats.
        INVERSE: tl.constexpr = 1.0 / MAXIMUM
        amax = amax_bits.to(tl.float32, bitcast=True)
        near = amax * INVERSE
        scale = tl.fma(tl.fma(-near, MAXIMUM, amax), INVERSE, near)
    return tl.where(amax_bits > 0, scale * multiplier, 1.0)


@triton.jit
def plain_ratio(x: tl.tensor, scale: tl.tensor, POW2: tl.constexpr) -> tl.tensor:
    """x / scale of plain blocks, rounded as the IEEE division wherever an FP8 code could tell.

    Two instructions an element, where a division's reciprocal unit would bound the kernel: the block's reciprocal in
    two floats, off by 2^-47 together, times x. A code differs only if the true quotient lies closer than that to the
    middle of two floats next to the middle of two codes; test_quotients.py goes through all such pairs. The seed of
    the reciprocal is an integer subtraction, so that every processor computes the same bits.
    """
    bits = scale.to(tl.int32, bitcast=True)
    if POW2:
        ratio = x * (bits * -1 + RECIPROCAL_OF_POWER).to(tl.float32, bitcast=True)
    else:
        one = tl.full(scale.shape, 1.0, tl.float32)
        high = (bits * -1 + RECIPROCAL_SEED).to(tl.float32, bitcast=True)
        for _ in tl.static_range(3):
            high = tl.fma(tl.fma(-scale, high, one), high, high)
        low = tl.fma(-scale, high, one) * high
        ratio = tl.fma(x, high, x * low)
    return ratio


@triton.jit
def plain_codes(ratio: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """uint8 codes, rounded to nearest even; the conversion itself saturates (cvt.rn.satfinite)."""
    FORMAT: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
    return ratio.to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def encode(x: tl.tensor, ratio: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """uint8 codes of any x; NaN and Inf get the NaN code with their sign, which the conversion would drop."""
    sign = (x.to(tl.int32, bitcast=True) >> 24) & SIGN_OF_CODE
    return tl.where(is_finite(x), plain_codes(ratio, E4M3), (sign | NAN_CODE).to(tl.uint8))


@triton.jit
def decode(codes: tl.tensor, E4M3: tl.constexpr) -> tl.tensor:
    """float32 values of uint8 codes."""
    FORMAT: tl.constexpr = tl.float8e4nv if E4M3 else tl.float8e5
    return codes.to(FORMAT, bitcast=True).to(tl.float32)
