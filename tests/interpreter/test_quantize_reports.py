"""Field reports on quantisation, each a test by its number."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import quantize
from fp8_safeguard.kernels.triton_fused import quantize_layouts
from fp8_safeguard.monitor.stats import COLUMNS

from .quantize_checks import assert_stats, check, same_bits


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,), (0, 3, 5), (2, 0, 5), (2, 3, 0)])
@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_b20_empty_tensors(shape: Any, blocks: str) -> None:
    fused = check(torch.empty(shape), blocks=blocks)
    assert torch.isfinite(fused.stats).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("blocks", ["", "col", "tile"])
def test_b26_zero_blocks_stay_zero_and_change_no_other(
    blocks: str, fmt: str, generator: torch.Generator
) -> None:
    x = torch.randn(128, 256, generator=generator)
    y = x.clone()
    y[5], y[9, 128:] = 0.0, 0.0
    fused = check(y, blocks=blocks, fmt=fmt)
    assert (fused.row.scale[5] == 1).all()
    untouched = [row for row in range(128) if row not in (5, 9)]
    assert same_bits(fused.row.data[untouched], quantize(x, fmt=fmt).data[untouched])
    assert fused.stats[0][COLUMNS.index("rows_flushed")] == 0


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_b28_small_blocks_keep_their_digits(blocks: str) -> None:
    x = (torch.arange(1, 9) / 8 * 1e-9).repeat(16)[None].expand(128, 128)
    fused = check(x, blocks=blocks)
    for quantised in (fused.row, fused.block):
        assert ((quantised.dequantize() - x).abs() <= 0.0625 * x).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_b29_a_nan_anywhere_is_counted(dtype: torch.dtype) -> None:
    """One in each row and column of ones, at every position of a block in turn."""
    x = torch.ones(128, 128, dtype=dtype)
    x.fill_diagonal_(torch.nan)
    fused = check(x)
    assert (fused.stats[:, COLUMNS.index("nan")] == 128).all()
    assert (fused.stats[:, COLUMNS.index("amax")] == 1.0).all()
    for quantised in (fused.row, fused.block):
        assert (quantised.scale == torch.tensor(1.0) / 448).all()
        assert torch.equal(torch.isnan(quantised.dequantize()), torch.eye(128, dtype=torch.bool))


def test_b32_non_finite_input_gives_the_same_bytes_everywhere(generator: torch.Generator) -> None:
    x = torch.randn(4, 256, generator=generator)
    x[1, 7], x[2, 200], x[3, 3], x[3, 4] = torch.nan, torch.inf, -torch.inf, -torch.nan
    for fmt in ("e4m3", "e5m2"):
        for blocks in ("col", "tile"):
            check(x, blocks=blocks, fmt=fmt)


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_b33_non_contiguous_input_equals_its_copy(blocks: str) -> None:
    x = torch.arange(128 * 256).reshape(128, 256).float()
    views = (
        x.t(),
        x[:, ::2],
        x[:, 1:129],
        x[5].expand(130, 256),
        x[:, :1].expand(128, 140),
        x.t()[3:, 5:],
        x[:, 7],
        x[:24, :80].reshape(2, 3, 20, 16).contiguous(memory_format=torch.channels_last),
    )
    for view in views:
        fused = check(view, blocks=blocks, stats=False)
        copied = quantize_layouts(view.clone(memory_format=torch.contiguous_format), blocks=blocks)
        assert same_bits(fused.row.data, copied.row.data)
        assert same_bits(fused.block.data, copied.block.data)


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_b35_no_block_straddles_two_experts(blocks: str) -> None:
    x = torch.stack([torch.full((192, 128), 1.0), torch.full((192, 128), 1000.0)])
    scale = check(x, blocks=blocks).block.scale
    assert torch.equal(scale[0].unique(), torch.tensor([1.0]) / 448)
    assert torch.equal(scale[1].unique(), torch.tensor([1000.0]) / 448)


@pytest.mark.parametrize("counts", [[64, 64, 64, 64], [192, 192], [384, 64, 64]])
def test_b36_every_shard_has_scale_rows_of_its_own(counts: list[int], generator: torch.Generator) -> None:
    x = torch.randn(sum(counts), 16, generator=generator)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    scale = quantize_layouts(x, row=False, blocks="col", offsets=offsets).block.scale
    shards = [quantize(part, layout="col").scale for part in x.split(counts)]
    used = sum(len(shard) for shard in shards)
    assert same_bits(scale[:used], torch.cat(shards))
    assert (scale[used:] == 1).all()
    assert len(scale) == sum(counts) // 128 + len(counts) + 1


@pytest.mark.parametrize("filler", [7.0, 1e30, float("nan")])
def test_b42_rows_behind_the_last_expert_decide_nothing(filler: float, generator: torch.Generator) -> None:
    x = torch.randn(16, 128, generator=generator)
    x[0, 0] = 4.0
    x[5:] = filler
    fused = quantize_layouts(x, blocks="col", stats=True, offsets=torch.tensor([0, 5], dtype=torch.int32))
    alone, stats = quantize(x[:5], layout="col", stats=True)
    assert same_bits(fused.block.data[:5], alone.data)
    assert same_bits(fused.block.scale[0], alone.scale[0])
    assert (fused.block.data[5:].view(torch.uint8) == 0).all()
    assert_stats(fused.stats[1, 0], stats)
    assert fused.stats[0, 0, COLUMNS.index("count")] == 5 * 128


@pytest.mark.parametrize(
    ("fmt", "values", "wanted"),
    [
        ("e4m3", [2.0**-9, 2.0**-10, 1.01 * 2.0**-10, 3 * 2.0**-10, 2.0**-6], [1, 0, 1, 2, 8]),
        ("e5m2", [2.0**-16, 2.0**-17, 1.01 * 2.0**-17, 3 * 2.0**-17, 2.0**-14], [1, 0, 1, 2, 4]),
    ],
)
def test_b44_subnormal_codes(fmt: str, values: list[float], wanted: list[int]) -> None:
    maximum = {"e4m3": 448.0, "e5m2": 57344.0}[fmt]
    fused = check(torch.tensor([[maximum, *values]]), fmt=fmt, blocks="")
    assert fused.row.data.view(torch.uint8)[0, 1:].tolist() == wanted


def test_b45_scale_has_one_shape_and_dtype(generator: torch.Generator) -> None:
    for shape, blocks, expected in (
        ((200, 300), "col", (2, 300)),
        ((3, 130, 70), "tile", (3, 2, 1)),
        ((300,), "col", (300,)),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            fused = check(torch.randn(shape, generator=generator).to(dtype), blocks=blocks, stats=False)
            assert (fused.block.scale.shape, fused.block.scale.dtype) == (expected, torch.float32)
