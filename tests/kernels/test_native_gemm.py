"""The native GEMM with each instruction set against float64 products of the dequantised operands."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import QuantizedTensor, native_gemm, quantize

TOLERANCE = 1e-6
"""Of sum |a||b| in float32: chains of 16 products, then one scale and add for each block of 128."""
QUANTUM = 2.0**-149
"""Smallest step of float32: a subnormal result cannot be nearer."""

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEVELS = range(len(native_gemm.INSTRUCTION_SETS))


def use(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply with that instruction set from now on."""
    monkeypatch.setattr(native_gemm, "level", lambda: level)


@pytest.fixture(params=LEVELS, ids=native_gemm.INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each instruction set in turn."""
    if not native_gemm.available():
        pytest.fail("the native kernels were not built: install a C++ compiler and run `make setup`")
    if request.param > native_gemm.level():
        pytest.skip(f"this processor has no {native_gemm.INSTRUCTION_SETS[request.param]}")
    use(request.param, monkeypatch)
    return int(request.param)


def wide(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Magnitudes that differ from row to row and column to column."""
    spread = torch.randn(rows, 1, generator=generator) + torch.randn(1, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp(spread)


def exact(operand: QuantizedTensor) -> Tensor:
    return operand.dequantize(torch.float64)


def assert_close(got: Tensor, a: Tensor, b: Tensor, quanta: float = 0) -> None:
    """got is a @ b.T within TOLERANCE x sum |a||b| and some steps of the smallest float32; a and b float64."""
    assert got.dtype == torch.float32
    assert ((got.double() - a @ b.mT).abs() <= TOLERANCE * (a.abs() @ b.abs().mT) + quanta * QUANTUM).all()


def coded(codes: Tensor, scale: Tensor, layout: str = "row", fmt: str = "e4m3") -> QuantizedTensor:
    """A tensor of these uint8 codes."""
    return QuantizedTensor(codes.view(DTYPES[fmt]), scale, layout, fmt)


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "tile"), ("tile", "row"), ("tile", "tile")])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 31, 129), (70, 130, 257), (3, 200, 1500)])
def test_within_tolerance_of_float64(
    shape: Any, layouts: Any, formats: Any, generator: torch.Generator
) -> None:
    rows, columns, depth = shape
    a = quantize(wide(rows, depth, generator), layout=layouts[0], fmt=formats[0])
    b = quantize(wide(columns, depth, generator), layout=layouts[1], fmt=formats[1])
    assert_close(native_gemm.gemm_nt(a, b, torch.float32), exact(a), exact(b))


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
def test_b44_every_pair_of_codes_multiplies_exactly(formats: tuple[str, str]) -> None:
    """Subnormal codes, signed zeros, Inf and NaN included; ml_dtypes decodes for comparison."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    a, b = (coded(codes, torch.ones(256, 1), fmt=fmt) for fmt in formats)
    got = native_gemm.gemm_nt(a, b, torch.float32).double().numpy()
    views = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    values = [codes[:, 0].numpy().view(views[fmt]).astype(np.float64) for fmt in formats]
    with np.errstate(invalid="ignore"):
        wanted = np.outer(*values)
    np.testing.assert_array_equal(got, wanted)


def test_every_instruction_set_gives_the_same_bits(
    instruction_set: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All add in the order of the matrix tiles, whatever the values are: here random codes, NaN and Inf too."""
    codes = torch.randint(0, 256, (2, 100, 700), generator=generator, dtype=torch.uint8)
    codes[:, 3:] = torch.where(codes[:, 3:] & 0x7F >= 0x7C, 0x7B, codes[:, 3:])
    a, b = (coded(part, torch.rand(100, 6, generator=generator) + 0.1, fmt="e5m2") for part in codes)
    ours = native_gemm.gemm_nt(a, b, torch.float32)
    use(0, monkeypatch)
    plain = native_gemm.gemm_nt(a, b, torch.float32)
    assert torch.equal(ours.isnan(), plain.isnan())
    assert torch.equal(ours.nan_to_num(0.0), plain.nan_to_num(0.0))
    assert torch.isfinite(ours[3:, 3:]).all()


