"""Grouped-query attention with QKNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_safeguard.kernels import Fp8Linear, LinearPrecision
from fp8_safeguard.trainer.config import TrainConfig

# Shapes: B sequences, S positions, D model width, H query heads, G key/value heads, C channels of a head.


class QKNorm(nn.Module):
    """RMSNorm of each head on its own: x / sqrt(mean_C x^2 + eps) * gain, with one gain [C] for all heads.

    Stands between the projection and the rotary embedding, on queries and on keys, so that the logits are bounded
    by the gains whatever the projection's weights do. Works in float32.
    """

    def __init__(self, head_dim: int, *, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(head_dim))
        self.epsilon = epsilon

    def forward(self, x_BHSC: Tensor) -> Tensor:
        """float32, the shape of the input, whatever its leading dimensions."""
        return F.rms_norm(x_BHSC.float(), self.gain.shape, self.gain, self.epsilon)


def rotary_table(sequence_length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [S, C]: angle of position s and channel pair (i, i + C/2) is s * base^(-2i/C)."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(sequence_length, dtype=torch.float64)[:, None] * frequency[None, :]
    angle_SC = torch.cat([angle, angle], dim=-1)
    return angle_SC.cos().float(), angle_SC.sin().float()


def rotate(x_BHSC: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotary embedding of queries or keys; channels i and i + C/2 form a pair."""
    low, high = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos_SC + torch.cat([-high, low], dim=-1) * sin_SC


class Attention(nn.Module):
    """Causal self-attention: FP8 projections, everything between them in float32."""

    cos_SC: Tensor
    sin_SC: Tensor

    def __init__(self, config: TrainConfig, precision: LinearPrecision) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = Fp8Linear(config.d_model, width, precision=precision)
        self.out = Fp8Linear(self.heads * self.head_dim, config.d_model, precision=precision)
        self.q_norm = QKNorm(self.head_dim, epsilon=config.norm_epsilon)
        self.k_norm = QKNorm(self.head_dim, epsilon=config.norm_epsilon)
        cos_SC, sin_SC = rotary_table(config.sequence_length, self.head_dim, config.rope_base)
        self.register_buffer("cos_SC", cos_SC, persistent=False)
        self.register_buffer("sin_SC", sin_SC, persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """bfloat16 [B, S, D] to the same."""
        batch, length, _ = x_BSD.shape
        heads = self.qkv(x_BSD).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q_BHSC, k_BGSC, v_BGSC = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos_SC, sin_SC = self.cos_SC[:length], self.sin_SC[:length]
        q_BHSC = rotate(self.q_norm(q_BHSC), cos_SC, sin_SC)
        k_BGSC = rotate(self.k_norm(k_BGSC), cos_SC, sin_SC)
        mixed_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BGSC, v_BGSC.float(), is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        mixed_BSD = mixed_BHSC.transpose(1, 2).reshape(batch, length, -1).to(x_BSD.dtype)
        y_BSD: Tensor = self.out(mixed_BSD)
        return y_BSD
