"""A slow server, a dead one, a disk that hangs: no step waits for them, and nothing grows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, backlog, client, once, outage, sample, spool, transport
from fp8_safeguard.hooks.once import OnceLog

Watch = Callable[..., Guard]
Train = Callable[..., list[torch.Tensor]]


def stack(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))


def in_time(train: Train, model: nn.Module, steps: int, seconds: float = 60.0) -> bool:
    """Whether so many steps end while whatever is held is still held; a step that waits would wait for ever."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    training = threading.Thread(target=train, args=(model, optimizer, steps), daemon=True)
    training.start()
    training.join(seconds)
    return not training.is_alive()


class TestNoStepWaits:
    def test_files_and_network_are_other_threads_work(
        self, watch: Watch, train: Train, endpoint: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, set[int]] = {}

        def spied(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def spy(*arguments: Any, **keywords: Any) -> Any:
                seen.setdefault(name, set()).add(threading.get_ident())
                return real(*arguments, **keywords)

            monkeypatch.setattr(owner, name, spy)

        spied(sample.SampleBuilder, "_build")
        spied(backlog, "sample_to_wire")
        for name in ("open", "put", "take", "remove"):
            spied(backlog.Backlog, name)
        for name in ("put", "take", "remove"):
            spied(spool.Spool, name)
        spied(transport.Transport, "post")
        model = stack()
        guard = watch(model, server=endpoint.url, run="threads", overhead_budget=1.0)
        train(model, torch.optim.SGD(model.parameters(), 0.01), 12)
        assert guard.flush(30)
        assert set(seen) == {"_build", "sample_to_wire", "open", "put", "take", "remove", "post"}
        mine = threading.get_ident()
        assert not [name for name, threads in seen.items() if mine in threads]

    def test_a_disk_that_hangs_holds_no_step_up(
        self, watch: Watch, train: Train, endpoint: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hangs, released = threading.Event(), threading.Event()

        def hang(self: Any, *arguments: Any) -> None:
            hangs.set()
            released.wait(120)

        monkeypatch.setattr(spool.Spool, "put", hang)
        monkeypatch.setattr(client, "INBOX_SAMPLES", 20)
        model = stack()
        guard = watch(model, server=endpoint.url, run="disk")
        try:
            assert in_time(train, model, 60)
            assert hangs.is_set()
            inner = guard._session
            inner.deliver()
            assert inner.samples == 60
            # What the thread behind the disk cannot take is bounded, and counted.
            assert len(inner.client._inbox) == 20
            assert inner.builder.dropped > 0
        finally:
            released.set()

    def test_a_server_that_takes_ever_so_long_holds_no_step_up(
        self, watch: Watch, train: Train, endpoint: Any, accept: Any
    ) -> None:
        asked, released = threading.Event(), threading.Event()

        def slow(body: dict[str, Any]) -> Any:
            asked.set()
            released.wait(120)
            return 200, accept(body)

        endpoint.answer = slow
        model = stack()
        guard = watch(model, server=endpoint.url, run="slow", overhead_budget=1.0)
        try:
            assert in_time(train, model, 30)
            assert asked.wait(60)
            assert in_time(train, model, 30)
            assert guard.delivered == 0
        finally:
            released.set()
        assert guard.flush(60)

    def test_a_server_that_is_down_for_500_steps_costs_no_thread_and_no_memory(
        self, watch: Watch, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(outage, "FIRST_BACKOFF_SECONDS", 0.01)
        model = stack()
        guard = watch(model, server="http://127.0.0.1:9", run="down", every=10)
        assert in_time(train, model, 100)
        until = time.monotonic() + 60.0
        while not guard._session.once.counts and time.monotonic() < until:
            time.sleep(0.01)  # the first refusal, which is told of once
        threads, sizes = threading.active_count(), sizes_of(guard)
        assert in_time(train, model, 400)
        assert threading.active_count() <= threads
        assert sizes_of(guard) == sizes
        assert guard._session.builder.dropped == 0


def sizes_of(guard: Guard) -> dict[str, int]:
    """What a session could pile up while it trains."""
    inner = guard._session
    budget, notes = inner.budget, inner.notes()
    return {
        "once": len(inner.once.counts),
        "accepted": len(inner.client._accepted),
        "notes": len(notes.values) + len(notes.scalars),
        "layers": len(inner.meter.layers),
        "spans": len(inner.meter._spans),
        "recent": len(inner.recent._entries),
        "wgrads": len(inner._wgrad_at),
        "queue": len(budget._queue),
        "steps": len(budget._idle) if budget.limit else 0,
        "pace": len(budget.pace._latest),
    }


class TestNothingGrows:
    def test_hundreds_of_steps_leave_a_handful(self, watch: Watch, train: Train) -> None:
        model = stack(3)
        guard = watch(model, every=2, overhead_budget=0.5)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        train(model, optimizer, 200)
        for _ in range(200):
            train(model, optimizer)
            guard.log(loss=1.0)
            guard.log_scalar("0", "entropy", 0.5)
        guard._session.deliver()
        # Whatever the budget makes of it on this machine: three layers, 64 steps remembered, four operands, two notes.
        bounds = {
            "once": 2, "accepted": 0, "notes": 2, "layers": 3, "spans": 0, "recent": 4, "wgrads": 3, "queue": 3,
            "steps": 64, "pace": 64,
        }  # fmt: skip
        found = sizes_of(guard)
        assert not {name: size for name, size in found.items() if size > bounds[name]}

    def test_notes_of_a_step_that_nobody_ends_are_bounded(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        guard = watch(stack())
        guard._session._notes.scalars = type(guard._session._notes.scalars)(maxlen=10)
        for value in range(100):
            guard.log_scalar("0", "entropy", float(value))
        assert [value for _, _, value in guard._session.notes().scalars] == [float(v) for v in range(90, 100)]
        assert sample.Notes().scalars.maxlen == sample.MOST_SCALARS

    def test_kinds_of_trouble_are_bounded(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(once, "KINDS", 5)
        log = OnceLog()
        for number in range(20):
            log.warning(f"entry {number}", "entry %d", number)
        assert len(log.counts) == 6
        assert log.counts["further kinds"] == 15
        assert [record.getMessage() for record in caplog.records] == [
            *(f"entry {number}" for number in range(5)), "further kinds of trouble are counted and not told",
        ]  # fmt: skip
        log.warning("entry 0", "entry %d", 0)
        assert log.counts["entry 0"] == 2

    def test_slot_lists_that_change_without_end_are_sent_again_and_not_remembered(
        self, watch: Watch, train: Train, endpoint: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "ACCEPTED_LISTS", 2)
        model = stack(6)
        guard = watch(model, server=endpoint.url, run="lists", recompute=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(12):
            train(model, optimizer)
            assert guard._session.flush(30)
            assert len(guard._session.client._accepted) <= 2
        assert [s["step"] for s in endpoint.samples] == list(range(12))
