"""Routed experts: padding, recomputation and emptiness change no bit of any gradient."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import (
    LinearPrecision,
    OperandError,
    OperandFormat,
    QuantizedTensor,
    fp8_grouped_linear,
    grouped_gemm_wgrad,
    passes,
    quantize,
)
from fp8_safeguard.kernels.moe import (
    FastMoEFunction,
    combine,
    eager,
    expert_fused,
    fast_moe,
    group_limited_topk,
    permute,
    routing_map,
    spread,
    swiglu,
)

NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dprobability")
# Operands of three mantissa bits: 2.6 % noise a GEMM, a handful of them in a row.
FP8_TOLERANCE = 0.1


@pytest.fixture(params=["passes", "fused"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who computes FP8 layers; a CPU takes the fused steps one by one."""
    if request.param == "fused":
        monkeypatch.setattr(
            expert_fused, "usable", lambda experts: experts.call.precision == LinearPrecision()
        )
    return str(request.param)


def differing(found: list[Tensor], expected: list[Tensor]) -> list[str]:
    """The names of results that differ in any bit."""
    return [name for name, a, b in zip(NAMES, found, expected, strict=True) if not torch.equal(a, b)]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("alignment", [1, 16, 128])
def test_padding_and_recomputation_change_no_bit(
    make_inputs: Any,
    plain: Any,
    results: Any,
    precisions: Any,
    precision: str,
    recompute: bool,
    alignment: int,
) -> None:
    inputs, form = make_inputs(), precisions[precision]
    route = routing_map(inputs.expert_Tk, 5, alignment=alignment)
    bare = routing_map(inputs.expert_Tk, 5, alignment=1)
    expected = results(lambda x, up, down, weight: plain(x, up, down, bare, weight, form), inputs)
    padded = results(lambda x, up, down, weight: plain(x, up, down, route, weight, form), inputs)
    fused = results(
        lambda x, up, down, weight: FastMoEFunction.apply(x, up, down, weight, route, form, recompute), inputs
    )
    assert differing(padded, expected) == []
    assert differing(fused, expected) == []


def test_mixed_precisions_and_formats_are_those_of_the_plain_chain(
    make_inputs: Any, plain: Any, results: Any
) -> None:
    inputs = make_inputs(tokens=70)
    form = LinearPrecision(
        dgrad="bf16",
        dy=OperandFormat(fmt="e5m2", scale="pow2"),
        x=OperandFormat(scale="pow2", multiplier=0.5),
    )
    route = routing_map(inputs.expert_Tk, 5)
    expected = results(lambda x, up, down, weight: plain(x, up, down, route, weight, form), inputs)
    for recompute in (True, False):
        found = results(
            lambda x, up, down, weight, recompute=recompute: fast_moe(
                x, up, down, route, weight, precision=form, recompute=recompute
            ),
            inputs,
        )
        assert differing(found, expected) == []


def test_gradients_are_those_of_dense_experts_in_float64(make_inputs: Any, results: Any) -> None:
    inputs = make_inputs()

    def dense(x_TD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, weight_Tk: Tensor) -> Tensor:
        """Every token through every expert, the weights of those not chosen 0."""
        weight_TE = torch.zeros(len(x_TD), 5, dtype=torch.float64).scatter(
            1, inputs.expert_Tk.long(), weight_Tk.double()
        )
        gate, up = torch.einsum("td,egd->teg", x_TD.double(), w_gate_up_EGD.double()).chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * up
        y = torch.einsum("tef,edf,te->td", hidden, w_down_EDF.double(), weight_TE)
        return y.bfloat16()

    found = results(lambda *tensors: fast_moe(*tensors[:3], inputs.expert_Tk, tensors[3]), inputs)
    for name, ours, exact in zip(NAMES, found, results(dense, inputs), strict=True):
        error = (ours.double() - exact.double()).norm() / exact.double().norm()
        assert error < FP8_TOLERANCE, (name, float(error))


