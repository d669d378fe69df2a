"""How a process ends: what is sent, what is kept, and what the server is told."""

from __future__ import annotations

import re
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard

Watch = Callable[..., Guard]
Train = Callable[..., list[torch.Tensor]]
Script = Callable[..., Any]

READY = "print('ready', flush=True)\n"


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"


def kept_steps(spool_dir: Path, run: str = "exit") -> list[int]:
    """Steps in the files of the run, file by file."""
    found = []
    for path in sorted((spool_dir / run).glob("*.sqlite")):
        with sqlite3.connect(path) as connection:
            found += [row[0] for row in connection.execute("SELECT step FROM samples ORDER BY key")]
        connection.close()
    return found


class TestNormalEnd:
    def test_b74_everything_arrives_before_a_normal_exit_and_the_end_is_told(
        self, endpoint: Any, script: Script, spool_dir: Path
    ) -> None:
        process = script("steps(50)", endpoint.url)
        errors = process.end()
        assert process.returncode == 0, errors
        assert [sample["step"] for sample in endpoint.samples] == list(range(50))
        assert endpoint.ended == [{"attempt": "0", "group": "0"}]
        assert not (spool_dir / "exit").exists()

    def test_b74_a_black_hole_holds_the_exit_up_for_a_bounded_time_and_the_samples_are_kept(
        self, black_hole: str, script: Script, spool_dir: Path
    ) -> None:
        process = script("farewell.EXIT_SECONDS = 0.5\nsteps(50)\n" + READY, black_hole)
        process.until()
        start = time.monotonic()
        errors = process.end()
        assert time.monotonic() - start < 30
        assert process.returncode == 0
        said = f"50 samples of run exit did not reach {black_hole} within 0.5 s: they are kept in {spool_dir}"
        assert said in errors
        assert kept_steps(spool_dir) == list(range(50))

    def test_b74_without_a_disk_the_loss_is_counted(
        self, black_hole: str, watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, server=black_hole, run="lost", spool_dir="")
        train(model, torch.optim.SGD(model.parameters(), 0.1), 5)
        guard.detach(timeout=0.2)
        said = f"5 samples of run lost did not reach {black_hole} within 0.2 s and are lost"
        assert [r.message for r in caplog.records if "lost" in r.message] == [said]

    def test_b74_after_an_exception_everything_arrives_and_no_end_is_told(
        self, endpoint: Any, script: Script
    ) -> None:
        process = script("steps(4)\nraise ZeroDivisionError('ours')", endpoint.url)
        errors = process.end()
        assert process.returncode == 1
        assert "ZeroDivisionError: ours" in errors
        assert [sample["step"] for sample in endpoint.samples] == list(range(4))
        assert endpoint.ended == []

    def test_an_exit_without_handlers_loses_nothing_that_was_stored(
        self, black_hole: str, script: Script, spool_dir: Path
    ) -> None:
        # The newest step is handed over when the next one begins, or the trainer asks: it may be logged until then.
        process = script("steps(6)\nguard.last_sample()\non_disk(guard)\nos._exit(3)", black_hole)
        process.end()
        assert process.returncode == 3
        assert kept_steps(spool_dir) == list(range(6))


class TestSigterm:
    def test_b74_sigterm_sends_the_rest_and_keeps_the_exit_code(self, endpoint: Any, script: Script) -> None:
        process = script("steps(5)\n" + READY + "time.sleep(60)", endpoint.url)
        process.until()
        process.send_signal(signal.SIGTERM)
        errors = process.end()
        assert process.returncode == -signal.SIGTERM, errors
        assert [sample["step"] for sample in endpoint.samples] == list(range(5))
        assert endpoint.ended == []

    def test_b74_sigterm_in_the_middle_of_training_loses_no_finished_step(
        self, endpoint: Any, script: Script
    ) -> None:
        tail = "done = 0\nsteps(1)\n" + READY + "while True:\n    steps(1)\n"
        process = script(tail, endpoint.url)
        process.until()
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        errors = process.end()
        assert process.returncode == -signal.SIGTERM, errors
        arrived = [sample["step"] for sample in endpoint.samples]
        assert arrived == list(range(len(arrived)))
        assert "Traceback" not in errors

    def test_b74_an_earlier_sigterm_handler_still_runs_and_the_run_has_not_ended(
        self, endpoint: Any, script: Script
    ) -> None:
        head = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))\n"
        process = script("steps(2)\n" + READY + "time.sleep(60)", endpoint.url, head=head)
        process.until()
        process.send_signal(signal.SIGTERM)
        process.end()
        assert process.returncode == 7
        assert [sample["step"] for sample in endpoint.samples] == [0, 1]
        assert endpoint.ended == []

    def test_b74_a_second_sigterm_does_not_wait_and_the_samples_are_kept(
        self, black_hole: str, script: Script, spool_dir: Path
    ) -> None:
        tail = (
            "farewell.EXIT_SECONDS = 60.0\nsteps(3)\nguard.last_sample()\non_disk(guard)\n"
            "session, finish = guard._session, guard._session.finish\n"
            "session.finish = lambda *a, **k: (print('sending', flush=True), finish(*a, **k))\n"
        )
        process = script(tail + READY + "time.sleep(60)", black_hole)
        process.until()
        process.send_signal(signal.SIGTERM)
        process.until("sending")
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        errors = process.end()
        assert time.monotonic() - start < 40
        assert process.returncode == -signal.SIGTERM, errors
        assert kept_steps(spool_dir) == [0, 1, 2]

    def test_b74_after_a_handler_that_goes_on_so_does_the_monitor(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        seen: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(len(endpoint.samples)))
        try:
            model = nn.Linear(8, 8)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            guard = watch(model, server=endpoint.url, run="term")
            train(model, optimizer, 2)
            signal.raise_signal(signal.SIGTERM)
            train(model, optimizer)
            assert guard.flush(10)
            guard.detach()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert seen == [2]
        assert [sample["step"] for sample in endpoint.samples] == [0, 1, 2]
        assert endpoint.ended == []  # it was stopped, and may go on later


