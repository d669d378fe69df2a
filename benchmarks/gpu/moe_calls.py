"""Inputs of every fused MoE operation, and its call."""

# Shapes: T tokens, D width, E experts, k copies of a token, R their rows, F SwiGLU width, G = 2 F, H heads, C channels of a head.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from gpu.case import Bench, kernels
from torch import Tensor

EPSILON = 1e-6
ALIGNMENT = 16
ROUTER_OPTIONS = {"top_k": 8, "groups": 8, "top_groups": 4, "normalise": True, "scale": 2.5}
Inputs = dict[str, Any]
"""Tensors and routing maps by the name of the operation's argument."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of all operations."""

    tokens: int
    width: int
    experts: int
    copies: int
    rows: int
    """Rows of SwiGLU."""
    heads: int
    channels: int


LARGE = Size(tokens=8192, width=8192, experts=64, copies=8, rows=8192, heads=64, channels=128)
"""What is timed."""
CHECKED = Size(tokens=1024, width=1152, experts=24, copies=4, rows=1040, heads=6, channels=128)
SMALL = Size(tokens=40, width=136, experts=16, copies=2, rows=48, heads=2, channels=32)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of kernels/moe, in its eager and its Triton form alike."""

    inputs: Callable[[Bench, Size], Inputs]
    call: Callable[[ModuleType, Inputs, Any], Any]
    """Of the operations' module, the inputs and what is wanted."""
    quantises: bool = False
    """Whether it takes a Wanted."""


def normal_router(bench: Bench, size: Size) -> Inputs:
    """Logits and the selection's bias."""
    experts = 256 if size is LARGE else size.experts
    float32 = torch.float32
    logits_TE, bias_E = (
        bench.normal(size.tokens, experts, dtype=float32),
        bench.normal(experts, dtype=float32),
    )
    return {"logits_TE": logits_TE, "bias_E": 0.05 * bias_E}


