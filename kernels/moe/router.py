"""Which experts a token visits, and the map of its copies."""

# Shapes: T tokens, E experts, k experts of a token.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.routing import ALIGNMENT, RoutingMap, check_routing


def group_limited_topk(
    logits_TE: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, k], weights float32 [T, k]) of router logits [T, E], computed in float32.

    Scores are sigmoids. The top k are taken by score + bias [E] among the experts of the `top_groups` best of
    `groups` equal, neighbouring groups, a group counting for the sum of its best two (DeepSeek-V3, section 2.1.2:
    a token then visits few nodes). The lower index wins a tie, ids fall by score + bias. Weights are the bare
    scores, divided by their sum (over the k, in slot order) with `normalise`, times `scale`. The bias selects
    only: gradients go to the logits, through the weights. A NaN counts as the largest score, so it is chosen and
    seen in the weight. OperandError where groups are unequal or hold fewer than k experts.
    """
    _check_topk(logits_TE, bias_E, top_k, groups, top_groups)
    bias = None if bias_E is None else bias_E.detach()
    expert_Tk, weight_Tk = _TopK.apply(logits_TE, bias, (top_k, groups, top_groups, normalise, scale))  # type: ignore[no-untyped-call]
    return expert_Tk, weight_Tk


def routing_map(expert_Tk: Tensor, experts: int, *, alignment: int = ALIGNMENT) -> RoutingMap:
    """Where each copy goes: rows sorted by expert, then token and slot, every expert's share a multiple of `alignment`.

    expert_Tk is int32 or int64 [T, k] with ids from 0 to experts - 1, or -1 for a copy that goes nowhere (dropped,
    or sent to another rank). Padding rows are ZERO rows: with real tokens of probability 0 in their place, which
    share the [128,1] blocks of wgrad, FP8 weight gradients change by about 1 %. R depends on shapes only, so nothing
    waits for the device: T k with `alignment` 1, otherwise T k rounded up plus `alignment` an expert. Align after
    the split over ranks: a total that is a multiple of 16 does not make its shards so. OperandError for ids that are
    no experts, which only a CPU is asked about; a device drops those copies.
    """
    check_routing(expert_Tk, experts, alignment)
    made: RoutingMap = operations(expert_Tk).routing(expert_Tk, experts, alignment)
    return made


class _TopK(torch.autograd.Function):
    """The selection and, differentiably, its weights."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: tuple[Any, ...]) -> Any:
        top_k, groups, top_groups, normalise, scale = options
        ops = operations(logits_TE)
        expert_Tk, weight_Tk = ops.topk(
            logits_TE,
            bias_E,
            top_k=top_k,
            groups=groups,
            top_groups=top_groups,
            normalise=normalise,
            scale=scale,
        )
        ctx.save_for_backward(logits_TE, expert_Tk)
        ctx.mark_non_differentiable(expert_Tk)
        ctx.weighing = {"normalise": normalise, "scale": scale}
        return expert_Tk, weight_Tk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dweight_Tk: Tensor) -> tuple[Tensor, None, None]:
        logits_TE, expert_Tk = ctx.saved_tensors
        dlogits_TE = operations(logits_TE).topk_backward(dweight_Tk, logits_TE, expert_Tk, **ctx.weighing)
        return dlogits_TE, None, None


def _check_topk(logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, top_groups: int) -> None:
    """Raise OperandError unless there are enough experts in equal groups."""
    if logits_TE.dim() != 2 or not logits_TE.dtype.is_floating_point:
        raise OperandError(
            f"logits are {logits_TE.dtype} {list(logits_TE.shape)}: pass float32 [tokens, experts]"
        )
    experts = logits_TE.shape[1]
    if bias_E is not None and bias_E.shape != (experts,):
        raise OperandError(
            f"bias has shape {list(bias_E.shape)}, the logits have {experts} experts: pass [experts]"
        )
    if groups < 1 or experts % groups:
        raise OperandError(
            f"groups={groups} does not divide {experts} experts: groups are equal and neighbouring"
        )
    if not 1 <= top_groups <= groups:
        raise OperandError(f"top_groups={top_groups} must be between 1 and groups={groups}")
    most = experts // groups * top_groups
    if not 1 <= top_k <= most:
        raise OperandError(
            f"top_k={top_k} must be between 1 and {most}, the experts of {top_groups} of {groups} groups"
        )
