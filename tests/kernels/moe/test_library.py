"""Under torch.compile: one graph, the same bits, shapes that were promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from fp8_safeguard.kernels.moe import (
    QKNorm,
    eager,
    fast_moe,
    group_limited_topk,
    library,
    rms_norm,
    routing_map,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Torch's tracer makes an instance of each autograd function, against which torch itself warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_block_is_one_graph_with_the_bits_of_the_eager_one(make_inputs: Any) -> None:
    inputs = make_inputs(tokens=40, width=64, hidden=32)
    generator = torch.Generator().manual_seed(0)
    leaves = [
        inputs.x_TD,
        inputs.w_gate_up_EGD,
        inputs.w_down_EDF,
        torch.randn(40, 5, generator=generator),
        torch.rand(64, generator=generator),
    ]
    norm, tables = (
        QKNorm(16),
        (torch.rand(40, 16, generator=generator), torch.rand(40, 16, generator=generator)),
    )

    def block(x_TD: Tensor, w_gate_up: Tensor, w_down: Tensor, logits_TE: Tensor, gain_D: Tensor) -> Tensor:
        normed_TD = rms_norm(x_TD, gain_D)
        heads = norm(normed_TD.view(40, 4, 16), *tables).flatten(1).bfloat16()
        expert_Tk, weight_Tk = group_limited_topk(logits_TE, top_k=2)
        route = routing_map(expert_Tk, 5)
        return heads + fast_moe(normed_TD, w_gate_up, w_down, route, weight_Tk)

    found = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        y_TD = function(*own)
        found.append([y_TD.detach(), *torch.autograd.grad(y_TD, [*own, norm.gain], inputs.dy_TD)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    expert_Tk = torch.tensor([[0, 2], [2, -1], [1, 0]], dtype=torch.int32)
    route = eager.routing(expert_Tk, 3, 4)
    parts = (route.source_R, route.position_Tk, route.offsets, route.counts_E, 4)
    rows, weight_Tk = route.rows, torch.rand(3, 2, generator=generator)
    offsets, probability_R = route.offsets, torch.rand(rows, generator=generator)
    heads, tables = normal(3, 2, 4), (normal(3, 4), normal(3, 4))
    return {
        "topk": (normal(3, 4), normal(4), 2, 2, 1, True, 2.0),
        "topk_backward": (weight_Tk, normal(3, 4), expert_Tk.abs(), True, 2.0),
        "routing": (expert_Tk, 3, 4),
        "gather": (normal(3, 6).bfloat16(), *parts),
        "sum_copies": (normal(rows, 6).bfloat16(), weight_Tk, *parts),
        "combine_backward": (normal(3, 6).bfloat16(), normal(rows, 6).bfloat16(), weight_Tk, *parts),
        "swiglu": (normal(rows, 6).bfloat16(), probability_R, offsets),
        "swiglu_backward": (normal(rows, 3).bfloat16(), normal(rows, 6).bfloat16(), probability_R, offsets),
        "rms_norm": (normal(3, 6).bfloat16(), normal(6), 1e-6),
        "rms_norm_backward": (normal(3, 6), normal(3, 6), normal(6), torch.rand(3, generator=generator)),
        "qk_norm_rope": (heads.bfloat16(), normal(4), *tables, 1e-6),
        "qk_norm_rope_backward": (
            heads,
            heads.bfloat16(),
            normal(4),
            *tables,
            torch.rand(3, 2, generator=generator),
        ),
    }


@pytest.mark.parametrize("name", list(calls()))
def test_operators_keep_what_their_shapes_promise(name: str) -> None:
    operator = getattr(library, f"_{name}")
    torch.library.opcheck(operator, calls()[name], test_utils=("test_schema", "test_faketensor"))
