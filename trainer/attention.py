"""Grouped-query attention with QKNorm and rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_safeguard.kernels import Fp8Linear, LinearPrecision
from fp8_safeguard.kernels.moe import QKNorm
from fp8_safeguard.trainer.config import TrainConfig

# Shapes: B sequences, S positions, D model width, H query heads, G key/value heads, C channels of a head.


def rotary_table(sequence_length: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [S, C]: angle of position s and channel pair (i, i + C/2) is s * base^(-2i/C)."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(sequence_length, dtype=torch.float64)[:, None] * frequency[None, :]
    angle_SC = torch.cat([angle, angle], dim=-1)
    return angle_SC.cos().float(), angle_SC.sin().float()


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

    @torch.no_grad()
    def logit_scalars(self) -> dict[str, float]:
        """`qk_logit_max`: what no logit |q k^T| / sqrt(C) can exceed, sqrt(C) max|gain of q| max|gain of k|.

        QKNorm gives each head's channels a mean square of 1 before the gain, and the rotation keeps its norm, so that
        |q| <= sqrt(C) max|gain|; then Cauchy-Schwarz. From the gains alone: it costs no pass over the tokens.
        """
        largest = self.q_norm.gain.abs().max() * self.k_norm.gain.abs().max()
        return {"qk_logit_max": math.sqrt(self.head_dim) * float(largest)}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """bfloat16 [B, S, D] to the same."""
        batch, length, _ = x_BSD.shape
        heads = self.qkv(x_BSD).view(batch, length, -1, self.head_dim)
        q_BSHC, k_BSGC, v_BSGC = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        tables = self.cos_SC[:length], self.sin_SC[:length]
        q_BHSC = self.q_norm(q_BSHC, *tables).transpose(1, 2)
        k_BGSC = self.k_norm(k_BSGC, *tables).transpose(1, 2)
        v_BGSC = v_BSGC.transpose(1, 2).float()
        mixed_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BGSC, v_BGSC, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        mixed_BSD = mixed_BHSC.transpose(1, 2).reshape(batch, length, -1).to(x_BSD.dtype)
        y_BSD: Tensor = self.out(mixed_BSD)
        return y_BSD
