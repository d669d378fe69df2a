"""Mixture of experts: router, dispatch, grouped FP8 experts, one shared expert."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision
from fp8_safeguard.trainer.config import TrainConfig

# Shapes: T tokens, D model width, E experts, k experts of a token, R = T k routed rows, F SwiGLU width.


class Route(NamedTuple):
    """Where each token goes. Rows are sorted by expert, and by token inside an expert."""

    source_R: Tensor
    """int64 [R]: the token that a sorted row is a copy of."""
    position_Tk: Tensor
    """int64 [T, k]: the sorted row of each of a token's copies; the inverse of source_R."""
    weight_R: Tensor
    """float32 [R]: routing weight of a sorted row, differentiable."""
    offsets: Tensor
    """int32 [E + 1]: first row of each expert, and R."""


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
        score_TE = torch.sigmoid(F.linear(x_TD.float(), self.weight))
        expert_Tk = (score_TE.detach() + self.bias_E).topk(self.top_k, dim=-1).indices
        chosen_Tk = score_TE.gather(1, expert_Tk)
        # A token whose scores are all 0 in float32 has weight 0 rather than 0/0.
        weight_Tk = chosen_Tk / chosen_Tk.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        order_R = expert_Tk.flatten().argsort(stable=True)
        count_E = expert_Tk.flatten().bincount(minlength=self.bias_E.numel())
        if self.training:
            self.load_E += count_E
        position = torch.empty_like(order_R)
        position[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        return Route(
            source_R=order_R.div(self.top_k, rounding_mode="floor"),
            position_Tk=position.view_as(expert_Tk),
            weight_R=gather_rows(weight_Tk.reshape(-1, 1), order_R, position.view(-1, 1)).squeeze(-1),
            offsets=F.pad(count_E.cumsum(0), (1, 0)).to(torch.int32),
        )

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
        """`entropy` of the load since balance() (1 is even, 0 one expert) and `load_max` (busiest over mean)."""
        share_E = self.load_E.to(torch.float64) / max(int(self.load_E.sum()), 1)
        # With one expert the entropy is 0 of at most 0: as even as it can be is not worth a special value.
        entropy = float(torch.special.entr(share_E).sum()) / math.log(max(share_E.numel(), 2))
        return {"entropy": entropy, "load_max": float(share_E.max()) * share_E.numel()}


def gather_rows(x_TD: Tensor, source_R: Tensor, position_Tk: Tensor) -> Tensor:
    """x[source], [R, D]: each token's row once for each of its experts. `position_Tk` is the inverse of `source_R`."""
    x_RD: Tensor = _Gather.apply(x_TD, source_R, position_Tk)  # type: ignore[no-untyped-call]
    return x_RD


def combine_rows(x_RD: Tensor, source_R: Tensor, position_Tk: Tensor) -> Tensor:
    """[T, D]: the sum of each token's k rows, accumulated in float32."""
    x_TD: Tensor = _Combine.apply(x_RD, source_R, position_Tk)  # type: ignore[no-untyped-call]
    return x_TD


class _Gather(torch.autograd.Function):
    """rows[source]; its backward is a gather as well, which is faster than index_add and sums in a fixed order."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x_TD: Tensor, source_R: Tensor, position_Tk: Tensor
    ) -> Tensor:
        ctx.save_for_backward(position_Tk)
        return x_TD.index_select(0, source_R)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (position_Tk,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _sum_copies(grads[0], position_Tk), None, None


class _Combine(torch.autograd.Function):
    """Sum of each token's k rows; its backward is the gather of _Gather."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x_RD: Tensor, source_R: Tensor, position_Tk: Tensor
    ) -> Tensor:
        ctx.save_for_backward(source_R)
        return _sum_copies(x_RD, position_Tk)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (source_R,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0].index_select(0, source_R), None, None


def _sum_copies(x_RD: Tensor, position_Tk: Tensor) -> Tensor:
    """[T, D]: float32 sum over k of x[position], in x's dtype."""
    total = x_RD.index_select(0, position_Tk[:, 0]).float()
    for copy in range(1, position_Tk.shape[1]):
        total += x_RD.index_select(0, position_Tk[:, copy])
    return total.to(x_RD.dtype)


def swiglu(gate_up: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(gate) * up [* weight of the row] in float32, in the input's dtype; gate and up are its two halves."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    value = F.silu(gate) * up
    if weight is not None:
        value = value * weight.unsqueeze(-1)
    return value.to(gate_up.dtype)


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
        x_RD = gather_rows(x_TD, route.source_R, route.position_Tk)
        hidden_RF = swiglu(self.gate_up(x_RD, route.offsets), route.weight_R)
        return combine_rows(self.down(hidden_RF, route.offsets), route.source_R, route.position_Tk)


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
