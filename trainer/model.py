"""The language model: a small Ling-like mixture-of-experts transformer over bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision, OperandFormat
from fp8_safeguard.trainer.attention import Attention
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.data import VOCABULARY
from fp8_safeguard.trainer.moe import MixtureOfExperts, Router

# Embedding: as large as what the blocks write, so that they add to it rather than drown it. Head: small, so that
# training starts at the loss of a uniform guess.
_DEVIATION: dict[str, float] = {"embedding.weight": 1.0, "head": 0.02}

_BLOCKS = OperandFormat()

# Shapes: B sequences, S positions, D model width, V vocabulary.


def linear_precision(name: str, operand: OperandFormat = _BLOCKS) -> LinearPrecision:
    """'fp8' or 'bf16' in all three GEMMs, their operands in that format."""
    return LinearPrecision(fprop=name, dgrad=name, wgrad=name, x=operand, w=operand, dy=operand)


def operand_format(config: TrainConfig) -> OperandFormat:
    """How every operand of an FP8 GEMM gets its scales."""
    return OperandFormat(
        scaling=config.scaling,
        amax_history=config.amax_history,
        margin=config.margin,
        initial_scale=config.initial_scale,
    )


class Norm(nn.Module):
    """RMSNorm with a gain, in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """float32, the shape of the input."""
        return F.rms_norm(x.float(), self.gain.shape, self.gain, self.epsilon)


class Block(nn.Module):
    """Pre-norm attention and mixture of experts on a float32 residual stream."""

    def __init__(self, config: TrainConfig, precision: LinearPrecision) -> None:
        super().__init__()
        self.attention_norm = Norm(config.d_model, config.norm_epsilon)
        self.attention = Attention(config, precision)
        self.mlp_norm = Norm(config.d_model, config.norm_epsilon)
        self.mlp = MixtureOfExperts(config, precision)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """float32 [B, S, D] to the same."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD).to(torch.bfloat16))
        routed_TD: Tensor = self.mlp(self.mlp_norm(x_BSD).flatten(0, 1))
        return x_BSD + routed_TD.view_as(x_BSD)


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    FP8: the six linears of a block. Float32: embedding, norms, router, softmax, residual stream, head. The
    parameters are the float32 master weights; a linear rounds its own copy at each use.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        precision = linear_precision(config.precision, operand_format(config))
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(Block(config, precision) for _ in range(config.layers))
        self.norm = Norm(config.d_model, config.norm_epsilon)
        self.head = nn.Parameter(torch.empty(VOCABULARY, config.d_model))
        self.initialize(torch.Generator().manual_seed(config.seed))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Normal weights of deviation 1/sqrt(fan in), smaller by sqrt(2 layers) where they write the residual."""
        shrink = 1.0 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = _DEVIATION.get(name, parameter.shape[-1] ** -0.5)
            if name.endswith(("out.weight", "down.weight")):
                deviation *= shrink
            parameter.normal_(0.0, deviation, generator=generator)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """int64 [B, S] to float32 logits [B, S, V]."""
        x_BSD = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return F.linear(self.norm(x_BSD), self.head)

    def loss(self, tokens_BS: Tensor, targets_BS: Tensor, weights_BS: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats, a float32 scalar; with weights each token's counts as much."""
        logits_BSV = self(tokens_BS)
        if weights_BS is None:
            return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
        loss_T = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="none")
        return (loss_T * weights_BS.flatten()).mean()

    def linears(self) -> dict[str, Fp8Linear | Fp8GroupedLinear]:
        """The layers with FP8 GEMMs, by name, in forward order of their definition."""
        kinds = (Fp8Linear, Fp8GroupedLinear)
        return {name: module for name, module in self.named_modules() if isinstance(module, kinds)}

    def routers(self) -> dict[str, Router]:
        """The routers, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Router)}

    def attentions(self) -> dict[str, Attention]:
        """The attention modules, by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Attention)}
