"""A fork while a guard is at work: the parent reports, the child neither hangs nor touches anything."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.hooks.spool import Owner, open_leftover, open_own
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Train = Callable[..., list[torch.Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Each item is made by the observed model, under training."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.enable_grad():
            self.model(torch.ones(2, 8)).sum().backward()
            self.optimizer.step()
        return torch.tensor(os.getpid())


def ends_well(child: int) -> bool:
    """Whether the child ends by itself and without an error."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
def test_b75_forked_workers_with_the_model_finish_and_only_the_parent_reports(
    endpoint: Any, watch: Watch, train: Train, kind: Any
) -> None:
    model = kind(8, 8)
    guard = watch(model, server=endpoint.url, run="fork", mode="enforce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pids: set[int] = set()
    for _ in range(3):
        loader = torch.utils.data.DataLoader(
            Data(model, optimizer), num_workers=2, multiprocessing_context="fork"
        )
        for batch in loader:
            train(model, optimizer)  # the client's threads are at work while workers come and go
            pids |= {int(pid) for pid in batch}
    assert os.getpid() not in pids
    assert len(pids) == 6
    guard.last_sample()
    assert guard.flush(30)
    keys = [(s["attempt"]["id"], s["group"], s["step"]) for s in endpoint.samples]
    assert keys == [("0", "0", step) for step in range(18)]


@pytest.mark.parametrize("held", ["client", "controls", "files"])
def test_b75_a_lock_that_is_held_at_the_fork_does_not_hang_the_child(
    endpoint: Any, watch: Watch, train: Train, held: str
) -> None:
    model = Fp8Linear(8, 8)
    guard = watch(model, server=endpoint.url, run="fork", mode="enforce")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 2)
    assert guard.flush(10)
    client, controls = guard._session.client, guard._session.controls
    lock: Any = {"client": client._change, "controls": controls._lock, "files": client._working}[held]
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)
    child = os.fork()
    if child == 0:
        try:
            train(model, optimizer, 3)
            guard.step()
            assert not guard.flush(1)
            guard.detach()
            os._exit(0)
        finally:
            os._exit(1)
    finished = ends_well(child)
    done.set()
    holder.join()
    assert finished
    train(model, optimizer, 2)
    guard.last_sample()
    assert guard.flush(10)
    assert [sample["step"] for sample in endpoint.samples] == [0, 1, 2, 3]


def test_b75_a_forked_child_that_drops_the_file_does_not_close_it_for_its_parent(tmp_path: Path) -> None:
    """To close it would write the log back and delete it under the parent, whose later samples would be lost."""
    owner = Owner("run", "0", "0")
    spool, _ = open_own(tmp_path, owner)
    spool.put(0, "list", lambda: b"", b"x" * 5000)
    log = spool.path.with_name(spool.path.name + "-wal")
    before = log.stat()
    child = os.fork()
    if child == 0:
        spool.forget_in_child()
        del spool
        gc.collect()
        os._exit(0)
    assert ends_well(child)
    assert (log.stat().st_ino, log.stat().st_size) == (before.st_ino, before.st_size)
    with pytest.raises(OSError, match="owner is at work"):
        open_leftover(spool.path, owner)
    spool.put(1, "list", lambda: b"", b"x")
    assert [entry.step for entry in spool.take(9, 10**6)] == [0, 1]
    spool.close()


def test_b75_a_child_that_ends_like_a_program_leaves_the_parents_file_whole_and_owned(
    script: Any, spool_dir: Path
) -> None:
    """Its interpreter takes everything apart, the connection to the parent's file included."""
    tail = """
import gc
steps(3)
guard.last_sample()
on_disk(guard)
child = os.fork()
if child == 0:
    del guard, model
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
steps(2)
guard.last_sample()
on_disk(guard)
print('ready', flush=True)
time.sleep(60)
"""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        process = script(tail, f"http://127.0.0.1:{hole.getsockname()[1]}", run="whole")
        process.until()
        (path,) = (spool_dir / "whole").glob("*.sqlite")
        assert path.with_name(path.name + "-wal").stat().st_size > 0
        with pytest.raises(OSError, match="owner is at work"):
            open_leftover(path, Owner("whole", "0", "0"))
        process.send_signal(signal.SIGKILL)
        process.end()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert [row[0] for row in connection.execute("SELECT step FROM samples")] == [0, 1, 2, 3, 4]
    connection.close()
