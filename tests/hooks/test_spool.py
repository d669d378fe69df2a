"""The file that samples wait in: order, bounds, owners, and what a disk may do."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError, attach
from fp8_safeguard.hooks import spool as spool_module
from fp8_safeguard.hooks.spool import Owner, Spool, open_leftover, open_own
from fp8_safeguard.monitor.wire import parse_sample

Watch = Callable[..., Guard]
Train = Callable[..., list[torch.Tensor]]
Accept = Callable[..., dict[str, Any]]

OWNER = Owner("run", "0", "0")


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    opened, damaged = open_own(tmp_path, OWNER)
    assert damaged is None
    yield opened
    opened.close()


def put(spool: Spool, *steps: int, size: int = 10) -> None:
    for step in steps:
        spool.put(step, "list", lambda: b"slots", bytes(size))


def steps_of(spool: Spool, most: int = 100, most_bytes: int = 10**6) -> list[int]:
    return [entry.step for entry in spool.take(most, most_bytes)]


def rows(path: Path, query: str = "SELECT step FROM samples ORDER BY key") -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute(query)]
    finally:
        connection.close()


class TestFile:
    def test_the_oldest_come_first_in_bounded_helpings(self, spool: Spool) -> None:
        put(spool, 5, 3, 9, size=40)
        assert steps_of(spool) == [5, 3, 9]
        assert steps_of(spool, most=2) == [5, 3]
        assert steps_of(spool, most_bytes=80) == [5, 3]
        assert steps_of(spool, most_bytes=1) == [5]
        assert spool.slots("list") == b"slots"
        assert (spool.count, spool.bytes) == (3, 120)

    def test_what_has_arrived_is_gone_and_the_rest_survives_the_owner(self, tmp_path: Path) -> None:
        first, _ = open_own(tmp_path, OWNER)
        put(first, 0, 1, 2, 3)
        first.remove(first.take(2, 1000))
        assert (first.count, first.bytes) == (2, 20)
        first.close()
        second, _ = open_own(tmp_path, OWNER)
        put(second, 4)
        assert steps_of(second) == [2, 3, 4]
        assert second.slots("list") == b"slots"
        second.remove(second.take(9, 1000))
        second.close()
        assert list(tmp_path.iterdir()) == []

    def test_room_is_made_at_the_old_end_and_what_is_on_its_way_stays(self, spool: Spool) -> None:
        put(spool, 0, 1, 2)
        on_its_way = spool.take(1, 1000)
        spool.send(on_its_way)
        assert spool.drop_oldest()
        assert (spool.count, spool.bytes) == (2, 20)
        spool.remove(on_its_way)
        spool.send(spool.take(1, 1000))
        assert steps_of(spool) == [2]
        assert not spool.drop_oldest()

    def test_a_refused_sample_is_set_aside_and_kept_under_another_name(self, tmp_path: Path) -> None:
        spool, _ = open_own(tmp_path, OWNER)
        put(spool, 0, 1)
        first, second = spool.take(2, 1000)
        spool.refuse(first, "422 no")
        assert steps_of(spool) == [1]
        spool.remove([second])
        spool.close()
        (left,) = (tmp_path / "run").iterdir()
        assert left.name.endswith(".refused")
        assert rows(left, "SELECT step || reason FROM refused") == ["0422 no"]

    def test_a_delete_that_fails_does_not_send_twice(
        self, spool: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing() -> Any:
            raise sqlite3.OperationalError("disk I/O error")

        put(spool, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(spool, "_transaction", failing)
            with pytest.raises(sqlite3.OperationalError):
                spool.remove(spool.take(1, 1000))
        assert steps_of(spool) == [1]
        spool.remove(spool.take(1, 1000))
        assert rows_of_open(spool) == []

    def test_names_of_attempts_are_kept_apart(self, tmp_path: Path) -> None:
        names = [("a/b", "0"), ("a_b", "0"), ("a", "b-0"), ("a-b", "0"), ("é" * 500, "..")]
        spools = [open_own(tmp_path, Owner("run", *name))[0] for name in names]
        assert len({opened.path for opened in spools}) == len(names)
        for opened in spools:
            assert opened.path.parent == tmp_path / "run"
            opened.close()


def rows_of_open(spool: Spool) -> list[Any]:
    return spool._connection.execute("SELECT key FROM samples").fetchall()


class TestOwners:
    def test_a_second_owner_of_the_same_ids_has_a_file_of_its_own(self, spool: Spool, tmp_path: Path) -> None:
        put(spool, 1)
        second, _ = open_own(tmp_path, OWNER)
        put(second, 2)
        assert steps_of(second) == [2]
        with pytest.raises(OSError, match="owner is at work"):
            open_leftover(spool.path, OWNER)
        second.remove(second.take(1, 1000))
        second.close()

    def test_the_file_of_a_killed_process_is_a_dead_owners(
        self, script: Callable[..., Any], tmp_path: Path
    ) -> None:
        tail = (
            "import pathlib; from fp8_safeguard.hooks.spool import Owner, open_own\n"
            f"spool, _ = open_own(pathlib.Path({str(tmp_path)!r}), Owner('run', 'dead', '0'))\n"
            "[spool.put(step, 'list', lambda: b'slots', b'x' * 5000) for step in range(50)]\n"
            "print('ready', flush=True); time.sleep(60)"
        )
        process = script(tail, None)
        process.until()
        (path,) = spool_module.find_leftovers(tmp_path, OWNER)
        with pytest.raises(OSError, match="owner is at work"):
            open_leftover(path, OWNER)
        process.send_signal(signal.SIGKILL)
        process.end()
        leftover = open_leftover(path, OWNER)
        assert leftover.owner.attempt == "dead"
        assert steps_of(leftover) == list(range(50))
        leftover.close()


@pytest.fixture
def away(endpoint: Any) -> Any:
    """The endpoint, refusing to take anything for now."""
    endpoint.answer = lambda body: (503, {})
    return endpoint


def observe(
    watch: Watch, train: Train, url: str | None, steps: int = 3, **options: Any
) -> tuple[Guard, nn.Module]:
    model = nn.Linear(8, 8)
    guard = watch(model, server=url, **{"run": "r", "recompute": 0, **options})
    train(model, torch.optim.SGD(model.parameters(), 0.1), steps)
    guard.last_sample()
    # An endpoint that takes nothing has been asked, and everything is where it waits.
    guard.flush(0.5)
    return guard, model


class TestDisk:
    """Whatever the disk does, training goes on, and the samples arrive once the server is there."""

    def arrives(self, guard: Guard, endpoint: Any, accept: Accept) -> list[int]:
        endpoint.requests.clear()
        endpoint.answer = lambda body: (200, accept(body))
        assert guard.flush(10)
        return [sample["step"] for sample in endpoint.samples]

    def test_a_folder_that_cannot_be_written_is_one_line_and_memory_takes_over(
        self, watch: Watch, train: Train, away: Any, accept: Accept, tmp_path: Path, caplog: Any
    ) -> None:
        (tmp_path / "file").touch()
        guard, _ = observe(watch, train, away.url, spool_dir=tmp_path / "file" / "spool")
        assert self.arrives(guard, away, accept) == [0, 1, 2]
        assert sum("the disk does not take samples" in r.message for r in caplog.records) == 1

    def test_a_disk_that_fills_up_and_is_freed_keeps_the_order(
        self, watch: Watch, train: Train, away: Any, accept: Accept, caplog: Any, monkeypatch: Any
    ) -> None:
        full = {"now": True}
        original = Spool.put

        def put_limited(self: Spool, *arguments: Any) -> None:
            pages = self._connection.execute("PRAGMA page_count").fetchone()[0]
            limit = pages if full["now"] and self.count >= 2 else 10**6
            self._connection.execute(f"PRAGMA max_page_count={limit}")
            original(self, *arguments)

        def steps(number: int, wanted: int) -> None:
            train(model, optimizer, number)
            guard.last_sample()
            end = time.monotonic() + 30
            while backlog.count < wanted:
                assert time.monotonic() < end
                time.sleep(0.005)

        monkeypatch.setattr(Spool, "put", put_limited)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        guard = watch(model, server=away.url, run="r", recompute=0)
        backlog = guard._session.client._backlog
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps(6, wanted=6)
        assert 0 < backlog.in_memory < 6
        full["now"] = False
        steps(2, wanted=8)
        assert self.arrives(guard, away, accept) == list(range(8))
        steps(1, wanted=0)
        assert guard.flush(10)
        assert backlog.in_memory == 0
        assert sum("database or disk is full" in r.message for r in caplog.records) == 1

    def test_a_locked_file_is_one_line_and_memory_takes_over(
        self, watch: Watch, train: Train, away: Any, accept: Accept, spool_dir: Path, caplog: Any
    ) -> None:
        spool, _ = open_own(spool_dir, Owner("r", "0", "0"))
        put(spool, 0)
        spool.close()
        holder = sqlite3.connect(spool.path, isolation_level=None)
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        guard, _ = observe(watch, train, away.url)
        assert self.arrives(guard, away, accept) == [0, 1, 2]
        holder.close()
        assert sum("is locked" in r.message for r in caplog.records) >= 1

    @pytest.mark.parametrize("contents", [b"no database at all" * 100, None])
    def test_a_damaged_file_is_kept_under_another_name(
        self,
        watch: Watch,
        train: Train,
        away: Any,
        accept: Accept,
        spool_dir: Path,
        caplog: Any,
        contents: Any,
    ) -> None:
        spool, _ = open_own(spool_dir, Owner("r", "0", "0"))
        put(spool, *range(40), size=2000)
        spool.close()
        whole = spool.path.read_bytes()
        # Its first page is good and says what the others should hold.
        spool.path.write_bytes(contents or whole[:4096] + b"\xff" * (len(whole) - 4096))
        guard, _ = observe(watch, train, away.url)
        assert self.arrives(guard, away, accept) == [0, 1, 2]
        assert sum("is damaged" in r.message for r in caplog.records) == 1
        assert [path for path in spool.path.parent.iterdir() if path.name.endswith(".sqlite.damaged")]

    def test_a_file_of_a_later_version_is_left_alone(
        self, watch: Watch, train: Train, away: Any, accept: Accept, spool_dir: Path
    ) -> None:
        spool, _ = open_own(spool_dir, Owner("r", "0", "0"))
        put(spool, 7)
        spool._connection.execute("PRAGMA user_version=99")
        spool.close()
        before = spool.path.read_bytes()
        guard, _ = observe(watch, train, away.url)
        assert self.arrives(guard, away, accept) == [0, 1, 2]
        assert spool.path.read_bytes() == before

    def test_the_bound_drops_the_oldest_says_so_once_and_counts_them(
        self, watch: Watch, train: Train, away: Any, accept: Accept, monkeypatch: Any, caplog: Any
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SPOOL_MAX_BYTES", "16000")
        guard, _ = observe(watch, train, away.url, steps=20)
        (path,) = spool_module.find_leftovers(
            guard._session.options.spool_dir, OWNER.__class__("r", "0", "0")
        )
        arrived = self.arrives(guard, away, accept)
        assert 3 < len(arrived) < 15
        # One was on its way when its neighbours were dropped.
        assert arrived[1:] == list(range(21 - len(arrived), 20))
        assert guard._session.builder.dropped == 20 - len(arrived)
        said = [r.message for r in caplog.records if "dropped" in r.message]
        assert len(said) == 1
        assert "FP8_SAFEGUARD_SPOOL_MAX_BYTES=16000" in said[0]
        assert path.exists()

    @pytest.mark.parametrize("given", ["spool_dir", "variable"])
    def test_an_empty_folder_keeps_nothing_on_disk(
        self,
        watch: Watch,
        train: Train,
        away: Any,
        accept: Accept,
        tmp_path: Path,
        monkeypatch: Any,
        given: str,
    ) -> None:
        if given == "variable":
            monkeypatch.setenv("FP8_SAFEGUARD_SPOOL_DIR", "")
        guard, _ = observe(watch, train, away.url, **({"spool_dir": ""} if given == "spool_dir" else {}))
        assert list(tmp_path.iterdir()) == []
        assert self.arrives(guard, away, accept) == [0, 1, 2]

    def test_the_default_is_the_users_state_folder_and_it_is_empty_in_the_end(
        self, watch: Watch, train: Train, endpoint: Any, spool_dir: Path
    ) -> None:
        guard, _ = observe(watch, train, endpoint.url)
        assert [path.suffix for path in (spool_dir / "r").iterdir() if path.suffix == ".sqlite"]
        guard.detach()
        assert list(spool_dir.iterdir()) == []

    @pytest.mark.parametrize("text", ["0", "1GB", "-5", "1.5"])
    def test_a_limit_that_is_no_number_of_bytes_is_refused(self, monkeypatch: Any, text: str) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SPOOL_MAX_BYTES", text)
        with pytest.raises(OptionError, match=f"SPOOL_MAX_BYTES is '{text}'.*whole number of bytes"):
            attach(nn.Linear(2, 2))


class TestWithoutAServer:
    def test_samples_stay_in_the_file_as_they_would_travel(
        self, watch: Watch, train: Train, tmp_path: Path
    ) -> None:
        guard, _ = observe(watch, train, None, run="kept", attempt="a/b", spool_dir=tmp_path / "spool")
        assert guard.flush(10)
        guard.detach()
        (path,) = (tmp_path / "spool" / "kept").glob("*.sqlite")
        lists = {
            digest: msgpack.unpackb(body)
            for digest, body in sqlite3.connect(path).execute("SELECT * FROM slot_lists")
        }
        bodies = [msgpack.unpackb(body) for body in rows(path, "SELECT body FROM samples ORDER BY key")]
        samples = [parse_sample({**body, "slots": lists[body["slots_id"]]}) for body in bodies]
        assert [(sample.step, sample.attempt.id) for sample in samples] == [(n, "a/b") for n in range(3)]

    def test_a_later_guard_of_the_run_with_a_server_sends_them_first(
        self, watch: Watch, train: Train, endpoint: Any, tmp_path: Path
    ) -> None:
        for attempt in ("0", "1"):
            guard, _ = observe(watch, train, None, attempt=attempt, spool_dir=tmp_path)
            guard.detach()
        other, _ = observe(watch, train, None, run="other", spool_dir=tmp_path)
        other.detach()
        guard = watch(nn.Linear(8, 8), server=endpoint.url, run="r", attempt="2", spool_dir=tmp_path)
        assert guard.flush(10)  # no step is needed
        assert [(s["attempt"]["id"], s["step"]) for s in endpoint.samples] == [
            (attempt, step) for attempt in ("0", "1") for step in range(3)
        ]
        guard.detach()
        assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "state"] == [
            "other"
        ]
