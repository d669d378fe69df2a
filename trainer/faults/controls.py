"""What hurts BF16 as much as FP8, and what hurts neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8_safeguard.trainer.data import Batch, ByteCorpus, load_text
from fp8_safeguard.trainer.errors import ConfigError
from fp8_safeguard.trainer.faults.base import Fault, Harm, block_prefix

# Shapes: N sequences, S sequence length, D width, E experts.

# What a module's tensor was multiplied by, or held before a fault took it. Weak: a fault keeps no model alive.
_BEFORE: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()

_UNCHOSEN = -1e4
"""A selection bias that no sigmoid score makes up for."""


@dataclass(frozen=True, kw_only=True)
class _BlockFault(Fault):
    """A fault of one block."""

    harms: ClassVar[Harm] = "both"

    layer: int = 1
    """Index of the block; negative counts from the last."""

    def part(self, model: nn.Module, layers: int, name: str) -> Any:
        """A submodule of the block."""
        return model.get_submodule(block_prefix(self.layer, layers) + name)


@dataclass(frozen=True, kw_only=True)
class _Raised(_BlockFault):
    """Gains that are multiplied once, at the start; training goes on from there."""

    factor: float
    """A power of two, so that what is multiplied can be divided again without a trace."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not 0.0 < self.factor < 2.0**64 or torch.frexp(torch.tensor(self.factor)).mantissa != 0.5:
            yield f"fault.factor is {self.factor}; it must be a power of two below 2^64"

    def raised(self, model: nn.Module, layers: int) -> list[tuple[Any, Tensor]]:
        """The norms concerned, and what the gain of each is multiplied by."""
        raise NotImplementedError

    @torch.no_grad()
    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Multiply at the first step; a run resumed later has it in its weights."""
        if step != self.start_step:
            return
        for norm, factors in self.raised(model, layers):
            if norm not in _BEFORE:
                _BEFORE[norm] = factors
                norm.gain.mul_(factors)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Divide what was multiplied."""
        for module in model.modules():
            if module in _BEFORE:
                gain: Any = module.gain
                gain.div_(_BEFORE.pop(module))


@dataclass(frozen=True, kw_only=True)
class NormGain(_Raised):
    """A norm's gain is far too large in a few channels, and nothing makes up for it (the recipe's layer 15)."""

    kind: ClassVar[str] = "norm-gain"

    factor: float = 128.0
    norm: str = "mlp_norm"
    """`mlp_norm` or `attention_norm`."""
    channels: int = 4
    """How many of them."""
    seed: int = 0
    """Seed of the choice of channels."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if self.norm not in ("mlp_norm", "attention_norm"):
            yield f"fault.norm is {self.norm!r}; it must be mlp_norm or attention_norm"
        if self.channels < 1:
            yield f"fault.channels is {self.channels}; it must be at least 1"

    def raised(self, model: nn.Module, layers: int) -> list[tuple[Any, Tensor]]:
        """The norm, in some channels."""
        norm = self.part(model, layers, self.norm)
        chosen = torch.randperm(len(norm.gain), generator=torch.Generator().manual_seed(self.seed))
        factors_D = torch.ones_like(norm.gain)
        factors_D[chosen[: self.channels]] = self.factor
        return [(norm, factors_D)]


@dataclass(frozen=True, kw_only=True)
class QKGain(_Raised):
    """Queries and keys of one block grow: its attention hardens."""

    kind: ClassVar[str] = "qk-gain"

    factor: float = 8.0

    def raised(self, model: nn.Module, layers: int) -> list[tuple[Any, Tensor]]:
        """Both norms, whole."""
        attention = self.part(model, layers, "attention")
        norms = attention.q_norm, attention.k_norm
        return [(norm, torch.full_like(norm.gain, self.factor)) for norm in norms]


@dataclass(frozen=True, kw_only=True)
class _Held(_BlockFault):
    """A tensor that is held at a value, step after step."""

    name: ClassVar[str]
    """Of the tensor in its module."""

    def held(self, model: nn.Module, layers: int) -> tuple[nn.Module, slice, float]:
        """The module, the part of its tensor, and the value."""
        raise NotImplementedError

    @torch.no_grad()
    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Set it again: the optimizer or the balancing has moved it."""
        module, part, value = self.held(model, layers)
        tensor: Tensor = getattr(module, self.name)
        if module not in _BEFORE:
            _BEFORE[module] = tensor.detach().clone()
        tensor[part] = value

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Put back what it was when the fault began."""
        for module in model.modules():
            if module in _BEFORE:
                getattr(module, self.name).copy_(_BEFORE.pop(module))


@dataclass(frozen=True, kw_only=True)
class DeadLayer(_Held):
    """A block's MLP gets nothing but zeros: its norm's gain is held at 0."""

    kind: ClassVar[str] = "dead-layer"

    name: ClassVar[str] = "gain"

    def held(self, model: nn.Module, layers: int) -> tuple[nn.Module, slice, float]:
        """The whole gain."""
        return self.part(model, layers, "mlp_norm"), slice(None), 0.0


@dataclass(frozen=True, kw_only=True)
class StarvedExpert(_Held):
    """One expert gets no token any more."""

    kind: ClassVar[str] = "starved-expert"
    name: ClassVar[str] = "bias_E"

    expert: int = 0
    """Index of the expert."""

    def held(self, model: nn.Module, layers: int) -> tuple[nn.Module, slice, float]:
        """The expert's selection bias."""
        router = self.part(model, layers, "mlp.router")
        experts = len(router.bias_E)
        if not 0 <= self.expert < experts:
            raise ConfigError(f"fault.expert is {self.expert}; the model has experts 0 to {experts - 1}")
        return router, slice(self.expert, self.expert + 1), _UNCHOSEN


