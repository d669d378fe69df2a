"""The training step that everything is measured on: a small GPT."""

# Shapes: B sequences, T tokens of a sequence, D width, V vocabulary.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

HEAD_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the model and its batch are."""

    width: int
    layers: int
    vocabulary: int
    tokens: int
    batch: int


PLAIN = Size(width=512, layers=2, vocabulary=1024, tokens=256, batch=4)
"""What the overhead is promised for: 9 linear layers, 1024 tokens a step."""
SMALL = Size(width=128, layers=2, vocabulary=256, tokens=32, batch=4)
"""A step of some ten milliseconds, in which a wait of ours would show most."""


class Block(nn.Module):
    """Attention and MLP of four plain linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // HEAD_WIDTH

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm2(x_BTD))))


class Trainer:
    """A small GPT, its optimizer and a new batch of tokens each step.

    One batch would be learned by heart: gradients die away, and the layers are in breach as those of a run are not.
    """

    def __init__(self, dtype: str, size: Size = PLAIN) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(size.vocabulary, size.width),
            *(Block(size.width) for _ in range(size.layers)),
            nn.Linear(size.width, size.vocabulary),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.size, self.draws = size, torch.Generator().manual_seed(0)
        self.bf16 = dtype == "bf16"

    def gradients(self) -> None:
        """Forward and backward."""
        shape = self.size.batch, self.size.tokens + 1
        tokens_BT = torch.randint(self.size.vocabulary, shape, generator=self.draws)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            logits_BTV = self.model(tokens_BT[:, :-1])
        cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()

    def update(self) -> None:
        """What the optimizer does."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Forward, backward, update."""
        self.gradients()
        self.update()