class TestFewRows:
    """Up to 64 rows times codes that lie across k, as the emulated gradients of sampled rows are."""

    @pytest.mark.parametrize("rows", [1, 32, 33, 64, 65])
    @pytest.mark.parametrize(
        ("columns", "depth"),
        [(1, 1), (32, 128), (96, 300), (70, 96), (257, 33), (40, 32 * 128), (40, 40 * 128)],
    )
    def test_same_bits_as_without_tiles(
        self, rows: int, columns: int, depth: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All codes of both formats."""
        for a_fmt, b_fmt in (("e5m2", "e4m3"), ("e4m3", "e5m2")):
            a = coded(*codes_and_scales(rows, depth, generator), fmt=a_fmt)
            b_codes, b_scale = codes_and_scales(columns, depth, generator)
            b = coded(strided(b_codes, "turned"), b_scale, fmt=b_fmt)
            ours = native_gemm.gemm_nt(a, b, torch.float32)
            with monkeypatch.context() as patch:
                use(0, patch)
                plain = native_gemm.gemm_nt(a, b, torch.float32)
            assert torch.equal(ours.nan_to_num(7.0, 8.0, 9.0), plain.nan_to_num(7.0, 8.0, 9.0))
            assert ours.isfinite().any()

    def test_scales_that_need_float64_in_some_columns(self, generator: torch.Generator) -> None:
        small = [
            torch.randint(0, 16, (size, 256), generator=generator, dtype=torch.uint8) for size in (64, 160)
        ]
        b_scale = torch.ones(160, 2)
        b_scale[70:75] = 2.0**-149
        a, b = coded(small[0], torch.full((64, 2), 2.0**100)), coded(strided(small[1], "turned"), b_scale)
        assert_close(native_gemm.gemm_nt(a, b, torch.float32), exact(a), exact(b), quanta=1)

    def test_nothing_is_read_behind_the_last_code(self, instruction_set: int) -> None:
        """Behind it lies memory that nobody may read: a read would end the process, so another one multiplies."""
        found = subprocess.run(
            [sys.executable, "-c", LAST_CODE, str(instruction_set)], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr

    def test_out_gets_nothing_beyond_its_edges(self, generator: torch.Generator) -> None:
        a, b = quantize(wide(33, 128, generator)), quantize(wide(40, 128, generator))
        b = coded(strided(b.data.view(torch.uint8), "turned"), b.scale)
        out = torch.zeros(40, 64)
        native_gemm.gemm_nt(a, b, torch.float32, out[:33, :40])
        assert_close(out[:33, :40], exact(a), exact(b))
        assert not out[33:].any()
        assert not out[:, 40:].any()


LAST_CODE = """
import ctypes, mmap, sys
import torch
from fp8_safeguard.kernels import QuantizedTensor, native_gemm

assert native_gemm.level() >= int(sys.argv[1])  # asking allows the process matrix tiles
native_gemm.level = lambda: int(sys.argv[1])
page, depth, columns = mmap.PAGESIZE, 128, 40
memory = mmap.mmap(-1, 3 * page)
whole = torch.frombuffer(memory, dtype=torch.uint8)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(whole.data_ptr() + 2 * page), ctypes.c_size_t(page), 0) == 0
lines = whole[2 * page - depth * columns : 2 * page].view(depth, columns)
lines.fill_(0x38)
a, b = (
    QuantizedTensor(codes.view(torch.float8_e4m3fn), torch.ones(codes.shape[0], 1), "row", "e4m3")
    for codes in (torch.full((64, depth), 0x38, dtype=torch.uint8), lines.t())
)
assert (native_gemm.gemm_nt(a, b, torch.float32) == depth).all()
"""


def codes_and_scales(rows: int, depth: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any codes, NaN and Inf of either format in the last of several rows alone; scales by row and block."""
    codes = torch.randint(0, 256, (rows, depth), generator=generator, dtype=torch.uint8)
    finite = codes[: max(1, rows - 1)]
    finite[finite & 0x7F >= 0x7C] = 0x7B
    return codes, torch.rand(rows, -(-depth // 128), generator=generator) + 0.1


def test_nan_spoils_its_row_only(generator: torch.Generator) -> None:
    x = wide(5, 200, generator)
    x[2, 150] = float("inf")
    got = native_gemm.gemm_nt(quantize(x), quantize(wide(6, 200, generator), layout="tile"), torch.bfloat16)
    assert torch.isnan(got[2]).all()
    assert torch.isfinite(got[[0, 1, 3, 4]]).all()


def strided(tensor: Tensor, kind: str) -> Tensor:
    """The same matrix in other strides."""
    if kind == "turned":
        return tensor.t().contiguous().t()
    spread = tensor.new_zeros(2 * tensor.shape[0], 3 * tensor.shape[1])
    spread[::2, ::3] = tensor
    return spread[::2, ::3]


@pytest.mark.parametrize("kind", ["turned", "spread"])
@pytest.mark.parametrize("shape", [(40, 50, 300), (64, 64, 128)])
def test_b33_strides_of_codes_and_scales_do_not_matter(
    shape: Any, kind: str, generator: torch.Generator
) -> None:
    rows, columns, depth = shape
    plain = [quantize(wide(size, depth, generator)) for size in (rows, columns)]
    wanted = native_gemm.gemm_nt(*plain, torch.float32)
    views = [
        coded(strided(operand.data.view(torch.uint8), kind), strided(operand.scale, kind))
        for operand in plain
    ]
    assert not views[0].data.is_contiguous()
    assert torch.equal(native_gemm.gemm_nt(*views, torch.float32), wanted)


EXTREMES = [
    (2.0**-149, 2.0**120),
    (2.0**-149, 1.0),
    (2.0**-100, 2.0**-30),
    (2.0**120, 2.0**-120),
    (2.0**60, 2.0**50),
]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("a_scale", "b_scale"), EXTREMES)
def test_tiny_and_huge_scales_lose_nothing(
    a_scale: float, b_scale: float, fmt: str, generator: torch.Generator
) -> None:
    """A step of float32 arithmetic would be subnormal or infinite; the result mostly is neither."""
    for scales in ((a_scale, b_scale), (b_scale, a_scale)):
        a, b = (
            coded(
                torch.randint(0, 0x78, (40, 300), generator=generator, dtype=torch.uint8),
                scale * (1 + torch.randint(0, 8, (40, 3), generator=generator)).float(),
                fmt=fmt,
            )
            for scale in scales
        )
        wanted = exact(a) @ exact(b).t()
        got = native_gemm.gemm_nt(a, b, torch.float32)
        finite = wanted < torch.finfo(torch.float32).max
        assert torch.equal(got[~finite], torch.full_like(got[~finite], float("inf")))
        error = (got.double() - wanted).abs()[finite]
        assert (error <= (TOLERANCE * wanted + QUANTUM / 2)[finite]).all()


def test_a_users_flush_to_zero_neither_counts_nor_changes(generator: torch.Generator) -> None:
    a, b = quantize(wide(8, 100, generator) * 1e-42), quantize(wide(9, 100, generator))
    wanted = native_gemm.gemm_nt(a, b, torch.float32)
    assert torch.set_flush_denormal(True)
    try:
        got = native_gemm.gemm_nt(a, b, torch.float32)
        assert torch.tensor(1e-40).mul(0.5) == 0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, wanted)
    assert (got != 0).any()


