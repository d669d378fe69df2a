"""Every fused MoE kernel that ships, ready to compile, with its promises."""

# Shapes: T tokens, D model width, E experts, k experts of a token, R permuted rows, F SwiGLU width, G = 2 F, H heads,
# C channels of a head. Tensors are of torch's `meta` device: shapes only.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8_safeguard.kernels.moe.routing import RoutingMap, Wanted, capacity
from fp8_safeguard.kernels.moe.triton_logfmt import plan_logfmt_decode, plan_logfmt_encode
from fp8_safeguard.kernels.moe.triton_norm import plan_rms_norm, plan_rms_norm_backward
from fp8_safeguard.kernels.moe.triton_permute import plan_combine_backward, plan_gather, plan_sum_copies
from fp8_safeguard.kernels.moe.triton_rope import plan_qk_norm_rope, plan_qk_norm_rope_backward
from fp8_safeguard.kernels.moe.triton_router import plan_topk, plan_topk_backward
from fp8_safeguard.kernels.moe.triton_routing import plan_routing
from fp8_safeguard.kernels.moe.triton_swiglu import plan_swiglu, plan_swiglu_backward
from fp8_safeguard.kernels.triton_launch import Launch
from fp8_safeguard.kernels.triton_shipped import Shipped

TOKENS, WIDTH, EXPERTS, TOP_K, HIDDEN, HEADS, CHANNELS = 8192, 8192, 256, 8, 2048, 32, 128
ROWS = Wanted(values=False, row=True)
BOTH = Wanted(values=False, row=True, blocks="col")
ALL = Wanted(row=True, blocks="col")
GRADIENT = Wanted(values=False, row=True, blocks="col", fmt="e5m2", scale="pow2")


def shipped(architecture: int) -> dict[str, Shipped]:
    """Every fused MoE kernel by name: the same ones for all architectures."""
    return dict(_quantising()) | dict(_norms()) | dict(_routing())


def _quantising() -> Iterator[tuple[str, Shipped]]:
    """The fused operations of expert rows."""
    made = _map()
    rows, offsets = made.rows, made.offsets
    for name, dtype in _SOURCES.items():
        gate_up_RG, dh_RF = _meta((rows, 2 * HIDDEN), dtype), _meta((rows, HIDDEN), dtype)
        probability_R, x_TD = _meta((rows,), torch.float32), _meta((TOKENS, WIDTH), dtype)
        forward = plan_swiglu(gate_up_RG, probability_R, BOTH, offsets, True)[0]
        yield f"moe_swiglu_row_col_{name}", _quantiser(forward[0])
        backward = plan_swiglu_backward(dh_RF, gate_up_RG, probability_R, BOTH, offsets, True)[0]
        yield f"moe_swiglu_backward_row_col_{name}", _quantiser(backward[0])
        yield f"moe_gather_row_col_{name}", _quantiser(plan_gather(x_TD, made, BOTH)[0][0])
    x_TD, y_RD = _meta((TOKENS, WIDTH), torch.bfloat16), _meta((rows, WIDTH), torch.bfloat16)
    weight_Tk = _meta((TOKENS, TOP_K), torch.float32)
    yield "moe_gather_row_bf16", _quantiser(plan_gather(x_TD, made, ROWS)[0][0])
    yield "moe_gather_values_bf16", Shipped(launch=plan_gather(x_TD, made, Wanted())[0][0])
    combine = plan_combine_backward(x_TD, y_RD, weight_Tk, made, BOTH)[0]
    yield "moe_combine_backward_row_col_bf16", _quantiser(combine[0])
    yield "moe_sum_parts_indexed", Shipped(launch=combine[-1])
    for name, weight in (("", None), ("_weighted", weight_Tk)):
        yield f"moe_sum_copies{name}_bf16", Shipped(launch=plan_sum_copies(y_RD, made, weight)[0])
    gate_up_RG, dh_RF = _meta((rows, 2 * HIDDEN), torch.bfloat16), _meta((rows, HIDDEN), torch.bfloat16)
    probability_R = _meta((rows,), torch.float32)
    rows_only = plan_swiglu(gate_up_RG, probability_R, ROWS, offsets, True)[0]
    yield "moe_swiglu_row_bf16", _quantiser(rows_only[0])
    rows_only = plan_swiglu_backward(dh_RF, gate_up_RG, probability_R, ROWS, offsets, True)[0]
    yield "moe_swiglu_backward_row_bf16", _quantiser(rows_only[0])
    whole = plan_swiglu(gate_up_RG, probability_R, ALL, offsets, True)[0]
    yield "moe_swiglu_values_row_col_bf16", _quantiser(whole[0])
    gradient = plan_swiglu_backward(dh_RF, gate_up_RG, probability_R, GRADIENT, offsets, True)[0]
    yield "moe_swiglu_backward_pow2_e5m2_bf16", _quantiser(gradient[0])
    dense = plan_swiglu_backward(dh_RF, gate_up_RG, None, BOTH, None, False)[0]
    yield "moe_swiglu_backward_dense_bf16", _quantiser(dense[0])


