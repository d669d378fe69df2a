"""QKNorm and attention against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8_safeguard.trainer import TrainConfig
from fp8_safeguard.trainer.attention import Attention, QKNorm, rotary_table, rotate
from fp8_safeguard.trainer.model import linear_precision

# Float32 arithmetic on values near 1, sums of at most 64 terms.
FLOAT32_TOLERANCE = 2e-6
# Three bfloat16 roundings (projections, output) of values near 1.
BFLOAT16_TOLERANCE = 0.02


def test_qk_norm_is_x_over_root_mean_square_times_gain() -> None:
    torch.manual_seed(0)
    norm = QKNorm(8, epsilon=1e-3)
    torch.nn.init.uniform_(norm.gain, 0.5, 2.0)
    x = torch.randn(2, 3, 5, 8).to(torch.bfloat16)
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.gain.double()
    assert norm.gain.shape == (8,)
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x).double(), expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


def test_qk_norm_treats_heads_apart_and_ignores_their_scale() -> None:
    torch.manual_seed(1)
    norm = QKNorm(16, epsilon=1e-12)
    x = torch.randn(1, 4, 3, 16)
    scaled = x * torch.tensor([1.0, 1e-3, 50.0, 7.0]).view(1, 4, 1, 1)
    torch.testing.assert_close(norm(scaled), norm(x), rtol=1e-5, atol=1e-5)


def test_qk_norm_of_a_zero_head_is_zero_with_a_finite_gradient() -> None:
    x = torch.zeros(1, 1, 1, 8, requires_grad=True)
    QKNorm(8)(x).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    torch.manual_seed(2)
    x = torch.randn(1, 1, 6, 4)
    cos, sin = rotary_table(6, 4, 100.0)
    turned = rotate(x, cos, sin).double()
    for s in range(6):
        for i in range(2):
            pair = torch.complex(x[0, 0, s, i].double(), x[0, 0, s, i + 2].double())
            angle = torch.tensor(s * 100.0 ** (-2 * i / 4), dtype=torch.float64)
            expected = pair * torch.polar(torch.ones((), dtype=torch.float64), angle)
            torch.testing.assert_close(turned[0, 0, s, i], expected.real, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(turned[0, 0, s, i + 2], expected.imag, rtol=1e-5, atol=1e-5)


def brute_force(layer: Attention, x_BSD: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention head by head, position by position, in float64."""
    qkv = (x_BSD.double() @ layer.qkv.weight.double().T)[0]
    width, heads, groups = layer.head_dim, layer.heads, layer.kv_heads
    split = qkv.view(len(qkv), heads + 2 * groups, width)

    def ready(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        normed = x / (x.pow(2).mean(-1, keepdim=True) + layer.q_norm.epsilon).sqrt() * gain.double()
        cos, sin = layer.cos_SC[: len(x)].double(), layer.sin_SC[: len(x)].double()
        return rotate(normed, cos, sin)

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