def test_equal_signs_and_equal_values_do_not_drift() -> None:
    """The worst case of a float32 chain: every rounding error has the same sign."""
    a, b = quantize(torch.full((2, 50000), 0.1)), quantize(torch.full((3, 50000), 0.7), layout="tile")
    assert_close(native_gemm.gemm_nt(a, b, torch.float32), exact(a), exact(b))


def test_bfloat16_is_float32_rounded_once(generator: torch.Generator) -> None:
    a, b = quantize(wide(33, 300, generator)), quantize(wide(65, 300, generator))
    full = native_gemm.gemm_nt(a, b, torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        got = native_gemm.gemm_nt(a, b, dtype)
        assert got.dtype == dtype
        assert torch.equal(got, full.to(dtype))


def test_bfloat16_ties_go_to_even() -> None:
    one = torch.full((1, 1), 0x38, dtype=torch.uint8)
    scale = torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [-1 - 2**-8], [2.0**128 - 2.0**104]])
    got = native_gemm.gemm_nt(coded(one.expand(4, 1), scale), coded(one, torch.ones(1, 1)), torch.bfloat16)
    assert got[:, 0].tolist() == [1.0, 1 + 2**-6, -1.0, float("inf")]


@pytest.mark.parametrize("kind", ["plain", "turned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_added_to_out(dtype: torch.dtype, kind: str, generator: torch.Generator) -> None:
    a, b = quantize(wide(33, 300, generator)), quantize(wide(40, 300, generator))
    before = torch.randn(33, 40, generator=generator).to(dtype)
    out = before.clone() if kind == "plain" else strided(before, kind)
    given = native_gemm.gemm_nt(a, b, dtype, out)
    assert given is out
    assert torch.equal(out, (before.float() + native_gemm.gemm_nt(a, b, torch.float32)).to(dtype))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 4, 128), (4, 0, 128), (4, 4, 0)])
