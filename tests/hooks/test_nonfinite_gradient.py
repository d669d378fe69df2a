"""A gradient that is no number under a finite loss, and no scaler to notice it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide, observe
from fp8_safeguard.monitor.wire import parse_sample


def test_b96_a_nan_gradient_without_a_loss_scaler_is_counted_and_its_layer_falls_back(
    watch: Callable[..., Guard],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = watch(model, optimizer=optimizer, recompute=8)
    state, made, counted = PolicyState(), [], []
    for step in range(5):
        y = x = torch.randn(32, 64)
        for layer in model:
            y = layer(y)
            if layer is model[1] and step in (2, 3):
                y.register_hook(lambda dy: dy.index_fill(0, torch.tensor([0]), math.nan))
        loss = (y - x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        guard.log(loss=loss, gradient_norm=norm)
        if torch.isfinite(norm):
            optimizer.step()
        else:
            # A trainer that skips such steps says where they end.
            optimizer.zero_grad()
        guard.step(step)
        optimizer.zero_grad()
        sample: Any = guard.last_sample()
        assert math.isfinite(sample["run"]["loss"])
        state, decisions = decide(
            state, observe([parse_sample(sample)]), PolicyConfig(run="r", mode="enforce")
        )
        made.append({(act.layer, act.action) for act in decisions})
        counted.append(state.trends.nonfinite_steps)
    assert counted == [0, 0, 1, 2, 2]
    assert made[:3] == [set()] * 3
    assert ("1", "bf16_fallback") in made[3]
    assert {layer for layer, _ in made[3]} == {"1"}
