"""The interpreter's fix bites: narrow floats round as on the GPU."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
ML = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}


@triton.jit
def cast_kernel(source_ptr: tl.tensor, target_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target_ptr + index, tl.load(source_ptr + index).to(target_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr: tl.tensor, b_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + index, tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index)))


@triton.jit
def fma_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, z_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr
) -> None:
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, tl.fma(tl.load(x_ptr + index), tl.load(y_ptr + index), tl.load(z_ptr + index)))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(x.numel() // 4096,)](x, out, 4096)
    return out


def every_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def encoded(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Codes by ml_dtypes, saturated first; every NaN as 0x7f."""
    with np.errstate(invalid="ignore"):
        codes = (
            np.clip(x.float().numpy(), -LIMIT[dtype], LIMIT[dtype])
            .astype(np.float32)
            .astype(ML[dtype])
            .view(np.uint8)
        )
    return np.where(torch.isnan(x).numpy(), 0x7F, codes)


def codes_of(x: torch.Tensor) -> Any:
    nan = torch.isnan(x.float()).numpy()
    return np.where(nan, 0x7F, x.view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_bf16_to_fp8(dtype: torch.dtype) -> None:
    x = every_bf16()
    assert np.array_equal(codes_of(cast(x, dtype)), encoded(x, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float32_midpoints_and_their_neighbours_to_fp8(dtype: torch.dtype) -> None:
    values = torch.arange(127, dtype=torch.uint8).view(dtype).float()
    values = values[torch.isfinite(values)]
    middle = (values[1:] + values[:-1]) / 2
    below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))
    x = torch.zeros(4096)
    points = torch.cat([middle, below, above, -middle, values])
    x[: len(points)] = points
    assert np.array_equal(codes_of(cast(x, dtype)), encoded(x, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_code_to_float32(dtype: torch.dtype) -> None:
    codes = torch.arange(4096).to(torch.uint8).view(dtype)
    assert torch.equal(cast(codes, torch.float32).nan_to_num(7e7), codes.float().nan_to_num(7e7))


def test_every_bf16_to_float32_and_back() -> None:
    x = every_bf16()
    assert torch.equal(cast(x, torch.float32).nan_to_num(7e7), x.float().nan_to_num(7e7))
    wide = torch.randn(65536, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cast(wide, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot_multiplies_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(64, 64)
    dot_kernel[(1,)](a, b, out, 64)
    bound = 1e-6 * (a.double().abs() @ b.double().abs())
    assert ((out - a.double() @ b.double()).abs() <= bound).all()


def test_fma_rounds_once() -> None:
    one_ulp_more = torch.full((16,), 1 + 2.0**-23)
    out = torch.empty(16)
    fma_kernel[(1,)](one_ulp_more, one_ulp_more, -one_ulp_more, out, 16)
    exact = (1 + 2.0**-23) * (1 + 2.0**-23) - (1 + 2.0**-23)
    assert torch.equal(out, torch.full((16,), exact, dtype=torch.float64).float())
