"""Field reports on FP8 products, each a test by its number."""

from itertools import pairwise

import pytest
import torch

from fp8_safeguard.kernels import QuantizedTensor, quantize
from fp8_safeguard.kernels.triton_products import (
    fp8_gemm_nt,
    fp8_gemm_wgrad,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
)

from .product_checks import assert_close, columns, offsets_of, operands


def test_b26_zero_rows_give_exact_zeros(generator: torch.Generator) -> None:
    a, b = operands(40, 48, 256, generator)
    kept = fp8_gemm_nt(quantize(a), quantize(b))
    a[5], b[7] = 0.0, 0.0
    got = fp8_gemm_nt(quantize(a), quantize(b))
    assert (got[5] == 0).all()
    assert (got[:, 7] == 0).all()
    others, columns_kept = [row for row in range(40) if row != 5], [n for n in range(48) if n != 7]
    assert torch.equal(got[others][:, columns_kept], kept[others][:, columns_kept])


def test_b28_small_gradients_keep_their_digits(generator: torch.Generator) -> None:
    dy, x = torch.randn(130, 32, generator=generator) * 1e-9, torch.randn(130, 48, generator=generator)
    wide = dy.double().t() @ x.double()
    got = fp8_gemm_wgrad(columns(dy), columns(x)).double()
    assert (got - wide).norm() <= 0.05 * wide.norm()


@pytest.mark.parametrize("kind", ["shifted", "spread", "turned"])
def test_b33_non_contiguous_codes_equal_their_copy(kind: str, generator: torch.Generator) -> None:
    a, b = (quantize(x) for x in operands(70, 90, 384, generator))
    store = torch.zeros(90, 800, dtype=torch.uint8).view(b.data.dtype)
    turned = torch.zeros(384, 96, dtype=torch.uint8).view(b.data.dtype)[:, :90].t()
    view = {"shifted": store[:, 3:387], "spread": store[:, 1:769:2], "turned": turned}[kind]
    view.copy_(b.data)
    assert torch.equal(fp8_gemm_nt(a, QuantizedTensor(view, b.scale, "row", "e4m3")), fp8_gemm_nt(a, b))


def test_b35_experts_keep_their_weights_apart() -> None:
    w = torch.stack([torch.full((192, 128), 1.0), torch.full((192, 128), 1000.0)])
    got = grouped_gemm_nt(quantize(torch.ones(4, 128)), quantize(w, layout="tile"), offsets_of([2, 2]))
    assert torch.allclose(got[:2], torch.tensor(128.0), rtol=1e-6)
    assert torch.allclose(got[2:], torch.tensor(128000.0), rtol=1e-6)


@pytest.mark.parametrize("counts", [[64, 64, 64, 64], [192, 192], [384, 64, 64]])
def test_b36_scales_of_small_segments_do_not_overlap(counts: list[int], generator: torch.Generator) -> None:
    offsets = offsets_of(counts)
    dy, x = (
        torch.randn(sum(counts), 16, generator=generator),
        torch.randn(sum(counts), 32, generator=generator),
    )
    got = grouped_gemm_wgrad(columns(dy, offsets), columns(x, offsets), offsets, aligned=True)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        alone = fp8_gemm_wgrad(columns(dy[start:end]), columns(x[start:end]))
        assert torch.equal(got[expert], alone)


def test_b37_any_number_of_tokens_an_expert(generator: torch.Generator) -> None:
    counts = [0, 1, 31, 32, 33, 200]
    dy, x = torch.randn(297, 16, generator=generator), torch.randn(297, 16, generator=generator)
    offsets = offsets_of(counts)
    got = grouped_gemm_wgrad(columns(dy, offsets), columns(x, offsets), offsets)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        wide_dy, wide_x = (quantize(t[start:end], layout="col").dequantize(torch.float64) for t in (dy, x))
        assert_close(got[expert], wide_dy.t(), wide_x.t())


