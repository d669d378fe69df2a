"""Triton: adds partial sums in a fixed order."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: P partial sums, N numbers. No atomics: the same input gives the same bits, whatever order the programs ran in.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.triton_launch import Launch

NUMBERS, PARTS = 64, 32


@triton.jit
def sum_parts_kernel(
    parts_ptr: tl.tensor, index_ptr: tl.tensor, out_ptr: tl.tensor,
    parts: tl.tensor, width: tl.tensor, numbers: tl.tensor,
    INDEXED: tl.constexpr, NUMBERS: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """out[n] = the sum of parts[p, n or index[n]], in float32: PARTS chains side by side, then a tree.

    An index below 0 gives 0.
    """
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    place = number
    if INDEXED:
        place = tl.load(index_ptr + number, mask=number < numbers, other=-1)
    known = (number < numbers) & (place >= 0)
    sums = tl.zeros((PARTS, NUMBERS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        held = (part < parts)[:, None] & known[None, :]
        at = part.to(tl.int64)[:, None] * width + place[None, :]
        sums += tl.load(parts_ptr + at, mask=held, other=0.0)
    tl.store(out_ptr + number, tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty), mask=number < numbers)


def plan_sum(
    parts_PW: Tensor, index: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Launch, Tensor]:
    """The kernel that adds float32 partial sums, and what it fills: [W], or of the index's shape."""
    parts, width = parts_PW.shape
    shape = (width,) if index is None else index.shape
    out = torch.empty(shape, dtype=dtype, device=parts_PW.device)
    arguments = {
        "parts_ptr": parts_PW,
        "index_ptr": parts_PW if index is None else index.contiguous(),
        "out_ptr": out,
        "parts": parts,
        "width": width,
        "numbers": out.numel(),
        "INDEXED": index is not None,
        "NUMBERS": NUMBERS,
        "PARTS": PARTS,
    }
    grid = (-(-out.numel() // NUMBERS),)
    return Launch(kernel=sum_parts_kernel, grid=grid, arguments=arguments, stages=1), out
