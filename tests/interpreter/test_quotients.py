"""Plain scales and quotients equal the IEEE division wherever it matters."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from fp8_safeguard.kernels.triton_codes import plain_codes, plain_ratio, plain_scale

F32 = np.float32


@triton.jit
def scale_kernel(amax_ptr: tl.tensor, scale_ptr: tl.tensor, E4M3: tl.constexpr, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[None, :]
    bits = tl.load(amax_ptr + at).to(tl.int32, bitcast=True)
    tl.store(scale_ptr + at, plain_scale(bits, 1.0, E4M3, False))


@triton.jit
def code_kernel(
    x_ptr: tl.tensor, scale_ptr: tl.tensor, code_ptr: tl.tensor, E4M3: tl.constexpr, SIZE: tl.constexpr
) -> None:
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[None, :]
    ratio = plain_ratio(tl.load(x_ptr + at), tl.load(scale_ptr + at), False)
    tl.store(code_ptr + at, plain_codes(ratio, E4M3))


def test_the_scale_of_every_mantissa() -> None:
    """Both formats: 448 and 57344 are 2^7 apart, so their quotients have the same mantissas."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    amax = (mantissas | (120 << 23)).view(torch.float32)
    scale = torch.empty_like(amax)
    scale_kernel[(8,)](amax, scale, True, 2**20)
    assert torch.equal(scale, amax / 448.0)
    scale_kernel[(1,)](amax[::8].contiguous(), scale, False, 2**20)
    assert torch.equal(scale[: 2**20], amax[::8] / 57344.0)


def codes(x: NDArray[Any], scale: NDArray[Any], e4m3: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes by the kernel, and by the IEEE division and torch's conversion."""
    size = 1 << max(len(x) - 1, 1).bit_length()
    x_t, scale_t = (torch.ones(size) for _ in range(2))
    x_t[: len(x)], scale_t[: len(x)] = torch.from_numpy(x), torch.from_numpy(scale)
    code = torch.empty(size, dtype=torch.uint8)
    code_kernel[(1,)](x_t, scale_t, code, e4m3, size)
    dtype, limit = (torch.float8_e4m3fn, 448.0) if e4m3 else (torch.float8_e5m2, 57344.0)
    wanted = (x_t / scale_t).clamp(-limit, limit).to(dtype).view(torch.uint8)
    return code.numpy(), wanted.numpy()


@pytest.mark.parametrize("e4m3", [True, False])
def test_quotients_next_to_the_middle_of_two_codes(e4m3: bool) -> None:
    """The only places where an error of 2^-46 could move a code.

    A quotient must lie next to the middle h = n/16 of two codes, and there within 2^-46 of the middle of two floats,
    h (1 +- 2^-24). Then x = s h (1 +- 2^-24) must be a float, which leaves mantissas s = k 2^20 + d with small d.
    """
    k, d, n = np.meshgrid(np.arange(8, 17), np.arange(-8, 9), np.arange(16, 32), indexing="ij")
    mantissa = (k * 2**20 + d).ravel().astype(np.float64)
    middle = n.ravel() / 16.0
    kept = (mantissa >= 2**23) & (mantissa < 2**24)
    mantissa, middle = mantissa[kept], middle[kept]
    x, scale = [], []
    for side in (-1.0, -0.5, 0.0, 0.5, 1.0):
        for steps in range(-3, 4):
            exact = mantissa * middle * (1 + side * 2.0**-24)
            near = exact.astype(F32)
            moved = (near.view(np.int32) + steps).view(F32)
            x.append(moved)
            scale.append(mantissa.astype(F32))
    numerator, denominator = np.concatenate(x), np.concatenate(scale)
    for shift in (1.0, 2.0**-8 if e4m3 else 2.0**-15, 2.0**8):
        got, wanted = codes(numerator * F32(shift), denominator, e4m3)
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("e4m3", [True, False])
def test_ordinary_quotients(e4m3: bool) -> None:
    generator = np.random.default_rng(3)
    amax = np.exp(generator.normal(0, 10, 2**20)).astype(F32)
    x = (amax * generator.uniform(-1, 1, 2**20)).astype(F32)
    x[::2] = (x[::2].view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    got, wanted = codes(x, amax / F32(448.0 if e4m3 else 57344.0), e4m3)
    assert np.array_equal(got, wanted)
