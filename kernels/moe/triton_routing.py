"""Triton: the routing map by a counting sort on the device."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens, k copies of a token, N = T k copies in order, E experts, B blocks of copies, R permuted rows.
# Counts of each block, their running sums, then every copy to its place. No atomics and nothing asked of the device: the
# same ids give the same rows, and rows of an expert are in the order of their tokens and slots.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.moe.routing import RoutingMap, capacity
from fp8_safeguard.kernels.moe.triton_plan import run
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two

COPIES = 256
"""Copies of a block."""
ELEMENTS = 8192
"""Copies times experts that are compared at a time."""


@triton.jit
def one_hot(
    expert_ptr: tl.tensor, index: tl.tensor, end: tl.tensor, experts: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:
    """int32 [copies, LANES]: 1 at each copy's expert; nothing for an id that is none."""
    expert = tl.load(expert_ptr + index, mask=index < end, other=-1).to(tl.int32)
    lane = tl.arange(0, LANES)[None, :]
    return ((expert[:, None] == lane) & (lane < experts)).to(tl.int32)


@triton.jit
def count_kernel(
    expert_ptr: tl.tensor, counts_ptr: tl.tensor, copies: tl.tensor, experts: tl.tensor,
    COPIES: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """counts[block, expert] of one block of copies."""
    begin = tl.program_id(0) * COPIES
    counts = tl.zeros((LANES,), tl.int32)
    for start in range(0, COPIES, CHUNK):
        index = begin + start + tl.arange(0, CHUNK)
        counts += tl.sum(one_hot(expert_ptr, index, copies, experts, LANES), axis=0)
    tl.store(counts_ptr + tl.program_id(0) * LANES + tl.arange(0, LANES), counts)


@triton.jit
def scan_kernel(
    counts_ptr: tl.tensor, offsets_ptr: tl.tensor, totals_ptr: tl.tensor, blocks: tl.tensor, experts: tl.tensor,
    alignment: tl.tensor, CHUNK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Counts become the copies of the same expert in the blocks before; then counts and aligned offsets of the experts."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.int32)
    for start in range(0, blocks, CHUNK):
        block_1 = start + tl.arange(0, CHUNK)[:, None]
        at = counts_ptr + block_1 * LANES + lane[None, :]
        counts = tl.load(at, mask=block_1 < blocks, other=0)
        before = tl.cumsum(counts, 0) - counts + total[None, :]
        tl.store(at, before, mask=block_1 < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + lane, total, mask=lane < experts)
    padded = (total + alignment - 1) // alignment * alignment
    ends = tl.cumsum(padded, 0)
    tl.store(offsets_ptr + lane, ends - padded, mask=lane < experts)
    tl.store(offsets_ptr + 1 + lane, ends, mask=lane == experts - 1)


@triton.jit
def scatter_kernel(
    expert_ptr: tl.tensor, before_ptr: tl.tensor, offsets_ptr: tl.tensor, source_ptr: tl.tensor,
    position_ptr: tl.tensor, copies: tl.tensor, experts: tl.tensor, copies_of_token: tl.tensor,
    COPIES: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Row of each copy of a block, and the token of each such row."""
    begin = tl.program_id(0) * COPIES
    lane = tl.arange(0, LANES)
    at = tl.load(before_ptr + tl.program_id(0) * LANES + lane)
    at += tl.load(offsets_ptr + lane, mask=lane < experts, other=0)
    for start in range(0, COPIES, CHUNK):
        index = begin + start + tl.arange(0, CHUNK)
        hot = one_hot(expert_ptr, index, copies, experts, LANES)
        before = tl.cumsum(hot, 0) - hot
        known = tl.sum(hot, axis=1) > 0
        row = tl.sum(hot * (before + at[None, :]), axis=1)
        tl.store(position_ptr + index, tl.where(known, row, -1), mask=index < copies)
        tl.store(source_ptr + row, index // copies_of_token, mask=known)
        at += tl.sum(hot, axis=0)


def routing(expert_Tk: Tensor, experts: int, alignment: int) -> RoutingMap:
    """The routing map of those expert ids; an id that is no expert's is a copy that goes nowhere.

    Moves 8 bytes read and 8 written for each copy, and 4 bytes an expert, three times, for each 256 copies.
    """
    launches, made = plan_routing(expert_Tk, experts, alignment)
    run(launches)
    return made


def plan_routing(expert_Tk: Tensor, experts: int, alignment: int) -> tuple[list[Launch], RoutingMap]:
    """The kernels of `routing` and what they fill."""
    (tokens, top_k), device = expert_Tk.shape, expert_Tk.device
    copies, lanes = tokens * top_k, next_power_of_two(experts)
    blocks, chunk = -(-copies // COPIES), min(max(ELEMENTS // lanes, 16), COPIES)
    expert_N = expert_Tk.detach().reshape(-1)
    counts_BL = torch.empty((blocks, lanes), dtype=torch.int32, device=device)
    source_R = torch.full((capacity(copies, experts, alignment),), -1, dtype=torch.int32, device=device)
    position_Tk = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    offsets, counts_E = (
        torch.empty((size,), dtype=torch.int32, device=device) for size in (experts + 1, experts)
    )
    sizes = {"copies": copies, "experts": experts, "COPIES": COPIES, "CHUNK": chunk, "LANES": lanes}
    count = Launch(
        kernel=count_kernel, grid=(blocks,), arguments=sizes | {"expert_ptr": expert_N, "counts_ptr": counts_BL},
        stages=1,
    )  # fmt: skip
    scanned = {
        "counts_ptr": counts_BL,
        "offsets_ptr": offsets,
        "totals_ptr": counts_E,
        "blocks": blocks,
        "experts": experts,
        "alignment": alignment,
        "CHUNK": chunk,
        "LANES": lanes,
    }
    scan = Launch(kernel=scan_kernel, grid=(1,), arguments=scanned, warps=8, stages=1)
    placed = {
        "expert_ptr": expert_N,
        "before_ptr": counts_BL,
        "offsets_ptr": offsets,
        "source_ptr": source_R,
        "position_ptr": position_Tk,
        "copies_of_token": top_k,
    }
    scatter = Launch(kernel=scatter_kernel, grid=(blocks,), arguments=sizes | placed, stages=1)
    return [count, scan, scatter], RoutingMap(source_R, position_Tk, offsets, counts_E, alignment)
