"""Formats and scales against ml_dtypes, exact fractions and brute force."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_safeguard.monitor import formats
from fp8_safeguard.monitor.formats import (
    E4M3,
    E5M2,
    INT8,
    Format,
    block_scale,
    decode,
    encode,
    get_format,
    round_to_format,
)

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ALL_CODES = np.arange(256, dtype=np.uint8)


def oracle_values(name: str) -> np.ndarray:
    return ALL_CODES.view(ORACLE[name]).astype(np.float64)


def nearest_by_search(values: np.ndarray, name: str) -> np.ndarray:
    """Nearest grid value by exact midpoints; a tie goes to the even code. Knows nothing of exponents."""
    grid = oracle_values(name)[: 0x7F if name == "e4m3" else 0x7C]
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = np.minimum(np.abs(values), grid[-1])
    code = np.searchsorted(middle, magnitude, side="left")
    tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return np.copysign(grid[code], values)


def all_bfloat16() -> np.ndarray:
    bits = np.arange(65536, dtype=np.uint32) << 16
    return bits.view(np.float32)[np.isfinite(bits.view(np.float32))].astype(np.float64)


@pytest.mark.parametrize("name", ORACLE)
def test_b44_every_code_decodes_as_ml_dtypes_subnormals_included(name: str) -> None:
    np.testing.assert_array_equal(decode(ALL_CODES, name), oracle_values(name))


@pytest.mark.parametrize("name", ORACLE)
def test_b44_every_value_of_the_format_encodes_to_its_own_code(name: str) -> None:
    finite = np.isfinite(oracle_values(name))
    np.testing.assert_array_equal(encode(oracle_values(name)[finite], name), ALL_CODES[finite])


def test_b44_the_report_s_own_values() -> None:
    """The quantum of E4M3's subnormals is 2^-9, of E5M2's 2^-16; half a quantum is a tie and goes to zero."""
    assert decode(np.array([1, 7, 8], np.uint8), "e4m3").tolist() == [2.0**-9, 0.013671875, 2.0**-6]
    assert decode(np.array([1, 3, 4], np.uint8), "e5m2").tolist() == [2.0**-16, 3 * 2.0**-16, 2.0**-14]
    points = np.array([2.0**-9, 2.0**-10, 1.01 * 2.0**-10, 3 * 2.0**-10, 2.0**-6])
    assert encode(points, "e4m3").tolist() == [1, 0, 1, 2, 8]
    assert encode(-points, "e4m3").tolist() == [0x81, 0x80, 0x81, 0x82, 0x88]
    assert encode([2.0**-16, 2.0**-17, 1.01 * 2.0**-17, 3 * 2.0**-17], "e5m2").tolist() == [1, 0, 1, 2]
    assert round_to_format(points, "e4m3").tolist() == [2.0**-9, 0.0, 2.0**-9, 2.0**-8, 2.0**-6]


@pytest.mark.parametrize("name", ORACLE)
def test_rounding_of_every_bfloat16_equals_a_search_for_the_nearest(name: str) -> None:
    values = all_bfloat16()
    rounded = round_to_format(values, name)
    np.testing.assert_array_equal(rounded, nearest_by_search(values, name))
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(values))
    np.testing.assert_array_equal(decode(encode(values, name), name), rounded)


@pytest.mark.parametrize("name", ORACLE)
def test_ties_go_to_the_even_code(name: str) -> None:
    grid = oracle_values(name)[: 0x7F if name == "e4m3" else 0x7C]
    midpoints = (grid[1:] + grid[:-1]) / 2
    assert (encode(midpoints, name) % 2 == 0).all()
    above, below = np.nextafter(midpoints, np.inf), np.nextafter(midpoints, 0)
    np.testing.assert_array_equal(round_to_format(above, name), grid[1:])
    np.testing.assert_array_equal(round_to_format(below, name), grid[:-1])


@pytest.mark.parametrize("name", ORACLE)
def test_random_values_in_range_equal_the_cast_of_ml_dtypes(name: str) -> None:
    rng = np.random.default_rng(7)
    limit = get_format(name).max
    values = np.clip(rng.standard_normal(200_000) * np.exp2(rng.integers(-20, 16, 200_000)), -limit, limit)
    values = values.astype(np.float32)
    np.testing.assert_array_equal(encode(values, name), values.astype(ORACLE[name]).view(np.uint8))


@pytest.mark.parametrize("name", ORACLE)
def test_nan_and_inf_become_the_nan_code_and_keep_their_sign(name: str) -> None:
    codes = encode([np.nan, np.inf, -np.inf], name)
    assert codes.tolist() == [0x7F, 0x7F, 0xFF]
    assert np.isnan(decode(codes, name)).all()


def test_values_beyond_the_maximum_are_clamped() -> None:
    assert round_to_format([449, 464, 1e9, -1e300], E4M3).tolist() == [448, 448, 448, -448]
    assert round_to_format([61440, -1e300], E5M2).tolist() == [57344, -57344]


@pytest.mark.parametrize(
    ("fmt", "kept", "lost"), [(E4M3, 464.0, 464.00003), (E5M2, 61439.996, 61440.0), (INT8, 127.49999, 127.5)]
)
def test_saturation_begins_where_rounding_without_the_clamp_would_pass_the_maximum(
    fmt: Format, kept: float, lost: float
) -> None:
    ratios = np.array([kept, -kept, lost, -lost, fmt.max])
    assert fmt.saturates(ratios).tolist() == [False, False, True, True, False]
    if fmt.name in ORACLE:
        # ml_dtypes does not clamp: past the edge E4M3 gives NaN, E5M2 gives Inf.
        unclamped = np.array([kept, lost], dtype=np.float32).astype(ORACLE[fmt.name]).astype(np.float64)
        assert np.isfinite(unclamped).tolist() == [True, False]


def test_int8_is_the_uniform_grid_of_the_seed() -> None:
    values = np.random.default_rng(3).uniform(-140, 140, 1000)
    np.testing.assert_array_equal(round_to_format(values, INT8), np.clip(np.rint(values), -127, 127))
    np.testing.assert_array_equal(decode(encode(values, INT8), INT8), round_to_format(values, INT8))
    with pytest.raises(formats.ScaleError, match="int8 has no code"):
        encode([np.nan], INT8)


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(formats.UnknownFormatError, match=r"'e3m4'.*e4m3, e5m2, int8"):
        get_format("e3m4")
    assert get_format(E4M3) is E4M3


def exact_float32(value: Fraction) -> float:
    """Nearest float32 of a positive fraction, ties to even, without any floating-point division."""
    exponent = -149
    while value / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    scaled = value / Fraction(2) ** exponent
    return float(round(scaled) * Fraction(2) ** exponent)


positive_float32 = st.floats(2.0**-149, float(np.finfo(np.float32).max), width=32, allow_subnormal=True)
fp8_formats = st.sampled_from([E4M3, E5M2])


@given(positive_float32, fp8_formats)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_fp32_scale_is_the_correctly_rounded_quotient(amax: float, fmt: Format) -> None:
    expected = max(exact_float32(Fraction(amax) / Fraction(fmt.max)), 2.0**-149)
    scale = block_scale(amax, fmt)
    assert scale.dtype == np.float32
    assert float(scale) == expected


@given(positive_float32, fp8_formats)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_pow2_scale_is_the_smallest_power_of_two_that_holds_amax(amax: float, fmt: Format) -> None:
    scale = Fraction(float(block_scale(amax, fmt, "pow2")))
    ratio = Fraction(amax) / Fraction(fmt.max)
    assert scale.numerator == 1 or scale.denominator == 1
    assert bin(scale.numerator).count("1") == 1
    assert scale >= ratio
    assert scale == Fraction(2) ** -149 or scale / 2 < ratio


@pytest.mark.parametrize("exponent", [-149, -140, -126, -10, 0, 1, 100, 127])
def test_pow2_scale_of_e4m3_turns_at_a_mantissa_of_1_75(exponent: int) -> None:
    at = float(np.float32(1.75) * np.float64(2.0) ** exponent) if exponent > -147 else 2.0**exponent
    assert float(block_scale(at, E4M3, "pow2")) == max(2.0 ** (exponent - 8), 2.0**-149)
    if exponent > -126:
        above = np.nextafter(np.float32(at), np.float32(np.inf))
        assert float(block_scale(above, E4M3, "pow2")) == max(2.0 ** (exponent - 7), 2.0**-149)


@pytest.mark.parametrize("amax", [2.0**-149, 3e-44, 1e-43, 2.9e-43, 1e-40, 1e-38, 1e-30, 2.2e-10])
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
def test_b28_no_floor_eats_a_small_block(amax: float, kind: str) -> None:
    """The element at amax survives in every block, however small; an amax floor of 1e-4 would flush all of these."""
    amax = np.float32(amax)
    ratio = amax / block_scale(amax, E4M3, kind)
    assert abs(round_to_format(ratio, E4M3)) >= 1


def test_b26_a_block_without_values_has_scale_one_whatever_the_multiplier() -> None:
    for kind in ("fp32", "pow2"):
        assert block_scale([0.0, 0.0], E4M3, kind, 2.0**-6).tolist() == [1.0, 1.0]


def test_multiplier_is_exact_and_floored() -> None:
    scale = block_scale([448.0, 2.0**-149, 448.0 * 2.0**-148], E4M3, "fp32", 2.0**-2)
    assert scale.tolist() == [0.25, 2.0**-149, 2.0**-149]
    assert block_scale(448.0, E4M3, "pow2", 8.0) == 8.0
    assert np.isfinite(block_scale(3e38, E4M3, "fp32", 2.0**100))


@pytest.mark.parametrize("multiplier", [0.0, -1.0, 3.0, np.nan, np.inf, 2.0**-140])
def test_multiplier_must_be_a_power_of_two(multiplier: float) -> None:
    with pytest.raises(formats.ScaleError, match="power of two"):
        block_scale(1.0, E4M3, "fp32", multiplier)


def test_an_unknown_scale_kind_names_the_known_ones() -> None:
    with pytest.raises(formats.ScaleError, match=r"'e8m0'.*fp32 or pow2"):
        block_scale(1.0, E4M3, "e8m0")
