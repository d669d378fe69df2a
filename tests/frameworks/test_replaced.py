"""Conversions that come after attach() are noticed, and named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, attach

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they say of each other while they are imported
    from peft import LoraConfig, get_peft_model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(torch.randn(16, 16)).square().sum().backward()
    optimizer.step()


def reasons(guard: Guard) -> dict[str, str]:
    return {row["name"]: row["reason"] for row in guard.coverage() if row["status"] == "not observed"}


@pytest.mark.parametrize("sampled", [False, True])
def test_torchaos_conversion_after_attach_is_named_once(
    sampled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a sample was taken before it or not; its modules share the weights and have no hooks of ours."""
    model = Net()
    with attach(model, every=1) as guard:
        if sampled:
            step(model)
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
        for _ in range(2):
            step(model)
            guard.last_sample()
        replaced = "replaced after attach(): attach again last"
        assert reasons(guard) == {"up": replaced, "down": replaced}
        said = [r.message for r in caplog.records if "was replaced" in r.message]
        assert [line.split(" was ")[0] for line in said] == ["module up and 1 others"]
    with attach(model, every=1) as guard:
        step(model)
        assert guard.last_sample() is not None
        assert reasons(guard) == {}


def test_pefts_adapters_after_attach_are_named_and_their_bases_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    with attach(model, every=1) as guard:
        step(model)
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["up"]))
        step(adapted)
        sample = guard.last_sample()
        assert sample is not None
        assert {slot["layer"] for slot in sample["slots"]} == {"up", "down"}
        missing = reasons(guard)
    added = "added after attach(): attach again last"
    assert missing == {f"up.lora_{ab}.default.weight": added for ab in "AB"}
    assert not [r for r in caplog.records if "was replaced" in r.message]
