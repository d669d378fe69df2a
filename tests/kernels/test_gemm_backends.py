"""What torch's scaled_mm and DeepGEMM are handed, checked by stand-ins that keep their rules and multiply in float64."""

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_safeguard.kernels import (
    OperandError,
    QuantizedTensor,
    deep_gemm,
    quantize,
    torch_products,
)

TOLERANCE = 1e-6
ROW, TILE = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128


def whole(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def spread(scale: Tensor, rows: int, columns: int, tile: bool) -> Tensor:
    """Every element's scale from [rows or row blocks, blocks]."""
    scale = scale.repeat_interleave(128, dim=0)[:rows] if tile else scale
    return scale.repeat_interleave(128, dim=1)[:, :columns].double()


class Cublas:
    """torch.nn.functional.scaled_mm by the checks of ScaledBlas.cpp and the alignments of cuBLAS."""

    def __init__(self) -> None:
        self.recipes: list[tuple[Any, Any]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        recipe_a: Any,
        scale_b: Tensor,
        recipe_b: Any,
        **more: Any,
    ) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert a.dtype == torch.float8_e4m3fn or b.dtype == torch.float8_e4m3fn
        assert (a.stride(1), b.stride(0)) == (1, 1)
        assert not any(size % 16 for size in (n, k, a.stride(0), b.stride(1)))
        assert not more["use_fast_accum"]
        assert (recipe_a, recipe_b) != (TILE, TILE)
        self.recipes.append((recipe_a, recipe_b))
        wide = []
        for codes, rows, scale, recipe in ((a, m, scale_a, recipe_a), (b.t(), n, scale_b, recipe_b)):
            assert scale.dtype == torch.float32
            blocks = whole(k, 128) // 128
            if recipe == TILE:
                shape = whole(blocks, 4), whole(rows, 128) // 128
                scale = scale.t()
            else:
                assert rows % 4 == 0
                shape = rows, blocks
            given = scale.t() if recipe == TILE else scale
            assert given.shape == shape
            assert given.stride(0) == 1
            assert given.stride(1) == shape[0] or shape[1] == 1
            wide.append(codes.double() * spread(scale[:, :blocks], rows, k, recipe == TILE))
        return (wide[0] @ wide[1].t()).to(more["output_dtype"])


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> Cublas:
    stand_in = Cublas()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    return stand_in


def assert_close(got: Tensor, a: Tensor, b: Tensor) -> None:
    assert ((got.double() - a @ b.t()).abs() <= TOLERANCE * (a.abs() @ b.abs().t())).all()


def wide(operand: QuantizedTensor) -> Tensor:
    return operand.dequantize(torch.float64)


@pytest.mark.parametrize("k", [128, 256, 272, 1040])
@pytest.mark.parametrize("layouts", [("row", "tile"), ("row", "row"), ("tile", "row")])
def test_scaled_mm_gets_its_layouts(
    layouts: tuple[str, str], k: int, cublas: Cublas, generator: torch.Generator
) -> None:
    a, b = torch.randn(132, k, generator=generator), torch.randn(144, k, generator=generator)
    qa, qb = quantize(a, layout=layouts[0]), quantize(b, layout=layouts[1])
    assert_close(torch_products.fp8_gemm_nt(qa, qb), wide(qa), wide(qb))
    assert cublas.recipes == [tuple(TILE if layout == "tile" else ROW for layout in layouts)]


def test_scaled_mm_takes_weights_and_gradients_that_are_views(
    cublas: Cublas, generator: torch.Generator
) -> None:
    dy, x = torch.randn(272, 144, generator=generator), torch.randn(272, 208, generator=generator)
    qdy, qx = quantize(dy, layout="col"), quantize(x, layout="col")
    assert_close(torch_products.fp8_gemm_wgrad(qdy, qx), wide(qdy).t(), wide(qx).t())
    base = quantize(torch.randn(144, 272, generator=generator), layout="tile")
    view = QuantizedTensor(base.data.t(), base.scale.t(), "tile", "e4m3")
    a = quantize(torch.randn(8, 144, generator=generator))
    assert_close(torch_products.fp8_gemm_nt(a, view), wide(a), wide(base).t())


def test_scaled_mm_keeps_scales_that_already_lie_right(cublas: Cublas, generator: torch.Generator) -> None:
    a = quantize(torch.randn(8, 272, generator=generator))
    turned = QuantizedTensor(a.data, a.scale.t().contiguous().t(), "row", "e4m3")
    assert torch_products.scale_of(turned).data_ptr() == turned.scale.data_ptr()
    assert torch.equal(torch_products.scale_of(a), a.scale)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "said"),
    [
        ({"layout": "tile"}, {"layout": "tile"}, torch.float32, "both operands are in 'tile' blocks"),
        ({"fmt": "e5m2"}, {"fmt": "e5m2"}, torch.float32, "both operands are E5M2"),
        ({}, {}, torch.float64, "torch.float64"),
        ({"shape": (32, 40)}, {"shape": (32, 40)}, torch.float32, "K = 40"),
        ({}, {"shape": (24, 64)}, torch.float32, "N = 24"),
        ({"shape": (6, 64)}, {}, torch.float32, "6 rows, not a multiple of 4"),
    ],
)
def test_what_scaled_mm_does_not_take_is_said(
    a: dict[str, Any], b: dict[str, Any], dtype: torch.dtype, said: str, cublas: Cublas
) -> None:
    first, second = (quantize(torch.ones(each.pop("shape", (32, 64))), **each) for each in (a, b))
    with pytest.raises(OperandError, match=said) as caught:
        torch_products.fp8_gemm_nt(first, second, dtype)
    assert "'triton'" in str(caught.value)
    assert not cublas.recipes