def test_b39_all_experts_empty(generator: torch.Generator) -> None:
    none = torch.zeros(4, dtype=torch.int32)
    b = quantize(torch.randn(3, 8, 16, generator=generator), layout="tile")
    assert grouped_gemm_nt(quantize(torch.empty(0, 16)), b, none).shape == (0, 8)
    assert torch.equal(grouped_gemm_nt(quantize(torch.ones(2, 16)), b, none), torch.zeros(2, 8))
    for rows in (0, 5):
        dy, x = quantize(torch.ones(rows, 8), layout="col"), quantize(torch.ones(rows, 16), layout="col")
        assert torch.equal(grouped_gemm_wgrad(dy, x, none), torch.zeros(3, 8, 16))


@pytest.mark.parametrize("aligned", [True, False])
def test_b40_a_zero_column_and_its_filler_scale_do_not_count(
    aligned: bool, generator: torch.Generator
) -> None:
    """Through the tensor memory accelerator, and without."""
    counts = [256, 128, 128, 256]
    offsets = offsets_of(counts)
    dy, x = torch.randn(768, 80, generator=generator), torch.randn(768, 32, generator=generator)
    x[256:384, 7] = 0.0
    qdy, qx = columns(dy, offsets), columns(x, offsets)
    results = []
    for filler in (1e-30, 1e-12, 1.0, 1.0):
        scale = qx.scale.clone()
        scale[2, 7] = filler
        operand = QuantizedTensor(qx.data, scale, "col", "e4m3", offsets)
        results.append(grouped_gemm_wgrad(qdy, operand, offsets, aligned=aligned))
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(
        results[0][1], qdy.dequantize(torch.float64)[256:384].t(), qx.dequantize(torch.float64)[256:384].t()
    )


def test_b41_counts_are_those_of_the_offsets_not_of_the_buffer(generator: torch.Generator) -> None:
    """Three experts with 3, 0 and 5 of 8 tokens in a receive buffer of 12 aligned rows."""
    a = torch.randn(12, 32, generator=generator)
    b = quantize(torch.randn(3, 16, 32, generator=generator), layout="tile")
    got = grouped_gemm_nt(quantize(a), b, offsets_of([3, 0, 5]))
    wide, weight = quantize(a).dequantize(torch.float64), b.dequantize(torch.float64)
    assert_close(got[:3], wide[:3], weight[0])
    assert_close(got[3:8], wide[3:8], weight[2])
    assert torch.equal(got[8:], torch.zeros(4, 16))


@pytest.mark.parametrize("filler", [1e30, float("nan")])
def test_b42_rows_behind_the_last_expert_reach_no_result(filler: float, generator: torch.Generator) -> None:
    x, dy = torch.randn(144, 32, generator=generator), torch.randn(144, 48, generator=generator)
    x[96:], dy[96:] = filler, filler
    offsets = offsets_of([48, 48])
    w = quantize(torch.randn(2, 48, 32, generator=generator), layout="tile")
    got = grouped_gemm_nt(quantize(x), w, offsets)
    assert torch.equal(got[:96], grouped_gemm_nt(quantize(x[:96]), w, offsets))
    assert (got[96:] == 0).all()
    alone = grouped_gemm_wgrad(columns(dy[:96], offsets), columns(x[:96], offsets), offsets)
    for aligned in (True, False):
        got = grouped_gemm_wgrad(columns(dy, offsets), columns(x, offsets), offsets, aligned=aligned)
        assert torch.equal(got, alone)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_b44_every_code_is_multiplied_as_its_value(dtype: torch.dtype) -> None:
    """All finite codes times one, subnormals included, each against torch's own value of it."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    codes = codes[torch.isfinite(codes.float())]
    one = torch.zeros(len(codes), 128).to(dtype)
    one[:, 5] = codes
    fmt = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}[dtype]
    a = QuantizedTensor(one, torch.ones(len(codes), 1), "row", fmt)
    got = fp8_gemm_nt(a, quantize(torch.ones(16, 128) * 448.0))
    assert torch.equal(got, (codes.float() * 448.0)[:, None].expand(-1, 16))
