"""Ways the field pads experts that this package does not take, for comparison."""

# Shapes: T tokens, k experts of a token, E experts.

from __future__ import annotations

import torch
from torch import Tensor

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.routing import ALIGNMENT, check_routing


def pad_with_real_tokens(
    expert_Tk: Tensor, weight_Tk: Tensor, experts: int, *, alignment: int = ALIGNMENT
) -> tuple[Tensor, Tensor]:
    """(experts [T, k + E], weights [T, k + E]): each expert filled up to `alignment` with real tokens of weight 0.

    What some trainers do in the place of zero rows. Outputs stay the same, FP8 weight gradients do not: the extra
    rows share the [128,1] blocks of wgrad, raise their scales and so round their neighbours anew, by about 1 % of dW.
    Each expert takes the first tokens that are not its own; make the map of the result with alignment=1, and take
    load statistics from the ids before. OperandError where an expert would need more tokens than there are.
    """
    check_routing(expert_Tk, experts, alignment)
    ids_E = torch.arange(experts, device=expert_Tk.device)
    own_TE = (expert_Tk.unsqueeze(-1) == ids_E).any(dim=1)
    missing_E = -own_TE.sum(dim=0) % alignment
    taken_TE = ~own_TE & ((~own_TE).cumsum(dim=0) <= missing_E)
    if bool((taken_TE.sum(dim=0) < missing_E).any()):
        raise OperandError(
            f"{expert_Tk.shape[0]} tokens are too few to fill {experts} experts up to {alignment}: pad with zero rows "
            "(routing_map)"
        )
    extra_TE = torch.where(taken_TE, ids_E, -1).to(expert_Tk.dtype)
    padded_Tk = torch.cat([expert_Tk, extra_TE], dim=1)
    return padded_Tk, torch.cat([weight_Tk, weight_Tk.new_zeros(extra_TE.shape)], dim=1)
