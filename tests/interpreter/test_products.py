"""FP8 GEMMs in Triton, dense and grouped, against float64 products."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OffsetsError, OperandError, QuantizedTensor, quantize
from fp8_safeguard.kernels.triton_config import HOPPER, gemm_config
from fp8_safeguard.kernels.triton_products import (
    fp8_gemm_nt,
    fp8_gemm_wgrad,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
    turned,
)

from .product_checks import assert_close, columns, offsets_of, operands


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("layout", ["row", "tile"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 96, 128), (70, 130, 257), (130, 144, 400), (3, 200, 1024)])
def test_within_tolerance_of_float64(shape: Any, layout: str, scale: str, generator: torch.Generator) -> None:
    a, b = operands(*shape, generator)
    qa, qb = quantize(a, scale=scale), quantize(b, layout=layout, scale=scale)
    assert_close(fp8_gemm_nt(qa, qb), qa.dequantize(torch.float64), qb.dequantize(torch.float64))


@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
def test_formats_may_differ(formats: tuple[str, str], generator: torch.Generator) -> None:
    a, b = operands(66, 70, 256, generator)
    qa, qb = (quantize(x, fmt=fmt) for x, fmt in zip((a, b), formats, strict=True))
    assert_close(fp8_gemm_nt(qa, qb), qa.dequantize(torch.float64), qb.dequantize(torch.float64))


def test_both_loads_give_the_same_bits(generator: torch.Generator) -> None:
    """Through the tensor memory accelerator, or by pointers."""
    a, b = operands(200, 272, 400, generator)
    qa, qb = quantize(a), quantize(b, layout="tile")
    pointer = gemm_config(HOPPER, 200, scales="tile", tma=False)
    assert torch.equal(fp8_gemm_nt(qa, qb), fp8_gemm_nt(qa, qb, config=pointer))


def test_the_fused_transpose_needs_no_copy(generator: torch.Generator) -> None:
    """dgrad reads the weight of fprop, whose codes are contiguous along the other dimension."""
    dy, w = torch.randn(70, 130, generator=generator), torch.randn(130, 272, generator=generator)
    qdy, qw = quantize(dy), quantize(w, layout="tile")
    got = fp8_gemm_nt(qdy, turned(qw))
    assert torch.equal(got, fp8_gemm_nt(qdy, qw.transpose()))
    assert_close(got, qdy.dequantize(torch.float64), qw.dequantize(torch.float64).t())


def test_output_dtype_is_one_rounding(generator: torch.Generator) -> None:
    a, b = operands(33, 80, 300, generator)
    qa, qb = quantize(a), quantize(b)
    assert torch.equal(fp8_gemm_nt(qa, qb, torch.bfloat16), fp8_gemm_nt(qa, qb).bfloat16())


@pytest.mark.parametrize("n", [80, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulating_adds_once(dtype: torch.dtype, n: int, generator: torch.Generator) -> None:
    a, b = operands(130, n, 300, generator)
    qa, qb = quantize(a), quantize(b)
    held = torch.randn(130, n, generator=generator).to(dtype)
    got = held.clone()
    assert fp8_gemm_nt(qa, qb, out=got) is got
    assert torch.equal(got, (held.float() + fp8_gemm_nt(qa, qb)).to(dtype))


@pytest.mark.parametrize("k_major", [True, False])
def test_wgrad(k_major: bool, generator: torch.Generator) -> None:
    dy, x = torch.randn(300, 130, generator=generator), torch.randn(300, 70, generator=generator)
    qdy, qx = columns(dy, k_major=k_major), columns(x, k_major=k_major)
    wide = qdy.dequantize(torch.float64).t(), qx.dequantize(torch.float64).t()
    got = fp8_gemm_wgrad(qdy, qx)
    assert_close(got, *wide)
    assert torch.equal(fp8_gemm_wgrad(qdy, qx, out=torch.ones(130, 70)), got + 1)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_subnormal_operands_lose_nothing(fmt: str, generator: torch.Generator) -> None:
    a, b = operands(5, 7, 127, generator)
    qa, qb = quantize(a * 1e-42, fmt=fmt), quantize(b * 1e10, fmt=fmt)
    assert_close(fp8_gemm_nt(qa, qb), qa.dequantize(torch.float64), qb.dequantize(torch.float64))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 128), (4, 0, 128), (4, 4, 0)])
def test_empty_operands(m: int, n: int, k: int) -> None:
    got = fp8_gemm_nt(quantize(torch.ones(m, k)), quantize(torch.ones(n, k), layout="tile"))
    assert torch.equal(got, torch.zeros(m, n))


def test_nan_spoils_its_row_only(generator: torch.Generator) -> None:
    a, b = operands(5, 6, 200, generator)
    a[2, 150] = torch.inf
    got = fp8_gemm_nt(quantize(a), quantize(b, layout="tile"))
    assert torch.isnan(got[2]).all()
    assert torch.isfinite(got[[0, 1, 3, 4]]).all()


COUNTS = [0, 130, 1, 0, 150, 77, 0]
ALIGNED = [0, 144, 16, 0, 128, 80, 0]


@pytest.mark.parametrize("layout", ["row", "tile"])
@pytest.mark.parametrize(("n", "k"), [(130, 200), (16, 128), (144, 48)])
def test_grouped_nt(n: int, k: int, layout: str, generator: torch.Generator) -> None:
    a = quantize(torch.randn(sum(COUNTS) + 20, k, generator=generator))
    b = quantize(torch.randn(len(COUNTS), n, k, generator=generator), layout=layout)
    offsets = offsets_of(COUNTS)
    got = grouped_gemm_nt(a, b, offsets)
    wide_a, wide_b = a.dequantize(torch.float64), b.dequantize(torch.float64)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        assert_close(got[start:end], wide_a[start:end], wide_b[expert])
    assert torch.equal(got[sum(COUNTS) :], torch.zeros(20, n))


def test_grouped_nt_equals_the_dense_product_of_each_expert(generator: torch.Generator) -> None:
    a = quantize(torch.randn(sum(COUNTS), 256, generator=generator))
    b = quantize(torch.randn(len(COUNTS), 130, 256, generator=generator), layout="tile")
    got = grouped_gemm_nt(a, b, offsets_of(COUNTS))
    for expert, (start, end) in enumerate(pairwise(offsets_of(COUNTS).tolist())):
        rows = QuantizedTensor(a.data[start:end], a.scale[start:end], "row", "e4m3")
        weight = QuantizedTensor(b.data[expert], b.scale[expert], "tile", "e4m3")
        assert torch.equal(got[start:end], fp8_gemm_nt(rows, weight))


def test_grouped_dgrad_reads_the_weights_of_fprop(generator: torch.Generator) -> None:
    dy = quantize(torch.randn(sum(COUNTS), 70, generator=generator))
    w = quantize(torch.randn(len(COUNTS), 70, 130, generator=generator), layout="tile")
    turned_w = QuantizedTensor(w.data.mT, w.scale.mT, "tile", "e4m3")
    offsets = offsets_of(COUNTS)
    assert torch.equal(grouped_gemm_nt(dy, turned_w, offsets), grouped_gemm_nt(dy, w.transpose(), offsets))


@pytest.mark.parametrize(
    ("counts", "split", "k_major", "aligned"),
    [
        (COUNTS, True, True, False),
        (COUNTS, True, False, False),
        (COUNTS, False, False, False),
        (ALIGNED, True, True, True),
    ],
)
def test_grouped_wgrad(
    counts: list[int], split: bool, k_major: bool, aligned: bool, generator: torch.Generator
) -> None:
    rows, offsets = sum(counts), offsets_of(counts)
    dy, x = torch.randn(rows, 130, generator=generator), torch.randn(rows, 70, generator=generator)
    kept = offsets if split else None
    wide_dy, wide_x = (quantize(t, layout="col", offsets=kept).dequantize(torch.float64) for t in (dy, x))
    got = grouped_gemm_wgrad(columns(dy, kept, k_major), columns(x, kept, k_major), offsets, aligned=aligned)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        assert_close(got[expert], wide_dy[start:end].t(), wide_x[start:end].t())
        if start == end:
            assert torch.equal(got[expert], torch.zeros(130, 70))


def test_grouped_wgrad_accumulates(generator: torch.Generator) -> None:
    offsets = offsets_of([0, 40, 3])
    dy, x = columns(torch.randn(43, 20, generator=generator), offsets), columns(torch.ones(43, 24), offsets)
    got = grouped_gemm_wgrad(dy, x, offsets)
    held = torch.randn(3, 20, 24, generator=generator)
    assert torch.equal(grouped_gemm_wgrad(dy, x, offsets, out=held.clone()), held + got)


def test_nan_of_the_next_expert_does_not_leak(generator: torch.Generator) -> None:
    offsets = offsets_of(ALIGNED)
    dy, x = torch.randn(368, 80, generator=generator), torch.randn(368, 48, generator=generator)
    x[144] = torch.nan
    for aligned in (True, False):
        got = grouped_gemm_wgrad(columns(dy, offsets), columns(x, offsets), offsets, aligned=aligned)
        assert torch.isnan(got).flatten(1).any(dim=1).tolist() == [
            False,
            False,
            True,
            False,
            False,
            False,
            False,
        ]


def test_mistakes_are_explained(generator: torch.Generator) -> None:
    x = torch.randn(8, 16, generator=generator)
    row, col = quantize(x), quantize(x, layout="col")
    with pytest.raises(OperandError, match="'row' or 'tile'"):
        fp8_gemm_nt(row, col)
    with pytest.raises(OperandError, match="contiguous tensor of that shape"):
        fp8_gemm_nt(row, row, out=torch.zeros(3, 3))
    experts = quantize(torch.randn(3, 4, 16, generator=generator), layout="tile")
    with pytest.raises(OffsetsError, match="3 experts need"):
        grouped_gemm_nt(row, experts, offsets_of([8]))
    with pytest.raises(OperandError, match="both with offsets"):
        grouped_gemm_wgrad(columns(x, offsets_of([8])), col, offsets_of([8]))
