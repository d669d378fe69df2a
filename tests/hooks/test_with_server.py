"""The client and the real server understand each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings


class Model(nn.Module):
    """One layer of each kind, an expert layer included."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.plain, self.experts = (
            Fp8Linear(32, 32),
            nn.Linear(32, 32),
            Fp8GroupedLinear(3, 32, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 10, 10, 40], dtype=torch.int32)
        return self.experts(torch.relu_(self.plain(self.ours(x))), offsets)


def test_samples_are_stored_once_the_list_by_its_digest_and_nothing_is_dropped(
    tmp_path: Path, watch: Callable[..., Guard], caplog: Any
) -> None:
    torch.manual_seed(0)
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/hooks.db")) as url:
        model = Model()
        guard = watch(model, server=url, run="real", mode="enforce", recompute=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(4):
            loss = model(torch.randn(40, 32)).square().mean()
            loss.backward()
            guard.log(loss=loss, gradient_norm=float("nan") if step == 2 else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert guard.flush(30)
        place = f"{url}/api/v1/runs/real"
        with httpx2.Client() as client:
            run = client.get(place).json()
            layers = {item["layer"] for item in client.get(f"{place}/layers").json()["items"]}
            query = {"layer": "plain", "metric": "relative_error", "gemm": "dgrad"}
            series = client.get(f"{place}/series", params=query).json()
        guard.detach()
    assert (run["last_step"], run["dropped"], run["mode"]) == (3, 0, "enforce")
    assert layers == {"ours", "plain", "experts"}
    assert series["steps"] == [0, 1, 2, 3]
    assert all(0.01 < value < 0.06 for value in series["values"])
    troubles = [r.message for r in caplog.records if r.name == "fp8_safeguard" and r.levelname != "INFO"]
    assert troubles == []


def test_b10_steps_of_a_layer_with_and_without_gradient_stay_queryable(
    tmp_path: Path, watch: Callable[..., Guard]
) -> None:
    """Frozen at steps 0, 1, 4 and 5: no value there, neither zero nor the last one, and those at 2 and 3 are kept."""
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/hooks.db")) as url:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        guard = watch(model, server=url, run="frozen", recompute=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            model[0].requires_grad_(step in (2, 3))
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert guard.flush(30)
        seen = {}
        with httpx2.Client() as client:
            for name, slot in {
                "x": {"operand": "x", "layout": "row"}, "w": {"operand": "w", "layout": "tile"},
                "dy": {"operand": "dy", "layout": "row"}, "wgrad": {"gemm": "wgrad"},
            }.items():  # fmt: skip
                query = {"layer": "0", "metric": "amax", **slot}
                series = client.get(f"{url}/api/v1/runs/frozen/series", params=query).json()
                pairs = zip(series["steps"], series["values"], strict=True)
                seen[name] = [step for step, value in pairs if value is not None]
        guard.detach()
    assert seen == {"x": [*range(6)], "w": [*range(6)], "dy": [2, 3], "wgrad": [2, 3]}
