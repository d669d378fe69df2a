"""Quantisation and statistics in Triton equal the CPU's, bit for bit."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OperandError, UnknownOptionError, quantize, tensor_stats
from fp8_safeguard.kernels.triton_fused import quantize_layouts, reblock
from fp8_safeguard.kernels.triton_transpose import transpose_tiles
from fp8_safeguard.monitor.stats import COLUMNS

from .quantize_checks import assert_stats, check, same_bits


def every_bf16() -> torch.Tensor:
    """All 65,536 codes [256,256], neighbours in magnitude next to each other, NaN and Inf among them."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return values.reshape(256, 256)


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_every_bf16(blocks: str, fmt: str, scale: str) -> None:
    check(every_bf16(), blocks=blocks, fmt=fmt, scale=scale)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_finite_bf16_beside_a_block_maximum(fmt: str) -> None:
    """Ratios of every size: the block's maximum decides the scale, not its neighbour."""
    values = every_bf16().reshape(-1)
    values = values[torch.isfinite(values) & (values.abs() < 2.0**20)]
    values = values[: len(values) // 127 * 127].reshape(-1, 127)
    top = torch.full((len(values), 1), 2.0**20, dtype=torch.bfloat16)
    check(torch.cat([values, top], dim=1), fmt=fmt, blocks="")


def random_bits(side: int) -> torch.Tensor:
    """float32 numbers of any bit pattern [side,side]."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (side, side), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_a_million_random_bits(blocks: str) -> None:
    check(random_bits(1024), row=blocks == "col", blocks=blocks, stats=False)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_statistics_of_random_bits(fmt: str) -> None:
    check(random_bits(192), fmt=fmt)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_million_log_gaussian(fmt: str, generator: torch.Generator) -> None:
    size = torch.exp(2.5 * torch.randn(1024, 1024, generator=generator))
    check(size * torch.randn(1024, 1024, generator=generator).sign(), fmt=fmt)


@pytest.mark.parametrize("blocks", ["col", "tile"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 129), (129, 1), (128, 128), (130, 257), (2, 60, 130), (2, 1, 130, 7), (5,)]
)
def test_ragged_shapes(shape: Any, blocks: str, generator: torch.Generator) -> None:
    check(torch.randn(shape, generator=generator), blocks=blocks)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2]
)
def test_source_dtypes(dtype: torch.dtype, generator: torch.Generator) -> None:
    check(torch.randn(40, 200, generator=generator).to(dtype), stats=dtype != torch.float8_e5m2)


@pytest.mark.parametrize(
    "options",
    [{"row": True, "blocks": ""}, {"row": False, "blocks": "col"}, {"row": False, "blocks": "tile"}],
)
@pytest.mark.parametrize("stats", [False, True])
def test_layouts_alone(options: Any, stats: bool, generator: torch.Generator) -> None:
    x = torch.randn(150, 200, generator=generator)
    x[3, 5] = torch.inf
    check(x, stats=stats, **options)


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("multiplier", [2.0**-126, 2.0**-21, 0.25, 4.0, 2.0**20, 2.0**127])
def test_multipliers(multiplier: float, scale: str, generator: torch.Generator) -> None:
    check(torch.randn(40, 200, generator=generator), multiplier=multiplier, scale=scale)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-35, 1e-30, 1e30, 3e38])
def test_sizes(size: float, fmt: str, generator: torch.Generator) -> None:
    x = torch.rand(20, 140, generator=generator) * size
    check(x, fmt=fmt)
    assert torch.isfinite(quantize_layouts(x, fmt=fmt, stats=True).stats).all()


def test_blocks_of_very_different_size_in_one_tile(generator: torch.Generator) -> None:
    x = torch.randn(128, 128, generator=generator)
    for last in (15, 30):
        check(x * torch.logspace(-30, last, 128)[:, None])
        check(x * torch.logspace(-30, last, 128)[None, :])


@pytest.mark.parametrize("columns", [1, 15, 17, 130])
@pytest.mark.parametrize("blocks", ["", "col", "tile"])
def test_columns_that_are_no_multiple_of_16(blocks: str, columns: int, generator: torch.Generator) -> None:
    """They are copied to one, whose zeros must not show: in counts, scales, or what a code's neighbour reads."""
    x = torch.randn(40, columns, generator=generator)
    x[3], x[4, 0] = 0.0, torch.nan
    fused = check(x, blocks=blocks, multiplier=0.5)
    assert fused.row.data.stride(0) % 16 == 0
    offsets = torch.tensor([0, 7, 7, 39], dtype=torch.int32)
    if blocks:
        stats = quantize_layouts(x, blocks=blocks, stats=True, offsets=offsets).stats
        assert_stats(stats[1, 2], tensor_stats(x, layout=blocks, offsets=offsets)[2])


def test_statistics_alone(generator: torch.Generator) -> None:
    x = torch.randn(150, 200, generator=generator)
    fused = quantize_layouts(x, blocks="col", stats=True, store=False)
    assert (fused.row, fused.block) == (None, None)
    for slot, layout in enumerate(("row", "col")):
        assert_stats(fused.stats[slot], tensor_stats(x, layout=layout))


def test_statistics_do_not_vary(generator: torch.Generator) -> None:
    x = torch.randn(300, 300, generator=generator)
    first = quantize_layouts(x, blocks="col", stats=True).stats
    assert torch.equal(first, quantize_layouts(x, blocks="col", stats=True).stats)


def test_flushed_and_lossless_blocks_have_their_bins() -> None:
    x = torch.zeros(4, 384)
    x[0, :128] = 1.0
    x[1, 0], x[1, 1:128] = 1.0, 2.0**-30
    x[2, 128:256] = torch.tensor([1.0, 2.0]).repeat(64)
    for scale in ("fp32", "pow2"):
        check(x, scale=scale)
        check(x, scale=scale, multiplier=2.0**10)


COUNTS = [0, 130, 1, 0, 256, 77, 0]


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_experts(blocks: str, generator: torch.Generator) -> None:
    """Blocks start anew at each expert's first row; statistics by expert; the host never sees the offsets."""
    x = torch.randn(sum(COUNTS), 140, generator=generator)
    offsets = torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)
    fused = quantize_layouts(x, blocks=blocks, stats=True, offsets=offsets)
    wanted = quantize(x, layout=blocks, offsets=offsets)
    assert same_bits(fused.row.data, quantize(x).data)
    assert same_bits(fused.row.scale, quantize(x).scale)
    assert same_bits(fused.block.data, wanted.data)
    assert same_bits(fused.block.scale[: len(wanted.scale)], wanted.scale)
    assert (fused.block.scale[len(wanted.scale) :] == 1).all()
    for slot, layout in enumerate(("row", blocks)):
        by_expert = tensor_stats(x, layout=layout, offsets=offsets)
        for expert in range(len(COUNTS)):
            assert_stats(fused.stats[slot, expert], by_expert[expert])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(130, 257), (2, 70, 130)])
