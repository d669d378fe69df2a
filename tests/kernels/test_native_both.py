"""Row and col blocks measured in one go, against their float64 definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels import layout_stats, native
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH, measure

SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
EXACT = [index for index in range(VECTOR_LENGTH) if index not in SUMS]
FLOAT32_TOLERANCE = 1e-7
"""Sums in a block are float32, and one block can have nearly all of a tensor's; those of many are far nearer."""

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")


@pytest.fixture(params=range(1, len(native.INSTRUCTION_SETS)), ids=native.INSTRUCTION_SETS[1:])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    if request.param > native.level():
        pytest.skip("not on this processor")
    monkeypatch.setattr(native, "level", lambda: request.param)
    monkeypatch.setattr(native, "WIDE_SUMS_ELEMENTS", 0)
    return int(request.param)


def assert_defined(x: torch.Tensor, **options: Any) -> None:
    """As `monitor.stats.measure` defines both layouts: counts, amax and histogram exactly."""
    ours, wide = layout_stats(x, **options).numpy(), x.float().numpy()
    for vector, layout in zip(ours, ("row", "col"), strict=True):
        wanted = measure(wide, layout=layout, **options).to_vector()
        np.testing.assert_array_equal(vector[EXACT], wanted[EXACT], err_msg=layout)
        np.testing.assert_allclose(vector[SUMS], wanted[SUMS], rtol=FLOAT32_TOLERANCE, atol=0, err_msg=layout)


def cauchy(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Heavy tails: every cell has elements that become zero."""
    return torch.randn(shape, generator=generator) / torch.randn(shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "exponent"),
    [
        ((300, 700), 0),
        ((1, 640), 0),
        ((257, 33), 0),
        ((130, 64), -14),
        ((130, 200), -40),
        ((130, 200), -95),
        ((130, 200), 60),
    ],
)
def test_they_are_the_definition(
    level: int, shape: tuple[int, int], exponent: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator) * 2.0**exponent
    assert_defined(x.to(dtype))
    assert_defined(x.to(dtype), fmt="e5m2", scale="pow2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("multiplier", [1.0, 0.25, 2.0**12])
def test_elements_that_become_zero_are_counted(
    level: int, dtype: torch.dtype, multiplier: float, generator: torch.Generator
) -> None:
    x = cauchy((256, 384), generator)
    x[5], x[:, 70] = 0.0, 0.0
    x[130] *= 2.0**-30
    assert_defined(x.to(dtype), multiplier=multiplier)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cells_that_need_care_lie_beside_those_that_do_not(
    level: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """NaN, Inf, numbers beyond any unit and blocks far smaller than their neighbours, each in a cell of its own."""
    x = torch.randn(256, 640, generator=generator)
    x[3, 5], x[7, 130], x[9, 131] = float("nan"), float("inf"), -float("inf")
    x[128:, :128] *= 2.0**-120
    x[10, 256:384] *= 2.0**-60
    x[:128, 384:512] = 0.0
    assert_defined(x.to(dtype))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_bfloat16_ratio_is_rounded_as_division_says(
    level: int, fmt: str, generator: torch.Generator
) -> None:
    """All significands over many of a block's maximum: ties, and what lies nearest to them."""
    significands = torch.arange(128, 256, dtype=torch.float32)
    below = torch.arange(0, -12, -1, dtype=torch.float32)
    for top in significands[::5]:
        x = significands[:, None] * 2.0 ** below[torch.randint(12, (128, 128), generator=generator)]
        x = torch.where(x > top, x / 2, x)
        x[:, 0], x[0] = top, top
        assert_defined(x.bfloat16(), fmt=fmt)