@dataclass(frozen=True, kw_only=True)
class TokenWeights(Fault):
    """The loss weighs its tokens over several decades: another objective, with gradients as uneven."""

    kind: ClassVar[str] = "token-weights"
    harms: ClassVar[Harm] = "both"

    decades: float = 6.0
    """log10 of the largest weight over the smallest; their mean is 1 over a long time."""
    seed: int = 0
    """Seed of the weights."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if not 0.0 < self.decades <= 30.0:
            yield f"fault.decades is {self.decades}; it must be above 0 and at most 30"

    def batch(self, batch: Batch, step: int) -> Batch:
        """With a weight for each token, log-uniform."""
        if not self.active(step):
            return batch
        draws = torch.rand(batch.tokens_NS.shape, generator=_generator(self.seed, step))
        weights_NS = 10.0 ** (-self.decades * draws)
        return replace(batch, weights_NS=weights_NS / weights_NS.mean())


@dataclass(frozen=True, kw_only=True)
class DataSpike(Fault):
    """Some steps of random bytes: the loss jumps, and the numerics are healthy."""

    kind: ClassVar[str] = "data-spike"
    harms: ClassVar[Harm] = "both"

    steps: int = 20
    """How many steps."""
    seed: int = 0
    """Seed of the bytes."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        yield from super().problems()
        if self.steps < 1:
            yield f"fault.steps is {self.steps}; it must be at least 1"

    def active(self, step: int) -> bool:
        """For those steps."""
        return self.start_step <= step < self.start_step + self.steps

    def batch(self, batch: Batch, step: int) -> Batch:
        """Random bytes in the place of text."""
        if not self.active(step):
            return batch
        sequences, length = batch.tokens_NS.shape
        rows = torch.randint(256, (sequences, length + 1), generator=_generator(self.seed, step))
        return replace(batch, tokens_NS=rows[:, :-1].contiguous(), targets_NS=rows[:, 1:].contiguous())


@dataclass(frozen=True, kw_only=True)
class DomainShift(Fault):
    """Training goes on with another text: the loss jumps and falls again, and nothing is wrong."""

    kind: ClassVar[str] = "domain-shift"
    harms: ClassVar[Harm] = "neither"

    corpus: str = "stdlib"
    """As TrainConfig.corpus."""
    seed: int = 0
    """Seed of the order of its sequences."""

    def batch(self, batch: Batch, step: int) -> Batch:
        """As many sequences of the other text, the next ones at each step."""
        if not self.active(step):
            return batch
        count, length = batch.tokens_NS.shape
        return _other_corpus(self.corpus, length, self.seed).batch((step - self.start_step) * count, count)


@lru_cache(maxsize=2)
def _other_corpus(corpus: str, sequence_length: int, seed: int) -> ByteCorpus:
    name, text = load_text(corpus)
    return ByteCorpus(name, text, sequence_length=sequence_length, validation_fraction=0.05, seed=seed)


def _generator(seed: int, step: int) -> torch.Generator:
    """Another one at each step, the same one whenever the step is repeated."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)
