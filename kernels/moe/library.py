"""Operators for torch.compile: each MoE operation an opaque call with known shapes."""

# Shapes: T tokens, k experts of a token, E experts, R permuted rows, D model width, F SwiGLU width, G = 2 F, H heads,
# C channels of a head.
# Eager code does not come through here. Under torch.compile `operations` answers with this module: the names and
# arguments of the raw operations, so that the same autograd functions serve. At run time an operator does what they do.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels.lazy import compiled_module
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted, capacity


def topk(logits_TE: Tensor, bias_E: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """The raw operation of that name."""
    selected: tuple[Tensor, Tensor] = _topk(logits_TE, bias_E, **options)
    return selected


def topk_backward(dweight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor, **options: Any) -> Tensor:
    """The raw operation of that name."""
    dlogits_TE: Tensor = _topk_backward(dweight_Tk, logits_TE, expert_Tk, **options)
    return dlogits_TE


def routing(expert_Tk: Tensor, experts: int, alignment: int) -> RoutingMap:
    """The raw operation of that name."""
    source_R, position_Tk, offsets, counts_E = _routing(expert_Tk, experts, alignment)
    return RoutingMap(source_R, position_Tk, offsets, counts_E, alignment)


def gather(x_TD: Tensor, routing_map: RoutingMap, wanted: Wanted) -> Produced:
    """The raw operation of that name; codes are not compiled."""
    if _asks_codes(wanted):
        return _direct(x_TD).gather(x_TD, routing_map, wanted)  # type: ignore[no-any-return]
    return _values(_gather(x_TD, *_tensors(routing_map)))


def sum_copies(y_RD: Tensor, routing_map: RoutingMap, weight_Tk: Tensor | None) -> Tensor:
    """The raw operation of that name."""
    y_TD: Tensor = _sum_copies(y_RD, weight_Tk, *_tensors(routing_map))
    return y_TD


def combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weight_Tk: Tensor, routing_map: RoutingMap, wanted: Wanted
) -> tuple[Produced, Tensor]:
    """The raw operation of that name, values only: what autograd asks for."""
    assert not _asks_codes(wanted)
    rows_RD, dweight_Tk = _combine_backward(dy_TD, y_RD, weight_Tk, *_tensors(routing_map))
    return _values(rows_RD), dweight_Tk


def swiglu(
    gate_up_RG: Tensor,
    probability_R: Tensor | None,
    wanted: Wanted,
    offsets: Tensor | None,
    *,
    aligned: bool = False,
) -> Produced:
    """The raw operation of that name; codes are not compiled."""
    if _asks_codes(wanted):
        direct = _direct(gate_up_RG).swiglu
        return direct(gate_up_RG, probability_R, wanted, offsets, aligned=aligned)  # type: ignore[no-any-return]
    return _values(_swiglu(gate_up_RG, probability_R, offsets))


def swiglu_backward(
    dh_RF: Tensor, gate_up_RG: Tensor, probability_R: Tensor | None, wanted: Wanted, offsets: Tensor | None
) -> tuple[Produced, Tensor | None]:
    """The raw operation of that name, values only."""
    assert not _asks_codes(wanted)
    dgate_up_RG, dprobability_R = _swiglu_backward(dh_RF, gate_up_RG, probability_R, offsets)
    return _values(dgate_up_RG), None if probability_R is None else dprobability_R


def rms_norm(x_TD: Tensor, gain_D: Tensor, epsilon: float, wanted: Wanted) -> tuple[Produced, Tensor]:
    """The raw operation of that name; codes are not compiled."""
    if _asks_codes(wanted):
        return _direct(x_TD).rms_norm(x_TD, gain_D, epsilon, wanted)  # type: ignore[no-any-return]
    y_TD, rstd_T = _rms_norm(x_TD, gain_D, epsilon)
    return _values(y_TD), rstd_T


def rms_norm_backward(dy_TD: Tensor, x_TD: Tensor, gain_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, Tensor]:
    """The raw operation of that name."""
    gradients: tuple[Tensor, Tensor] = _rms_norm_backward(dy_TD, x_TD, gain_D, rstd_T)
    return gradients


