"""FP8 GEMMs, dense and grouped, against float64 products of the dequantised operands."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import (
    OffsetsError,
    OperandError,
    QuantizedTensor,
    dispatch,
    fp8_gemm_nt,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
    quantize,
)

TOLERANCE = 1e-6
"""Of sum |a||b|, float32 output: a few float32 roundings (6e-8) in chains of at most 512 products."""


@pytest.fixture(params=["native", "numba", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend of a CPU."""
    missing = dispatch.unavailable(request.param, "cpu")
    if missing:
        pytest.skip(missing)
    with dispatch.use_gemm_backend(request.param):
        yield request.param


def assert_close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """got is a @ b.T within TOLERANCE x sum |a||b|, operands float64."""
    bound = TOLERANCE * (a.abs() @ b.abs().mT)
    assert got.dtype == torch.float32
    assert ((got.double() - a @ b.mT).abs() <= bound).all()


def operands(m: int, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Wide-range operands: every block has its own magnitude."""
    a = torch.randn(m, k, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
    b = torch.randn(n, k, generator=generator) * torch.exp(torch.randn(1, k, generator=generator))
    return a, b


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("layout", ["row", "tile"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (64, 96, 128), (70, 130, 257), (128, 128, 1500), (3, 200, 4096)]
)
def test_within_tolerance_of_float64(
    shape: Any, layout: str, scale: str, fmt: str, generator: torch.Generator
) -> None:
    a, b = operands(*shape, generator)
    qa, qb = quantize(a, fmt=fmt, scale=scale), quantize(b, layout=layout, fmt=fmt, scale=scale)
    got = fp8_gemm_nt(qa, qb)
    assert_close(got, qa.dequantize(torch.float64), qb.dequantize(torch.float64))


def test_equal_signs_and_equal_values_do_not_drift() -> None:
    """The worst case of a float32 chain: every rounding error has the same sign."""
    a, b = torch.full((4, 8192), 0.1), torch.full((5, 8192), 0.7)
    qa, qb = quantize(a), quantize(b, layout="tile")
    assert_close(fp8_gemm_nt(qa, qb), qa.dequantize(torch.float64), qb.dequantize(torch.float64))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_subnormal_operands_lose_nothing(fmt: str, generator: torch.Generator) -> None:
    """code x scale would be a float32 subnormal; the result is an ordinary number."""
    a, b = operands(5, 7, 127, generator)
    qa, qb = quantize(a * 1e-42, fmt=fmt), quantize(b * 1e10, fmt=fmt)
    assert qa.scale.max() < 2.0**-126
    a64, b64 = qa.dequantize(torch.float64), qb.dequantize(torch.float64)
    assert_close(fp8_gemm_nt(qa, qb), a64, b64)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    qb3 = quantize((b * 1e10)[None], fmt=fmt)
    assert_close(grouped_gemm_nt(qa, qb3, offsets), a64, b64)


@pytest.mark.parametrize("precision", ["medium", "high"])
def test_the_users_matmul_precision_neither_counts_nor_changes(
    precision: str, generator: torch.Generator
) -> None:
    a, b = operands(64, 64, 512, generator)
    qa, qb = quantize(a), quantize(b, layout="tile")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = fp8_gemm_nt(qa, qb)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert_close(got, qa.dequantize(torch.float64), qb.dequantize(torch.float64))


def test_autocast_does_not_count(generator: torch.Generator) -> None:
    a, b = operands(64, 64, 1200, generator)
    qa, qb = quantize(a), quantize(b, layout="tile")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fp8_gemm_nt(qa, qb)
    assert_close(got, qa.dequantize(torch.float64), qb.dequantize(torch.float64))


def test_output_dtype_is_one_rounding(generator: torch.Generator) -> None:
    a, b = operands(33, 65, 300, generator)
    qa, qb = quantize(a), quantize(b)
    assert torch.equal(fp8_gemm_nt(qa, qb, torch.bfloat16), fp8_gemm_nt(qa, qb).bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 128), (4, 0, 128), (4, 4, 0)])
def test_empty_operands(m: int, n: int, k: int) -> None:
    got = fp8_gemm_nt(quantize(torch.ones(m, k)), quantize(torch.ones(n, k), layout="tile"))
    assert torch.equal(got, torch.zeros(m, n))


def test_a_tile_quantised_first_operand(generator: torch.Generator) -> None:
    a, b = operands(150, 70, 200, generator)
    qa, qb = quantize(a, layout="tile"), quantize(b)
    assert_close(fp8_gemm_nt(qa, qb), qa.dequantize(torch.float64), qb.dequantize(torch.float64))


@pytest.mark.parametrize("size", [2.0**-115, 2.0**-80, 2.0**70, 2.0**115])
def test_scales_of_any_size(size: float, generator: torch.Generator) -> None:
    """The other operand brings the result back to ordinary numbers."""
    a, b = operands(40, 24, 300, generator)
    qa, qb = quantize(a * size), quantize(b / size, layout="tile")
    a64, b64 = qa.dequantize(torch.float64), qb.dequantize(torch.float64)
    assert_close(fp8_gemm_nt(qa, qb), a64, b64)
    dy, x = quantize(a.t() * size, layout="col"), quantize(b.t() / size, layout="col")
    got = grouped_gemm_wgrad(dy, x, torch.tensor([0, 300], dtype=torch.int32))
    assert_close(got[0], dy.dequantize(torch.float64).t(), x.dequantize(torch.float64).t())


def test_nan_spoils_its_row_only(generator: torch.Generator) -> None:
    a, b = operands(5, 6, 200, generator)
    a[2, 150] = float("inf")
    got = fp8_gemm_nt(quantize(a), quantize(b, layout="tile"))
    assert torch.isnan(got[2]).all()
    assert torch.isfinite(got[[0, 1, 3, 4]]).all()


COUNTS = [0, 130, 1, 0, 256, 77, 0]


@pytest.fixture
def offsets() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()], dtype=torch.int32)


def grouped(
    generator: torch.Generator, n: int, k: int, layout: str = "tile"
) -> tuple[QuantizedTensor, QuantizedTensor]:
    a = torch.randn(sum(COUNTS) + 20, k, generator=generator)
    b = torch.randn(len(COUNTS), n, k, generator=generator)
    return quantize(a), quantize(b, layout=layout)


@pytest.mark.parametrize("layout", ["row", "tile"])
@pytest.mark.parametrize(("n", "k"), [(130, 200), (1, 128), (64, 1)])
def test_grouped_nt(n: int, k: int, layout: str, offsets: torch.Tensor, generator: torch.Generator) -> None:
    a, b = grouped(generator, n, k, layout)
    got = grouped_gemm_nt(a, b, offsets)
    wide_a, wide_b = a.dequantize(torch.float64), b.dequantize(torch.float64)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        assert_close(got[start:end], wide_a[start:end], wide_b[expert])
    assert torch.equal(got[sum(COUNTS) :], torch.zeros(20, n))


@pytest.mark.parametrize("split", [True, False])
def test_grouped_wgrad_gives_empty_experts_exact_zeros(
    split: bool, offsets: torch.Tensor, generator: torch.Generator
) -> None:
    rows = sum(COUNTS)
    dy, x = torch.randn(rows, 130, generator=generator), torch.randn(rows, 70, generator=generator)
    kept = offsets if split else None
    qdy, qx = quantize(dy, layout="col", offsets=kept), quantize(x, layout="col", offsets=kept)
    got = grouped_gemm_wgrad(qdy, qx, offsets)
    wide_dy, wide_x = qdy.dequantize(torch.float64), qx.dequantize(torch.float64)
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start == end:
            assert torch.equal(got[expert], torch.zeros(130, 70))
        assert_close(got[expert], wide_dy[start:end].t(), wide_x[start:end].t())


def test_b39_all_experts_empty(generator: torch.Generator) -> None:
    none = torch.zeros(4, dtype=torch.int32)
    b = quantize(torch.randn(3, 8, 16, generator=generator), layout="tile")
    assert grouped_gemm_nt(quantize(torch.empty(0, 16)), b, none).shape == (0, 8)
    dy, x = quantize(torch.empty(0, 8), layout="col"), quantize(torch.empty(0, 16), layout="col")
    assert torch.equal(grouped_gemm_wgrad(dy, x, none), torch.zeros(3, 8, 16))


def test_mistakes_are_explained(generator: torch.Generator) -> None:
    x = torch.randn(8, 16, generator=generator)
    row, col = quantize(x), quantize(x, layout="col")
    with pytest.raises(OperandError, match="'row' or 'tile'"):
        fp8_gemm_nt(row, col)
    with pytest.raises(OperandError, match="K differs"):
        fp8_gemm_nt(row, quantize(x[:, :15]))
    with pytest.raises(OperandError, match="'col'"):
        grouped_gemm_wgrad(row, col, torch.tensor([0, 8], dtype=torch.int32))
    experts = quantize(torch.randn(3, 4, 16, generator=generator), layout="tile")
    with pytest.raises(OffsetsError, match="multiples of 16, as alignment=16 promises"):
        grouped_gemm_nt(row, experts, torch.tensor([0, 3, 5, 8], dtype=torch.int32), alignment=16)
    with pytest.raises(OffsetsError, match="describe 1 experts"):
        grouped_gemm_nt(row, experts, torch.tensor([0, 8], dtype=torch.int32))
