"""Several layouts from one call equal each from a call of its own, on every path."""

import importlib
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import (
    OffsetsError,
    OperandError,
    QuantizedTensor,
    UnknownOptionError,
    tensor_stats,
)
from fp8_safeguard.kernels import quantize as quantize_one
from fp8_safeguard.kernels.layouts import quantize_layouts, reblock
from fp8_safeguard.monitor.stats import VECTOR_LENGTH

OPTIONS: list[dict[str, Any]] = [{}, {"fmt": "e5m2", "scale": "pow2", "multiplier": 0.25}]
OFFSETS = [0, 130, 130, 131, 387]
CALLERS = ("layouts", "quantize", "stats")


@pytest.fixture(autouse=True)
def one_implementation(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes the implementation under test."""
    for caller in CALLERS:
        module = importlib.import_module(f"fp8_safeguard.kernels.{caller}")
        monkeypatch.setattr(module, "implementation", lambda x: implementation)


def assert_same_tensor(ours: QuantizedTensor | None, expected: QuantizedTensor) -> None:
    """Codes, scales and what they mean, bit for bit."""
    assert ours is not None
    assert torch.equal(ours.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(ours.scale.view(torch.int32), expected.scale.view(torch.int32))
    assert (ours.layout, ours.fmt, ours.offsets) == (expected.layout, expected.fmt, expected.offsets)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("blocks", ["col", "tile"])
@pytest.mark.parametrize("shape", [(300, 200), (3, 130, 70), (129,), (0, 5), (4, 0), (1, 700)])
def test_both_layouts_equal_two_calls(
    shape: Any, blocks: str, options: Any, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator).bfloat16()
    if x.numel() > 500:
        x.view(-1)[7], x.view(-1)[300] = float("nan"), -float("inf")
    row, block, stats = quantize_layouts(x, blocks=blocks, stats=True, **options)
    assert_same_tensor(row, quantize_one(x, **options))
    assert_same_tensor(block, quantize_one(x, layout=blocks, **options))
    assert stats is not None
    expected = torch.stack([tensor_stats(x, **options), tensor_stats(x, layout=blocks, **options)])
    # Matrices one by one or rows all together: float64 sums in another order.
    torch.testing.assert_close(stats, expected, rtol=1e-13, atol=0)


def test_only_what_is_wanted_is_made(generator: torch.Generator) -> None:
    x = torch.randn(200, 150, generator=generator)
    assert quantize_layouts(x)[1:] == (None, None)
    row, block, stats = quantize_layouts(x, row=False, blocks="col", stats=True)
    assert row is None
    assert_same_tensor(block, quantize_one(x, layout="col"))
    assert stats is not None
    assert stats.shape == (1, VECTOR_LENGTH)


@pytest.mark.parametrize("rows", [387, 500])
@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_experts_have_blocks_of_their_own_and_room_for_all_that_there_can_be(
    blocks: str, rows: int, generator: torch.Generator
) -> None:
    """Rows behind the last expert: codes of their own in `row`, zero codes in blocks, never measured."""
    x = torch.randn(rows, 200, generator=generator)
    offsets, owned = torch.tensor(OFFSETS, dtype=torch.int32), OFFSETS[-1]
    row, block, stats = quantize_layouts(x, blocks=blocks, stats=True, offsets=offsets)
    assert_same_tensor(row, quantize_one(x))
    expected = quantize_one(x[:owned], layout=blocks, offsets=offsets)
    assert block is not None
    assert block.scale.shape[0] == rows // 128 + len(OFFSETS)
    held = expected.scale.shape[0]
    assert torch.equal(block.scale[:held], expected.scale)
    assert (block.scale[held:] == 1).all()
    assert torch.equal(block.data[:owned].view(torch.uint8), expected.data.view(torch.uint8))
    assert (block.data[owned:].view(torch.uint8) == 0).all()
    assert torch.equal(block.dequantize()[:owned], expected.dequantize())
    assert stats is not None
    assert torch.equal(stats[0], tensor_stats(x, offsets=offsets))
    assert torch.equal(stats[1], tensor_stats(x, layout=blocks, offsets=offsets))


def test_b42_stale_padding_rows_decide_no_scale_and_no_statistics(generator: torch.Generator) -> None:
    """What a worst-case buffer holds behind the last expert may be anything, NaN included."""
    x = torch.randn(400, 200, generator=generator)
    offsets = torch.tensor([0, 100, 250], dtype=torch.int32)
    clean_row, clean_block, clean_stats = quantize_layouts(x, blocks="col", stats=True, offsets=offsets)
    assert clean_row is not None
    assert clean_block is not None
    assert clean_stats is not None
    scale = clean_row.scale[:250]
    for stale in (1e30, float("nan"), float("inf"), 0.0):
        x[250:] = stale
        row, block, stats = quantize_layouts(x, blocks="col", stats=True, offsets=offsets)
        assert row is not None
        assert stats is not None
        assert torch.equal(row.scale[:250], scale)
        assert_same_tensor(block, clean_block)
        assert torch.equal(stats, clean_stats)


def test_b42_aligned_experts_padded_with_zeros_keep_their_scales(generator: torch.Generator) -> None:
    """Zero rows between an expert's last row and the next multiple of 16 change no scale and no ratio."""
    counts = [5, 0, 130]
    x = torch.randn(sum(counts), 96, generator=generator)
    padded, offsets, start = torch.zeros(176, 96), [0], 0
    for count in counts:
        padded[offsets[-1] : offsets[-1] + count] = x[start : start + count]
        offsets.append(offsets[-1] + count + -count % 16)
        start += count
    ours = quantize_layouts(
        padded, blocks="col", offsets=torch.tensor(offsets, dtype=torch.int32), aligned=True
    ).block
    plain = quantize_one(x, layout="col", offsets=torch.tensor([0, 5, 5, 135], dtype=torch.int32))
    assert ours is not None
    assert torch.equal(ours.scale[: plain.scale.shape[0]], plain.scale)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_power_of_two_scales_are_reblocked_without_loss(fmt: str, generator: torch.Generator) -> None:
    """Magnitudes from 1 to 4 stay normal in every block; scales of amax / max would round each code again."""
    x = (torch.rand(2, 200, 150, generator=generator) * 3 + 1) * torch.randn(
        2, 200, 150, generator=generator
    ).sign()
    rows = quantize_one(x, fmt=fmt, scale="pow2")
    assert torch.equal(reblock(rows).dequantize(), rows.dequantize())
    x[0, 3, 5], x[1, :, 7], x[1, 9] = float("nan"), 0.0, 1e-6
    rows = quantize_one(x, fmt=fmt, scale="pow2")
    assert_same_tensor(reblock(rows), quantize_one(rows.dequantize(), layout="col", fmt=fmt, scale="pow2"))


def test_mistakes_are_explained() -> None:
    x = torch.ones(20, 4)
    with pytest.raises(OperandError, match="no layout is wanted"):
        quantize_layouts(x, row=False)
    with pytest.raises(UnknownOptionError, match="'tile'"):
        quantize_layouts(x, blocks="row")
    with pytest.raises(OffsetsError, match="end at most at 20"):
        quantize_layouts(x, blocks="col", offsets=torch.tensor([0, 21], dtype=torch.int32))
    with pytest.raises(OperandError, match="scales are no powers of two"):
        reblock(quantize_one(x * 3))
    with pytest.raises(OperandError, match="'col' tensor cannot be re-blocked"):
        reblock(quantize_one(x, layout="col", scale="pow2"))
    with pytest.raises(OperandError, match="not a multiple of 16"):
        quantize_layouts(x, blocks="col", offsets=torch.tensor([0, 16], dtype=torch.int32), aligned=True)
