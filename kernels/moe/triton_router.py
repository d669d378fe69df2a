"""Triton: group-limited sigmoid top-k of the router, and its backward."""

# mypy: disable-error-code="untyped-decorator,import-untyped"
# Shapes: T tokens, E experts, k experts of a token. A row of scores is held as groups x experts of a group, both rounded up
# to powers of two (lanes). Scores are compared as integers that order as the numbers do, NaN above all: no NaN can hide
# the experts behind it, and every id is one of an expert.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_safeguard.kernels.moe import eager
from fp8_safeguard.kernels.moe.triton_plan import UNFUSED_FLOATS, source
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two

ELEMENTS = 1024
"""Scores that a program holds."""

WEIGHT_FLOOR = tl.constexpr(eager.WEIGHT_FLOOR)
TAKEN = tl.constexpr(-(2**31))
"""Key of what may not be chosen (any more): below that of any number."""
NOWHERE = tl.constexpr(2**30)


@triton.jit
def order_key(x: tl.tensor) -> tl.tensor:
    """int32 that orders as float32 does; NaN of either sign is the largest, both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def best_of(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Index of the largest key of each row, the lowest where several are."""
    most = tl.max(key, axis=1, keep_dims=True)
    return tl.min(tl.where(key == most, index, NOWHERE), axis=1, keep_dims=True)


@triton.jit
def score_of(logits: tl.tensor) -> tl.tensor:
    """1 / (1 + e^-x), one IEEE division, in the order of torch.sigmoid."""
    return tl.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))


