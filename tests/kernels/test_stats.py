"""tensor_stats against the float64 definition and against counts made by hand."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels import OffsetsError, native, quantize, tensor_stats
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.stats import merge_stats
from fp8_safeguard.monitor.stats import COLUMNS, VECTOR_LENGTH, TensorStats, measure

LAYOUTS = ("row", "col", "tile")
Defined = Callable[..., Any]
SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
EXACT = [index for index in range(VECTOR_LENGTH) if index not in SUMS]

SUM_TOLERANCE = 1e-12
"""Both sides add non-negative float64 terms that are themselves exact, in different orders. Ours: at most
128 x 128 / 8 additions a block and ceil(C / 128) blocks a stripe, stripes by two-sum; so under (2048 + C / 128) x
2^-53, 2.3e-13 for any C up to 4096. The other side is numpy's pairwise sum."""


def assert_equal_stats(ours: torch.Tensor, expected: Any) -> None:
    """Counts, amax and histogram exactly, sums within SUM_TOLERANCE."""
    assert ours.dtype == torch.float64
    np.testing.assert_array_equal(ours.numpy()[EXACT], np.asarray(expected)[EXACT])
    np.testing.assert_allclose(ours.numpy()[SUMS], np.asarray(expected)[SUMS], rtol=SUM_TOLERANCE, atol=0)


def named(vector: torch.Tensor) -> TensorStats:
    return TensorStats.from_vector(vector.numpy())


def both(
    x: torch.Tensor,
    implementation: Any,
    layout: str,
    fmt: str = "e4m3",
    scale: str = "fp32",
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Stats of a matrix by one implementation."""
    vectors = implementation.stats_of_rows(x, [0, x.shape[0]], layout, get_format(fmt), scale, multiplier)
    return vectors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (7,), (129, 257), (300, 850), (3, 130, 70), (2, 2, 5, 140), (128, 128), (256, 1), (1, 2048)],
)
def test_any_shape_and_dtype(
    shape: Any, layout: str, dtype: torch.dtype, generator: torch.Generator, defined: Defined
) -> None:
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    assert_equal_stats(tensor_stats(x, layout=layout), defined(x, layout))


@pytest.mark.parametrize(
    "options",
    [{"scale": "fp32"}, {"scale": "pow2"}, {"multiplier": 2.0**-3}, {"scale": "pow2", "multiplier": 2.0**6}],
)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_on_wide_data(
    log_gaussian: Any, layout: str, fmt: str, options: Any, implementation: Any, defined: Defined
) -> None:
    x = log_gaussian[:300].clone()
    x[3:9] = 0
    x[20, 100:300] = 0
    x[100, 5], x[100, 6], x[200, 200], x[131, 0] = float("nan"), float("inf"), -float("inf"), float("nan")
    x[250] *= 1e-8
    assert_equal_stats(
        both(x, implementation, layout, fmt, **options), defined(x, layout, fmt=fmt, **options)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bfloat16_value_and_random_bits(
    bfloat16_values: Any, random_bits: Any, layout: str, implementation: Any, defined: Defined
) -> None:
    for x in (bfloat16_values, random_bits[:1024], random_bits[-1024:]):
        assert_equal_stats(both(x, implementation, layout), defined(x, layout))


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 3e-43, 1e30])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_tiny_and_huge_tensors_keep_their_ratios(
    scale: float, layout: str, generator: torch.Generator, implementation: Any, defined: Defined
) -> None:
    """A gradient near 1e-30 has sums near 1e-60, which float32 cannot hold; ratios must not notice."""
    x = (torch.randn(200, 300, generator=generator, dtype=torch.float64) * scale).float()
    assert_equal_stats(both(x, implementation, layout), defined(x, layout))
    if scale == 1e-30:
        power = 2.0**-100
        scaled = torch.randn(200, 300, generator=generator)
        small, plain = both(scaled * power, implementation, layout), both(scaled, implementation, layout)
        ratios = small[SUMS] / plain[SUMS]
        assert ratios.tolist() == [power**2, power**2, power**2, power**4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", range(len(native.INSTRUCTION_SETS)))
def test_native_sums_of_large_tensors_are_near_and_their_counts_exact(
    level: int,
    layout: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
    defined: Defined,
) -> None:
    """Above WIDE_SUMS_ELEMENTS a block's sums are float32: every tensor is taken for a large one here."""
    if level > native.level():
        pytest.skip(f"this processor has no {native.INSTRUCTION_SETS[level]}")
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "WIDE_SUMS_ELEMENTS", 0)
    for power in (1.0, 2.0**-100, 2.0**60):
        x = (torch.randn(300, 1100, generator=generator) * power).to(dtype)
        x[3], x[5, 7], x[200, 900] = 0, float("nan"), -float("inf")
        ours, wanted = both(x, native, layout).numpy(), np.asarray(defined(x, layout))
        np.testing.assert_array_equal(ours[: SUMS[0]], wanted[: SUMS[0]])
        np.testing.assert_allclose(ours[SUMS], wanted[SUMS], rtol=3e-7, atol=0)
        # A block within the float32 error of an edge may fall on its other side.
        bins, wanted_bins = ours[SUMS[-1] + 1 :], wanted[SUMS[-1] + 1 :]
        assert bins.sum() == wanted_bins.sum()
        assert np.abs(bins - wanted_bins).sum() <= 2