def test_empty_operands(rows: int, columns: int, depth: int) -> None:
    a, b = quantize(torch.ones(rows, depth)), quantize(torch.ones(columns, depth), layout="tile")
    assert torch.equal(native_gemm.gemm_nt(a, b, torch.float32), torch.zeros(rows, columns))


COUNTS = [0, 130, 1, 0, 256, 77, 0]
BOUNDS = [0, *torch.tensor(COUNTS).cumsum(0).tolist()]


@pytest.mark.parametrize("layout", ["row", "tile"])
@pytest.mark.parametrize(("features", "depth"), [(130, 200), (1, 128), (64, 1)])
def test_grouped_nt(layout: str, features: int, depth: int, generator: torch.Generator) -> None:
    a = quantize(wide(BOUNDS[-1] + 20, depth, generator))
    b = quantize(torch.randn(len(COUNTS), features, depth, generator=generator), layout=layout)
    got = native_gemm.grouped_nt(a, b, BOUNDS, torch.float32)
    for expert, (start, end) in enumerate(pairwise(BOUNDS)):
        assert_close(got[start:end], exact(a)[start:end], exact(b)[expert])
    assert torch.equal(got[BOUNDS[-1] :], torch.zeros(20, features))
    out = torch.ones_like(got)
    assert torch.equal(native_gemm.grouped_nt(a, b, BOUNDS, torch.float32, out), 1 + got)


@pytest.mark.parametrize("split", [(False, False), (True, True), (True, False), (False, True)])
def test_grouped_wgrad_cuts_where_any_block_begins(
    split: tuple[bool, bool], generator: torch.Generator
) -> None:
    """Blocks of the two operands may start at each expert or at every 128th row of all."""
    offsets = torch.tensor(BOUNDS, dtype=torch.int32)
    dy, x = (
        quantize(wide(BOUNDS[-1], width, generator), layout="col", fmt=fmt, offsets=offsets if own else None)
        for width, fmt, own in ((130, "e5m2", split[0]), (70, "e4m3", split[1]))
    )
    got = native_gemm.grouped_wgrad(dy, x, BOUNDS, torch.float32)
    for expert, (start, end) in enumerate(pairwise(BOUNDS)):
        assert_close(got[expert], exact(dy)[start:end].t(), exact(x)[start:end].t())
        assert end > start or torch.equal(got[expert], torch.zeros(130, 70))
    out = torch.full_like(got, 0.5)
    assert torch.equal(native_gemm.grouped_wgrad(dy, x, BOUNDS, torch.float32, out), 0.5 + got)


def test_b39_all_experts_empty() -> None:
    dy, x = quantize(torch.empty(0, 8), layout="col"), quantize(torch.empty(0, 16), layout="col")
    zeros = native_gemm.grouped_wgrad(dy, x, [0, 0, 0, 0], torch.bfloat16)
    assert torch.equal(zeros, torch.zeros(3, 8, 16, dtype=torch.bfloat16))
    a, b = quantize(torch.empty(0, 16)), quantize(torch.ones(3, 8, 16), layout="tile")
    assert native_gemm.grouped_nt(a, b, [0, 0, 0, 0], torch.float32).shape == (0, 8)
