"""The router against a search in plain Python, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.moe import group_limited_topk

# Float32 sigmoid, sum and division of numbers of one sign.
TOLERANCE = 1e-6


def brute_force(
    scores: list[float], bias: list[float], top_k: int, groups: int, top_groups: int
) -> tuple[list[int], list[float]]:
    """Experts of one token and their normalised scores; sorted() is stable, so lower indices win."""
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(groups)]
    pairs = [sorted((np.float32(choice[e]) for e in group), reverse=True)[:2] for group in members]
    worth = [np.float32(sum(pair)) for pair in pairs]
    best = sorted(range(groups), key=lambda group: -worth[group])[:top_groups]
    allowed = sorted(e for group in best for e in members[group])
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    total = sum(scores[e] for e in chosen)
    return chosen, [scores[e] / total for e in chosen]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_selection_and_weights_are_those_of_a_search(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 2, 4]))
    top_groups = data.draw(st.integers(1, groups))
    size = data.draw(st.integers(1, 4))
    top_k = data.draw(st.integers(1, size * top_groups))
    # Few values, so that experts and groups tie often. Biases are multiples of 1/8: sums with them tie exactly.
    logits = data.draw(
        st.lists(
            st.lists(st.sampled_from([-2.0, 0.0, 1.0, 3.0]), min_size=groups * size, max_size=groups * size),
            min_size=1,
            max_size=6,
        )
    )
    bias = data.draw(
        st.lists(st.sampled_from([-0.125, 0.0, 0.5]), min_size=groups * size, max_size=groups * size)
    )
    logits_TE = torch.tensor(logits)
    experts, weights = group_limited_topk(
        logits_TE, torch.tensor(bias), top_k=top_k, groups=groups, top_groups=top_groups
    )
    assert (experts.dtype, weights.dtype) == (torch.int32, torch.float32)
    # The scores of the search are the float32 ones: a tie is a tie of those.
    for token, scores in enumerate(torch.sigmoid(logits_TE)):
        choice = (scores + torch.tensor(bias)).tolist()
        chosen, _ = brute_force(choice, [0.0] * len(bias), top_k, groups, top_groups)
        assert experts[token].tolist() == chosen
        exact = [1 / (1 + math.exp(-logits[token][e])) for e in chosen]
        expected = [value / sum(exact) for value in exact]
        assert weights[token].tolist() == pytest.approx(expected, rel=TOLERANCE)


def test_without_normalisation_weights_are_scaled_sigmoids() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    experts, weights = group_limited_topk(logits, top_k=2, normalise=False, scale=2.5)
    assert experts.tolist() == [[2, 0]]
    assert weights[0].tolist() == pytest.approx(
        [2.5 / (1 + math.exp(-2.0)), 2.5 / (1 + math.exp(-0.5))], rel=TOLERANCE
    )


def test_a_token_visits_the_best_groups_only_though_a_better_expert_stands_alone() -> None:
    # The best expert of all is in group 0, whose second is poor: groups 1 and 2 have the better pairs.
    logits = torch.tensor([[9.0, -9.0, 2.0, 2.0, 3.0, 1.9]])
    experts, _ = group_limited_topk(logits, top_k=3, groups=3, top_groups=2)
    assert experts.tolist() == [[4, 2, 3]]


def test_scores_that_are_all_zero_give_weight_zero_and_a_finite_gradient() -> None:
    logits = torch.full((1, 4), -200.0, requires_grad=True)
    _, weights = group_limited_topk(logits, top_k=2)
    weights.sum().backward()
    assert weights.tolist() == [[0.0, 0.0]]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_a_nan_is_chosen_and_seen() -> None:
    experts, weights = group_limited_topk(torch.tensor([[0.0, math.nan, 1.0, 5.0]]), top_k=2)
    assert experts.tolist() == [[1, 3]]
    assert torch.isnan(weights).all()


@pytest.mark.parametrize(("normalise", "scale"), [(True, 1.0), (True, 2.5), (False, 0.5)])
def test_gradients_of_the_logits(normalise: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(8, generator=generator, dtype=torch.float64)

    def weights(logits_TE: torch.Tensor) -> torch.Tensor:
        return group_limited_topk(
            logits_TE, bias, top_k=3, groups=4, top_groups=2, normalise=normalise, scale=scale
        )[1]

    assert torch.autograd.gradcheck(weights, (logits,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 7}, "top_k=7"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 1, "groups": 4}, "groups=4"),
        ({"top_k": 1, "groups": 2, "top_groups": 3}, "top_groups=3"),
        ({"top_k": 4, "groups": 2, "top_groups": 1}, "between 1 and 3"),
        ({"top_k": 1, "bias_E": torch.zeros(5)}, r"bias has shape \[5\]"),
    ],
)
def test_what_cannot_be_selected_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(OperandError, match=said):
        group_limited_topk(torch.zeros(2, 6), **options)  # type: ignore[arg-type]
