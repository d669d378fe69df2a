"""Routing, dispatch, balance and the experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fp8_safeguard.trainer import TrainConfig
from fp8_safeguard.trainer.model import linear_precision
from fp8_safeguard.trainer.moe import MixtureOfExperts, Router

# Chains of bfloat16 roundings (input, hidden, output) on values near 0.1.
BFLOAT16_TOLERANCE = 0.02


@pytest.fixture
def router(make_config: Callable[..., TrainConfig]) -> Router:
    torch.manual_seed(0)
    made = Router(make_config())
    torch.nn.init.normal_(made.weight, std=0.2)
    return made


@pytest.fixture
def moe(make_config: Callable[..., TrainConfig]) -> MixtureOfExperts:
    torch.manual_seed(1)
    made = MixtureOfExperts(make_config(), linear_precision("bf16"))
    torch.nn.init.normal_(made.router.weight, std=0.2)
    return made


def test_rows_are_sorted_by_expert_without_padding(router: Router) -> None:
    made = router(torch.randn(40, 64)).map
    assert made.offsets[-1] == made.rows == 80
    copies = torch.arange(40).repeat_interleave(2).view(40, 2)
    assert torch.equal(made.source_R[made.position_Tk], copies.int())
    for start, end in zip(made.offsets[:-1], made.offsets[1:], strict=True):
        assert torch.all(made.source_R[start:end].diff() > 0)


def test_weights_are_the_chosen_sigmoids_normalised_to_one_per_token(router: Router) -> None:
    x = torch.randn(40, 64)
    scores = torch.sigmoid(x.double() @ router.weight.double().T)
    best = scores.topk(2, dim=-1)
    expected = best.values / best.values.sum(-1, keepdim=True)
    torch.testing.assert_close(router(x).weight_Tk.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_bias_selects_but_does_not_weigh(router: Router) -> None:
    x = torch.randn(40, 64)
    router.bias_E[3] = 10.0
    route = router(x)
    assert route.map.counts_E[3] == 40
    assert route.weight_Tk.sum(-1).allclose(torch.ones(40))
    assert torch.all(route.weight_Tk < 1.0)


def test_balance_moves_the_bias_one_step_against_the_load(router: Router) -> None:
    router.load_E.copy_(torch.tensor([30, 10, 20, 20]))
    router.balance()
    assert torch.equal(router.bias_E, torch.tensor([-1e-3, 1e-3, 0.0, 0.0]))
    assert int(router.load_E.sum()) == 0


def test_a_skipped_step_clears_the_load_and_keeps_the_bias(router: Router) -> None:
    router.load_E.copy_(torch.tensor([30, 10, 20, 20]))
    router.balance(apply=False)
    assert not router.bias_E.any()
    assert int(router.load_E.sum()) == 0


def test_load_is_counted_in_training_only(router: Router) -> None:
    router(torch.randn(10, 64))
    assert int(router.load_E.sum()) == 20
    router.eval()
    router(torch.randn(10, 64))
    assert int(router.load_E.sum()) == 20


def test_balancing_evens_a_collapsed_router(router: Router) -> None:
    torch.manual_seed(4)
    router.bias_rate = 0.01
    router.weight.data[0] += 0.1
    x = torch.randn(256, 64) + 0.5
    router(x)
    before = router.load_scalars()
    for _ in range(150):
        router.balance()
        router(x)
    after = router.load_scalars()
    assert before["load_max"] > 1.8
    assert after["load_max"] < 1.2
    assert after["entropy"] > 0.99 > before["entropy"]


@pytest.mark.parametrize(
    ("load", "entropy", "load_max", "load_min"),
    [
        ([5, 5, 5, 5], 1.0, 1.0, 1.0),
        ([20, 0, 0, 0], 0.0, 4.0, 0.0),
        ([9, 9, 1, 1], 0.734497796, 1.8, 0.2),
        ([10, 10, 0, 0], 0.5, 2.0, 0.0),
        ([0, 0, 0, 0], 0.0, 0.0, 0.0),
    ],
)
def test_load_scalars_closed_form(
    router: Router, load: list[int], entropy: float, load_max: float, load_min: float
) -> None:
    router.load_E.copy_(torch.tensor(load))
    scalars = router.load_scalars()
    assert math.isclose(scalars["entropy"], entropy, abs_tol=1e-9)
    assert math.isclose(scalars["load_max"], load_max, abs_tol=1e-12)
    assert math.isclose(scalars["load_min"], load_min, abs_tol=1e-12)


def brute_force(moe: MixtureOfExperts, x_TD: torch.Tensor) -> torch.Tensor:
    """Every token through its own experts, one at a time, in float64."""

    def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ gate_up.double().T).chunk(2)
        return (torch.nn.functional.silu(gate) * up) @ down.double().T

    scores = torch.sigmoid(x_TD.double() @ moe.router.weight.double().T)
    outputs = []
    for x, score in zip(x_TD.double(), scores, strict=True):
        best = score.topk(2)
        y = expert(x, moe.shared.gate_up.weight, moe.shared.down.weight)
        for weight, e in zip(best.values / best.values.sum(), best.indices, strict=True):
            y = y + weight * expert(x, moe.experts.gate_up.weight[e], moe.experts.down.weight[e])
        outputs.append(y)
    return torch.stack(outputs)


def test_moe_is_the_weighted_sum_of_each_tokens_experts(moe: MixtureOfExperts) -> None:
    x = torch.randn(20, 64)
    y = moe(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.double(), brute_force(moe, x), rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE
    )


def test_gradients_reach_chosen_experts_and_the_router_only(moe: MixtureOfExperts) -> None:
    moe.router.bias_E.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    moe(torch.randn(20, 64)).float().pow(2).sum().backward()
    for weight in (moe.experts.gate_up.weight, moe.experts.down.weight):
        assert weight.grad is not None
        assert [bool(g.any()) for g in weight.grad] == [True, True, False, False]
    assert moe.router.weight.grad is not None
    assert [bool(g.any()) for g in moe.router.weight.grad] == [True, True, False, False]
