"""LogFMT-8 against a search over all 256 codes in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.logfmt import NAN_CODE, RANGE, logfmt8_encode

# The logarithms of a tile are kept in float32: below 2^8 an error of 2^-17, times ln 2.
LOGARITHM_TOLERANCE = 1.1e-5


def all_values(low: float, step: float) -> NDArray[np.float64]:
    """float64 [256]: what each code means; NaN for the one that is no number."""
    k = np.arange(1, 128, dtype=np.float64)
    magnitude = np.concatenate([[0.0], np.exp2(low + step * (k - 1))])
    return np.concatenate([magnitude, [np.nan], -magnitude[1:]])


def check_nearest(x: torch.Tensor) -> None:
    """Every code of x [C] is the nearest of all, and every tile's range is its own."""
    encoded = logfmt8_encode(x)
    for index, tile in enumerate(x.double().split(128)):
        values = all_values(float(encoded.low[index]), float(encoded.step[index]))
        codes = encoded.codes[index * 128 : index * 128 + len(tile)].tolist()
        magnitudes = [abs(v) for v in tile.tolist() if v != 0 and math.isfinite(v)]
        if magnitudes:
            high, low = math.log2(max(magnitudes)), math.log2(min(magnitudes))
            expected = max(low, high - RANGE)
            assert float(encoded.low[index]) == pytest.approx(expected, abs=LOGARITHM_TOLERANCE)
            top = float(encoded.low[index]) + 126 * float(encoded.step[index])
            assert top == pytest.approx(high, abs=2 * LOGARITHM_TOLERANCE)
        for value, code in zip(tile.tolist(), codes, strict=True):
            if not math.isfinite(value):
                assert code == NAN_CODE
                continue
            assert code != NAN_CODE
            distance = np.abs(values - value)
            best = np.nanmin(distance)
            # Two neighbours may be as near as float64 can tell.
            assert distance[code] <= best + 1e-14 * abs(value)
            assert (code == 0) == (value == 0 or abs(value) <= values[1] / 2)
            assert (code & 0x80 != 0) == (value < 0 and code != 0)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_code_is_the_nearest_in_linear_space(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    spread = data.draw(st.sampled_from([0.0, 0.01, 1.0, 8.0, 30.0, 80.0]))
    centre = data.draw(st.sampled_from([-100.0, 0.0, 40.0]))
    length = data.draw(st.integers(1, 300))
    generator = torch.Generator().manual_seed(seed)
    logs = (centre + spread * (torch.rand(length, generator=generator, dtype=torch.float64) - 0.5)).exp2()
    sign = torch.randint(-1, 2, (length,), generator=generator)
    check_nearest((logs * sign).float())


def test_all_bfloat16_values(bfloat16_values: torch.Tensor) -> None:
    # Sorted by magnitude, 128 neighbours share a tile; every seventh row keeps the search short.
    check_nearest(bfloat16_values[::7].flatten())
    decoded = logfmt8_encode(bfloat16_values).decode(torch.float64)
    finite = torch.isfinite(bfloat16_values)
    assert torch.equal(torch.isnan(decoded), ~finite)
    error = (decoded - bfloat16_values.double()).abs()[finite]
    assert torch.all(error <= 0.1 * bfloat16_values.double().abs()[finite])


@pytest.mark.parametrize("edge", [0.0, -0.0, 1e-45, 3.4e38, 2.0**-149, 1.5])
def test_tiles_of_one_magnitude(edge: float) -> None:
    x = torch.tensor([edge, -edge, 0.0])
    encoded = logfmt8_encode(x)
    check_nearest(x)
    decoded = encoded.decode()
    assert torch.isfinite(decoded).all()
    assert decoded.tolist() == pytest.approx(x.tolist(), rel=LOGARITHM_TOLERANCE * 8)
    positive, negative, zero = encoded.codes.tolist()
    assert (zero, negative) == (0, positive + 0x80 if edge else 0)


def test_what_lies_32_binades_below_is_rounded_like_anything_else() -> None:
    low = 2.0**-32
    x = torch.tensor([1.0, low, 0.6 * low, 0.5 * low, 0.4 * low, 1e-30, -0.6 * low, -0.4 * low])
    assert logfmt8_encode(x).codes.tolist() == [127, 1, 1, 0, 0, 0, 0x81, 0]


def test_nan_and_infinity_take_a_code_of_their_own_and_leave_the_range_alone() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -math.nan, 2.0, -1.0, 0.0])
    encoded, clean = logfmt8_encode(x), logfmt8_encode(x[4:])
    assert encoded.codes.tolist() == [NAN_CODE] * 4 + clean.codes.tolist()
    assert (encoded.low.item(), encoded.step.item()) == (clean.low.item(), clean.step.item())
    decoded = encoded.decode()
    assert torch.isnan(decoded[:4]).all()
    assert decoded[4:].tolist() == pytest.approx([2.0, -1.0, 0.0], rel=LOGARITHM_TOLERANCE)
    lost = logfmt8_encode(torch.tensor([math.nan, math.inf]))
    assert lost.codes.tolist() == [NAN_CODE] * 2
    assert (lost.low.item(), lost.step.item()) == (0.0, 0.0)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 3, 129), (2, 256)])
def test_any_shape_and_stride(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded = logfmt8_encode(x)
    tiles = -(-shape[-1] // 128)
    assert encoded.codes.shape == shape
    assert encoded.low.shape == encoded.step.shape == (*shape[:-1], tiles)
    assert (encoded.codes.dtype, encoded.low.dtype, encoded.step.dtype) == (torch.uint8, *[torch.float32] * 2)
    rows = math.prod(shape[:-1])
    for row, codes in zip(x.view(rows, shape[-1]), encoded.codes.view(rows, shape[-1]), strict=True):
        assert torch.equal(logfmt8_encode(row).codes, codes)
    if len(shape) > 1:
        turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert torch.equal(logfmt8_encode(turned).codes, encoded.codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_decoding_rounds_once_and_stays_finite(dtype: torch.dtype) -> None:
    x = torch.tensor([3.4e38, -3.4e38, 1.0, 0.0])
    decoded = logfmt8_encode(x).decode(dtype)
    assert decoded.dtype == dtype
    assert torch.isfinite(decoded).all()
    ordinary = logfmt8_encode(torch.randn(64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(ordinary.decode(dtype), ordinary.decode(torch.float64).to(dtype))


def test_gaussian_noise_is_below_that_of_e4m3() -> None:
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(2))
    error = logfmt8_encode(x).decode() - x
    # E4M3 with a scale per 1x128 block: 2.57 %.
    assert 0.005 < float(error.norm() / x.norm()) < 0.0257


def test_integers_and_scalars_are_refused() -> None:
    with pytest.raises(OperandError, match="int64"):
        logfmt8_encode(torch.arange(3))
    with pytest.raises(OperandError, match="at least one dimension"):
        logfmt8_encode(torch.tensor(1.0))
