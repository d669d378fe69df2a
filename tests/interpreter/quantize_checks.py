"""What quantising tests compare: bits, statistics, and the whole of a call with the CPU's."""

from typing import Any

import torch

from fp8_safeguard.kernels import quantize, tensor_stats
from fp8_safeguard.kernels.triton_fused import Fused, quantize_layouts
from fp8_safeguard.monitor.stats import COLUMNS

SUMS = [COLUMNS.index(name) for name in ("sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")]
RELATIVE = 1e-6
"""Of the sums: blocks are summed in float32 (6e-8 a step, a tree of steps), across blocks in float64."""


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bytes, sign of zero and of NaN included."""
    kind = torch.uint8 if got.element_size() == 1 else torch.int32
    return got.dtype == wanted.dtype and torch.equal(got.view(kind), wanted.view(kind))


def assert_stats(got: torch.Tensor, wanted: torch.Tensor) -> None:
    exact = [index for index in range(len(wanted)) if index not in SUMS]
    assert torch.equal(got[exact], wanted[exact]), (got - wanted)[exact]
    assert torch.allclose(got[SUMS], wanted[SUMS], rtol=RELATIVE, atol=0.0), (got / wanted)[SUMS]


def check(x: torch.Tensor, **options: Any) -> Fused:
    """quantize_layouts gives what quantize and tensor_stats give for each of its layouts."""
    asked = {"row": True, "blocks": "col", "stats": True} | options
    fused = quantize_layouts(x, **asked)
    shared = {name: asked[name] for name in ("fmt", "scale", "multiplier") if name in asked}
    layouts = (["row"] if asked["row"] else []) + ([asked["blocks"]] if asked["blocks"] else [])
    for slot, layout in enumerate(layouts):
        wanted = quantize(x, layout=layout, **shared)
        got = fused.row if layout == "row" else fused.block
        assert got is not None
        assert got.data.shape == x.shape
        assert (got.scale.dtype, got.scale.shape) == (torch.float32, wanted.scale.shape)
        assert same_bits(got.scale, wanted.scale)
        assert same_bits(got.data, wanted.data)
        if asked["stats"]:
            assert fused.stats is not None
            assert_stats(fused.stats[slot], tensor_stats(x, layout=layout, **shared))
    return fused
