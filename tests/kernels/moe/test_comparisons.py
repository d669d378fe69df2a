"""What padding with real tokens does, which padding with zero rows does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.moe import fast_moe, pad_with_real_tokens, routing_map


def test_real_tokens_of_weight_zero_fill_each_expert_once(make_inputs: Any) -> None:
    inputs = make_inputs()
    before = routing_map(inputs.expert_Tk, 5, alignment=1).counts_E
    experts, weights = pad_with_real_tokens(inputs.expert_Tk, inputs.weight_Tk, 5)
    padded = routing_map(experts, 5, alignment=1)
    assert padded.counts_E.tolist() == [-(-int(count) // 16) * 16 for count in before]
    assert not weights[:, 2:].any()
    for row in experts.tolist():
        chosen = [expert for expert in row if expert >= 0]
        assert len(chosen) == len(set(chosen))


# BF16 sums group their terms anew where rows move, which shows where a sum stands next to a rounding edge.
@pytest.mark.parametrize(("precision", "least", "most"), [("fp8", 2e-3, 3e-2), ("bf16", 0.0, 1e-4)])
def test_real_tokens_change_fp8_weight_gradients_by_about_one_percent_and_zero_rows_by_nothing(
    make_inputs: Any, results: Any, precisions: Any, precision: str, least: float, most: float
) -> None:
    inputs = make_inputs(tokens=300, width=128, hidden=128)
    form = precisions[precision]
    bare = routing_map(inputs.expert_Tk, 5, alignment=1)
    zeros = routing_map(inputs.expert_Tk, 5)
    real_Tk, real_weight_Tk = pad_with_real_tokens(inputs.expert_Tk, inputs.weight_Tk, 5)
    real = routing_map(real_Tk, 5, alignment=1)
    unpadded, with_zeros, with_tokens = (
        results(
            lambda x, up, down, weight, route=route: fast_moe(x, up, down, route, weight, precision=form),
            inputs,
            weight_Tk,
        )
        for route, weight_Tk in (
            (bare, inputs.weight_Tk),
            (zeros, inputs.weight_Tk),
            (real, real_weight_Tk),
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(unpadded, with_zeros, strict=True))
    # y and dx do not notice: rows are quantised by themselves.
    assert torch.equal(unpadded[0], with_tokens[0])
    assert torch.equal(unpadded[1], with_tokens[1])
    for exact, changed in zip(unpadded[2:4], with_tokens[2:4], strict=True):
        change = float((changed - exact).norm() / exact.norm())
        assert least <= change <= most


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(OperandError, match="3 tokens are too few"):
        pad_with_real_tokens(torch.tensor([[0], [0], [1]]), torch.ones(3, 1), 2)
