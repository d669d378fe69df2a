"""Ten thousand steps, each of them sampled, take no more memory than two thousand."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.kernels import Fp8Linear

WARM, STEPS = 2_000, 10_000
RESIDENT_BYTES = 4 * 2**20
"""Half a kilobyte a step in between: a fifth of a sample's statistics. What allocators keep varies by 0.3 MiB."""
OBJECTS = 200
"""One object in forty steps. Caches and the outage's own state vary by a few tens."""
SPOOL_BYTES = 200_000
"""Some fifty samples: the spool is full, and drops the oldest, long before the first look."""


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    resident_bytes: int
    objects: int
    tensors: int


def held(guard: Guard) -> Held:
    """Once the sender has built and stored every sample."""
    client, end = guard._session.client, time.monotonic() + 60
    while client._inbox or client._busy:
        assert time.monotonic() < end
        time.sleep(0.005)
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(pages * os.sysconf("SC_PAGE_SIZE"), len(objects), tensors)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        with torch.no_grad():
            model(torch.randn(4, 8))
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to read the memory")
@pytest.mark.parametrize(
    "options",
    [
        {},
        # Port 9: nothing listens there.
        {"server": "http://127.0.0.1:9", "run": "growth"},
        {"server": "http://127.0.0.1:9", "run": "growth", "spool_dir": ""},
    ],
    ids=["no server", "server away and the spool full", "server away and no disk"],
)
def test_ten_thousand_sampled_steps_do_not_grow(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("FP8_SAFEGUARD_SPOOL_MAX_BYTES", str(SPOOL_BYTES))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Fp8Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = attach(model, every=1, **options)
    try:
        train(model, optimizer, WARM)
        before = held(guard)
        train(model, optimizer, STEPS - WARM)
        after = held(guard)
    finally:
        guard.detach(timeout=0.1)
    assert after.tensors == before.tensors
    assert after.objects - before.objects < OBJECTS
    assert after.resident_bytes - before.resident_bytes < RESIDENT_BYTES
