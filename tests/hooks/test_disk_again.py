"""A disk that failed for a while is used again; a folder that was deleted under us is no lie."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import backlog as backlog_module
from fp8_safeguard.hooks import outage
from fp8_safeguard.hooks.spool import Owner, open_own

OWNER = Owner("r", "0", "0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "DISK_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(outage, "FIRST_BACKOFF_SECONDS", 0.01)


class Run:
    """A guard whose server takes nothing, one more step at a time."""

    def __init__(self, watch: Any, train: Any, endpoint: Any, **options: Any) -> None:
        endpoint.answer = lambda body: (503, {})
        self._train, self._endpoint = train, endpoint
        self._model = nn.Linear(8, 8)
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.1)
        self.guard = watch(self._model, server=endpoint.url, run="r", recompute=0, **options)
        self.backlog = self.guard._session.client._backlog
        self._done = 0

    def steps(self, number: int) -> None:
        self._train(self._model, self._optimizer, number)
        self._done += number
        self.guard.last_sample()
        eventually(lambda: self.backlog.count == self._done)

    def arrives(self, accept: Any) -> list[int]:
        self._endpoint.requests.clear()
        self._endpoint.answer = lambda body: (200, accept(body))
        assert self.guard.flush(10)
        return [sample["step"] for sample in self._endpoint.samples]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def stored(path: Path) -> list[int]:
    with sqlite3.connect(path) as connection:
        found = [row[0] for row in connection.execute("SELECT step FROM samples ORDER BY key")]
    connection.close()
    return found


def test_what_waits_in_memory_goes_to_the_disk_as_soon_as_there_is_one(
    watch: Any, train: Any, endpoint: Any, accept: Any, tmp_path: Path, caplog: Any
) -> None:
    place = tmp_path / "mount"
    place.touch()  # a file where the folder will be
    run = Run(watch, train, endpoint, spool_dir=place)
    run.steps(3)
    assert run.backlog.in_memory == 3
    place.unlink()
    end = time.monotonic() + 30
    while run.backlog.in_memory:
        assert time.monotonic() < end
        time.sleep(0.06)
        run.steps(1)
    done = run.backlog.count
    assert sum("the disk does not take samples" in r.message for r in caplog.records) == 1
    run.guard.detach(timeout=0.1)
    assert stored(next((place / "r").glob("*.sqlite"))) == list(range(done))
    assert (
        f"{done} samples of run r did not reach {endpoint.url} within 0.1 s: they are kept in {place}"
        in caplog.text
    )


def test_a_file_that_is_damaged_in_mid_run_has_a_successor(
    watch: Any, train: Any, endpoint: Any, spool_dir: Path
) -> None:
    run = Run(watch, train, endpoint)
    run.steps(2)
    path = run.backlog._own.path
    run.backlog._fail(run.backlog._own, damage())
    run._done = 0
    run.steps(2)
    assert run.backlog.in_memory == 0
    run.guard.detach(timeout=0.1)
    assert stored(path) == [2, 3]
    assert [p.name for p in path.parent.glob("*damaged")] == [path.name + ".damaged"]


def damage() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def test_a_folder_that_is_deleted_in_mid_run_loses_nothing_while_the_process_lives(
    watch: Any, train: Any, endpoint: Any, accept: Any, spool_dir: Path, caplog: Any
) -> None:
    run = Run(watch, train, endpoint)
    run.steps(3)
    shutil.rmtree(spool_dir)
    run.steps(2)
    assert sum("was deleted: what waited in it is lost if" in r.message for r in caplog.records) == 1
    assert run.arrives(accept) == [0, 1, 2, 3, 4]
    run.guard.detach()
    assert list(spool_dir.iterdir()) == []


def test_samples_in_a_deleted_file_are_not_said_to_be_kept(
    watch: Any, train: Any, endpoint: Any, spool_dir: Path, caplog: Any
) -> None:
    run = Run(watch, train, endpoint)
    run.steps(3)
    shutil.rmtree(spool_dir)
    run.steps(2)
    run.guard.detach(timeout=0.1)
    assert (
        f"2 samples of run r did not reach {endpoint.url} within 0.1 s: they are kept in {spool_dir}"
        in caplog.text
    )
    assert f"3 samples of run r did not reach {endpoint.url} within 0.1 s and are lost" in caplog.text


def test_a_deleted_file_does_not_take_its_namesakes_with_it(tmp_path: Path) -> None:
    first, _ = open_own(tmp_path, OWNER)
    shutil.rmtree(tmp_path / "r")
    second, _ = open_own(tmp_path, OWNER)
    second.put(1, "list", lambda: b"slots", b"body")
    assert (first.is_gone, second.is_gone) == (True, False)
    first.close()
    assert second.path.exists()
    third, _ = open_own(tmp_path, OWNER)  # the second one's lock is still in force
    assert third.path != second.path
    third.close()
    second.close()
    assert stored(second.path) == [1]


def test_only_what_is_on_its_way_is_kept_from_being_dropped(tmp_path: Path) -> None:
    spool, _ = open_own(tmp_path, OWNER)
    for step in range(4):
        spool.put(step, "list", lambda: b"slots", b"body")
    taken = spool.take(4, 1000)
    spool.send(taken[:1])
    assert spool.drop_oldest()
    assert [entry.step for entry in spool.take(4, 1000)] == [0, 2, 3]
    spool.close()
