"""layout_stats: the row and col statistics of tensor_stats, from one read."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels import (
    OffsetsError,
    OperandError,
    UnknownOptionError,
    layout_stats,
    native,
    stats,
    tensor_stats,
)
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH, TensorStats, measure

SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
EXACT = [index for index in range(VECTOR_LENGTH) if index not in SUMS]
SUM_TOLERANCE = 1e-12
"""float64 sums of the same exact terms, in different orders (test_stats.py says how many)."""

FLOAT32_TOLERANCE = 1e-7
"""Of large tensors, whose sums in a block are float32 (native.WIDE_SUMS_ELEMENTS)."""


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch, implementation: Any) -> Any:
    """Each implementation in turn behind the public function."""
    monkeypatch.setattr(stats, "implementation", lambda x: implementation)
    return implementation


def assert_same(ours: torch.Tensor, wanted: Any, tolerance: float = SUM_TOLERANCE) -> None:
    """Counts, amax and histogram exactly, sums to float64 rounding."""
    assert ours.dtype == torch.float64
    wanted = np.asarray(wanted)
    np.testing.assert_array_equal(ours.numpy()[..., EXACT], wanted[..., EXACT])
    np.testing.assert_allclose(ours.numpy()[..., SUMS], wanted[..., SUMS], rtol=tolerance, atol=0)


def defined_pair(x: torch.Tensor, **options: Any) -> Any:
    """Both layouts by the float64 definition."""
    wide = x.float().numpy()
    return np.stack([measure(wide, layout=layout, **options).to_vector() for layout in ("row", "col")])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7,), (129, 257), (3, 130, 70), (256, 1), (0, 16), (4, 0)])
def test_both_layouts_are_the_definition(
    shape: Any, dtype: torch.dtype, generator: torch.Generator, everywhere: Any
) -> None:
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    assert_same(layout_stats(x), defined_pair(x))


@pytest.mark.parametrize("options", [{"fmt": "e5m2", "scale": "pow2"}, {"multiplier": 2.0**-6}])
def test_options_and_values_that_are_not_finite(
    log_gaussian: Any, options: dict[str, Any], everywhere: Any
) -> None:
    x = log_gaussian[:260, :300].clone()
    x[3:9], x[100, 5], x[100, 6], x[200, 200] = 0, float("nan"), float("inf"), -float("inf")
    x[250] *= 1e-8
    assert_same(layout_stats(x, **options), defined_pair(x, **options))


def test_offsets_give_each_expert_its_own_pair(generator: torch.Generator, everywhere: Any) -> None:
    x = torch.randn(500, 200, generator=generator).bfloat16()  # 36 rows of padding behind the last expert
    firsts = [0, 0, 130, 131, 131, 464]
    offsets = torch.tensor(firsts, dtype=torch.int32)
    pair = layout_stats(x, offsets=offsets)
    assert pair.shape == (2, 5, VECTOR_LENGTH)
    for expert, (start, end) in enumerate(pairwise(firsts)):
        assert_same(pair[:, expert], defined_pair(x[start:end]))


def test_views_are_measured_like_their_copies(generator: torch.Generator, everywhere: Any) -> None:
    x = torch.randn(256, 300, generator=generator)
    for view in (x.t(), x[:, ::2], x[::3, 1:129], x[3].expand(130, 300), x.bfloat16().t()):
        assert_same(layout_stats(view), defined_pair(view.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("level", range(len(native.INSTRUCTION_SETS)))
def test_large_tensors_agree_with_two_calls(
    level: int, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in a block are float32, and of both layouts at once in another order."""
    if level > native.level():
        pytest.skip(f"this processor has no {native.INSTRUCTION_SETS[level]}")
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "WIDE_SUMS_ELEMENTS", 0)
    x = torch.randn(300, 1100, generator=generator).to(dtype)
    two = torch.stack([tensor_stats(x, layout=layout) for layout in ("row", "col")])
    assert_same(layout_stats(x), two, FLOAT32_TOLERANCE)


def test_x_is_read_once(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    runs: list[Any] = []
    run = native._Call.run
    monkeypatch.setattr(stats, "implementation", lambda x: native)

    def counted(call: Any) -> None:
        runs.append(call)
        run(call)

    monkeypatch.setattr(native._Call, "run", counted)
    layout_stats(torch.randn(4, 300, 200, generator=generator))
    assert len(runs) == 1


def test_it_refuses_what_tensor_stats_refuses() -> None:
    with pytest.raises(OffsetsError, match="end at most at 4"):
        layout_stats(torch.ones(4, 4), offsets=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(OperandError, match="int64"):
        layout_stats(torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(UnknownOptionError, match="e4m4"):
        layout_stats(torch.ones(4, 4), fmt="e4m4")


def test_b25_float8_tensors_are_measured_on_every_path(everywhere: Any) -> None:
    """torch has no isinf or isfinite for them."""
    bytes_of = {
        torch.float8_e4m3fn: ([0x00, 0x7E, 0x7F, 0xFF], (2, 0, 448.0)),
        torch.float8_e5m2: ([0x7C, 0x7D, 0x3C, 0xBC], (1, 1, 1.0)),
    }
    for dtype, (codes, found) in bytes_of.items():
        x = torch.tensor(codes, dtype=torch.uint8).view(dtype)[None]
        for vector in (tensor_stats(x), tensor_stats(x, layout="tile"), *layout_stats(x)):
            measured = TensorStats.from_vector(vector.numpy())
            assert (measured.nan, measured.inf, measured.amax) == found
            assert measured.count == 4


def test_b25_the_implementations_take_the_values_that_float8_holds(implementation: Any) -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = every.view(dtype)
        for layout in ("row", "col", "tile"):
            options = layout, get_format("e4m3"), "fp32", 1.0
            ours = implementation.stats_of_rows(x, [0, 2], *options)[0]
            assert_same(ours, measure(x.float().numpy(), layout=layout).to_vector())
