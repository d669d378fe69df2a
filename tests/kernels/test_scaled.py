"""One scale for a whole tensor, and amax floors, against ml_dtypes and float64."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8_safeguard.kernels import (
    KernelError,
    LinearPrecision,
    OperandError,
    OperandFormat,
    ScaledFormat,
    fp8_gemm_nt,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
    layout_stats,
    quantize,
    round_trip,
    tensor_stats,
    tiles,
)
from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.monitor.stats import COLUMNS, TILE_SQNR_EDGES_DB

FMTS = ("e4m3", "e5m2")
LAYOUTS = ("row", "col", "tile")
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}
ML = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
BLOCK_SHAPES = {"row": (1, 128), "col": (128, 1), "tile": (128, 128)}
OFFSETS = torch.tensor([0, 40, 40, 169, 200], dtype=torch.int32)


def encoded(x: Tensor, scale: float, fmt: str) -> NDArray[np.float64]:
    """Codes' values by ml_dtypes, of finite x."""
    ratio = x.float().numpy() / np.float32(scale)
    clamped = np.clip(ratio, -MAXIMUM[fmt], MAXIMUM[fmt]).astype(np.float32)
    return clamped.astype(ML[fmt]).astype(np.float64)


def measured(x: Tensor, layout: str, scale: float, fmt: str) -> dict[str, Any]:
    """TensorStats in float64, column by column, block by block, from what they are defined as."""
    x = x.float()
    values, finite = x.double().numpy(), np.isfinite(x.numpy())
    kept = np.where(finite, values, 0.0)
    q = encoded(torch.from_numpy(kept).float(), scale, fmt)
    ratio = np.abs(kept.astype(np.float32) / np.float32(scale))
    edge = ratio >= 61440.0 if fmt == "e5m2" else ratio > 464.0
    back = q * float(np.float32(scale))
    zero = (q == 0) & finite
    rows, columns = BLOCK_SHAPES[layout]

    def summed(squares: NDArray[np.float64]) -> NDArray[np.float64]:
        """By block."""
        bands = np.add.reduceat(squares, np.arange(0, x.shape[0], rows), axis=0) if len(squares) else squares
        return np.add.reduceat(bands, np.arange(0, x.shape[1], columns), axis=1).ravel()

    signal, noise = summed(kept**2), summed((kept - back) ** 2)
    with np.errstate(divide="ignore"):
        decibels = 10 * np.log10(signal[signal > 0] / noise[signal > 0])
    counts = np.bincount(np.searchsorted(TILE_SQNR_EDGES_DB[1:-1], decibels, side="right"), minlength=16)
    return {
        "count": x.numel(),
        "zeros": zero.sum(),
        "underflow": (zero & (kept != 0)).sum(),
        "saturated": (edge & finite).sum(),
        "nan": np.isnan(values).sum(),
        "inf": np.isinf(values).sum(),
        "rows": x.shape[0],
        "rows_flushed": (zero.all(axis=1) & (kept != 0).any(axis=1)).sum(),
        "amax": np.abs(kept).max(initial=0.0),
        "sum_sq": (kept**2).sum(),
        "sum_sq_q": (back**2).sum(),
        "sum_sq_err": ((kept - back) ** 2).sum(),
        "sum_4th": (kept**4).sum(),
        "histogram": counts,
    }