def test_counts_by_hand(implementation: Any) -> None:
    """One block at scale 1 with one of everything."""
    x = torch.tensor([[448.0, 2.0**-10, -(2.0**-11), 0.0, -0.0, float("nan"), float("inf"), 2.0**-9, 1.0]])
    stats = named(both(x, implementation, "row"))
    assert stats.count == 9
    assert stats.zeros == 4
    assert stats.underflow == 2
    assert (stats.nan, stats.inf, stats.saturated) == (1, 1, 0)
    assert (stats.rows, stats.rows_flushed) == (1, 0)
    assert stats.amax == 448.0
    assert stats.sum_sq_err == 2.0**-20 + 2.0**-22
    assert stats.sum_sq_q == 448.0**2 + 2.0**-18 + 1.0


def test_saturation_counts_what_the_clamp_changed_and_not_448(implementation: Any) -> None:
    """At scale 1/2 ratios are doubled: 464 itself rounds to 448, beyond it the clamp acts."""
    x = torch.tensor([[448.0, 232.0, 232.5, 224.0, -240.0, 1.0]])
    assert named(both(x, implementation, "row", multiplier=0.5)).saturated == 3
    healthy = torch.randn(512, 512, generator=torch.Generator().manual_seed(3))
    for layout in LAYOUTS:
        assert named(both(healthy, implementation, layout)).saturated == 0
    edge = torch.tensor([[57344.0, 30720.0, 30719.9]])
    assert named(both(edge, implementation, "row", "e5m2", multiplier=0.5)).saturated == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flushed_rows_are_non_zero_rows_that_went_to_zero(layout: str, implementation: Any) -> None:
    x = torch.zeros(128, 256)
    x[0] = 448.0  # keeps the scale at 1 in col and tile
    x[1] = 2.0**-12
    x[2, 0] = 2.0**-12
    x[4], x[5] = 2.0**-12, 2.0**-12
    x[5, 9] = float("nan")  # a NaN is not a zero, so this row is not flushed
    stats = named(both(x, implementation, layout))
    assert stats.rows == 128
    assert stats.rows_flushed == (0 if layout == "row" else 3)


