"""The gains of the norms travel with each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.hooks.norms import Norms
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.kernels.moe import QKNorm


class RMSNorm(nn.Module):
    """One of another make, with its gain under another name."""

    def __init__(self, width: int, attribute: str = "gain") -> None:
        super().__init__()
        setattr(self, attribute, nn.Parameter(torch.ones(width)))
        self.attribute = attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, self.attribute)


class GemmaRMSNorm(RMSNorm):
    """A weight of 0 is a gain of 1."""

    def __init__(self, width: int) -> None:
        super().__init__(width, "weight")
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.weight)


def gains(model: nn.Module) -> dict[tuple[str, str], float]:
    """What is said of the model's norms."""
    found = Norms(OnceLog()).scalars(model)
    return {(name, what): float(value) for name, what, value in found}


def test_largest_and_median_gain_of_every_kind_of_norm() -> None:
    model = nn.ModuleDict(
        {
            "layer": nn.LayerNorm(5),
            "rms": nn.RMSNorm(5),
            "own": RMSNorm(7),
            "qk": QKNorm(8),
            "plain": nn.LayerNorm(5, elementwise_affine=False),
            "linear": nn.Linear(5, 5),
        }
    )
    with torch.no_grad():
        model["rms"].weight.copy_(torch.tensor([1.0, -9.0, 0.5, 2.0, 3.0]))
    found = gains(model)
    assert {name for name, _ in found} == {"layer", "rms", "own", "qk"}
    # The gain's size counts, whatever its sign: the median of 1, 9, 0.5, 2, 3 is 2.
    assert (found["rms", "gain_amax"], found["rms", "gain_median"]) == (9.0, 2.0)
    assert (found["layer", "gain_amax"], found["own", "gain_amax"]) == (1.0, 1.0)


def test_a_gain_that_is_stored_around_zero_is_told_as_what_multiplies() -> None:
    gemma, megatron = GemmaRMSNorm(4), nn.LayerNorm(4)
    megatron.zero_centered_gamma = True
    with torch.no_grad():
        gemma.weight[2] = 31.0
        megatron.weight.zero_()
    found = gains(nn.ModuleDict({"a": gemma, "b": megatron}))
    assert [found["a", "gain_amax"], found["a", "gain_median"], found["b", "gain_amax"]] == [32.0, 1.0, 1.0]


def test_frozen_norms_are_silent_until_somebody_changes_them() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)).requires_grad_(False)
    norms = Norms(OnceLog())
    assert norms.scalars(model) == []
    assert norms.scalars(model) == []
    with torch.no_grad():
        model[1].weight[0] = 5.0
    named = [(name, what, float(value)) for name, what, value in norms.scalars(model)]
    assert named == [("1", "gain_amax", 5.0), ("1", "gain_median", 1.0)]


def test_a_gain_that_is_no_number_shows_and_no_failure_reaches_the_training() -> None:
    model = nn.LayerNorm(4)
    with torch.no_grad():
        model.weight[1] = math.nan
    assert math.isnan(gains(nn.ModuleDict({"a": model}))["a", "gain_amax"])
    broken = Norms(OnceLog())
    assert broken.scalars(None) == []
    broken.found = [object()]  # type: ignore[list-item]
    assert broken.scalars(model) == []


def test_norms_of_one_width_cost_the_same_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def operations(count: int) -> int:
        model = nn.ModuleList(nn.LayerNorm(6) for _ in range(count))
        norms = Norms(OnceLog())
        norms.scalars(model)
        with torch.profiler.profile() as profile:
            norms.scalars(model)
        return sum(
            event.count for event in profile.key_averages() if event.key in ("aten::amax", "aten::median")
        )

    assert operations(2) == operations(20) > 0


def test_every_sample_carries_them(watch: Callable[..., Guard]) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = watch(model, optimizer=optimizer)
    for _ in range(2):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).sum().backward()
        optimizer.step()
    sample: Any = guard.last_sample()
    assert sample["scalars"] == [
        {"layer": "0", "name": "gain_amax", "value": 1.0},
        {"layer": "0", "name": "gain_median", "value": 1.0},
    ]