class TestTheEndOfARun:
    def test_a_clean_detach_tells_the_end_once(self, endpoint: Any, watch: Watch, train: Train) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, server=endpoint.url, run="ended", attempt="a 1", group="g", groups=2)
        train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        guard.detach()
        guard.detach()
        assert endpoint.ended == [{"attempt": "a 1", "group": "g"}]
        assert endpoint.paths[-1].endswith("/samples")

    def test_a_detach_on_the_way_of_an_exception_tells_no_end(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        def with_block() -> None:
            with watch(model, server=endpoint.url, run="failed"):
                train(model, optimizer)
                raise ZeroDivisionError

        def finally_block() -> None:
            guard = watch(model, server=endpoint.url, run="failed", attempt="1")
            try:
                train(model, optimizer)
                raise ZeroDivisionError
            finally:
                guard.detach()

        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for failing in (with_block, finally_block):
            with pytest.raises(ZeroDivisionError):
                failing()
        assert [sample["attempt"]["id"] for sample in endpoint.samples] == ["0", "1"]
        assert endpoint.ended == []

    def test_no_end_is_told_while_samples_wait_or_where_none_was_sent(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        model = nn.Linear(8, 8)
        watch(model, server=endpoint.url, run="idle").detach()
        endpoint.answer = lambda body: (503, {})
        guard = watch(model, server=endpoint.url, run="waits")
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        guard.detach(timeout=0.2)
        assert endpoint.ended == []

    def test_a_server_that_does_not_know_the_end_does_no_harm(
        self, endpoint: Any, watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
    ) -> None:
        endpoint.end_status = 405
        model = nn.Linear(8, 8)
        guard = watch(model, server=endpoint.url, run="old")
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        guard.detach()
        assert len(endpoint.ended) == 1
        assert [r for r in caplog.records if r.levelname not in ("INFO", "DEBUG")] == []

    def test_a_guard_that_has_not_finished_tells_no_end(
        self, endpoint: Any, watch: Watch, train: Train
    ) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, server=endpoint.url, run="later")
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        guard.detach(finished=False)
        assert [sample["step"] for sample in endpoint.samples] == [0]
        assert guard.delivered == 1
        assert endpoint.ended == []


THREE = """
farewell.EXIT_SECONDS = 2.0
guards = [guard]
for name in ("second", "third"):
    other = nn.Linear(8, 8)
    guards.append(attach(other, server=guard._session.options.server, run=name, every=1))
    rate = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.randn(4, 8)).sum().backward()
    rate.step()
steps(1)
"""


class TestSeveralGuards:
    """The guards of one process wait together, and each says what became of its samples."""

    def ended(self, black_hole: str, process: Any) -> None:
        said = re.findall(rf"1 samples of run (\w+) did not reach {black_hole} within (\S+) s", process.end())
        assert {run for run, _ in said} == {"exit", "second", "third"}
        # One after the other would be two seconds for each.
        assert sorted(float(seconds) for _, seconds in said) == [0.5, 0.5, 2.0]

    def test_b74_the_exit_takes_no_longer_for_three_guards(self, black_hole: str, script: Script) -> None:
        process = script(THREE + READY, black_hole)
        process.until()
        self.ended(black_hole, process)
        assert process.returncode == 0

    def test_b74_nor_does_sigterm(self, black_hole: str, script: Script) -> None:
        process = script(THREE + READY + "time.sleep(60)", black_hole)
        process.until()
        process.send_signal(signal.SIGTERM)
        self.ended(black_hole, process)
        assert process.returncode == -signal.SIGTERM
