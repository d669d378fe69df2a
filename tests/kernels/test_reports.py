"""Field reports on quantisers, through every implementation and instruction set."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.stats import merge_stats
from fp8_safeguard.monitor.stats import COLUMNS

LAYOUTS = ("row", "col", "tile")
NAN, INF, AMAX, COUNT, SATURATED = (
    COLUMNS.index(name) for name in ("nan", "inf", "amax", "count", "saturated")
)
E4M3 = (get_format("e4m3"), "fp32", 1.0)
Brute = Callable[..., tuple[Any, Any]]


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x whose rows are blocks, turned where blocks are columns."""
    return x.t().contiguous() if layout == "col" else x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b20_an_empty_shard_has_no_blocks_and_leaves_the_reduced_amax_alone(
    layout: str, implementation: Any
) -> None:
    """Three ranks, the first and the last without rows: amax 0 is the identity of the maximum over ranks."""
    x = torch.tensor([[1.0, -3.0, 0.5, 2.0]])
    codes, scales = implementation.quantize_rows(x, [0, 0, 1, 1], layout, *E4M3)
    alone, own_scales = implementation.quantize_rows(x, [0, 1], layout, *E4M3)
    assert torch.equal(codes.view(torch.uint8), alone.view(torch.uint8))
    assert torch.equal(scales, own_scales)
    shards = implementation.stats_of_rows(x, [0, 0, 1, 1], layout, *E4M3)
    assert not shards[[0, 2]].any()
    reduced = merge_stats(shards)
    assert (reduced[AMAX], reduced[COUNT]) == (3.0, 4)
    assert torch.isfinite(reduced).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_b29_a_nan_at_any_place_of_a_block_is_seen_and_leaves_its_scale_alone(
    layout: str, size: int, dtype: torch.dtype, implementation: Any
) -> None:
    """Block i has a NaN at place i and 1.0 elsewhere; every other one has its sign bit set."""
    places = torch.arange(size)
    x = torch.ones(size, size)
    x[places, places] = torch.where(places % 2 == 1, -float("nan"), float("nan"))
    x = in_layout(x, layout).to(dtype)
    codes, scales = implementation.quantize_rows(x, [0, size], layout, *E4M3)
    one = torch.tensor(1.0) / 448
    assert (scales.flatten() == one).all()
    values = in_layout(codes.float(), layout)
    assert torch.isnan(values).nonzero().tolist() == [[place, place] for place in range(size)]
    assert (values[~torch.eye(size, dtype=torch.bool)] == 448).all()
    whole = implementation.stats_of_rows(x, [0, size], layout, *E4M3)[0]
    assert (whole[NAN], whole[INF], whole[AMAX], whole[COUNT]) == (size, 0, 1.0, size * size)
    if layout == "row":
        alone = implementation.stats_of_rows(x, list(range(size + 1)), layout, *E4M3)
        assert (alone[:, NAN] == 1).all()
        assert (alone[:, AMAX] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b32_one_nan_and_one_inf_give_the_same_bytes_everywhere(
    layout: str, fmt: str, dtype: torch.dtype, implementation: Any, brute: Brute, generator: torch.Generator
) -> None:
    x = torch.randn(4, 256, generator=generator).to(dtype)
    x[1, 3], x[2, 200] = float("nan"), -float("inf")
    options = (layout, get_format(fmt), "fp32", 1.0)
    codes, scales = implementation.quantize_rows(x, [0, 4], *options)
    expected, expected_scales = brute(x.float().numpy(), layout, fmt)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected)
    assert np.isin(expected_scales, scales.numpy()).all()
    assert codes.view(torch.uint8)[1, 3] & 0x7F == 0x7F
    assert codes.view(torch.uint8)[2, 200] == 0xFF
    vector = implementation.stats_of_rows(x, [0, 4], *options)[0]
    assert (vector[NAN], vector[INF], vector[SATURATED]) == (1, 1, 0)
    assert vector[AMAX] == x[torch.isfinite(x)].abs().max().item()


@pytest.mark.parametrize("counts", [[64, 64, 64, 64], [192, 192], [384, 64, 64]])
@pytest.mark.parametrize("layout", ["col", "tile"])
def test_b36_shards_smaller_than_a_block_have_scales_of_their_own(
    layout: str, counts: list[int], implementation: Any
) -> None:
    """Shard i holds 10^i: its row blocks start at its first row and no shard writes another's."""
    bounds = [0, *np.cumsum(counts).tolist()]
    values = 10.0 ** torch.arange(len(counts))
    x = values.repeat_interleave(torch.tensor(counts))[:, None].expand(-1, 130)
    codes, scales = implementation.quantize_rows(x, bounds, layout, *E4M3)
    blocks = torch.tensor([-(-count // 128) for count in counts])
    assert scales.shape[0] == int(blocks.sum())
    wanted = (values / 448).repeat_interleave(blocks)[:, None]
    assert torch.equal(scales, wanted.expand_as(scales))
    assert (codes.float() == 448).all()
    vectors = implementation.stats_of_rows(x, bounds, layout, *E4M3)
    assert vectors[:, AMAX].tolist() == values.tolist()
    assert vectors[:, COUNT].tolist() == [130.0 * count for count in counts]


@pytest.mark.parametrize("stale", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b42_stale_rows_of_a_buffer_decide_nothing(
    layout: str, stale: float, implementation: Any, generator: torch.Generator
) -> None:
    """16 rows, 5 of them valid with amax 2: the others may hold anything."""
    x = torch.full((16, 128), stale)
    x[:5] = torch.rand(5, 128, generator=generator) * 2
    x[2, 7] = -2.0
    codes, scales = implementation.quantize_rows(x, [0, 5], layout, *E4M3)
    alone, own_scales = implementation.quantize_rows(x[:5].clone(), [0, 5], layout, *E4M3)
    assert torch.equal(codes[:5].view(torch.uint8), alone.view(torch.uint8))
    held = own_scales.shape[0]
    assert torch.equal(scales[:held], own_scales)
    vector = implementation.stats_of_rows(x, [0, 5], layout, *E4M3)[0]
    assert (vector[AMAX], vector[COUNT], vector[NAN], vector[INF]) == (2.0, 5 * 128, 0, 0)
    assert vector[SATURATED] == 0
    restored = implementation.round_trip_rows(x, [0, 5], layout, *E4M3)[:5]
    assert torch.equal(restored, implementation.round_trip_rows(x[:5].clone(), [0, 5], layout, *E4M3))


@pytest.mark.parametrize("layout", ["col", "tile"])
def test_b35_experts_of_192_rows_share_no_block(layout: str, implementation: Any) -> None:
    """1.0 and 1000.0: cut as one matrix of 384 rows, the second of three row blocks would hold both."""
    x = torch.tensor([1.0, 1000.0]).repeat_interleave(192)[:, None].expand(-1, 128)
    _, scales = implementation.quantize_rows(x, [0, 192, 384], layout, *E4M3)
    amax = scales * 448
    for (first, last), value in zip(pairwise((0, 2, 4)), (1.0, 1000.0), strict=True):
        torch.testing.assert_close(amax[first:last], torch.full_like(amax[first:last], value))
    whole = implementation.quantize_rows(x, [0, 384], layout, *E4M3)[1] * 448
    torch.testing.assert_close(whole[:, 0], torch.tensor([1.0, 1000.0, 1000.0]))
