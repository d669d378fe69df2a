"""Two real ranks report as one process that runs both their batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError, attach, collectives
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear

WORKER = Path(__file__).parents[1] / "distributed" / "worker.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw; more scenarios are in tests/distributed."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder), "merged"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"merged.{rank}.json").read_text()) for rank in range(2)]


class Model(nn.Module):
    """The worker's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.plain = Fp8Linear(64, 32), nn.Linear(32, 32)
        self.experts = Fp8GroupedLinear(3, 32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(
            torch.relu(self.plain(self.ours(x))), torch.tensor([0, 10, 10, 40], dtype=torch.int32)
        )
        return out


def micro_batches(steps: int) -> dict[str, Any]:
    """The last sample of one process that runs both ranks' batches in each step."""
    torch.manual_seed(0)
    model = Model()
    with attach(model, every=1, recompute=3) as guard:
        for step in range(steps):
            model.zero_grad()
            for rank in range(2):
                generator = torch.Generator().manual_seed(100 * step + rank)
                (model(torch.randn(40, 64, generator=generator)).square().sum() / 100).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.01 * parameter.grad
            guard.step(step)
        sample = guard.last_sample()
    assert sample is not None
    return sample


def test_the_merged_sample_is_that_of_one_process_bit_by_bit(ranks: list[dict[str, Any]]) -> None:
    expected = micro_batches(6)
    for merged in ranks:
        sample = merged["sample"]
        assert sample["slots"] == expected["slots"]
        assert sample["columns"] == expected["columns"]
    weight = [slot.get("operand") == "w" and slot["layer"] == "ours" for slot in expected["slots"]].index(
        True
    )
    assert expected["columns"]["count"][weight] == 64 * 32  # once, not once a rank


@pytest.mark.parametrize("wrong", [0, -1.0, True, "soon", float("inf"), float("nan")])
def test_a_time_out_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match="rank_timeout is"):
        attach(nn.Linear(4, 4), rank_timeout=wrong)


def test_one_rank_of_one_has_a_client_and_no_round(watch: Callable[..., Guard]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        guard = watch(nn.Linear(4, 4))
        assert guard._session.controls.ranks is None
    finally:
        torch.distributed.destroy_process_group()


class Enough(Exception):
    """The caller is to stop."""


def test_connections_that_never_come_about_are_waited_for_in_naps_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library waits for a rank that has gone since it was there, or that no packet reaches, for as long as for any."""
    release, naps = threading.Event(), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            raise Enough

    monkeypatch.setattr("fp8_safeguard.hooks.collectives._gloo", lambda *_, **__: release.wait(5.0))
    try:
        with pytest.raises(Enough):
            collectives.Collectives(0, 1, nap).meet(torch.distributed.HashStore())
    finally:
        release.set()


def test_what_connecting_raises_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr("fp8_safeguard.hooks.collectives._gloo", refuse)
    with pytest.raises(RuntimeError, match="no route to host"):
        collectives.Collectives(0, 1, lambda seconds: None).meet(torch.distributed.HashStore())


@pytest.mark.parametrize("interface", [None, "lo"])
def test_a_torch_that_only_connects_at_once_is_connected_too(
    monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    gloo = torch.distributed.ProcessGroupGloo
    by_default, by_name = gloo.create_default_device, gloo.create_device
    asked: list[str | None] = []

    def default_device() -> Any:
        asked.append(None)
        return by_default()

    def device(interface: str) -> Any:
        asked.append(interface)
        return by_name(interface=interface)

    monkeypatch.setattr(gloo, "create_default_device", default_device)
    monkeypatch.setattr(gloo, "create_device", device)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    lone = collectives.Collectives(0, 1, time.sleep)
    lone.meet(torch.distributed.HashStore())
    assert lone.gather(torch.ones(2)).tolist() == [[1.0, 1.0]]
    lone.close()
    assert asked == [interface]


def test_a_group_whose_store_gives_no_second_connection_is_trained_on_alone(
    watch: Callable[..., Guard], caplog: pytest.LogCaptureFixture
) -> None:
    """As in a dry run with the backend `fake`: attach() does not raise."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = nn.Linear(4, 4)
        guard = watch(model, every=1)
        for step in range(3):
            model(torch.ones(8, 4)).sum().backward()
            guard.step(step)
        assert guard.flush(30.0)
        sample = guard.last_sample()
        assert sample is not None
        assert sample["step"] == 2
        assert sum("do not report together any more" in line for line in caplog.messages) == 1
    finally:
        torch.distributed.destroy_process_group()
