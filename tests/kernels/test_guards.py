"""What kernels refuse rather than read wrong memory, and settings they must not heed."""

import dataclasses
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8_safeguard.kernels import (
    KernelError,
    OffsetsError,
    OperandError,
    QKNorm,
    QuantizedTensor,
    dispatch,
    fast_moe,
    fp8_gemm_nt,
    fp8_grouped_linear,
    fp8_linear,
    grouped_gemm_nt,
    grouped_gemm_wgrad,
    quantize,
    tensor_stats,
)
from fp8_safeguard.kernels.codes import E5M2, get_format
from fp8_safeguard.kernels.moe import RoutingMap, rms_norm, routing_map, swiglu

OFFSETS = torch.tensor([0, 3, 3, 40, 64], dtype=torch.int32)


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_device_change_nothing(
    layout: str, dtype: torch.dtype, implementation: Any, generator: torch.Generator
) -> None:
    x = torch.randn(70, 140, generator=generator)
    options = (x, [0, 70], layout, get_format("e4m3"), "fp32", 1.0)
    codes, scales = implementation.quantize_rows(*options)
    vectors = implementation.stats_of_rows(*options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            other_codes, other_scales = implementation.quantize_rows(*options)
            other_vectors = implementation.stats_of_rows(*options)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(bits(codes), bits(other_codes))
    assert other_scales.dtype == torch.float32
    assert torch.equal(scales, other_scales)
    assert torch.equal(vectors, other_vectors)


def test_products_do_not_heed_the_default_dtype_and_device(generator: torch.Generator) -> None:
    x, w = (torch.randn(rows, 140, generator=generator) for rows in (64, 30))
    for name in ("native", "numba", "reference"):
        if dispatch.unavailable(name, "cpu"):
            continue
        answers = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                with torch.device("cpu" if dtype == torch.float32 else "meta"):
                    answers.append(fp8_linear(x, w, backend=name))
                    answers.append(fp8_gemm_nt(quantize(x), quantize(w), backend=name))
            finally:
                torch.set_default_dtype(torch.float32)
        assert torch.equal(answers[0], answers[2]), name
        assert torch.equal(answers[1], answers[3]), name


def test_the_saturation_edge_is_a_float32_whatever_the_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert dataclasses.replace(E5M2).last_kept == 61440.0 - 2.0**-8
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_negative_bit_is_heeded(implementation: Any, generator: torch.Generator) -> None:
    x = torch.randn(20, 140, generator=generator)
    options = ([0, 20], "row", get_format("e4m3"), "fp32", 1.0)
    codes, _ = implementation.quantize_rows(torch._neg_view(x), *options)
    assert torch.equal(bits(codes), bits(implementation.quantize_rows(-x, *options)[0]))


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_quotients_past_float32_saturate(layout: str, implementation: Any) -> None:
    x = torch.tensor([[3e38, 1e30, -3.0, 0.0]])
    options = (x, [0, 1], layout, get_format("e4m3"), "fp32", 2.0**-126)
    codes, scales = implementation.quantize_rows(*options)
    expected = (x.double() / scales.double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    assert torch.equal(bits(codes), bits(expected))
    assert not implementation.stats_of_rows(*options).isnan().any()


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_no_matrices(layout: str, implementation: Any) -> None:
    codes, scales = implementation.quantize_rows(
        torch.zeros(0, 140), [0], layout, get_format("e4m3"), "fp32", 1.0
    )
    assert codes.shape == (0, 140)
    assert scales.shape == (0, 140 if layout == "col" else 2)


X, W, W_EXPERTS = torch.ones(64, 140), torch.ones(30, 140), torch.ones(4, 30, 140)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fp8_linear(X, W.to("meta")),
        lambda: fp8_linear(X.long(), W),
        lambda: fp8_linear(X, W.int()),
        lambda: fp8_linear(X, W, torch.zeros(1)),
        lambda: fp8_grouped_linear(X, W_EXPERTS.to("meta"), OFFSETS),
        lambda: fp8_gemm_nt(quantize(X), quantize(W.to("meta"))),
        lambda: fp8_gemm_nt(quantize(X), quantize(W), torch.int32),
        lambda: fp8_gemm_nt(quantize(X, layout="tile", offsets=OFFSETS), quantize(W)),
        lambda: quantize([1.0]),  # type: ignore[call-overload]
        lambda: swiglu(torch.ones(3, 8, dtype=torch.int64)),
        lambda: torch.vmap(lambda x: tensor_stats(x))(W_EXPERTS),
    ],
)
def test_operands_that_do_not_fit_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(OperandError):
        call()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory_are_refused() -> None:
    if dispatch.backend() != "native":
        pytest.skip("only native code would read them")
    with FakeTensorMode(), pytest.raises(OperandError, match="no memory"):
        quantize(torch.empty(4, 130))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: dataclasses.replace(q, scale=q.scale[:, :1]),
        lambda q: dataclasses.replace(q, scale=q.scale[:-1]),
        lambda q: dataclasses.replace(q, scale=q.scale.double()),
        lambda q: dataclasses.replace(q, data=X),
        lambda q: dataclasses.replace(q, fmt="e5m2"),
    ],
)
def test_scales_and_codes_of_another_layout_are_refused(
    change: Callable[[QuantizedTensor], QuantizedTensor],
) -> None:
    with pytest.raises(OperandError, match="a has"):
        fp8_gemm_nt(change(quantize(X)), quantize(W))