def test_gradcheck_of_the_whole_chain_router_included() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 4), (3, 4), (3, 6, 4), (3, 4, 3))
    ]

    def chain(x_TD: Tensor, w_ED: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor) -> Tensor:
        expert_Tk, weight_Tk = group_limited_topk(x_TD @ w_ED.T, top_k=2)
        route = routing_map(expert_Tk, 3, alignment=4)
        x_RD = permute(x_TD, route)
        expert_R = torch.bucketize(torch.arange(route.rows), route.offsets[1:], right=True).clamp_max(2)
        gate_up_RG = torch.einsum("rd,rgd->rg", x_RD, w_gate_up_EGD[expert_R])
        h_RF = swiglu(gate_up_RG, spread(weight_Tk, route))
        return combine(torch.einsum("rf,rdf->rd", h_RF, w_down_EDF[expert_R]), route)

    assert torch.autograd.gradcheck(chain, tensors)


def test_the_backward_recomputes_up_to_the_activation_and_no_further(
    make_inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, calls = make_inputs(), []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(passes, "forward", counted("product", passes.forward))
    monkeypatch.setattr(eager, "swiglu", counted("activation", eager.swiglu))
    monkeypatch.setattr(eager, "sum_copies", counted("sum", eager.sum_copies))
    x_TD = inputs.x_TD.clone().requires_grad_()
    y_TD = fast_moe(x_TD, *inputs[1:5])
    assert calls == ["product", "activation", "product", "sum"]
    calls.clear()
    y_TD.backward(inputs.dy_TD)
    # The one sum of the backward is that of the copies' gradients.
    assert calls == ["product", "activation", "sum"]


def test_recomputation_keeps_x_the_weights_and_the_routing_only(make_inputs: Any) -> None:
    inputs = make_inputs()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs[:3], inputs.weight_Tk)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TD = fast_moe(*leaves[:3], inputs.expert_Tk, leaves[3])
    assert [tensor.data_ptr() for tensor in kept] == [leaf.data_ptr() for leaf in leaves]
    node = y_TD.grad_fn
    assert node is not None
    assert node.waiting is None  # type: ignore[attr-defined]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (3,), (0, 1, 3), (0, 1, 2)])
def test_frozen_inputs_get_no_gradient_and_change_none(
    make_inputs: Any, frozen: tuple[int, ...], recompute: bool
) -> None:
    inputs = make_inputs(tokens=40)
    found = []
    for free in (frozenset(range(4)), frozenset(range(4)) - set(frozen)):
        leaves = [
            tensor.clone().requires_grad_(index in free)
            for index, tensor in enumerate((*inputs[:3], inputs.weight_Tk))
        ]
        fast_moe(*leaves[:3], inputs.expert_Tk, leaves[3], recompute=recompute).backward(inputs.dy_TD)
        found.append([leaf.grad for leaf in leaves])
    for index, (full, part) in enumerate(zip(*found, strict=True)):
        assert full is not None
        assert part is None if index in frozen else part is not None and torch.equal(part, full)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_b39_no_tokens_at_all_give_zero_gradients_of_every_weight(
    make_inputs: Any, results: Any, precisions: Any, precision: str
) -> None:
    empty, busy = make_inputs(tokens=0), make_inputs(tokens=40)
    for alignment in (1, 16):
        route = routing_map(empty.expert_Tk, 5, alignment=alignment)
        assert route.counts_E.tolist() == [0] * 5

        def layer(x: Tensor, up: Tensor, down: Tensor, weight: Tensor, route: Any = route) -> Tensor:
            return fast_moe(x, up, down, route, weight, precision=precisions[precision])

        y, dx, dw_gate_up, dw_down, dweight = results(layer, empty)
        assert (y.shape, dx.shape, dweight.shape) == ((0, 96), (0, 96), (0, 2))
        # Zeros, not None: a rank without tokens still has something to reduce.
        for gradient, weight in ((dw_gate_up, empty.w_gate_up_EGD), (dw_down, empty.w_down_EDF)):
            assert gradient.shape == weight.shape
            assert not gradient.any()
        others = results(
            lambda *tensors: fast_moe(
                *tensors[:3], busy.expert_Tk, tensors[3], precision=precisions[precision]
            ),
            busy,
        )
        assert torch.equal(dw_down + others[3], others[3])


def test_b39_copies_that_all_go_elsewhere(make_inputs: Any, results: Any) -> None:
    inputs = make_inputs(tokens=20)._replace(expert_Tk=torch.full((20, 2), -1))
    for recompute in (True, False):
        found = results(
            lambda x, up, down, weight, recompute=recompute: fast_moe(
                x, up, down, inputs.expert_Tk, weight, recompute=recompute
            ),
            inputs,
        )
        assert not any(tensor.any() for tensor in found)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("recompute", [True, False])