def test_torch_has_no_grouped_product(cublas: Cublas) -> None:
    x, w = quantize(torch.ones(32, 64)), quantize(torch.ones(2, 16, 64), layout="tile")
    with pytest.raises(OperandError, match="one scale a row"):
        torch_products.grouped_gemm_nt(x, w, torch.tensor([0, 16, 32]), torch.float32)


def test_nothing_to_multiply_is_not_handed_on(cublas: Cublas) -> None:
    got = torch_products.fp8_gemm_nt(quantize(torch.ones(0, 64)), quantize(torch.ones(16, 64)))
    assert got.shape == (0, 16)
    assert not cublas.recipes


class DeepGemm(SimpleNamespace):
    """The package deep_gemm, by the assertions of its csrc/apis/gemm.hpp for Hopper."""

    @staticmethod
    def fp8_gemm_nt(a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None) -> None:
        tile = recipe == (1, 128, 128)
        assert tile or recipe == (1, 1, 128)
        for codes, scale in (a, b):
            assert codes.dtype == torch.float8_e4m3fn
            assert codes.stride(1) == 1
            assert scale.dtype == torch.float32
            assert scale.is_contiguous() or (scale.stride(0) == 1 and scale.stride(1) % 4 == 0)
        if not tile:
            assert c is d
            assert d.dtype == torch.float32
        wide_a = a[0].double() * spread(a[1], *a[0].shape, tile=False)
        wide_b = b[0].double() * spread(b[1], *b[0].shape, tile=tile)
        d.copy_(wide_a @ wide_b.t() + (0 if c is None else c))

    @classmethod
    def m_grouped_fp8_gemm_nt_contiguous(
        cls, a: Any, b: Any, d: Tensor, m_indices: Tensor, recipe: Any = None
    ) -> None:
        assert d.dtype == torch.bfloat16
        assert m_indices.dtype == torch.int32
        assert m_indices.is_contiguous()
        for start in range(0, len(m_indices), 128):
            rows = slice(start, start + 128)
            experts = set(m_indices[rows].tolist())
            assert len(experts) == 1
            expert = experts.pop()
            if expert >= 0:
                first, second = (part[rows] for part in a), (part[expert] for part in b)
                cls.fp8_gemm_nt(tuple(first), tuple(second), d[rows], recipe=recipe)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm())
    deep_gemm._package.cache_clear()


