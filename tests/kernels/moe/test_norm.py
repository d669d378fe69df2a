"""RMSNorm, QKNorm and the rotary embedding against closed forms."""

from __future__ import annotations

import pytest
import torch

from fp8_safeguard.kernels import OperandError, quantize, tensor_stats
from fp8_safeguard.kernels.moe import QKNorm, Wanted, qk_norm_rope, rms_norm, rms_norm_quantize

# Float32 arithmetic on values near 1, sums of at most 64 terms.
FLOAT32_TOLERANCE = 2e-6


def tables(positions: int, channels: int, base: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) float64 [S, C]: position s turns pair i by s base^(-2i/C)."""
    frequency = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def by_complex_numbers(x: torch.Tensor, gain: torch.Tensor, base: float, epsilon: float) -> torch.Tensor:
    """Norm and rotation of float64 [..., S, H, C], pairs as complex numbers."""
    normed = x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gain
    low, high = normed.chunk(2, dim=-1)
    positions, channels = x.shape[-3], x.shape[-1]
    exponent = -torch.arange(0, channels, 2, dtype=torch.float64) / channels
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * base**exponent
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rms_norm_is_x_over_root_mean_square_times_gain() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gain = torch.randn(2, 3, 40, generator=generator), torch.rand(40, generator=generator)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * gain.double()
    torch.testing.assert_close(
        rms_norm(x, gain, epsilon=1e-3).double(), exact, rtol=FLOAT32_TOLERANCE, atol=1e-6
    )
    rounded = rms_norm(x.bfloat16(), gain)
    assert torch.equal(rounded, rms_norm(x.bfloat16().float(), gain).bfloat16())


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 4), (0, 4)])
def test_gradients_of_rms_norm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(shape[-1], generator=generator, dtype=torch.float64, requires_grad=True)
    if x.numel():
        assert torch.autograd.gradcheck(rms_norm, (x, gain))
    else:
        rms_norm(x, gain).sum().backward()
        assert gain.grad is not None
        assert not gain.grad.any()


def test_the_backward_is_autograds_own_in_every_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    x, gain = torch.randn(30, 96, generator=generator), torch.rand(96, generator=generator)
    dy = torch.randn(30, 96, generator=generator)

    def defined(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain

    found = []
    for function in (rms_norm, defined):
        inputs = [x.clone().requires_grad_(), gain.clone().requires_grad_()]
        y = function(*inputs)
        found.append([y, *torch.autograd.grad(y, inputs, dy)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_quantised_norm_equals_the_unfused_chain() -> None:
    generator = torch.Generator().manual_seed(3)
    x, gain = torch.randn(150, 130, generator=generator).bfloat16(), torch.rand(130, generator=generator)
    produced = rms_norm_quantize(x, gain, Wanted(row=True, blocks="col", stats=True))
    normed = rms_norm(x, gain)
    assert produced.values is not None
    assert torch.equal(produced.values, normed)
    assert produced.stats is not None
    for slot, quantised in enumerate((produced.row, produced.block)):
        assert quantised is not None
        expected = quantize(normed, layout=quantised.layout)
        assert torch.equal(quantised.dequantize(), expected.dequantize())
        assert torch.equal(produced.stats[slot], tensor_stats(normed, layout=quantised.layout))


def test_qk_norm_treats_heads_apart_and_ignores_their_scale() -> None:
    norm = QKNorm(16, epsilon=1e-12)
    x = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(4))
    scaled = x * torch.tensor([1.0, 1e-3, 50.0, 7.0]).view(1, 4, 1, 1)
    torch.testing.assert_close(norm(scaled), norm(x), rtol=1e-5, atol=1e-5)
    assert list(norm.state_dict()) == ["gain"]
    assert norm.gain.shape == (16,)
    assert norm(x.bfloat16()).dtype == torch.float32


def test_qk_norm_of_a_zero_head_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(1, 1, 1, 8, requires_grad=True)
    QKNorm(8)(x, *[table.float() for table in tables(1, 8)]).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_norm_then_rotation_is_a_complex_product_on_any_strides() -> None:
    generator = torch.Generator().manual_seed(5)
    norm = QKNorm(8, epsilon=1e-3)
    torch.nn.init.uniform_(norm.gain, 0.5, 2.0, generator=generator)
    fused = torch.randn(2, 6, 7, 8, generator=generator)
    cos, sin = (table.float() for table in tables(6, 8))
    for heads in (fused, fused[:, :, 2:5]):
        expected = by_complex_numbers(heads.double(), norm.gain.double(), 100.0, 1e-3)
        found = norm(heads, cos, sin)
        torch.testing.assert_close(found.double(), expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_gradients_of_qk_norm_rope() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(qk_norm_rope, (x, gain, *tables(3, 4)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OperandError, match="one gain a channel"):
        rms_norm(torch.zeros(2, 4), torch.ones(3))
    with pytest.raises(OperandError, match=r"\[positions, channels\]"):
        qk_norm_rope(torch.zeros(1, 3, 2, 4), torch.ones(4), *tables(2, 4))
    with pytest.raises(OperandError, match="even number"):
        qk_norm_rope(torch.zeros(3, 2, 5), torch.ones(5), torch.ones(3, 5), torch.ones(3, 5))
