"""MXFP8 in Triton equals the contract's formats on blocks of 32."""

from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.kernels.mx import MxTensor
from fp8_safeguard.kernels.triton_mx import quantize_mx
from fp8_safeguard.monitor import formats


def literal(x: torch.Tensor, fmt: str) -> tuple[Any, Any]:
    """Codes and scale bytes of a matrix, block by block, in numpy."""
    values = x.float().numpy()
    codes, scales = (
        np.zeros(values.shape, np.uint8),
        np.zeros((len(values), -(-values.shape[1] // 32)), np.uint8),
    )
    for row, line in enumerate(values):
        for block in range(scales.shape[1]):
            part = line[block * 32 : block * 32 + 32]
            amax = np.max(np.abs(part[np.isfinite(part)]), initial=0)
            scale = np.maximum(formats.block_scale(amax, fmt, "pow2"), np.float32(2.0**-127))
            scales[row, block] = int(np.log2(scale)) + 127
            codes[row, block * 32 : block * 32 + 32] = formats.encode(part / scale, fmt)
    return codes, scales


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(3, 32), (40, 130), (1, 7)])
def test_equals_the_contract(shape: Any, fmt: str, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    got, (codes, scales) = quantize_mx(x, fmt=fmt), literal(x, fmt)
    assert np.array_equal(got.data.view(torch.uint8).numpy(), codes)
    assert np.array_equal(got.scale.numpy(), scales)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 3e38])
def test_sizes(size: float, generator: torch.Generator) -> None:
    x = torch.rand(4, 64, generator=generator) * size
    got, (codes, scales) = quantize_mx(x), literal(x, "e4m3")
    assert np.array_equal(got.data.view(torch.uint8).numpy(), codes)
    assert np.array_equal(got.scale.numpy(), scales)


def test_b46_infinite_elements_and_the_outermost_scales() -> None:
    x = torch.ones(1, 64)
    x[0, 3], x[0, 7] = torch.inf, -torch.inf
    x[0, 32:] = 2.0**-130
    got, (codes, scales) = quantize_mx(x), literal(x, "e4m3")
    assert np.array_equal(got.data.view(torch.uint8).numpy(), codes)
    assert got.scale.tolist() == scales.tolist()
    assert got.scale[0, 1] == 0
    wide = got.dequantize()
    assert torch.isnan(wide[0, [3, 7]]).all()
    assert torch.equal(wide[0, 32:], x[0, 32:])
    assert torch.isfinite(wide[0, [0, 31]]).all()


@pytest.mark.parametrize("shape", [(0, 40), (3, 0), (2, 3, 40), (40,)])
def test_any_shape(shape: Any, generator: torch.Generator) -> None:
    x = torch.randn(shape, generator=generator)
    got = quantize_mx(x)
    assert got.data.shape == x.shape
    if x.numel():
        bound = 2.0**-4 * x.abs() + 2.0**-9 * x.abs().amax(-1, keepdim=True)
        assert ((got.dequantize() - x).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_b29_a_nan_anywhere_in_a_block_leaves_its_scale(dtype: torch.dtype) -> None:
    x = torch.ones(32, 32, dtype=dtype)
    x.fill_diagonal_(torch.nan)
    got = quantize_mx(x)
    assert torch.equal(torch.isnan(got.dequantize()), torch.eye(32, dtype=torch.bool))
    assert (got.scale == 127 - 8).all()


def test_b46_the_outermost_scale_bytes_are_powers_of_two() -> None:
    codes = torch.ones(1, 64).to(torch.float8_e4m3fn)
    wide = MxTensor(codes, torch.tensor([[0, 254]], dtype=torch.uint8)).dequantize()
    assert wide[0, [0, 31, 32, 63]].tolist() == [2.0**-127, 2.0**-127, 2.0**127, 2.0**127]
