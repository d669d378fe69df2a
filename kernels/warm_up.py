"""Compiles the kernels that training uses, before it starts."""

from __future__ import annotations

import torch

from fp8_safeguard.kernels.linear import fp8_grouped_linear
from fp8_safeguard.kernels.stats import tensor_stats


def warm_up(activations: torch.dtype = torch.bfloat16, weights: torch.dtype = torch.float32) -> None:
    """Compile, or read from disk, what a training step with these dtypes runs and its statistics need.

    The first time on a machine this takes a good part of a minute; without it the first step does. Nothing to do
    where no kernel is compiled.
    """
    x_TK = torch.ones(2, 4, dtype=activations, requires_grad=True)
    w_ENK = torch.ones(1, 3, 4, dtype=weights, requires_grad=True)
    y_TN = fp8_grouped_linear(x_TK, w_ENK, torch.tensor([0, 2], dtype=torch.int32))
    torch.autograd.grad(y_TN.sum(), (x_TK, w_ENK))
    for layout in ("row", "col"):
        tensor_stats(x_TK, layout=layout)
    tensor_stats(w_ENK, layout="tile")
