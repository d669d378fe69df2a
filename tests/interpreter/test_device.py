"""The public calls, sent to Triton's kernels as CUDA tensors are, equal the CPU's."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import QuantizedTensor, quantize, tensor_stats, triton_fused
from fp8_safeguard.kernels.layouts import quantize_layouts

CALLERS = ("layouts", "quantize", "stats")
OFFSETS = torch.tensor([0, 64, 64, 208], dtype=torch.int32)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls its argument with every tensor taken for a CUDA tensor."""

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            for caller in CALLERS:
                patch.setattr(module_of(caller), "device_kernels", lambda x: triton_fused)
            return function(*arguments, **options)

    return call


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"fp8_safeguard.kernels.{name}")


def assert_same(ours: QuantizedTensor, expected: QuantizedTensor, rows: int | None = None) -> None:
    """The same codes and scales, of the first rows where padding follows them."""
    assert torch.equal(ours.data[:rows].view(torch.uint8), expected.data[:rows].view(torch.uint8))
    assert torch.equal(ours.scale[: expected.scale.shape[0]], expected.scale)
    assert (ours.layout, ours.fmt) == (expected.layout, expected.fmt)
    assert torch.equal(ours.dequantize()[:rows], expected.dequantize()[:rows])


@pytest.mark.parametrize("shape", [(140, 130), (2, 40, 70), (150,)])
@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_one_layout(layout: str, shape: Any, on_device: Any, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator).bfloat16()
    options = {"layout": layout, "fmt": "e5m2", "scale": "pow2"}
    ours, stats = on_device(quantize, x, stats=True, **options)
    expected, expected_stats = quantize(x, stats=True, **options)
    assert_same(ours, expected)
    torch.testing.assert_close(stats, expected_stats, rtol=1e-6, atol=0)
    torch.testing.assert_close(on_device(tensor_stats, x, **options), expected_stats, rtol=1e-6, atol=0)


@pytest.mark.parametrize("blocks", ["col", "tile"])
def test_experts(blocks: str, on_device: Any, generator: torch.Generator) -> None:
    """208 of 240 rows have an expert: the scales have room for what there could be, the surplus ones are 1."""
    x = torch.randn(240, 70, generator=generator)
    named = {"blocks": blocks, "stats": True, "offsets": OFFSETS}
    ours, expected = on_device(quantize_layouts, x, **named), quantize_layouts(x, **named)
    aligned = on_device(quantize_layouts, x, aligned=True, **named)
    for made in (ours, aligned):
        assert_same(made.row, expected.row)
        assert_same(made.block, expected.block)
        assert (
            made.block.scale.shape
            == expected.block.scale.shape
            == (240 // 128 + 4, expected.block.scale.shape[1])
        )
        torch.testing.assert_close(made.stats, expected.stats, rtol=1e-6, atol=0)
    alone = on_device(quantize, x, layout=blocks, offsets=OFFSETS)
    assert alone.scale.shape == expected.block.scale.shape
    assert_same(alone, quantize(x[:208], layout=blocks, offsets=OFFSETS), rows=208)
    vectors = on_device(tensor_stats, x, layout=blocks, offsets=OFFSETS)
    torch.testing.assert_close(vectors, expected.stats[1], rtol=1e-6, atol=0)