def router_options(inputs: Inputs) -> dict[str, Any]:
    """ROUTER_OPTIONS, no more copies than there are experts in the groups."""
    experts = inputs["logits_TE"].shape[1]
    return ROUTER_OPTIONS | {"top_k": min(8, experts // 2)}


def chosen(bench: Bench, size: Size) -> Inputs:
    """Expert ids as a router gives them; the last expert gets nothing."""
    scores_TE = bench.uniform(size.tokens, size.experts)
    scores_TE[:, -1] = -1.0
    return {"expert_Tk": scores_TE.topk(size.copies, dim=1).indices.int(), "experts": size.experts}


def router_gradient(bench: Bench, size: Size) -> Inputs:
    """Gradient of the weights, with the forward's logits and choice."""
    inputs = normal_router(bench, size)
    copies = router_options(inputs)["top_k"]
    expert_Tk = inputs["logits_TE"].topk(copies, dim=1).indices.int()
    dweight_Tk = bench.normal(size.tokens, copies, dtype=torch.float32)
    return {"dweight_Tk": dweight_Tk, "logits_TE": inputs["logits_TE"], "expert_Tk": expert_Tk}


def routed(bench: Bench, size: Size) -> Inputs:
    """Tokens, the rows of their copies, weights and the map."""
    picked = chosen(bench, size)
    routing_map = map_of(bench, picked["expert_Tk"], size)
    rows = routing_map.source_R.shape[0]
    weight_Tk = bench.uniform(size.tokens, size.copies)
    y_RD = bench.normal(rows, size.width).masked_fill_((routing_map.source_R < 0)[:, None], 0.0)
    x_TD, dy_TD = bench.normal(size.tokens, size.width), bench.normal(size.tokens, size.width)
    return {"x_TD": x_TD, "dy_TD": dy_TD, "y_RD": y_RD, "weight_Tk": weight_Tk, "routing_map": routing_map}


def map_of(bench: Bench, expert_Tk: Tensor, size: Size) -> Any:
    """The eager routing map; in a dry run one of the same shapes."""
    if bench.device != "meta":
        return kernels("moe.eager").routing(expert_Tk, size.experts, ALIGNMENT)
    made, copies = kernels("moe.routing"), size.tokens * size.copies
    rows, experts = made.capacity(copies, size.experts, ALIGNMENT), size.experts
    parts = [
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in (rows, expert_Tk.shape, experts + 1, experts)
    ]
    return made.RoutingMap(*parts, ALIGNMENT)


def activated(bench: Bench, size: Size) -> Inputs:
    """Gate and up, the rows' probabilities, the gradient of the product; two experts and rows behind them."""
    probability_R = bench.uniform(size.rows)
    half = size.rows // 32 * 16
    offsets = torch.tensor([0, half, size.rows // 16 * 16], dtype=torch.int32, device=bench.device)
    gate_up_RG, dh_RF = bench.normal(size.rows, 2 * size.width), bench.normal(size.rows, size.width)
    return {"gate_up_RG": gate_up_RG, "dh_RF": dh_RF, "probability_R": probability_R, "offsets": offsets}


def normed(bench: Bench, size: Size) -> Inputs:
    """Tokens, gain, the gradient and the forward's rstd."""
    x_TD, gain_D = (
        bench.normal(size.tokens, size.width),
        1 + 0.1 * bench.normal(size.width, dtype=torch.float32),
    )
    rstd_T = (x_TD.float().square().mean(dim=1) + EPSILON).rsqrt()
    return {"x_TD": x_TD, "gain_D": gain_D, "dy_TD": bench.normal(size.tokens, size.width), "rstd_T": rstd_T}


def headed(bench: Bench, size: Size) -> Inputs:
    """Heads, gain, angles, the gradient and the forward's rstd."""
    shape = (size.tokens, size.heads, size.channels)
    x_THC, dy_THC = bench.normal(*shape), bench.normal(*shape, dtype=torch.float32)
    frequency_c = 10000.0 ** (-torch.arange(size.channels // 2, device=bench.device) / (size.channels // 2))
    angle_TC = (torch.arange(size.tokens, device=bench.device)[:, None] * frequency_c).repeat(1, 2)
    gain_C = 1 + 0.1 * bench.normal(size.channels, dtype=torch.float32)
    rstd_TH = (x_THC.float().square().mean(dim=2) + EPSILON).rsqrt()
    angles = {"cos_TC": angle_TC.cos(), "sin_TC": angle_TC.sin()}
    return {"x_THC": x_THC, "dy_THC": dy_THC, "gain_C": gain_C, "rstd_TH": rstd_TH, **angles}


def elsewhere(inputs: Inputs) -> Inputs:
    """The inputs on the CPU, floating ones in float64: for the oracle."""
    return {name: _moved(value) for name, value in inputs.items()}


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu().double() if value.dtype.is_floating_point else value.cpu()
    if hasattr(value, "source_R"):
        names = ("source_R", "position_Tk", "offsets", "counts_E")
        return replace(value, **{name: getattr(value, name).cpu() for name in names})
    return value


def _names(*names: str) -> Callable[[Inputs], list[Any]]:
    return lambda inputs: [inputs[name] for name in names]


def _plain(inputs: Callable[[Bench, Size], Inputs], name: str, *arguments: str, **more: Any) -> Operation:
    """An operation whose arguments are inputs and numbers."""
    taken = _names(*arguments)
    return Operation(inputs=inputs, call=lambda ops, given, _: getattr(ops, name)(*taken(given), **more))


def _fused(
    inputs: Callable[[Bench, Size], Inputs],
    name: str,
    *arguments: str,
    after: tuple[str, ...] = (),
    **more: Any,
) -> Operation:
    """An operation that takes a Wanted behind some of its arguments."""
    first, last = _names(*arguments), _names(*after)
    return Operation(
        inputs=inputs, quantises=True,
        call=lambda ops, given, wanted: getattr(ops, name)(*first(given), *more.values(), wanted, *last(given)),
    )  # fmt: skip


OPERATIONS = {
    "topk": Operation(
        inputs=normal_router,
        call=lambda ops, given, _: ops.topk(given["logits_TE"], given["bias_E"], **router_options(given)),
    ),
    "topk_backward": _plain(
        router_gradient, "topk_backward", "dweight_Tk", "logits_TE", "expert_Tk", normalise=True, scale=2.5
    ),
    "routing": _plain(chosen, "routing", "expert_Tk", "experts", alignment=ALIGNMENT),
    "gather": _fused(routed, "gather", "x_TD", "routing_map"),
    "sum_copies": _plain(routed, "sum_copies", "y_RD", "routing_map", "weight_Tk"),
    "combine_backward": _fused(routed, "combine_backward", "dy_TD", "y_RD", "weight_Tk", "routing_map"),
    "swiglu": _fused(activated, "swiglu", "gate_up_RG", "probability_R", after=("offsets",)),
    "swiglu_backward": _fused(
        activated, "swiglu_backward", "dh_RF", "gate_up_RG", "probability_R", after=("offsets",)
    ),
    "rms_norm": _fused(normed, "rms_norm", "x_TD", "gain_D", epsilon=EPSILON),
    "rms_norm_backward": _plain(normed, "rms_norm_backward", "dy_TD", "x_TD", "gain_D", "rstd_T"),
    "qk_norm_rope": _plain(headed, "qk_norm_rope", "x_THC", "gain_C", "cos_TC", "sin_TC", epsilon=EPSILON),
    "qk_norm_rope_backward": _plain(
        headed, "qk_norm_rope_backward", "dy_THC", "x_THC", "gain_C", "cos_TC", "sin_TC", "rstd_TH"
    ),
}
"""By name, the same as in floors.FUSED."""
