"""Sampled rows of products, and their comparison, against float64."""

from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels import native, native_exact, native_gemm
from fp8_safeguard.kernels.native_exact import compare_rows, rows_of_product
from fp8_safeguard.monitor import stats

WITHIN = 4e-7
"""Of sum |a||b|. A product loses 2^-21 of itself at most with the parts left out, and a sum in float32 gains a few
units of 2^-24 a step of 32; IEEE float32 is no nearer (2.2e-7 at most on the same cases, ours 1.6e-7)."""
NULLS = set(stats.ALL_COLUMNS) - {"count", "nan", "inf", "amax", "sum_sq", "sum_sq_q", "sum_sq_err"}


@pytest.fixture
def on_tiles() -> None:
    if not native_exact.available() or native_gemm.level() < native_exact.TILE_LEVEL:
        pytest.skip("the native kernels were not built, or this processor has no matrix tiles (AMX)")


def assert_product(got: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == torch.float32
    exact, bound = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((got.double() - exact).abs() <= WITHIN * bound + 2.0**-149).all()


@pytest.mark.usefixtures("on_tiles")
class TestRowsOfProduct:
    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("a_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (64, 96, 48), (65, 33, 17), (130, 500, 70), (17, 1000, 15), (3, 2100, 5)]
    )
    def test_it_is_as_exact_as_float32(
        self, shape: Any, a_dtype: Any, b_dtype: Any, turned: bool, generator: torch.Generator
    ) -> None:
        rows, depth, columns = shape
        a = torch.randn(rows, depth, generator=generator).to(a_dtype)
        b = torch.randn(columns, depth, generator=generator).to(b_dtype).mT
        b = b if turned else b.contiguous()
        assert_product(rows_of_product(a, b), a, b)

    def test_products_of_bfloat16_are_exact(self, generator: torch.Generator) -> None:
        """Sums of few bits: nothing is rounded anywhere."""
        a = torch.randint(-8, 9, (20, 64), generator=generator).bfloat16()
        b = torch.randint(-8, 9, (64, 20), generator=generator).bfloat16()
        got = rows_of_product(a, b)
        assert got is not None
        assert torch.equal(got.double(), a.double() @ b.double())

    def test_all_24_bits_of_float32_count(self) -> None:
        a, b = torch.tensor([[1.0 + 2.0**-23]]), torch.tensor([[1.0 - 2.0**-24]])
        for left, right in ((a, torch.ones(1, 1)), (torch.ones(1, 1), b)):
            assert torch.equal(rows_of_product(left, right), left @ right)  # type: ignore[arg-type]

    def test_rows_of_any_magnitude_keep_their_precision(self, generator: torch.Generator) -> None:
        """Rows far apart from each other, subnormal ones too: tiles take subnormals for zeros."""
        a = torch.randn(40, 200, generator=generator)
        a *= 2.0 ** torch.linspace(-120, 100, 40)[:, None]
        b = torch.randn(200, 30, generator=generator) * 2.0**-20
        assert_product(rows_of_product(a, b), a, b)
        tiny = torch.randint(1, 2**23, (4, 64), generator=generator, dtype=torch.int32).view(torch.float32)
        wide = torch.randn(64, 8, generator=generator) * 2.0**30
        assert_product(rows_of_product(tiny, wide), tiny, wide)

    def test_wanted_rows_and_strides(self, generator: torch.Generator) -> None:
        a, b = torch.randn(300, 70, generator=generator), torch.randn(70, 90, generator=generator)
        places = torch.tensor([0, 7, 7, 299])
        assert_product(rows_of_product(a, b, places), a[places], b)
        assert_product(rows_of_product(a.mT.contiguous().mT, b, places), a[places], b)
        assert_product(rows_of_product(a, b, places[::2]), a[places[::2]], b)
        assert_product(rows_of_product(a[:, ::2], b[::2, 3:50]), a[:, ::2], b[::2, 3:50])

    def test_empty_operands(self) -> None:
        assert rows_of_product(torch.ones(0, 5), torch.ones(5, 3)).shape == (0, 3)  # type: ignore[union-attr]
        assert torch.equal(rows_of_product(torch.ones(2, 0), torch.ones(0, 3)), torch.zeros(2, 3))  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
    def test_what_tiles_cannot_multiply_is_left_to_torch(self, value: float) -> None:
        plain, odd = torch.ones(40, 40), torch.ones(40, 40)
        odd[39, 39] = value
        assert rows_of_product(plain, odd) is None
        assert rows_of_product(plain, odd.mT.contiguous().mT) is None
        assert (rows_of_product(odd, plain) is None) == (value != 3e38)
        assert rows_of_product(plain, plain * 2.0**-70) is None
        assert rows_of_product(plain, torch.zeros(40, 40)) is not None
        assert rows_of_product(plain, torch.full((40, 40), 1e-41)) is None

    def test_other_dtypes_layouts_and_devices_are_left_to_torch(self) -> None:
        plain = torch.ones(8, 8)
        for other in (plain.double(), plain.half(), plain.to("meta"), torch.ones(8, 16)[:, ::2][::2].mT):
            assert rows_of_product(plain, other) is None
        assert rows_of_product(plain.half(), plain) is None

    def test_processors_without_tiles_are_left_to_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_gemm, "level", lambda: native_exact.TILE_LEVEL - 1)
        assert rows_of_product(torch.ones(2, 2), torch.ones(2, 2)) is None


