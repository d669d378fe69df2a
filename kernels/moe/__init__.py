"""Mixture-of-experts operations: routing, permutation, activation, norms, experts."""

from fp8_safeguard.kernels.moe.activation import swiglu, swiglu_quantize
from fp8_safeguard.kernels.moe.comparisons import pad_with_real_tokens
from fp8_safeguard.kernels.moe.experts import FastMoEFunction, fast_moe
from fp8_safeguard.kernels.moe.norm import QKNorm, qk_norm_rope, rms_norm, rms_norm_quantize
from fp8_safeguard.kernels.moe.permute import combine, permute, permute_quantize
from fp8_safeguard.kernels.moe.router import group_limited_topk, routing_map
from fp8_safeguard.kernels.moe.routing import Produced, RoutingMap, Wanted, spread

__all__ = [
    "FastMoEFunction",
    "Produced",
    "QKNorm",
    "RoutingMap",
    "Wanted",
    "combine",
    "fast_moe",
    "group_limited_topk",
    "pad_with_real_tokens",
    "permute",
    "permute_quantize",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_quantize",
    "routing_map",
    "spread",
    "swiglu",
    "swiglu_quantize",
]