def assert_measured(got: Tensor, wanted: dict[str, Any]) -> None:
    for index, name in enumerate(COLUMNS):
        rel = 1e-6 if name.startswith("sum") else 0.0
        assert float(got[index]) == pytest.approx(float(wanted[name]), rel=rel, abs=0), name
    assert got[len(COLUMNS) :].tolist() == wanted["histogram"].tolist()


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    """About three decades, a zero row and a tiny one, ragged in both dimensions."""
    values = torch.randn(200, 150, generator=generator) * torch.exp(torch.randn(200, 1, generator=generator))
    values[3], values[7] = 0.0, 1e-9
    return values


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("octaves", [-8, 0, 16])
def test_codes_and_statistics_follow_the_given_scale(x: Tensor, octaves: int, layout: str, fmt: str) -> None:
    """From 256 times too small (most values saturate) to 2^16 too large (most become zero)."""
    scale = float(x.abs().max()) / MAXIMUM[fmt] * 2.0**octaves * 1.1
    quantized, stats = quantize(x, layout=layout, fmt=fmt, tensor_scale=scale, stats=True)
    np.testing.assert_array_equal(quantized.data.double().numpy(), encoded(x, scale, fmt))
    assert (quantized.scale == np.float32(scale)).all()
    assert quantized.scale.shape == quantize(x, layout=layout, fmt=fmt).scale.shape
    assert_measured(stats, measured(x, layout, scale, fmt))
    assert torch.equal(stats, tensor_stats(x, layout=layout, fmt=fmt, tensor_scale=torch.tensor(scale)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_counted_and_takes_the_nan_code(x: Tensor, dtype: torch.dtype) -> None:
    x = x.to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[7, 0] = float("inf")
    quantized, stats = quantize(x, tensor_scale=0.01, stats=True)
    assert torch.isnan(quantized.data.float()).nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [7, 0]]
    assert quantized.data.view(torch.uint8)[0, 2] == 0xFF
    assert_measured(stats, measured(x, "row", 0.01, "e4m3"))


def test_experts_are_measured_one_by_one(x: Tensor) -> None:
    pair = layout_stats(x, tensor_scale=0.02, offsets=OFFSETS)
    for index, layout in enumerate(("row", "col")):
        vectors = tensor_stats(x, layout=layout, tensor_scale=0.02, offsets=OFFSETS)
        assert torch.equal(pair[index], vectors)
        for expert, (start, end) in enumerate(pairwise(OFFSETS.tolist())):
            assert_measured(vectors[expert], measured(x[start:end], layout, 0.02, "e4m3"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_floor_counts_for_every_block_below_it(x: Tensor, layout: str, brute_scale: Any) -> None:
    """Blocks above it keep their scale, whatever code measures them: those below have the floor's."""
    floor = float(x.abs().amax(dim=1).median())
    floored = quantize(x, layout=layout, amax_floor=floor)
    plain = quantize(x, layout=layout)
    lowest = brute_scale(np.float32(floor), "e4m3", "fp32", 1.0)
    assert torch.equal(floored.scale, torch.where(plain.scale > lowest, plain.scale, torch.tensor(lowest)).where(
        plain.scale != 1.0, torch.tensor(lowest)
    ))  # fmt: skip
    whole = quantize(x, layout=layout, amax_floor=1e6, stats=True)
    alone = 1e6 / 448
    assert_measured(whole[1], measured(x, layout, alone, "e4m3"))


def test_a_floor_of_the_field_flushes_gradients_that_scales_without_it_keep() -> None:
    """Per-token gradients of a mean loss over 10^7 tokens; the floor of 1e-4 was found in published code."""
    generator = torch.Generator().manual_seed(5)
    dy = torch.randn(64, 128, generator=generator) * 1e-11
    underflow = COLUMNS.index("underflow")
    assert tensor_stats(dy, amax_floor=1e-4)[underflow] == dy.count_nonzero()
    assert tensor_stats(dy)[underflow] < 5


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("backend", ["native", "numba", "reference"])
def test_every_gemm_multiplies_what_such_codes_stand_for(x: Tensor, fmt: str, backend: str) -> None:
    """A scale that saturates x, against the float64 product of the dequantised operands."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(4, 96, 150, generator=generator)
    scale = float(x.abs().max()) / MAXIMUM[fmt] / 16
    a = quantize(x, fmt=fmt, tensor_scale=scale)
    b = quantize(w, layout="tile", tensor_scale=0.003)
    near = {"rtol": 1e-5, "atol": 1e-4}
    wanted = a.dequantize(torch.float64) @ b.dequantize(torch.float64)[1].T
    one = quantize(w[1], layout="tile", tensor_scale=0.003)
    torch.testing.assert_close(fp8_gemm_nt(a, one, backend=backend).double(), wanted, **near)
    grouped = grouped_gemm_nt(a, b, OFFSETS, backend=backend)
    torch.testing.assert_close(grouped[40:169].double(), (a.dequantize(torch.float64) @ b.dequantize(torch.float64)[2].T)[40:169], **near)  # fmt: skip
    dy = quantize(x[:, :70].contiguous(), layout="col", fmt=fmt, tensor_scale=scale, offsets=OFFSETS)
    columns = quantize(x, layout="col", fmt=fmt, tensor_scale=scale, offsets=OFFSETS)
    dw = grouped_gemm_wgrad(dy, columns, OFFSETS, backend=backend)
    exact = a.dequantize(torch.float64)[40:169]
    torch.testing.assert_close(dw[2].double(), exact[:, :70].T @ exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize(("margin", "multiplier"), [(0, 1.0), (3, 1.0), (-3, 0.5), (0, 4.0)])
def test_the_scale_is_transformer_engines_rule(fmt: str, margin: int, multiplier: float) -> None:
    """amax / maximum x 2^margin: TE's scale is maximum / amax / 2^margin, and its inverse what codes are times."""
    operand = ScaledFormat(fmt=fmt, scaling="delayed", margin=margin, multiplier=multiplier, amax=7.3)
    wanted = np.float32(7.3) / np.float32(MAXIMUM[fmt]) * 2.0**margin * multiplier
    assert operand.tensor_scale == float(np.float32(wanted))
    assert ScaledFormat(scaling="tensor", amax=0.0, margin=5).tensor_scale == 1.0
    assert ScaledFormat(scaling="tensor", amax=7.3, scale="pow2").tensor_scale == 2.0**-5


def test_round_trip_of_a_whole_operand_has_one_scale_in_every_layout(x: Tensor) -> None:
    operand = OperandFormat(scaling="tensor")
    scale = float(np.float32(x.abs().max()) / np.float32(448))
    wanted = torch.from_numpy(encoded(x, scale, "e4m3") * scale).float()
    for layout in LAYOUTS:
        torch.testing.assert_close(round_trip(x, layout, operand), wanted, rtol=2e-7, atol=0)


def assert_product(got: Tensor, a: Tensor, b: Tensor) -> None:
    """Within float32 accumulation of the exact product."""
    a, b = a.double(), b.double()
    assert ((got.double() - a @ b).abs() <= 2e-6 * (a.abs() @ b.abs()) + 1e-30).all()


@pytest.mark.parametrize("default", ["native", "numba"])
def test_products_of_tiles_take_mixed_scalings(
    x: Tensor, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operand with a scale for itself, one with block scales, both ways, as the what-ifs ask for them."""
    monkeypatch.setattr(tiles, "_default", lambda: default)
    generator = torch.Generator().manual_seed(4)
    w, dy = torch.randn(1, 96, 150, generator=generator), torch.randn(200, 96, generator=generator)
    whole, block = ScaledFormat(scaling="tensor", amax=30.0), OperandFormat(fmt="e5m2")
    for left, right in ((whole, block), (block, whole)):
        weight, bounds = tiles.weight(w, right), [0, 200]
        y = tiles.fprop(x, weight, 96, left, bounds, torch.float32)
        assert_product(y, round_trip(x, "row", left), round_trip(w[0], "tile", right).T)
        dx = tiles.dgrad(dy, weight, 150, left, bounds, torch.float32)
        assert_product(dx, round_trip(dy, "row", left), round_trip(w[0], "tile", right))
        dw = tiles.wgrad(dy, x, left, right, bounds)[0]
        assert_product(dw, round_trip(dy, "col", left).T, round_trip(x, "col", right))


def test_a_tensor_without_finite_values_has_the_neutral_scale() -> None:
    for values in (torch.zeros(4, 128), torch.full((4, 128), float("nan")), torch.empty(0, 128)):
        assert torch.equal(
            torch.nan_to_num(round_trip(values, "row", OperandFormat(scaling="tensor"))),
            torch.zeros(values.shape),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scaling": "column"}, "'block', 'tensor', 'delayed'"),
        ({"amax_history": 0}, "from 1 to 65536"),
        ({"amax_history": 1.5}, "amax_history=1.5"),
        ({"amax_history": True}, "amax_history=True"),
        ({"scaling": "delayed", "margin": 65}, "from -64 to 64"),
        ({"scaling": "delayed", "margin": 0.5}, "margin=0.5"),
        ({"margin": 1}, "use multiplier"),
        ({"amax_floor": -1.0}, "sets no floor"),
        ({"amax_floor": float("nan")}, "sets no floor"),
        ({"amax_choice": "mean"}, "most_recent"),
        ({"scaling": "delayed", "initial_scale": 0.0}, "None where no scale is known"),
        ({"scaling": "delayed", "initial_scale": float("inf")}, "initial_scale=inf"),
    ],
)
def test_options_that_do_not_exist_say_what_does(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        OperandFormat(**changes)


def test_a_scale_that_is_none_is_refused(x: Tensor) -> None:
    for scale in (0.0, -1.0, float("nan"), 2.0**128):
        with pytest.raises(KernelError, match="no scale"):
            quantize(x, tensor_scale=scale)
    with pytest.raises(OperandError, match="pass one number"):
        tensor_stats(x, tensor_scale=torch.ones(2))


def test_formats_with_and_without_a_scale_are_not_the_same() -> None:
    plain = OperandFormat(scaling="delayed")
    assert ScaledFormat.of(plain, amax=2.0) != plain
    assert ScaledFormat.of(plain, amax=2.0) == ScaledFormat.of(plain, amax=2.0)
    assert ScaledFormat.of(plain, amax=2.0) != ScaledFormat.of(plain, amax=3.0)
    assert LinearPrecision().is_plain
    assert not LinearPrecision(dy=plain).is_plain
    assert get_format("e4m3").maximum == MAXIMUM["e4m3"]