def test_reblocking_moves_codes_only(shape: Any, fmt: str, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    rows = quantize(x, fmt=fmt, scale="pow2")
    got, wanted = reblock(rows), quantize(rows.dequantize(), layout="col", fmt=fmt, scale="pow2")
    assert same_bits(got.data, wanted.data)
    assert same_bits(got.scale, wanted.scale)
    # What survives is unchanged: only what falls below the new block's smallest subnormal is rounded.
    kept = rows.dequantize().abs() >= got.expanded_scale() * {"e4m3": 2.0**-6, "e5m2": 2.0**-14}[fmt]
    assert torch.equal(got.dequantize()[kept], rows.dequantize()[kept])


def test_col_codes_may_be_stored_either_way(generator: torch.Generator) -> None:
    x = torch.randn(130, 80, generator=generator)
    turned, straight = (
        quantize_layouts(x, row=False, blocks="col", k_major=way).block for way in (True, False)
    )
    assert turned.data.t().stride(1) == 1
    assert turned.data.stride(1) % 16 == 0
    assert straight.data.is_contiguous()
    assert same_bits(turned.data, straight.data)


@pytest.mark.parametrize("shape", [(130, 257), (3, 140, 70), (128, 128), (0, 5)])
def test_a_weight_turned_on_demand(shape: Any, generator: torch.Generator) -> None:
    w = quantize(torch.randn(shape, generator=generator), layout="tile")
    got, wanted = transpose_tiles(w), w.transpose()
    assert got.data.is_contiguous()
    assert same_bits(got.data, wanted.data)
    assert same_bits(got.scale, wanted.scale)
    assert torch.equal(transpose_tiles(got).dequantize(), w.dequantize())


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_aligned_experts_are_stored_for_the_tensor_core(blocks: str, generator: torch.Generator) -> None:
    x = torch.randn(176, 80, generator=generator)
    offsets = torch.tensor([0, 16, 16, 160], dtype=torch.int32)
    got = quantize_layouts(x, blocks=blocks, stats=True, offsets=offsets, aligned=True)
    wanted = quantize_layouts(x, blocks=blocks, stats=True, offsets=offsets)
    assert same_bits(got.block.data, wanted.block.data)
    assert same_bits(got.block.scale, wanted.block.scale)
    assert torch.equal(got.stats, wanted.stats)
    assert (got.block.data.stride(0) == 1) == (blocks == "col")
    assert wanted.block.data.is_contiguous()
    with pytest.raises(OperandError, match="pad x"):
        quantize_layouts(x[:170], offsets=offsets, blocks=blocks, aligned=True)


def test_mistakes_are_explained(generator: torch.Generator) -> None:
    x = torch.randn(8, 16, generator=generator)
    with pytest.raises(UnknownOptionError, match="blocks='rows'"):
        quantize_layouts(x, blocks="rows")
    with pytest.raises(OperandError, match="no layout"):
        quantize_layouts(x, row=False)
    with pytest.raises(OperandError, match="'col'"):
        reblock(quantize(x, layout="col"))
    with pytest.raises(OperandError, match="not a tile-quantised weight"):
        transpose_tiles(quantize(x))


def test_segments_are_pairs(generator: torch.Generator) -> None:
    """Merging the statistics of matrices equals measuring them together."""
    x = torch.randn(3, 130, 70, generator=generator)
    offsets = torch.tensor([0, 130, 260, 390], dtype=torch.int32)
    whole = quantize_layouts(x, blocks="col", stats=True).stats
    parts = quantize_layouts(x.reshape(390, 70), blocks="col", stats=True, offsets=offsets).stats
    for slot in range(2):
        merged = parts[slot].sum(dim=0)
        merged[COLUMNS.index("amax")] = parts[slot, :, COLUMNS.index("amax")].max()
        assert_stats(whole[slot], merged)
    assert [end - start for start, end in pairwise(offsets.tolist())] == [130] * 3