@pytest.mark.parametrize("layout", ["row", "tile"])
def test_deep_gemm_gets_its_recipes(layout: str, package: None, generator: torch.Generator) -> None:
    a, b = torch.randn(70, 272, generator=generator), torch.randn(144, 272, generator=generator)
    qa, qb = quantize(a), quantize(b, layout=layout)
    assert_close(deep_gemm.fp8_gemm_nt(qa, qb), wide(qa), wide(qb))


def test_deep_gemm_gets_columns_as_rows(package: None, generator: torch.Generator) -> None:
    dy, x = torch.randn(272, 144, generator=generator), torch.randn(272, 208, generator=generator)
    qdy, qx = quantize(dy, layout="col"), quantize(x, layout="col")
    assert_close(deep_gemm.fp8_gemm_wgrad(qdy, qx), wide(qdy).t(), wide(qx).t())


def test_deep_gemm_gets_the_expert_of_each_row(package: None, generator: torch.Generator) -> None:
    bounds = [0, 0, 128, 384, 384]
    a = quantize(torch.randn(512, 272, generator=generator))
    b = quantize(torch.randn(4, 144, 272, generator=generator), layout="tile")
    offsets = torch.tensor(bounds, dtype=torch.int32)
    got = deep_gemm.grouped_gemm_nt(a, b, offsets, torch.float32, alignment=128)
    for expert, (start, end) in enumerate(pairwise(bounds)):
        exact = wide(a)[start:end] @ wide(b)[expert].t()
        assert torch.equal(got[start:end], exact.bfloat16().float())
    assert torch.equal(got[384:], torch.zeros(128, 144))


@pytest.mark.parametrize(
    ("a", "b", "dtype", "said"),
    [
        ({"layout": "tile"}, {"layout": "tile"}, torch.float32, "first operand is in 'tile'"),
        ({"fmt": "e5m2"}, {}, torch.float32, "E5M2"),
        ({}, {}, torch.float16, "torch.float16"),
        ({"shape": (32, 100)}, {"shape": (32, 100)}, torch.float32, "K = 100"),
    ],
)
def test_what_deep_gemm_does_not_take_is_said(
    a: dict[str, Any], b: dict[str, Any], dtype: torch.dtype, said: str, package: None
) -> None:
    first, second = (quantize(torch.ones(each.pop("shape", (32, 64))), **each) for each in (a, b))
    with pytest.raises(OperandError, match=said):
        deep_gemm.fp8_gemm_nt(first, second, dtype)


def test_deep_gemm_needs_experts_padded_to_its_blocks(package: None) -> None:
    x, w = quantize(torch.ones(128, 64)), quantize(torch.ones(2, 16, 64), layout="tile")
    offsets = torch.tensor([0, 16, 128], dtype=torch.int32)
    with pytest.raises(OperandError, match=r"multiples of 128 rows.*alignment=16"):
        deep_gemm.grouped_gemm_nt(x, w, offsets, torch.float32, alignment=16)
    dy, x = quantize(torch.ones(128, 16), layout="col"), quantize(torch.ones(128, 64), layout="col")
    with pytest.raises(OperandError, match="on the host"):
        deep_gemm.grouped_gemm_wgrad(dy, x, offsets, torch.float32, aligned=True)


def test_an_old_deep_gemm_is_told_apart(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    device = torch.device("cuda", 0)
    assert deep_gemm.unavailable(device) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "powers of two" in deep_gemm.unavailable(device)
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    deep_gemm._package.cache_clear()
    assert "has no fp8_gemm_nt; install 2.1" in deep_gemm.unavailable(device)
