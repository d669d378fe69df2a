"""Activation checkpointing: every GEMM counts once, whichever way the forward is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]


class Checkpointed(nn.Module):
    """Two layers inside a checkpoint, one of them used twice, and one outside."""

    def __init__(self, kind: type[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.outside, self.first, self.second = kind(64, 64), kind(64, 64), kind(64, 64)
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.second(torch.relu(self.first(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outside(x)
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_equal_those_without_checkpoint(
    watch: Watch, read: Read, kind: Any, reentrant: bool
) -> None:
    readings = []
    for mode in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(kind, mode)
        guard = watch(model, recompute=3, run=f"mode-{mode}")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):  # two micro-batches
            model(torch.randn(9, 64)).square().sum().backward()
        optimizer.step()
        readings.append(read(guard).stats)
    plain, checkpointed = readings
    assert plain["second x row"].count == 2 * 2 * 9 * 64
    assert plain == checkpointed


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_stay_bit_equal(watch: Watch, reentrant: bool) -> None:
    gradients = []
    for observed in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(Fp8Linear, reentrant)
        if observed:
            watch(model, recompute=3)
        model(torch.randn(9, 64)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
