"""Mixture of experts: router, dispatch, grouped FP8 experts, one shared expert."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision
from fp8_safeguard.kernels.moe import (
    RoutingMap,
    combine,
    group_limited_topk,
    permute,
    routing_map,
    spread,
    swiglu,
)
from fp8_safeguard.trainer.config import TrainConfig

# Shapes: T tokens, D model width, E experts, k experts of a token, R = T k routed rows, F SwiGLU width.


class Route(NamedTuple):
    """Where each token goes, and how much each of its experts counts."""

    map: RoutingMap
    """Rows sorted by expert, without padding: what observers measure is tokens."""
    weight_Tk: Tensor
    """float32 [T, k]: routing weights, differentiable."""


class Router(nn.Module):
    """Sigmoid scores in float32; the top k by score + bias; weights are the chosen scores, normalised.

    The bias only selects and has no gradient. After each update `balance` moves it by a fixed step towards equal
    load (auxiliary-loss-free balancing), so no loss term pulls at the weights.
    """

    bias_E: Tensor
    load_E: Tensor

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.top_k, self.bias_rate = config.experts_per_token, config.router_bias_rate
        self.weight = nn.Parameter(torch.empty(config.experts, config.d_model))
        self.register_buffer("bias_E", torch.zeros(config.experts))
        self.register_buffer("load_E", torch.zeros(config.experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor) -> Route:
        """Route float32 [T, D]. In training mode the load of this call is added to `load_E`."""
        logits_TE = F.linear(x_TD.float(), self.weight)
        expert_Tk, weight_Tk = group_limited_topk(logits_TE, self.bias_E, top_k=self.top_k)
        made = routing_map(expert_Tk, self.bias_E.numel(), alignment=1)
        if self.training:
            self.load_E += made.counts_E
        return Route(made, weight_Tk)

    @torch.no_grad()
    def balance(self, *, apply: bool = True) -> None:
        """Raise the bias of experts below the mean load since the last call, lower the others; clear the load.

        With `apply` false (a skipped step) the load is cleared and the bias stays.
        """
        load_E = self.load_E.to(torch.float32)
        if apply:
            self.bias_E += self.bias_rate * torch.sign(load_E.mean() - load_E)
        self.load_E.zero_()

    def load_scalars(self) -> dict[str, float]:
        """Load since balance(): `entropy` (1 even, 0 one expert), `load_max` and `load_min` (busiest, idlest over mean)."""
        share_E = self.load_E.to(torch.float64) / max(int(self.load_E.sum()), 1)
        # With one expert the entropy is 0 of at most 0: as even as it can be is not worth a special value.
        entropy = float(torch.special.entr(share_E).sum()) / math.log(max(share_E.numel(), 2))
        low, high = (float(share) * share_E.numel() for share in share_E.aminmax())
        return {"entropy": entropy, "load_max": high, "load_min": low}


class SharedExpert(nn.Module):
    """The SwiGLU expert that every token visits."""

    def __init__(self, config: TrainConfig, precision: LinearPrecision) -> None:
        super().__init__()
        self.gate_up = Fp8Linear(config.d_model, 2 * config.shared_hidden, precision=precision)
        self.down = Fp8Linear(config.shared_hidden, config.d_model, precision=precision)

    def forward(self, x_TD: Tensor) -> Tensor:
        """bfloat16 [T, D] to the same."""
        y_TD: Tensor = self.down(swiglu(self.gate_up(x_TD)))
        return y_TD


class RoutedExperts(nn.Module):
    """All routed experts as two grouped GEMMs; the routing weight is applied inside the activation."""

    def __init__(self, config: TrainConfig, precision: LinearPrecision) -> None:
        super().__init__()
        hidden = config.expert_hidden
        self.gate_up = Fp8GroupedLinear(config.experts, config.d_model, 2 * hidden, precision=precision)
        self.down = Fp8GroupedLinear(config.experts, hidden, config.d_model, precision=precision)

    def forward(self, x_TD: Tensor, route: Route) -> Tensor:
        """bfloat16 [T, D] to the same: the weighted sum over each token's experts."""
        x_RD, offsets = permute(x_TD, route.map), route.map.offsets
        hidden_RF = swiglu(self.gate_up(x_RD, offsets), spread(route.weight_Tk, route.map))
        return combine(self.down(hidden_RF, offsets), route.map)


class MixtureOfExperts(nn.Module):
    """The MLP of a block: shared expert plus routed experts."""

    def __init__(self, config: TrainConfig, precision: LinearPrecision) -> None:
        super().__init__()
        self.router = Router(config)
        self.shared = SharedExpert(config, precision)
        self.experts = RoutedExperts(config, precision)

    def forward(self, x_TD: Tensor) -> Tensor:
        """float32 [T, D] to bfloat16 [T, D]; the router sees the input unrounded."""
        route = self.router(x_TD)
        rounded_TD = x_TD.to(torch.bfloat16)
        y_TD: Tensor = self.shared(rounded_TD) + self.experts(rounded_TD, route)
        return y_TD