def qk_norm_rope(
    x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The raw operation of that name."""
    turned: tuple[Tensor, Tensor] = _qk_norm_rope(x_THC, gain_C, cos_SC, sin_SC, epsilon)
    return turned


def qk_norm_rope_backward(
    dy_THC: Tensor, x_THC: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, rstd_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """The raw operation of that name."""
    gradients: tuple[Tensor, Tensor] = _qk_norm_rope_backward(dy_THC, x_THC, gain_C, cos_SC, sin_SC, rstd_TH)
    return gradients


def _asks_codes(wanted: Wanted) -> bool:
    return wanted.row or wanted.blocks != "" or not wanted.values


def _values(values: Tensor) -> Produced:
    return Produced(values, None, None, None)


def _tensors(routing_map: RoutingMap) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """A map as an operator takes it."""
    return (
        routing_map.source_R,
        routing_map.position_Tk,
        routing_map.offsets,
        routing_map.counts_E,
        routing_map.alignment,
    )


def _direct(x: Tensor) -> Any:
    """The operations that run."""
    return compiled_module("moe.operations").running(x)


def _width(x: Tensor) -> torch.dtype:
    """What arithmetic on x runs in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.custom_op("fp8_safeguard::moe_topk", mutates_args=())
def _topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    options = {"groups": groups, "top_groups": top_groups, "normalise": normalise, "scale": scale}
    expert_Tk, weight_Tk = _direct(logits).topk(logits, bias, top_k=top_k, **options)
    return expert_Tk, weight_Tk


@_topk.register_fake
def _(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=_width(logits))


@torch.library.custom_op("fp8_safeguard::moe_topk_backward", mutates_args=())
def _topk_backward(dweight: Tensor, logits: Tensor, expert: Tensor, normalise: bool, scale: float) -> Tensor:
    dlogits_TE: Tensor = _direct(logits).topk_backward(
        dweight, logits, expert, normalise=normalise, scale=scale
    )
    return dlogits_TE


@_topk_backward.register_fake
def _(dweight: Tensor, logits: Tensor, expert: Tensor, normalise: bool, scale: float) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("fp8_safeguard::moe_routing", mutates_args=())
def _routing(expert: Tensor, experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = _direct(expert).routing(expert, experts, alignment)
    return made.source_R, made.position_Tk, made.offsets, made.counts_E


@_routing.register_fake
def _(expert: Tensor, experts: int, alignment: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = capacity(expert.numel(), experts, alignment)
    shapes = ((rows,), tuple(expert.shape), (experts + 1,), (experts,))
    source_R, position_Tk, offsets, counts_E = (
        expert.new_empty(shape, dtype=torch.int32) for shape in shapes
    )
    return source_R, position_Tk, offsets, counts_E


@torch.library.custom_op("fp8_safeguard::moe_gather", mutates_args=())
def _gather(
    x: Tensor, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor, alignment: int
) -> Tensor:
    route = RoutingMap(source, position, offsets, counts, alignment)
    values: Tensor = _direct(x).gather(x, route, Wanted()).values
    return values


@_gather.register_fake
def _(x: Tensor, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor, alignment: int) -> Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


@torch.library.custom_op("fp8_safeguard::moe_sum_copies", mutates_args=())
def _sum_copies(
    y: Tensor, weight: Tensor | None, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor, alignment: int
) -> Tensor:  # fmt: skip
    route = RoutingMap(source, position, offsets, counts, alignment)
    y_TD: Tensor = _direct(y).sum_copies(y, route, weight)
    return y_TD


@_sum_copies.register_fake
def _(
    y: Tensor, weight: Tensor | None, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor, alignment: int
) -> Tensor:  # fmt: skip
    return y.new_empty(position.shape[0], y.shape[1])


@torch.library.custom_op("fp8_safeguard::moe_combine_backward", mutates_args=())
def _combine_backward(
    dy: Tensor, y: Tensor, weight: Tensor, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor,
    alignment: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    route = RoutingMap(source, position, offsets, counts, alignment)
    produced, dweight_Tk = _direct(dy).combine_backward(dy, y, weight, route, Wanted())
    return produced.values, dweight_Tk


@_combine_backward.register_fake
def _(
    dy: Tensor, y: Tensor, weight: Tensor, source: Tensor, position: Tensor, offsets: Tensor, counts: Tensor,
    alignment: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return dy.new_empty(y.shape), dy.new_empty(position.shape, dtype=_width(dy))


@torch.library.custom_op("fp8_safeguard::moe_swiglu", mutates_args=())
def _swiglu(gate_up: Tensor, probability: Tensor | None, offsets: Tensor | None) -> Tensor:
    values: Tensor = _direct(gate_up).swiglu(gate_up, probability, Wanted(), offsets).values
    return values


@_swiglu.register_fake
def _(gate_up: Tensor, probability: Tensor | None, offsets: Tensor | None) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("fp8_safeguard::moe_swiglu_backward", mutates_args=())
def _swiglu_backward(
    dh: Tensor, gate_up: Tensor, probability: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The second result is empty without a probability."""
    produced, dprobability_R = _direct(gate_up).swiglu_backward(dh, gate_up, probability, Wanted(), offsets)
    return produced.values, dh.new_empty(0) if dprobability_R is None else dprobability_R


@_swiglu_backward.register_fake
def _(
    dh: Tensor, gate_up: Tensor, probability: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    dprobability = dh.new_empty(0) if probability is None else dh.new_empty(len(dh), dtype=_width(dh))
    return gate_up.new_empty(gate_up.shape), dprobability


@torch.library.custom_op("fp8_safeguard::moe_rms_norm", mutates_args=())
def _rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    produced, rstd_T = _direct(x).rms_norm(x, gain, epsilon, Wanted())
    return produced.values, rstd_T


@_rms_norm.register_fake
def _(x: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=_width(x))


@torch.library.custom_op("fp8_safeguard::moe_rms_norm_backward", mutates_args=())
def _rms_norm_backward(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx_TD, dgain_D = _direct(x).rms_norm_backward(dy, x, gain, rstd)
    return dx_TD, dgain_D


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gain.new_empty(gain.shape)


@torch.library.custom_op("fp8_safeguard::moe_qk_norm_rope", mutates_args=())
def _qk_norm_rope(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y_THC, rstd_TH = _direct(x).qk_norm_rope(x, gain, cos, sin, epsilon)
    return y_THC, rstd_TH


@_qk_norm_rope.register_fake
def _(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_width(x)), x.new_empty(x.shape[:2], dtype=_width(x))


@torch.library.custom_op("fp8_safeguard::moe_qk_norm_rope_backward", mutates_args=())
def _qk_norm_rope_backward(
    dy: Tensor, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx_THC, dgain_C = _direct(x).qk_norm_rope_backward(dy, x, gain, cos, sin, rstd)
    return dx_THC, dgain_C


@_qk_norm_rope_backward.register_fake
def _(dy: Tensor, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gain.new_empty(gain.shape)
