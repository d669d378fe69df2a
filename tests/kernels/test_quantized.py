"""QuantizedTensor: shapes, views, experts, transposes, and what users get wrong."""

import copy
import io
from itertools import pairwise
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import (
    KernelError,
    OffsetsError,
    OperandError,
    QuantizedTensor,
    UnknownOptionError,
    compiled,
    quantize,
    reference,
)
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.layouts import quantize_layouts

LAYOUTS = ("row", "col", "tile")


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((200, 300), "row", (200, 3)),
        ((200, 300), "col", (2, 300)),
        ((200, 300), "tile", (2, 3)),
        ((3, 130, 70), "row", (3, 130, 1)),
        ((3, 130, 70), "col", (3, 2, 70)),
        ((2, 3, 130, 70), "tile", (2, 3, 2, 1)),
        ((300,), "row", (3,)),
        ((300,), "col", (300,)),
        ((300,), "tile", (3,)),
        ((1,), "row", (1,)),
    ],
)
def test_b45_scale_has_one_shape_and_dtype_on_every_path(
    shape: Any, layout: str, expected: Any, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        quantized = quantize(x.to(dtype), layout=layout)
        assert quantized.scale.shape == expected
        assert quantized.scale.dtype == torch.float32
        assert quantized.shape == x.shape
        assert quantized.data.dtype == torch.float8_e4m3fn
        assert (quantized.layout, quantized.fmt) == (layout, "e4m3")


def beside_another(x: torch.Tensor, options: dict[str, Any]) -> QuantizedTensor:
    """The layout that the options name, quantised together with another one."""
    wanted = {name: value for name, value in options.items() if name != "layout"}
    blocks = "col" if options["layout"] == "row" else options["layout"]
    row, block, _ = quantize_layouts(x, blocks=blocks, stats=True, **wanted)
    found = row if options["layout"] == "row" else block
    assert found is not None
    return found


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_b45_every_path_to_a_scale_gives_the_same_bits(
    layout: str, fmt: str, scale: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Inline, with statistics, by expert, by each implementation, turned, copied, and after a checkpoint."""
    x = torch.randn(200, 300, generator=generator).to(dtype)
    options: dict[str, Any] = {"layout": layout, "fmt": fmt, "scale": scale}
    inline = quantize(x, **options)
    assert inline.scale.shape == {"row": (200, 3), "col": (2, 300), "tile": (2, 3)}[layout]
    turned = {"row": "col", "col": "row", "tile": "tile"}[layout]
    one_expert = torch.tensor([0, 200], dtype=torch.int32)
    weight = torch.nn.Parameter(x.clone())
    kept = io.BytesIO()
    torch.save({"weight": weight, "scale": inline.scale}, kept)
    kept.seek(0)
    resumed = torch.load(kept)
    rows = (x, [0, 200], layout, get_format(fmt), scale, 1.0)
    scales = {
        "with statistics": quantize(x, stats=True, **options)[0].scale,
        "one expert": quantize(x, offsets=one_expert, **options).scale,
        "beside another layout": beside_another(x, options).scale,
        "one matrix": quantize(x[None], **options).scale[0],
        "compiled": compiled.quantize_rows(*rows)[1],
        "reference": reference.quantize_rows(*rows)[1],
        "transposed": quantize(x.mT, **{**options, "layout": turned}).transpose().scale,
        "parameter": quantize(weight, **options).scale,
        "copy": copy.deepcopy(inline).scale,
        "resumed": resumed["scale"],
        "resumed weight": quantize(resumed["weight"], **options).scale,
    }
    for path, found in scales.items():
        assert (found.dtype, found.shape) == (torch.float32, inline.scale.shape), path
        assert torch.equal(found.view(torch.int32), inline.scale.view(torch.int32)), path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,), (0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_b20_empty_tensors(shape: Any, layout: str) -> None:
    quantized, stats = quantize(torch.empty(shape), layout=layout, stats=True)
    assert quantized.shape == shape
    assert quantized.dequantize().shape == shape
    assert stats[0] == 0
    assert torch.isfinite(stats).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_b33_non_contiguous_input_equals_its_copy(layout: str, dtype: torch.dtype, fmt: str) -> None:
    x = torch.arange(128 * 256).reshape(128, 256).to(dtype)
    channels_last = x.reshape(2, 4, 64, 64).contiguous(memory_format=torch.channels_last)
    views = (
        x.t(),
        x[:, ::2],
        x[::3],
        x[:, 1:129],
        x[3:, 5:],
        x[5].expand(130, 256),
        x[:, :1].expand(128, 140),
        channels_last,
        channels_last.transpose(0, 2),
        x[:, 7],
    )
    half_step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fmt]
    for view in views:
        copied = view.clone(memory_format=torch.contiguous_format)
        got, stats = quantize(view, layout=layout, fmt=fmt, stats=True)
        wanted, wanted_stats = quantize(copied, layout=layout, fmt=fmt, stats=True)
        assert got.data.is_contiguous()
        assert got.shape == view.shape
        assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
        assert torch.equal(got.scale, wanted.scale)
        assert torch.equal(stats, wanted_stats)
        # And in the right places: against the values themselves.
        error = (got.dequantize() - view.float()).abs()
        assert (error <= half_step * view.float().abs() + 2.0**-10 * view.float().abs().max()).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b33_both_implementations_read_views_by_their_strides(
    layout: str, implementation: Any, generator: torch.Generator
) -> None:
    x = torch.randn(256, 300, generator=generator)
    for view in (x.t(), x[:, ::2], x[1::3, 1:129], x[3].expand(130, 300), x[:, :1].expand(256, 140)):
        options = ([0, view.shape[0]], layout, get_format("e4m3"), "fp32", 1.0)
        codes, scales = implementation.quantize_rows(view, *options)
        wanted, wanted_scales = implementation.quantize_rows(view.contiguous(), *options)
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scales, wanted_scales)
        restored = implementation.round_trip_rows(view, *options)
        assert torch.equal(restored, implementation.round_trip_rows(view.contiguous(), *options))


@pytest.mark.parametrize("layout", ["col", "tile"])
def test_b35_no_block_straddles_two_experts(layout: str) -> None:
    x = torch.stack([torch.full((192, 128), 1.0), torch.full((192, 128), 1000.0)])
    quantized = quantize(x, layout=layout)
    row_blocks = 2
    assert quantized.scale.shape[:2] == (2, row_blocks)
    assert torch.equal(quantized.scale[0], torch.full_like(quantized.scale[0], 1.0) / 448)
    assert torch.equal(quantized.scale[1], torch.full_like(quantized.scale[1], 1000.0) / 448)
    for expert in (0, 1):
        alone = quantize(x[expert], layout=layout)
        assert torch.equal(quantized.scale[expert], alone.scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_start_blocks_anew_at_each_expert(layout: str, generator: torch.Generator) -> None:
    counts = [0, 130, 1, 0, 256, 77]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(sum(counts), 200, generator=generator) * torch.logspace(-3, 3, sum(counts))[:, None]
    together = quantize(x, layout=layout, offsets=offsets)
    bounds = offsets.tolist()
    apart = [quantize(x[start:end], layout=layout) for start, end in pairwise(bounds)]
    assert torch.equal(
        together.data.view(torch.uint8), torch.cat([part.data.view(torch.uint8) for part in apart])
    )
    assert torch.equal(together.scale, torch.cat([part.scale for part in apart]))
    assert torch.equal(together.dequantize(), torch.cat([part.dequantize() for part in apart]))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(130, 257), (3, 70, 129)])
def test_transpose_moves_bytes_and_scales_only(
    shape: Any, layout: str, fmt: str, generator: torch.Generator
) -> None:
    x = torch.randn(shape, generator=generator)
    quantized = quantize(x, layout=layout, fmt=fmt)
    transposed = quantized.transpose()
    assert transposed.layout == {"row": "col", "col": "row", "tile": "tile"}[layout]
    assert torch.equal(transposed.dequantize(), quantized.dequantize().mT)
    again = quantize(x.mT, layout=transposed.layout, fmt=fmt)
    assert torch.equal(transposed.data.view(torch.uint8), again.data.view(torch.uint8))
    assert torch.equal(transposed.scale, again.scale)


def test_dequantize_rounds_once_to_the_asked_dtype(generator: torch.Generator) -> None:
    x = torch.randn(64, 200, generator=generator)
    quantized = quantize(x)
    exact = quantized.data.double() * quantized.scale.double().repeat_interleave(128, dim=1)[:, :200]
    assert torch.equal(quantized.dequantize(torch.float64), exact)
    assert torch.equal(quantized.dequantize(), exact.float())
    assert quantized.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_quantize_ignores_autograd(generator: torch.Generator) -> None:
    x = torch.randn(4, 4, generator=generator, requires_grad=True)
    quantized, stats = quantize(x, stats=True)
    assert not quantized.scale.requires_grad
    assert not stats.requires_grad


@pytest.mark.parametrize(
    ("error", "options", "said"),
    [
        (UnknownOptionError, {"layout": "block"}, "'tile'"),
        (UnknownOptionError, {"fmt": "e4m3fnuz"}, "'e5m2'"),
        (UnknownOptionError, {"scale": "bf16"}, "'pow2'"),
        (KernelError, {"multiplier": 0.3}, "power of two"),
        (KernelError, {"multiplier": 0.0}, "power of two"),
        (KernelError, {"multiplier": float("nan")}, "power of two"),
        (
            OffsetsError,
            {"offsets": torch.tensor([0, 2], dtype=torch.int32), "layout": "col"},
            "cut the padding off",
        ),
        (OffsetsError, {"offsets": torch.tensor([1, 4], dtype=torch.int32), "layout": "col"}, "start at 0"),
        (
            OffsetsError,
            {"offsets": torch.tensor([0, 3, 2, 4], dtype=torch.int32), "layout": "col"},
            "never fall",
        ),
        (OffsetsError, {"offsets": torch.tensor([0.0, 4.0]), "layout": "col"}, "int32"),
    ],
)
def test_mistakes_are_explained(error: type[ValueError], options: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        quantize(torch.ones(4, 4), **options)


def test_what_cannot_be_quantised_is_explained() -> None:
    with pytest.raises(OperandError, match="floating-point"):
        quantize(torch.ones(4, dtype=torch.int32))
    with pytest.raises(OperandError, match="no dimension"):
        quantize(torch.tensor(1.0))
    with pytest.raises(OperandError, match="pass x as"):
        quantize(torch.ones(2, 2, 2), offsets=torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(OperandError, match="two dimensions"):
        quantize(torch.ones(4)).transpose()
