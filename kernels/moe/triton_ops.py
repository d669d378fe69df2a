"""The fused MoE operations in Triton, under the names of `eager`."""

from fp8_safeguard.kernels.moe.triton_norm import rms_norm, rms_norm_backward
from fp8_safeguard.kernels.moe.triton_permute import combine_backward, gather, sum_copies
from fp8_safeguard.kernels.moe.triton_rope import qk_norm_rope, qk_norm_rope_backward
from fp8_safeguard.kernels.moe.triton_router import topk, topk_backward
from fp8_safeguard.kernels.moe.triton_routing import routing
from fp8_safeguard.kernels.moe.triton_swiglu import swiglu, swiglu_backward

__all__ = [
    "combine_backward",
    "gather",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "rms_norm",
    "rms_norm_backward",
    "routing",
    "sum_copies",
    "swiglu",
    "swiglu_backward",
    "topk",
    "topk_backward",
]
