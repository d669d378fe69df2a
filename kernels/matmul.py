"""Float32-exact and BF16 matrix products that no torch setting can change."""

# Shapes: M x N the result, K the summed dimension.

from __future__ import annotations

import torch
from torch import Tensor

ACCUMULATION_LENGTH = 512
"""Products added up in one float32 chain: longer chains let the rounding error of equal-signed sums grow."""


def float32_is_exact(device: torch.device) -> bool:
    """Whether torch.mm on float32 keeps float32 products, under the user's own matmul settings.

    `torch.set_float32_matmul_precision("medium")` lets a CPU round operands to bfloat16. The setting is the
    user's and global to the process, so it is read here and never written.
    """
    if device.type != "cpu":
        return not torch.backends.cuda.matmul.allow_tf32
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    if getter is None:  # torch before 2.9 knows only the one setting
        return torch.get_float32_matmul_precision() == "highest"
    return getter("mkldnn", "matmul") in ("none", "ieee")


def mm_exact(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor | None = None) -> Tensor:
    """a @ b in float32 arithmetic (float64 where the user's settings would round float32 products).

    Written with `out=`, which autocast leaves alone.
    """
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out_MN is None else out_MN
    if not float32_is_exact(a_MK.device):
        return out.copy_(a_MK.double() @ b_KN.double())
    depth = a_MK.shape[1]
    torch.mm(a_MK[:, :ACCUMULATION_LENGTH], b_KN[:ACCUMULATION_LENGTH], out=out)
    for start in range(ACCUMULATION_LENGTH, depth, ACCUMULATION_LENGTH):
        end = start + ACCUMULATION_LENGTH
        out.addmm_(a_MK[:, start:end], b_KN[start:end])
    return out


def mm_bf16(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b with both rounded to bfloat16, accumulated in float32, result in bfloat16."""
    return a_MK.to(torch.bfloat16) @ b_KN.to(torch.bfloat16)
