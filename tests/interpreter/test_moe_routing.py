"""The router's choice and the routing map, on the device."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels.moe import RoutingMap, eager, triton_ops

NEAR = 1e-6
"""Relative: a few float32 roundings, of weights that are quotients of sums."""


def same_map(got: RoutingMap, wanted: RoutingMap) -> bool:
    names = ("source_R", "position_Tk", "offsets", "counts_E")
    pairs = [(getattr(got, name), getattr(wanted, name)) for name in names]
    return got.alignment == wanted.alignment and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def options(**changed: Any) -> dict[str, Any]:
    plain = {"top_k": 4, "groups": 4, "top_groups": 2, "normalise": True, "scale": 2.5}
    return plain | changed


def literal_choice(choice: torch.Tensor, top_k: int, groups: int, top_groups: int) -> list[int]:
    """Experts of one token, one sorted list after the other."""
    values, size = choice.tolist(), len(choice) // groups
    rank = {expert: (-value, expert) for expert, value in enumerate(values)}
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    scores = [sum(sorted((values[expert] for expert in member), reverse=True)[:2]) for member in members]
    best = sorted(range(groups), key=lambda group: (-scores[group], group))[:top_groups]
    allowed = [expert for group in best for expert in members[group]]
    return sorted(allowed, key=lambda expert: rank[expert])[:top_k]


@pytest.mark.parametrize(
    ("experts", "changed"),
    [
        (16, {}),
        (24, {"groups": 3, "normalise": False, "scale": 1.0}),
        (10, {"top_k": 3, "groups": 1, "top_groups": 1}),
        (6, {"top_k": 2, "groups": 6, "top_groups": 3}),
        (64, {"top_k": 8, "groups": 8, "top_groups": 4}),
    ],
)
def test_topk(experts: int, changed: dict[str, Any], generator: torch.Generator) -> None:
    logits = 2 * torch.randn(37, experts, generator=generator)
    bias = 0.1 * torch.randn(experts, generator=generator)
    asked = options(**changed)
    expert, weight = triton_ops.topk(logits, bias, **asked)
    limits = [asked[name] for name in ("top_k", "groups", "top_groups")]
    score = torch.sigmoid(logits)
    assert expert.dtype == torch.int32
    assert expert.tolist() == [literal_choice(row, *limits) for row in score + bias]
    exact = torch.sigmoid(logits.double()).gather(1, expert.long())
    if asked["normalise"]:
        exact /= exact.sum(-1, keepdim=True)
    assert torch.allclose(weight.double(), exact * asked["scale"], rtol=NEAR, atol=0.0)
    wanted, _ = eager.topk(logits, None, **asked)
    assert torch.equal(triton_ops.topk(logits, None, **asked)[0], wanted)


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.tensor([[1.0] * 16, [0.0, 2.0] * 8, [-200.0] * 16, [200.0] * 16])
    expert, weight = triton_ops.topk(logits, None, **options())
    assert expert.tolist() == [[0, 1, 2, 3], [1, 3, 5, 7], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert torch.equal(weight, eager.topk(logits, None, **options())[1])


def test_numbers_that_are_none_choose_experts_that_exist() -> None:
    """NaN counts as the largest, as in the plain chain; the ids stay ids and the weights say NaN."""
    logits = torch.zeros(4, 16)
    logits[0, 5], logits[1], logits[2, 3], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    bias = torch.zeros(16)
    bias[7:8] = torch.tensor([-(2**22)], dtype=torch.int32).view(torch.float32)
    assert bias.isnan()[7], "a NaN with its sign set"
    (expert, weight), (wanted, wanted_weight) = (
        module.topk(logits, bias, **options()) for module in (triton_ops, eager)
    )
    assert torch.equal(expert, wanted)
    assert torch.equal(weight.isnan(), wanted_weight.isnan())
    assert ((expert >= 0) & (expert < 16)).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_topk_backward(normalise: bool, generator: torch.Generator) -> None:
    """Against torch's autograd of the formula, in float64."""
    logits = 2 * torch.randn(37, 24, generator=generator)
    logits[3] = -300
    asked = options(groups=3, normalise=normalise)
    expert, _ = triton_ops.topk(logits, None, **asked)
    dweight = torch.randn(37, 4, generator=generator)
    leaf = logits.double().requires_grad_()
    chosen = torch.sigmoid(leaf).gather(1, expert.long())
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-20)
    (chosen * 2.5).backward(dweight.double())
    got = triton_ops.topk_backward(dweight, logits, expert, normalise=normalise, scale=2.5)
    assert leaf.grad is not None
    assert torch.allclose(got.double(), leaf.grad, rtol=1e-5, atol=1e-6)
    assert (got[torch.ones_like(got).scatter(1, expert.long(), 0.0) > 0] == 0).all()


@pytest.mark.parametrize("alignment", [16, 1, 8])
@pytest.mark.parametrize("shape", [(300, 3, 5), (37, 8, 64), (0, 2, 3), (1, 1, 1)])
def test_routing(shape: tuple[int, int, int], alignment: int, generator: torch.Generator) -> None:
    tokens, copies, experts = shape
    expert = torch.randint(-1, experts, (tokens, copies), generator=generator, dtype=torch.int32)
    assert same_map(triton_ops.routing(expert, experts, alignment), eager.routing(expert, experts, alignment))


def test_one_expert_takes_all(generator: torch.Generator) -> None:
    expert = torch.full((70, 4), 3, dtype=torch.int64)
    got = triton_ops.routing(expert, 7, 16)
    assert got.counts_E.tolist() == [0, 0, 0, 280, 0, 0, 0]
    assert got.offsets.tolist() == [0, 0, 0, 0, 288, 288, 288, 288]
    assert got.source_R[:280].tolist() == [row // 4 for row in range(280)]
    assert (got.source_R[280:] == -1).all()


def test_b37_every_expert_is_aligned_by_itself() -> None:
    counts = [0, 1, 31, 32, 33, 409]
    expert = torch.repeat_interleave(torch.arange(6), torch.tensor(counts)).to(torch.int32)[:, None]
    for unit in (16, 32, 128):
        got = triton_ops.routing(expert, 6, unit)
        assert got.counts_E.tolist() == counts
        assert got.offsets.diff().tolist() == [number + -number % unit for number in counts]


def test_b41_counts_are_those_of_the_assignments() -> None:
    expert = torch.tensor([[0, 2], [2, -1], [0, 2], [2, 0], [2, -1]], dtype=torch.int32)
    got = triton_ops.routing(expert, 3, 4)
    assert got.counts_E.tolist() == [3, 0, 5]
    assert got.offsets.tolist() == [0, 4, 4, 12]
    assert got.source_R[:12].tolist() == [0, 2, 3, -1, 0, 1, 2, 3, 4, -1, -1, -1]
    assert got.position_Tk.tolist() == [[0, 4], [5, -1], [1, 6], [7, 2], [8, -1]]


def test_ids_that_are_no_experts_go_nowhere() -> None:
    """A device cannot be asked: what lies beyond must not be written anywhere."""
    expert = torch.tensor([[0, 5], [7, 1]], dtype=torch.int32)
    got = triton_ops.routing(expert, 3, 1)
    assert got.position_Tk.tolist() == [[0, -1], [-1, 1]]
    assert got.counts_E.tolist() == [1, 1, 0]