def test_copies_that_go_nowhere_add_nothing_and_get_no_gradient(
    make_inputs: Any, plain: Any, results: Any, recompute: bool
) -> None:
    inputs = make_inputs(tokens=60)
    ids = inputs.expert_Tk.clone()
    ids[::3, 1] = -1
    ids[7] = -1
    route = routing_map(ids, 5)
    expected = results(
        lambda x, up, down, weight: plain(x, up, down, route, weight, LinearPrecision()), inputs
    )
    found = results(
        lambda x, up, down, weight: fast_moe(x, up, down, route, weight, recompute=recompute), inputs
    )
    assert differing(found, expected) == []
    assert not found[0][7].any()
    assert torch.equal(found[4] == 0, ids < 0)


def test_an_expert_without_tokens_gets_an_exactly_zero_gradient(make_inputs: Any, results: Any) -> None:
    inputs = make_inputs(avoid=(0, 3))
    _, _, dw_gate_up, dw_down, _ = results(
        lambda *tensors: fast_moe(*tensors[:3], inputs.expert_Tk, tensors[3]), inputs
    )
    for gradient in (dw_gate_up, dw_down):
        assert [bool(expert.any()) for expert in gradient] == [False, True, True, False, True]


def test_b20_an_empty_weight_shard_adds_nothing(make_inputs: Any, results: Any) -> None:
    inputs = make_inputs(tokens=20)
    shard = inputs._replace(
        w_gate_up_EGD=inputs.w_gate_up_EGD[:, :0].clone(), w_down_EDF=inputs.w_down_EDF[:, :, :0].clone()
    )
    found = results(lambda *tensors: fast_moe(*tensors[:3], inputs.expert_Tk, tensors[3]), shard)
    assert [tensor.shape for tensor in found] == [(20, 96), (20, 96), (5, 0, 96), (5, 96, 0), (20, 2)]
    assert not any(tensor.any() for tensor in found)


def test_b40_a_zero_column_and_the_filler_of_its_scale_do_not_count() -> None:
    sizes, channels, dead = [256, 128, 128, 256], 40, 7
    ids = torch.arange(4).repeat_interleave(torch.tensor(sizes)).view(-1, 1)
    route = routing_map(ids, 4)
    generator = torch.Generator().manual_seed(9)
    x_TD = torch.randn(len(ids), channels, generator=generator).bfloat16()
    x_TD[:, dead] = 0.0
    dy_TD = torch.randn(len(ids), 24, generator=generator).bfloat16()
    end, offsets = int(route.offsets[-1]), route.offsets
    dy, x = (
        quantize(permute(tensor, route)[:end], layout="col", offsets=offsets) for tensor in (dy_TD, x_TD)
    )
    bounds = offsets.tolist()
    exact = torch.stack(
        [
            dy.dequantize(torch.float64)[start:stop].T @ x.dequantize(torch.float64)[start:stop]
            for start, stop in pairwise(bounds)
        ]
    )
    first = None
    for filler in (1e-30, 1e-12, 1.0):
        scale = x.scale.clone()
        scale[:, dead] = filler
        for _ in range(5):
            dw = grouped_gemm_wgrad(dy, QuantizedTensor(x.data, scale, "col", x.fmt, x.offsets), offsets)
            first = dw if first is None else first
            assert torch.equal(dw, first)
            assert not dw[..., dead].any()
            assert (dw - exact).norm() < 1e-3 * exact.norm()
    weight_ENK = torch.zeros(4, 24, channels, requires_grad=True)
    fp8_grouped_linear(permute(x_TD, route), weight_ENK, offsets).backward(permute(dy_TD, route))
    assert weight_ENK.grad is not None
    assert not weight_ENK.grad[..., dead].any()
    assert (weight_ENK.grad - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w_down_EDF": torch.zeros(5, 96, 71)}, "do not fit"),
        ({"x_TD": torch.zeros(150, 95)}, "do not fit"),
        ({"weight_Tk": torch.zeros(150, 3)}, r"\[150, 3\]"),
        ({"x_TD": torch.zeros(149, 96)}, "149 tokens"),
        ({"x_TD": torch.zeros(2, 75, 96)}, r"pass x \[T, D\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_every_shape(
    make_inputs: Any, change: dict[str, Tensor], said: str
) -> None:
    with pytest.raises(OperandError, match=said):
        fast_moe(*make_inputs()._replace(**change)[:5])
