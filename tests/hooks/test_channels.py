"""A layer that is looked at closely says how many of its channels are outliers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear

TOKENS, WIDTH = 64, 128
OUTLIERS = (3, 40, 77)


class Model(nn.Module):
    """One linear layer on an input with outlier channels, by its name `linear`."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear], ids=["linear", "fp8"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_outlier_channels_are_counted_against_the_median_channel(
    watch: Callable[..., Guard], kind: Any, micro_batches: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    model = Model(kind(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = watch(model, optimizer=optimizer)
    x_TK = torch.randn(TOKENS, WIDTH, generator=generator)
    x_TK[:, list(OUTLIERS)] *= 1000.0
    x_TK.requires_grad_()
    dy_TN = torch.randn(TOKENS, WIDTH, generator=generator)
    guard._session.builder.flags.hear({"alerts": [{"layer": "linear", "severity": "act"}]})
    for _ in range(micro_batches):
        model(x_TK).backward(dy_TN)
    optimizer.step()
    sample: Any = guard.last_sample()
    named = [(record["name"], record["value"]) for record in sample["scalars"] if record["layer"] == "linear"]
    found = dict(named)
    assert len(named) == len(found) == 4, "once a step, whatever the number of its micro-batches"
    assert (found["x_outlier_channels"], found["dy_outlier_channels"]) == (3.0, 0.0)
    amax_K = x_TK.detach().abs().amax(0).double()
    expected = float(amax_K.max() / amax_K.sort().values[(WIDTH - 1) // 2])
    assert found["x_outlier_ratio"] == pytest.approx(expected, rel=0.01)
    assert 1.0 < found["dy_outlier_ratio"] < 4.0


def test_a_layer_nobody_looks_at_says_nothing_and_dead_channels_make_no_outliers(
    watch: Callable[..., Guard],
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = watch(model, optimizer=optimizer)
    x_TK = torch.zeros(TOKENS, WIDTH)
    x_TK[:, 0] = 1.0
    guard._session.builder.flags.hear({"alerts": [{"layer": "b", "severity": "act"}]})
    model["b"](x_TK).sum().backward()
    model["a"](x_TK).sum().backward()
    optimizer.step()
    sample: Any = guard.last_sample()
    found = {(record["layer"], record["name"]): record["value"] for record in sample["scalars"]}
    assert not any(layer == "a" for layer, _ in found)
    assert (found["b", "x_outlier_channels"], found["b", "x_outlier_ratio"]) == (0.0, 0.0)