def test_histogram_has_flushed_blocks_at_zero_db_and_lossless_ones_last(implementation: Any) -> None:
    x = torch.zeros(4, 128)
    x[0, :3] = torch.tensor([448.0, 8.0, 1.0])  # lossless
    x[1] = 2.0**-149
    x[2, 0] = 1.0
    stats = named(both(x, implementation, "row", multiplier=2.0**12))
    assert stats.histogram is not None
    assert stats.histogram[0] == 0
    assert sum(stats.histogram) == 3
    assert stats.histogram[1] >= 1
    assert named(both(x, implementation, "row")).histogram[-1] == 3


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b26_zero_blocks_add_zeros_and_no_underflow(
    layout: str, fmt: str, generator: torch.Generator, implementation: Any, brute: Callable[..., Any]
) -> None:
    """Underflow is counted element by element in the codes of ml_dtypes; zero blocks have none."""
    x = torch.randn(256, 256, generator=generator) * torch.exp(6 * torch.randn(256, 256, generator=generator))
    holes = torch.zeros(256, 256, dtype=torch.bool)
    holes[5] = holes[0, 128:] = holes[128:, 128:] = holes[128:, 7] = True
    x = torch.where(holes, 0.0, x)
    codes, _ = brute(x.numpy(), layout, fmt)
    lost = int(((codes & 0x7F == 0) & (x.numpy() != 0)).sum())
    stats = named(both(x, implementation, layout, fmt))
    assert (stats.underflow, stats.zeros) == (lost, lost + int(holes.sum()))
    assert lost > 0
    assert (stats.nan, stats.inf, stats.count) == (0, 0, x.numel())
    assert all(math.isfinite(stats.metric(name)) for name in ("cosine", "relative_error", "sqnr_db"))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b26_a_zero_block_alone_has_rate_zero_and_no_quality(
    layout: str, fmt: str, implementation: Any
) -> None:
    stats = named(both(torch.zeros(128, 256), implementation, layout, fmt))
    assert (stats.zero_ratio, stats.underflow_ratio, stats.rows_flushed) == (1.0, 0.0, 0)
    assert (stats.amax, stats.sum_sq, stats.sum_sq_q, stats.sum_sq_err) == (0.0, 0.0, 0.0, 0.0)
    assert (stats.cosine, stats.sqnr_db, stats.relative_error) == (None, None, None)
    assert stats.histogram is not None
    assert sum(stats.histogram) == 0


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b28_a_block_of_small_gradients_does_not_underflow(
    layout: str, fmt: str, scale: str, implementation: Any
) -> None:
    x = (torch.arange(1, 9, dtype=torch.float64) / 8 * 1e-9).float()
    x = x[None] if layout == "row" else x[:, None]
    stats = named(both(x, implementation, layout, fmt, scale))
    assert (stats.count, stats.zeros, stats.underflow, stats.saturated) == (8, 0, 0, 0)
    assert stats.amax == float(np.float32(1e-9))
    assert stats.relative_error <= {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt]


