"""RMSNorm, alone, quantised, and on attention heads with rotary embedding."""

# Shapes: T tokens, D width, S positions, H heads, C channels of a head.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8_safeguard.kernels.errors import OperandError
from fp8_safeguard.kernels.moe.operations import operations
from fp8_safeguard.kernels.moe.permute import VALUES
from fp8_safeguard.kernels.moe.routing import Produced, Wanted
from fp8_safeguard.kernels.operands import check_together


def rms_norm(x: Tensor, gain: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """x / sqrt(mean x^2 + epsilon) * gain over the last dimension, in x's shape and dtype, with gradients.

    Arithmetic is float32; gain is float32 [D], another length is an OperandError. (Zhang and Sennrich 2019, root mean
    square layer normalization.)
    """
    _check_gain(x, gain)
    y_TD: Tensor = _RMSNorm.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), gain, epsilon)  # type: ignore[no-untyped-call]
    return y_TD.view(x.shape)


def rms_norm_quantize(x_TD: Tensor, gain_D: Tensor, wanted: Wanted, *, epsilon: float = 1e-6) -> Produced:
    """What `rms_norm` gives of [T, D], quantised and measured as `wanted`, as `permute_quantize`; without gradients."""
    _check_gain(x_TD, gain_D)
    if x_TD.dim() != 2:
        raise OperandError(f"x has shape {list(x_TD.shape)}: pass [tokens, width]")
    produced: Produced = operations(x_TD).rms_norm(x_TD.detach(), gain_D.detach(), epsilon, wanted)[0]
    return produced


def qk_norm_rope(
    x: Tensor, gain_C: Tensor, cos_SC: Tensor, sin_SC: Tensor, *, epsilon: float = 1e-6
) -> Tensor:
    """RMSNorm of each head, then its rotary embedding: float32 in the shape of x [..., S, H, C], with gradients.

    gain [C] is shared by the heads; cos and sin are float32 [S, C]; channels i and i + C/2 are the pair that turns by
    the angle of channel i. (Henry et al. 2020, query-key normalization; Su et al. 2021, RoFormer.)
    """
    _check_gain(x, gain_C)
    if (
        x.dim() < 3
        or x.shape[-1] % 2
        or cos_SC.shape != (x.shape[-3], x.shape[-1])
        or sin_SC.shape != cos_SC.shape
    ):
        raise OperandError(
            f"x has shape {list(x.shape)}, cos {list(cos_SC.shape)} and sin {list(sin_SC.shape)}: pass x [..., positions, "
            "heads, channels] with an even number of channels, cos and sin [positions, channels]"
        )
    x_THC = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    tables = [cos_SC, sin_SC]
    if x.is_cuda and cos_SC.shape[0]:
        # The fused kernel wants a row of the tables a token.
        tables = [table.repeat(x_THC.shape[0] // table.shape[0], 1) for table in tables]
    y_THC: Tensor = _QKNormRope.apply(x_THC, gain_C, *tables, epsilon)  # type: ignore[no-untyped-call]
    return y_THC.view(x.shape)


class QKNorm(nn.Module):
    """RMSNorm of each head on its own: x / sqrt(mean_C x^2 + eps) * gain, with one gain [C] for all heads.

    Stands between the projection and the rotary embedding, on queries and on keys, so that the logits are bounded
    by the gains whatever the projection's weights do. Works in float32.
    """

    def __init__(self, head_dim: int, *, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(head_dim))
        self.epsilon = epsilon

    def forward(self, x: Tensor, cos_SC: Tensor | None = None, sin_SC: Tensor | None = None) -> Tensor:
        """float32, the shape of the input [..., C]; with cos and sin the rotary embedding of x [..., S, H, C] too."""
        if cos_SC is None or sin_SC is None:
            return rms_norm(x if x.dtype == torch.float64 else x.float(), self.gain, epsilon=self.epsilon)
        return qk_norm_rope(x, self.gain, cos_SC, sin_SC, epsilon=self.epsilon)


class _RMSNorm(torch.autograd.Function):
    """The norm of rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gain_D: Tensor, epsilon: float) -> Tensor:
        produced, rstd_T = operations(x_TD).rms_norm(x_TD, gain_D, epsilon, VALUES)
        ctx.save_for_backward(x_TD, gain_D, rstd_T)
        values: Tensor = produced.values
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        dx_TD, dgain_D = operations(dy_TD).rms_norm_backward(dy_TD, *ctx.saved_tensors)
        return dx_TD, dgain_D, None


class _QKNormRope(torch.autograd.Function):
    """The norm of heads and their rotation."""

    @staticmethod
    def forward(
        ctx: Any, x_THC: Tensor, gain_C: Tensor, cos_TC: Tensor, sin_TC: Tensor, epsilon: float
    ) -> Tensor:
        y_THC, rstd_TH = operations(x_THC).qk_norm_rope(x_THC, gain_C, cos_TC, sin_TC, epsilon)
        ctx.save_for_backward(x_THC, gain_C, cos_TC, sin_TC, rstd_TH)
        normed: Tensor = y_THC
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_THC: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dx_THC, dgain_C = operations(dy_THC).qk_norm_rope_backward(dy_THC, *ctx.saved_tensors)
        return dx_THC, dgain_C, None, None, None


def _check_gain(x: Tensor, gain: Tensor) -> None:
    """Raise OperandError unless there is one gain a channel."""
    check_together(x=x, gain=gain)
    if x.dim() < 1 or gain.shape != x.shape[-1:]:
        raise OperandError(f"gain has shape {list(gain.shape)}, x {list(x.shape)}: pass one gain a channel")