def test_offsets_past_the_scales_and_bad_promises_are_refused() -> None:
    dy = dataclasses.replace(quantize(X, layout="col", offsets=OFFSETS), offsets=torch.arange(0, 65, 16))
    cut = dataclasses.replace(dy, scale=dy.scale[:2])
    with pytest.raises(OffsetsError):
        grouped_gemm_wgrad(cut, cut, torch.arange(0, 65, 16), backend="native")
    for alignment in (0, -4):
        with pytest.raises(OffsetsError, match="at least 1"):
            grouped_gemm_nt(quantize(X), quantize(W_EXPERTS), OFFSETS, alignment=alignment)
    with pytest.raises(KernelError, match="power of two"):
        quantize(X, multiplier="2")  # type: ignore[call-overload]
    with pytest.raises(OffsetsError, match="list"):
        quantize(X, layout="col", offsets=[0, 64])  # type: ignore[call-overload]


def test_a_map_of_rows_that_do_not_exist_is_refused() -> None:
    source, position = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 1, dtype=torch.int32)
    ends, counts = torch.tensor([0, 4, 4000000]), torch.tensor([4, 4])
    route = RoutingMap(source, position, ends.int(), counts.int())
    with pytest.raises(OffsetsError):
        fast_moe(torch.ones(8, 32), torch.ones(2, 24, 32), torch.ones(2, 32, 12), route, torch.ones(8, 1))


def test_blocks_cut_elsewhere_than_the_product(generator: torch.Generator) -> None:
    x = torch.randn(64, 140, generator=generator) * torch.exp2(torch.arange(64.0)[:, None] / 4)
    ends = [0, 10, 20, 30, 64]
    dy = quantize(x, layout="col", offsets=OFFSETS)
    dy_TN = dy.dequantize(torch.float64)
    for name in ("native", "numba", "reference"):
        if dispatch.unavailable(name, "cpu"):
            continue
        dw = grouped_gemm_wgrad(dy, dy, torch.tensor(ends), backend=name)
        for expert, (start, end) in enumerate(pairwise(ends)):
            part = dy_TN[start:end]
            error = (dw[expert].double() - part.t() @ part).abs()
            assert (error <= 1e-6 * (part.abs().t() @ part.abs())).all(), name


def test_nothing_gives_nothing() -> None:
    assert swiglu(torch.zeros(0, 3, 8)).shape == (0, 3, 4)
    assert swiglu(torch.zeros(2, 3, 0), torch.ones(2, 3)).shape == (2, 3, 0)
    assert rms_norm(torch.zeros(3, 0), torch.ones(0)).shape == (3, 0)
    tables = torch.ones(4, 8)
    assert QKNorm(8)(torch.zeros(2, 4, 0, 8), tables, tables).shape == (2, 4, 0, 8)
    route = routing_map(torch.zeros(5, 0, dtype=torch.int32), 4)
    y = fast_moe(torch.ones(5, 32), torch.ones(4, 24, 32), torch.ones(4, 32, 12), route, torch.zeros(5, 0))
    assert torch.equal(y, torch.zeros(5, 32))


def test_pickled_tensors_come_back(generator: torch.Generator) -> None:
    x = torch.randn(64, 140, generator=generator)
    x[0, 0] = math.nan
    q = quantize(x, layout="col", offsets=OFFSETS)
    again = pickle.loads(pickle.dumps(q))
    assert torch.equal(bits(again.data), bits(q.data))
    assert torch.equal(again.dequantize(), q.dequantize()) or again.dequantize()[0, 0].isnan()
    assert (again.layout, again.fmt, again.data.dtype) == (q.layout, q.fmt, q.data.dtype)
