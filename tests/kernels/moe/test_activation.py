"""SwiGLU against its closed form and autograd of its definition."""

from __future__ import annotations

import math

import pytest
import torch

from fp8_safeguard.kernels import OperandError, quantize
from fp8_safeguard.kernels.moe import Wanted, routing_map, swiglu, swiglu_quantize


def test_closed_form() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    expected = [3.0 / (1 + math.exp(-1.0)), 0.5 * -2.0 / (1 + math.exp(2.0))]
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([expected]))
    torch.testing.assert_close(swiglu(gate_up, torch.tensor([0.25])), torch.tensor([expected]) / 4)


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 4), (4,), (0, 8)])
def test_gradients_with_and_without_the_probability(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    probability = torch.rand(shape[:-1], generator=generator, dtype=torch.float64, requires_grad=True)
    assert swiglu(gate_up).shape == (*shape[:-1], shape[-1] // 2)
    if gate_up.numel():
        assert torch.autograd.gradcheck(swiglu, (gate_up,))
        assert torch.autograd.gradcheck(swiglu, (gate_up, probability))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_backward_is_autograds_own_in_every_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up, probability = (
        torch.randn(40, 96, generator=generator).to(dtype),
        torch.rand(40, generator=generator),
    )
    dh = torch.randn(40, 48, generator=generator).to(dtype)

    def defined(gate_up: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up * probability.unsqueeze(-1)).to(dtype)

    found = []
    for function in (swiglu, defined):
        inputs = [gate_up.clone().requires_grad_(), probability.clone().requires_grad_()]
        h = function(*inputs)
        found.append([h, *torch.autograd.grad(h, inputs, dh)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    # The arguments are nobody's scratch space.
    before = gate_up.clone()
    swiglu(gate_up, probability)
    assert torch.equal(gate_up, before)


def test_quantised_activations_equal_the_unfused_chain_and_padding_is_zero() -> None:
    route = routing_map(torch.tensor([[0], [2], [2]]), 3)
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(route.rows, 260, generator=generator).bfloat16()
    probability = torch.rand(route.rows, generator=generator)
    end = int(route.offsets[-1])
    expected = swiglu(gate_up, probability)[:end]
    # Stale memory behind the last expert reaches nothing.
    gate_up[end:], probability[end:] = torch.nan, torch.inf
    produced = swiglu_quantize(gate_up, probability, Wanted(row=True, blocks="col", stats=True), route)
    assert produced.values is not None
    assert produced.row is not None
    assert produced.block is not None
    assert produced.stats is not None
    assert torch.equal(produced.values[:end], expected)
    assert not produced.values[end:].any()
    assert torch.equal(produced.row.dequantize()[:end], quantize(expected).dequantize())
    columns = quantize(expected, layout="col", offsets=route.offsets)
    assert torch.equal(produced.block.dequantize()[:end], columns.dequantize())
    # Sixteen rows each were measured, fifteen and fourteen of them padding.
    assert produced.stats[:, :, 0].tolist() == [[130.0, 0.0, 260.0]] * 2
    alone = swiglu_quantize(gate_up[:end], probability[:end], Wanted(values=False, row=True))
    assert alone.row is not None
    assert torch.equal(alone.row.dequantize(), quantize(expected).dequantize())


def test_odd_widths_and_missing_probabilities_are_refused() -> None:
    with pytest.raises(OperandError, match="two equal halves"):
        swiglu(torch.zeros(2, 5))
    with pytest.raises(OperandError, match="one a row"):
        swiglu(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(OperandError, match=r"\[rows, 2 width\]"):
        swiglu_quantize(torch.zeros(2, 2, 4), None, Wanted(row=True))