@pytest.mark.parametrize("level", range(len(native.INSTRUCTION_SETS)))
class TestCompareRows:
    @pytest.fixture(autouse=True)
    def _level(self, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
        if level > native.level():
            pytest.skip(f"this processor has no {native.INSTRUCTION_SETS[level]}")
        monkeypatch.setattr(native, "level", lambda: level)

    def check(self, got: torch.Tensor | None, exact: torch.Tensor, actual: torch.Tensor) -> None:
        assert got is not None
        ours = stats.TensorStats.from_vector(got.numpy(), NULLS)
        wanted = stats.compare(exact.double().numpy(), actual.double().numpy())
        assert ours.nulls == wanted.nulls
        np.testing.assert_allclose(ours.to_vector(), wanted.to_vector(), rtol=1e-13)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(1, 1), (3, 16), (64, 515), (5, 7), (0, 4), (4, 0)])
    def test_it_is_the_definition(self, shape: Any, dtype: torch.dtype, generator: torch.Generator) -> None:
        exact = torch.randn(shape, generator=generator)
        actual = (exact * 1.03).to(dtype)
        self.check(compare_rows(exact, actual), exact, actual)

    def test_values_that_are_not_finite_are_counted_and_left_out(self, generator: torch.Generator) -> None:
        exact, actual = torch.randn(9, 50, generator=generator), torch.randn(9, 50, generator=generator)
        exact[0, 0], exact[0, 1], exact[8, 49] = float("nan"), float("inf"), -float("inf")
        actual[0, 1], actual[3, 3], actual[8, 48], actual[5, 0] = (
            float("nan"),
            float("inf"),
            -float("nan"),
            3e38,
        )
        exact[4, 4], actual[4, 4] = 1e6, float("inf")  # the largest value, but its partner is not finite
        self.check(compare_rows(exact, actual), exact, actual)

    @pytest.mark.parametrize("scale", [1e-30, 1e-44, 1e30])
    def test_sums_of_tiny_and_huge_results(self, scale: float, generator: torch.Generator) -> None:
        exact = (torch.randn(4, 40, generator=generator, dtype=torch.float64) * scale).float()
        self.check(compare_rows(exact, exact * 1.5), exact, exact * 1.5)

    def test_rows_bias_and_strides(self, generator: torch.Generator) -> None:
        exact, whole = torch.randn(3, 40, generator=generator), torch.randn(99, 80, generator=generator)
        places, bias = torch.tensor([0, 50, 98]), torch.randn(40, generator=generator)
        actual = whole[:, 20:60]
        self.check(compare_rows(exact, actual, places, bias), exact + bias, actual[places])

    def test_other_dtypes_and_layouts_are_left_to_torch(self) -> None:
        plain = torch.ones(4, 4)
        assert compare_rows(plain.double(), plain) is None
        assert compare_rows(plain, plain.half()) is None
        assert compare_rows(plain, torch.ones(4, 8)[:, ::2]) is None
        assert compare_rows(plain, plain, None, plain[0].bfloat16()) is None


def test_a_library_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        @staticmethod
        def fp8_native_exact_job_bytes() -> int:
            return native_exact._PRODUCT.size

    for found in (None, Older, object()):
        monkeypatch.setattr(native, "library", lambda found=found: found)
        assert native_exact._library.__wrapped__() is None