@pytest.mark.parametrize(
    ("fmt", "values", "lost"),
    [
        ("e4m3", [448.0, 2.0**-9, 2.0**-10, 2.0**-10 * 1.01, 3 * 2.0**-10, 7 * 2.0**-9, 0.0], [2.0**-10]),
        ("e5m2", [57344.0, 2.0**-16, 2.0**-17, 2.0**-17 * 1.01, 3 * 2.0**-17, 0.0, 0.0], [2.0**-17]),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_b44_only_what_becomes_zero_is_underflow_and_subnormals_are_not(
    fmt: str, values: Any, lost: Any, sign: float, implementation: Any
) -> None:
    line = torch.tensor(values, dtype=torch.float32) * sign
    for layout, x in (("row", line[None]), ("col", line[:, None]), ("tile", line[None])):
        stats = named(both(x, implementation, layout, fmt))
        assert stats.underflow == len(lost)
        assert stats.zeros == len(lost) + values.count(0.0)
        assert stats.saturated == 0


def test_b20_empty_tensors_have_zero_everywhere() -> None:
    for shape in ((0, 16), (4, 0), (0,), (3, 0, 2)):
        for layout in LAYOUTS:
            vector = tensor_stats(torch.empty(shape), layout=layout)
            np.testing.assert_array_equal(
                vector.numpy(), measure(np.zeros(shape, np.float32), layout=layout).to_vector()
            )


def test_b25_float8_input_is_measured_by_the_values_it_holds() -> None:
    x = torch.tensor([0x00, 0x7E, 0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
    stats = named(tensor_stats(x))
    assert (stats.count, stats.nan, stats.inf, stats.zeros, stats.amax) == (4, 2, 0, 1, 448.0)
    wide = torch.tensor([0x7C, 0x7D, 0xFC, 0x01], dtype=torch.uint8).view(torch.float8_e5m2)
    stats = named(tensor_stats(wide))
    assert (stats.count, stats.nan, stats.inf, stats.amax) == (4, 1, 2, 2.0**-16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b33_views_are_measured_like_their_copies(
    layout: str, dtype: torch.dtype, generator: torch.Generator, defined: Defined
) -> None:
    x = torch.randn(256, 300, generator=generator).to(dtype)
    images = x[:, :256].reshape(16, 16, 16, 16).contiguous(memory_format=torch.channels_last)
    views = (x.t(), x[:, ::2], x[::3, 1:129], x[3].expand(130, 300), x[:, :1].expand(256, 140))
    for view in (*views, images, images.transpose(0, 3), x[:, 5]):
        assert_equal_stats(tensor_stats(view, layout=layout), defined(view.contiguous(), layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b33_both_implementations_measure_views(
    layout: str, generator: torch.Generator, implementation: Any, defined: Defined
) -> None:
    x = torch.randn(256, 300, generator=generator)
    for view in (x.t(), x[:, ::2], x[::3, 1:129], x[3].expand(130, 300)):
        assert_equal_stats(both(view, implementation, layout), defined(view.contiguous(), layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_equal_measuring_experts_apart(
    layout: str, generator: torch.Generator, implementation: Any, defined: Defined
) -> None:
    counts = [0, 130, 1, 0, 256, 77]
    offsets = [0, *np.cumsum(counts).tolist()]
    x = torch.randn(500, 200, generator=generator).bfloat16()  # 36 rows of padding behind the last expert
    vectors = implementation.stats_of_rows(x, offsets, layout, get_format("e4m3"), "fp32", 1.0)
    assert vectors.shape == (6, VECTOR_LENGTH)
    for expert, (start, end) in enumerate(pairwise(offsets)):
        assert_equal_stats(vectors[expert], defined(x[start:end], layout))
    public = tensor_stats(x, layout=layout, offsets=torch.tensor(offsets, dtype=torch.int32))
    assert public.shape == vectors.shape
    merged = TensorStats.merge(named(vector) for vector in public).to_vector()
    assert_equal_stats(merge_stats(public), merged)


def test_merging_row_parts_equals_the_whole(log_gaussian: Any) -> None:
    """Rows are quantised by themselves, so any split of the rows gives the same statistics."""
    x = log_gaussian[:500]
    whole = tensor_stats(x)
    parts = torch.stack([tensor_stats(part) for part in x.split(170)])
    assert_equal_stats(merge_stats(parts), whole.numpy())


def test_stats_beside_quantize_describe_what_was_quantised(generator: torch.Generator) -> None:
    x = torch.randn(130, 200, generator=generator)
    for layout in LAYOUTS:
        quantized, stats = quantize(x, layout=layout, stats=True)
        restored = quantized.dequantize(torch.float64)
        assert named(stats).zeros == int((quantized.data.view(torch.uint8) & 0x7F == 0).sum())
        np.testing.assert_allclose(
            named(stats).sum_sq_err, (x.double() - restored).square().sum().item(), rtol=1e-12
        )


def test_offsets_are_checked() -> None:
    with pytest.raises(OffsetsError, match="end at most at 4"):
        tensor_stats(torch.ones(4, 4), offsets=torch.tensor([0, 5], dtype=torch.int32))


def test_no_sum_notices_the_order_of_a_million_rows(brute_scale: Callable[..., Any]) -> None:
    """Two-sum across stripes: a plain running sum over 200,000 rows would drift past the tolerance."""
    x = torch.full((200_000, 1), 0.1)
    vector = tensor_stats(x)
    exact = float(np.float32(0.1)) ** 2
    assert vector[SUMS[0]].item() == pytest.approx(200_000 * exact, rel=1e-14)
