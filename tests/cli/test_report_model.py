"""The report of a real BF16 model: from hooks in shadow mode, over the wire, to the verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8_safeguard.hooks import attach

OUTLIER = 2.0**19


class Block(nn.Module):
    """A residual block whose input has outlier channels that its weight takes back: BF16 does not notice."""

    gain: torch.Tensor

    def __init__(self, outliers: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)
        gain = torch.ones(128)
        gain[[3, 70]] = outliers
        self.register_buffer("gain", gain)
        with torch.no_grad():
            self.up.weight /= gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.relu(self.up(x * self.gain)))
        return x + added


def train(url: str, run: str, folder: Path, *, outliers: float = 1.0, shadow: bool) -> None:
    """Eight sampled steps at a learning rate that leaves the weights as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(outliers if n == 1 else 1.0) for n in range(4)]).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = attach(
        model,
        server=url,
        run=run,
        optimizer=optimizer,
        every=1,
        recompute=8,
        shadow=shadow,
        spool_dir=str(folder),
    )
    for _ in range(8):
        model(torch.randn(64, 128, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # What-ifs follow once a layer is flagged: each step waits for the answer to the one before.
        guard.flush(30)
    guard.detach()


def test_shadow_mode_says_whether_a_bf16_model_is_ready_for_fp8(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    train(service.url, "shadowed", tmp_path, shadow=True)
    found = cli("report", "shadowed", "--json", "--server", service.url).json
    assert found["summary"]["sentence"] == "ready for FP8"
    # The first layer has no dgrad: nobody needs the gradient of its input.
    assert len(found["items"]) == 23
    assert {item["gemm"]: item["source"] for item in found["items"]} == {
        "fprop": "shadow",
        "dgrad": "emulated",
        "wgrad": "emulated",
    }
    # Two operands rounded to E4M3: 3.6 % on Gaussian data, never next to nothing.
    assert all(0.01 < item["error_median"] < 0.04 for item in found["items"])


def test_without_shadow_mode_the_forward_gemms_are_unknown(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    train(service.url, "unshadowed", tmp_path, shadow=False)
    said = cli("report", "unshadowed", "--server", service.url, "--exit-code")
    assert said.code == 1
    assert "8 of 23 GEMMs are not known; run it with attach(..., shadow=True)" in said.out


def test_the_layer_that_fp8_cannot_do_is_named_with_its_remedy(
    service: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    train(service.url, "outliers", tmp_path, outliers=OUTLIER, shadow=True)
    found = cli("report", "outliers", "--json", "--server", service.url).json
    assert found["summary"]["keep_bf16_layers"] == ["1.up"]
    assert found["summary"]["keep_bf16_ratio"] == 1 / 8
    item = next(item for item in found["items"] if (item["layer"], item["gemm"]) == ("1.up", "fprop"))
    assert item["error_median"] > 0.5
    assert item["underflow"] > 0.7
    assert item["underflow_slot"] == "x row"
    # E5M2 has the range that the outliers take.
    assert (item["best"]["variant"], item["remedy"]) == ("e5m2", "safe with e5m2")
    assert item["best"]["error_median"] < 0.1