def _norms() -> Iterator[tuple[str, Shipped]]:
    """RMSNorm of tokens and of heads."""
    gain_D, rstd_T = _meta((WIDTH,), torch.float32), _meta((TOKENS,), torch.float32)
    for name, dtype in _SOURCES.items():
        x_TD = _meta((TOKENS, WIDTH), dtype)
        launches = plan_rms_norm(x_TD, gain_D, 1e-6, BOTH)[0]
        yield f"moe_rstd_{name}", Shipped(launch=launches[0], ieee_division=True)
        yield f"moe_rms_norm_row_col_{name}", _quantiser(launches[1])
        backward = plan_rms_norm_backward(x_TD, x_TD, gain_D, rstd_T)[0]
        yield f"moe_rms_norm_backward_{name}", Shipped(launch=backward[0], ieee_division=True)
    yield "moe_sum_parts", Shipped(launch=backward[1])
    x_THC = _meta((TOKENS, 2 * HEADS, CHANNELS), torch.bfloat16)[:, :HEADS]
    dy_THC, rstd_TH = _meta((TOKENS, HEADS, CHANNELS), torch.float32), _meta((TOKENS, HEADS), torch.float32)
    gain_C, angle_SC = _meta((CHANNELS,), torch.float32), _meta((TOKENS // 2, CHANNELS), torch.float32)
    forward = plan_qk_norm_rope(x_THC, gain_C, angle_SC, angle_SC, 1e-6)[0]
    yield "moe_qk_norm_rope", Shipped(launch=forward, ieee_division=True)
    turned = plan_qk_norm_rope_backward(dy_THC, x_THC, gain_C, angle_SC, angle_SC, rstd_TH)[0]
    yield "moe_qk_norm_rope_backward", Shipped(launch=turned[0], ieee_division=True)


def _routing() -> Iterator[tuple[str, Shipped]]:
    """The router, its map, and the codec of what it sends."""
    logits_TE, bias_E = _meta((TOKENS, EXPERTS), torch.float32), _meta((EXPERTS,), torch.float32)
    expert_Tk, dweight_Tk = _meta((TOKENS, TOP_K), torch.int32), _meta((TOKENS, TOP_K), torch.float32)
    for name, groups, top_groups in (("", 1, 1), ("_grouped", 8, 4)):
        launch = plan_topk(logits_TE, bias_E, TOP_K, groups, top_groups, True, 2.5)[0]
        yield f"moe_topk{name}", Shipped(launch=launch, ieee_division=True)
    backward = plan_topk_backward(dweight_Tk, logits_TE, expert_Tk, True, 2.5)[0]
    yield "moe_topk_backward", Shipped(launch=backward, ieee_division=True)
    names = ("moe_routing_count", "moe_routing_scan", "moe_routing_scatter")
    for name, launch in zip(names, plan_routing(expert_Tk, EXPERTS, 16)[0], strict=True):
        yield name, Shipped(launch=launch)
    encode, encoded = plan_logfmt_encode(_meta((TOKENS, WIDTH), torch.bfloat16))
    yield "moe_logfmt_encode", Shipped(launch=encode)
    yield "moe_logfmt_decode", Shipped(launch=plan_logfmt_decode(encoded, torch.bfloat16)[0])


_SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _quantiser(launch: Launch) -> Shipped:
    return Shipped(launch=launch, saturating=True)


def _map() -> RoutingMap:
    """The map of TOKENS tokens."""
    rows = capacity(TOKENS * TOP_K, EXPERTS, 16)
    return RoutingMap(
        source_R=_meta((rows,), torch.int32),
        position_Tk=_meta((TOKENS, TOP_K), torch.int32),
        offsets=_meta((EXPERTS + 1,), torch.int32),
        counts_E=_meta((EXPERTS,), torch.int32),
        alignment=16,
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
