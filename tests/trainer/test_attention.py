"""Attention against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fp8_safeguard.trainer import TrainConfig
from fp8_safeguard.trainer.attention import Attention, rotary_table
from fp8_safeguard.trainer.model import linear_precision

# Three bfloat16 roundings (projections, output) of values near 1.
BFLOAT16_TOLERANCE = 0.02


def rotate(x_SC: torch.Tensor, base: float) -> torch.Tensor:
    """The pairs (i, i + C/2) of float64 [S, C] as complex numbers, turned by s base^(-2i/C)."""
    low, high = x_SC.chunk(2, dim=-1)
    exponent = -torch.arange(0, x_SC.shape[1], 2, dtype=torch.float64) / x_SC.shape[1]
    angle = torch.outer(torch.arange(len(x_SC), dtype=torch.float64), base**exponent)
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_the_table_turns_each_pair_by_position_times_frequency() -> None:
    cos, sin = rotary_table(6, 4, 100.0)
    for s in range(6):
        for i in range(4):
            angle = s * 100.0 ** (-2 * (i % 2) / 4)
            assert abs(float(cos[s, i]) - math.cos(angle)) < 1e-7
            assert abs(float(sin[s, i]) - math.sin(angle)) < 1e-7


def brute_force(layer: Attention, x_BSD: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention head by head, position by position, in float64."""
    qkv = (x_BSD.double() @ layer.qkv.weight.double().T)[0]
    width, heads, groups = layer.head_dim, layer.heads, layer.kv_heads
    split = qkv.view(len(qkv), heads + 2 * groups, width)

    def ready(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        normed = x / (x.pow(2).mean(-1, keepdim=True) + layer.q_norm.epsilon).sqrt() * gain.double()
        return rotate(normed, 10_000.0)

    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        q = ready(split[:, head], layer.q_norm.gain)
        k = ready(split[:, heads + group], layer.k_norm.gain)
        v = split[:, heads + groups + group]
        rows = [torch.softmax(q[s] @ k[: s + 1].T / width**0.5, -1) @ v[: s + 1] for s in range(len(q))]
        outputs.append(torch.stack(rows))
    return (torch.cat(outputs, -1) @ layer.out.weight.double().T)[None]


def test_attention_is_grouped_query_attention_with_norm_before_rotation(
    make_config: Callable[..., TrainConfig],
) -> None:
    torch.manual_seed(3)
    layer = Attention(make_config(), linear_precision("bf16"))
    torch.nn.init.uniform_(layer.q_norm.gain, 0.5, 3.0)
    torch.nn.init.uniform_(layer.k_norm.gain, 0.5, 3.0)
    x = torch.randn(1, 16, 64).to(torch.bfloat16)
    torch.testing.assert_close(
        layer(x).double(), brute_force(layer, x), rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE
    )