@triton.jit
def best_groups(
    key: tl.tensor, choice: tl.tensor, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr, TOP_GROUPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Keys [rows, lanes] of the experts in the TOP_GROUPS groups with the largest sum of their two best; else TAKEN."""
    ROWS: tl.constexpr = key.shape[0]
    lanes = tl.arange(0, SIZE_LANES)[None, :]
    grouped = tl.reshape(key, (ROWS * GROUP_LANES, SIZE_LANES))
    value = tl.reshape(choice, (ROWS * GROUP_LANES, SIZE_LANES))
    best = best_of(grouped, lanes)
    total = tl.sum(tl.where(lanes == best, value, 0.0), axis=1, keep_dims=True)
    if SIZE > 1:
        second = best_of(tl.where(lanes == best, TAKEN, grouped), lanes)
        total += tl.sum(tl.where(lanes == second, value, 0.0), axis=1, keep_dims=True)
    group = tl.arange(0, GROUP_LANES)[None, :]
    group_key = order_key(tl.reshape(total, (ROWS, GROUP_LANES)))
    group_key = tl.where(group < GROUPS, group_key, TAKEN)
    chosen = tl.zeros((ROWS, GROUP_LANES), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        taken = best_of(group_key, group)
        chosen = tl.where(group == taken, 1, chosen)
        group_key = tl.where(group == taken, TAKEN, group_key)
    allowed = tl.reshape(chosen, (ROWS * GROUP_LANES, 1)) > 0
    return tl.reshape(tl.where(allowed, grouped, TAKEN), (ROWS, GROUP_LANES * SIZE_LANES))


@triton.jit
def topk_kernel(
    logits_ptr: tl.tensor, bias_ptr: tl.tensor, expert_ptr: tl.tensor, weight_ptr: tl.tensor,
    tokens: tl.tensor, stride: tl.tensor, scale: tl.tensor,
    TOP_K: tl.constexpr, LANES: tl.constexpr, BIASED: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr,
) -> None:  # fmt: skip
    """The TOP_K experts of ROWS tokens by score + bias, and their scores as weights. LANES: power of two from TOP_K up."""
    token_1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    lane_1 = tl.arange(0, GROUP_LANES * SIZE_LANES)[None, :]
    expert_1 = (lane_1 // SIZE_LANES) * SIZE + lane_1 % SIZE_LANES
    inside = (lane_1 // SIZE_LANES < GROUPS) & (lane_1 % SIZE_LANES < SIZE)
    read = inside & (token_1 < tokens)
    score = score_of(
        tl.load(logits_ptr + token_1.to(tl.int64) * stride + expert_1, mask=read, other=0.0).to(tl.float32)
    )
    choice = score
    if BIASED:
        choice = score + tl.load(bias_ptr + expert_1, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, order_key(choice), TAKEN)
    if TOP_GROUPS < GROUPS:
        key = best_groups(key, choice, GROUPS, SIZE, GROUP_LANES, SIZE_LANES, TOP_GROUPS)
    slot_1 = tl.arange(0, LANES)[None, :]
    chosen, weight = tl.zeros((ROWS, LANES), tl.int32), tl.zeros((ROWS, LANES), tl.float32)
    for slot in tl.static_range(TOP_K):
        best = best_of(key, expert_1 + tl.where(inside, 0, NOWHERE))
        mine = inside & (expert_1 == best)
        value = tl.sum(tl.where(mine, score, 0.0), axis=1, keep_dims=True)
        chosen = tl.where(slot_1 == slot, best, chosen)
        weight = tl.where(slot_1 == slot, value, weight)
        key = tl.where(mine, TAKEN, key)
    if NORMALISE:
        total = tl.sum(weight, axis=1, keep_dims=True)
        total = tl.where(total < WEIGHT_FLOOR, WEIGHT_FLOOR, total)
        weight = tl.div_rn(weight, total + tl.zeros((ROWS, LANES), tl.float32))
    at = token_1 * TOP_K + slot_1
    wanted = (slot_1 < TOP_K) & (token_1 < tokens)
    tl.store(expert_ptr + at, chosen, mask=wanted)
    tl.store(weight_ptr + at, weight * scale, mask=wanted)


@triton.jit
def topk_backward_kernel(
    dweight_ptr: tl.tensor, logits_ptr: tl.tensor, expert_ptr: tl.tensor, dlogits_ptr: tl.tensor,
    tokens: tl.tensor, experts: tl.tensor, stride: tl.tensor, scale: tl.tensor,
    TOP_K: tl.constexpr, LANES: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, EXPERT_LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Gradient of the logits of ROWS tokens: of the chosen experts' scores, 0 elsewhere."""
    token_1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    slot_1 = tl.arange(0, LANES)[None, :]
    known = (token_1 < tokens) & (slot_1 < TOP_K)
    at = token_1 * TOP_K + slot_1
    chosen = tl.load(expert_ptr + at, mask=known, other=-1)
    row_ptr = logits_ptr + token_1.to(tl.int64) * stride
    score = score_of(tl.load(row_ptr + chosen, mask=known & (chosen >= 0), other=0.0).to(tl.float32))
    score = tl.where(known, score, 0.0)
    dscore = tl.load(dweight_ptr + at, mask=known, other=0.0).to(tl.float32) * scale
    if NORMALISE:
        total = tl.sum(score, axis=1, keep_dims=True)
        floored = tl.where(total < WEIGHT_FLOOR, WEIGHT_FLOOR, total) + tl.zeros((ROWS, LANES), tl.float32)
        dtotal = tl.sum(-dscore * tl.div_rn(tl.div_rn(score, floored), floored), axis=1, keep_dims=True)
        dscore = tl.div_rn(dscore, floored) + tl.where(total < WEIGHT_FLOOR, 0.0, dtotal)
    dlogit = dscore * (1.0 - score) * score
    expert_1 = tl.arange(0, EXPERT_LANES)[None, :]
    out = tl.zeros((ROWS, EXPERT_LANES), tl.float32)
    for slot in tl.static_range(TOP_K):
        mine = slot_1 == slot
        expert = tl.sum(tl.where(mine, chosen, 0), axis=1, keep_dims=True)
        value = tl.sum(tl.where(mine, dlogit, 0.0), axis=1, keep_dims=True)
        out += tl.where(expert_1 == expert, value, 0.0)
    to = dlogits_ptr + token_1.to(tl.int64) * experts + expert_1
    tl.store(to, out.to(dlogits_ptr.dtype.element_ty), mask=(token_1 < tokens) & (expert_1 < experts))


def topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Expert ids int32 [T, k] in falling order of sigmoid score + bias, and weights float32 [T, k] from the scores alone.

    Moves 4 bytes read for each logit, and 8 written for each choice.
    """
    launch, expert_Tk, weight_Tk = plan_topk(logits_TE, bias_E, top_k, groups, top_groups, normalise, scale)
    launch.run()
    return expert_Tk, weight_Tk


def plan_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Launch, Tensor, Tensor]:
    """The kernel of `topk` and what it fills."""
    logits_TE = source(logits_TE)
    tokens, experts = logits_TE.shape
    if top_groups >= groups:
        groups, top_groups = 1, 1
    size = experts // groups
    group_lanes, size_lanes = next_power_of_two(groups), next_power_of_two(size)
    rows = max(ELEMENTS // (group_lanes * size_lanes), 1)
    expert_Tk = torch.empty((tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    weight_Tk = torch.empty((tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    arguments = {
        "logits_ptr": logits_TE,
        "bias_ptr": logits_TE if bias_E is None else bias_E.detach().contiguous(),
        "expert_ptr": expert_Tk,
        "weight_ptr": weight_Tk,
        "tokens": tokens,
        "stride": logits_TE.stride(0),
        "scale": float(scale),
        "TOP_K": top_k,
        "LANES": next_power_of_two(top_k),
        "BIASED": bias_E is not None,
        "NORMALISE": normalise,
        "ROWS": rows,
        "GROUPS": groups,
        "SIZE": size,
        "TOP_GROUPS": top_groups,
        "GROUP_LANES": group_lanes,
        "SIZE_LANES": size_lanes,
    }
    grid = (-(-tokens // rows),)
    launch = Launch(kernel=topk_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS)
    return launch, expert_Tk, weight_Tk


def topk_backward(
    dweight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor, *, normalise: bool, scale: float
) -> Tensor:
    """Gradient of the logits [T, E]; the selection has none. Moves 4 bytes written for each logit."""
    launch, dlogits_TE = plan_topk_backward(dweight_Tk, logits_TE, expert_Tk, normalise, scale)
    launch.run()
    return dlogits_TE


def plan_topk_backward(
    dweight_Tk: Tensor, logits_TE: Tensor, expert_Tk: Tensor, normalise: bool, scale: float
) -> tuple[Launch, Tensor]:
    """The kernel of `topk_backward` and what it fills."""
    logits_TE = source(logits_TE)
    (tokens, experts), top_k = logits_TE.shape, expert_Tk.shape[1]
    dlogits_TE = torch.empty((tokens, experts), dtype=logits_TE.dtype, device=logits_TE.device)
    lanes = next_power_of_two(experts)
    rows = max(ELEMENTS // lanes, 1)
    arguments = {
        "dweight_ptr": dweight_Tk.detach().contiguous(),
        "logits_ptr": logits_TE,
        "expert_ptr": expert_Tk.contiguous(),
        "dlogits_ptr": dlogits_TE,
        "tokens": tokens,
        "experts": experts,
        "stride": logits_TE.stride(0),
        "scale": float(scale),
        "TOP_K": top_k,
        "LANES": next_power_of_two(top_k),
        "NORMALISE": normalise,
        "ROWS": rows,
        "EXPERT_LANES": lanes,
    }
    grid = (-(-tokens // rows),)
    launch = Launch(
        kernel=topk_backward_kernel, grid=grid, arguments=arguments, stages=1, options=UNFUSED_FLOATS
    )
    return launch, dlogits_TE
