"""LogFMT-8 in Triton equals the plain definition."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.logfmt import NAN_CODE, LogFmt8
from fp8_safeguard.kernels.logfmt import logfmt8_encode as plain_encode
from fp8_safeguard.kernels.moe.triton_logfmt import logfmt8_decode, logfmt8_encode

from .moe_checks import same_bits

DTYPES = [torch.bfloat16, torch.float32]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (
        torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    ).to(dtype)


def assert_equal(got: LogFmt8, wanted: LogFmt8) -> None:
    """Every code; the step may differ in its last bit, where it is a difference of logarithms that nearly agree."""
    assert same_bits(got.low, wanted.low)
    assert torch.allclose(got.step, wanted.step, rtol=2.0**-22, atol=0.0)
    assert torch.equal(got.codes, wanted.codes)


@pytest.mark.parametrize("shape", [(40, 300), (2, 3, 128), (7,), (0, 40), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_plain_definition(dtype: torch.dtype, shape: Any, generator: torch.Generator) -> None:
    x = numbers(shape, dtype, generator)
    got = logfmt8_encode(x)
    assert_equal(got, plain_encode(x))
    for target in DTYPES:
        assert same_bits(logfmt8_decode(got, target), got.decode(target))


def test_edges(generator: torch.Generator) -> None:
    x = numbers((12, 256), torch.float32, generator)
    x[0], x[1], x[2] = 0.0, 3.0, -0.0
    x[3, ::2], x[4, 5], x[4, 6], x[4, 7] = 0.0, torch.nan, torch.inf, -torch.inf
    x[5] *= 1e-42
    x[6, 1:] *= 1e-30
    x[7], x[7, 0] = 0.0, torch.finfo(torch.float32).max
    x[8] = -(2.0 ** torch.arange(256).remainder(40))
    got = logfmt8_encode(x)
    assert_equal(got, plain_encode(x))
    assert (got.codes[4, 5:8] == NAN_CODE).all()
    back = logfmt8_decode(got)
    assert same_bits(back.nan_to_num(7e7), got.decode().nan_to_num(7e7))
    assert torch.equal(back.isnan(), ~x.isfinite())
    assert (back[[0, 2]] == 0).all()
    assert torch.isfinite(logfmt8_decode(got, torch.bfloat16)[7]).all()


def test_error_is_that_of_the_format(generator: torch.Generator) -> None:
    """Neighbouring magnitudes differ by 2^step: half of that, relative, where 32 binades hold all of a tile."""
    x = numbers((16, 256), torch.float32, generator)
    got = logfmt8_encode(x)
    step = got.step.double().repeat_interleave(128, dim=-1)
    bound = x.double().abs() * (torch.exp2(step) - 1) / 2 * 1.01
    assert ((logfmt8_decode(got).double() - x.double()).abs() <= bound).all()


def test_b33_strided_input(generator: torch.Generator) -> None:
    x = numbers((140, 40), torch.float32, generator).t()
    assert_equal(logfmt8_encode(x), plain_encode(x.contiguous()))


def test_what_it_does_not_take() -> None:
    with pytest.raises(OperandError, match="float64"):
        logfmt8_encode(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(OperandError, match="int32"):
        logfmt8_decode(plain_encode(torch.zeros(3)), torch.int32)
