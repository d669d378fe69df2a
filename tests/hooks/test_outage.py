"""The server goes away and comes back: every sample is there once, in order, and training never notices."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, outage
from fp8_safeguard.hooks import client as client_module

Watch = Callable[..., Guard]
Train = Callable[..., list[torch.Tensor]]
Accept = Callable[..., dict[str, Any]]

SERVE = """
import sys
from fp8_safeguard.server.serve import run
from fp8_safeguard.server.settings import Settings
run(Settings(database_url=sys.argv[1], port=int(sys.argv[2])))
"""


class ServerProcess:
    """A real server on one port and one database, that can be killed and started again."""

    def __init__(self, database: Path) -> None:
        self.database = database
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = [sys.executable, "-c", SERVE, f"sqlite:///{self.database}", str(self.port)]
        self._process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx2.get(f"{self.url}/livez").status_code == 200:
                    return
            except httpx2.HTTPError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def rows(self, run: str) -> list[tuple[str, int]]:
        """Attempt and step of each stored sample of a run, in the order of storing."""
        query = """
            SELECT attempts.name, step FROM samples JOIN attempts ON attempts.id = attempt_id
            JOIN runs ON runs.id = run_id WHERE runs.name = ? ORDER BY samples.id
        """
        connection = sqlite3.connect(self.database)
        try:
            return list(connection.execute(query, (run,)))
        finally:
            connection.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("server") / "server.db")
    process.start()
    yield process
    process.kill()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_BACKOFF_SECONDS", 0.01)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelname == "WARNING" and r.name == "fp8_safeguard"]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class TestRealServer:
    def test_a_server_that_is_killed_and_started_again_has_every_sample_once_and_in_order(
        self, server: ServerProcess, watch: Watch, train: Train, spool_dir: Path, caplog: Any
    ) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        guard = watch(model, server=server.url, run="outage")
        spent: dict[str, list[float]] = {"up": [], "down": []}

        def steps(number: int, state: str) -> None:
            for _ in range(number):
                before = guard.spent_seconds
                train(model, optimizer)
                spent[state].append(guard.spent_seconds - before)

        steps(20, "up")
        assert guard.flush(30)
        server.kill()
        steps(60, "down")
        eventually(lambda: guard._session.client._backlog.count >= 59)
        server.start()
        steps(20, "up")
        guard.last_sample()
        assert guard.flush(60)
        assert server.rows("outage") == [("0", step) for step in range(100)]
        place = f"{server.url}/api/v1/runs/outage"
        assert httpx2.get(place).json()["dropped"] == 0
        # A step that waited for the network would be hundreds of milliseconds longer.
        assert statistics.median(spent["down"]) < 3 * statistics.median(spent["up"]) + 0.1
        down, back = warnings_of(caplog)
        assert down.startswith(f"no answer from {server.url} (")
        assert f"samples of run outage wait in {spool_dir / 'outage'}" in down
        assert back.startswith(f"{server.url} is back: run outage resumed after ")
        assert int(back.split()[-3]) >= 60
        guard.detach()
        assert list(spool_dir.iterdir()) == []

    def test_a_trainer_that_is_killed_in_an_outage_loses_nothing_that_the_next_attempt_does_not_send(
        self, server: ServerProcess, script: Any, watch: Watch, train: Train, spool_dir: Path
    ) -> None:
        tail = (
            "steps(5)\nguard.last_sample()\nassert guard.flush(30)\nprint('ready', flush=True)\n"
            "sys.stdin = open(os.environ['GO'])\nsys.stdin.read()\n"
            "steps(40)\nguard.last_sample()\non_disk(guard)\nprint('stored', flush=True)\ntime.sleep(60)"
        )
        go = spool_dir.parent.parent / "go"
        go.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(go)
        process = script(tail, server.url, head=f"os.environ['GO'] = {str(go)!r}", run="killed")
        process.until()
        server.kill()
        go.write_text("")
        process.until("stored")
        process.send_signal(signal.SIGKILL)
        process.end()
        server.start()
        model = nn.Linear(8, 8)
        guard = watch(model, server=server.url, run="killed", attempt="1")
        guard.load_state_dict({"step": 45, "plan": {"version": 0, "entries": []}, "attempt": "0"})
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        guard.last_sample()
        assert guard.flush(60)
        assert server.rows("killed") == [("0", n) for n in range(45)] + [("1", n) for n in range(45, 48)]
        attempts = httpx2.get(f"{server.url}/api/v1/runs/killed/attempts").json()["items"]
        told = {item["id"]: (item["parent"], item["from_step"]) for item in attempts}
        assert told == {"0": (None, 0), "1": ("0", 45)}
        guard.detach()
        assert list(spool_dir.iterdir()) == []


@pytest.fixture
def trained(endpoint: Any, watch: Watch, train: Train) -> Any:
    """A guard after so many steps, the last of them handed over."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def run(steps: int, **options: Any) -> Guard:
        guard = watch(model, **{"server": endpoint.url, "run": "r", "recompute": 0, **options})
        train(model, optimizer, steps)
        guard.last_sample()
        return guard

    return run


def recovers(guard: Guard, endpoint: Any, accept: Accept, steps: int) -> None:
    """From now on the endpoint is the service: everything arrives once and in order, nothing counts as dropped."""
    endpoint.requests.clear()
    endpoint.answer = lambda body: (200, accept(body))
    assert guard.flush(10)
    assert [sample["step"] for sample in endpoint.samples] == list(range(steps))
    assert guard._session.builder.dropped == 0


class TestSomebodyElseAnswers:
    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (200, "<html>Log in to the network</html>"),
            (200, {"ok": True}),
            (301, "<html>moved</html>"),
            (403, "<html>blocked by policy</html>"),
            (404, "<html>no such page</html>"),
            (502, "<html>bad gateway</html>"),
        ],
    )
    def test_a_portal_or_proxy_is_named_once_and_nothing_is_lost(
        self, trained: Any, endpoint: Any, accept: Accept, caplog: Any, status: int, body: Any
    ) -> None:
        endpoint.answer = lambda _: (status, body)
        guard = trained(3)
        eventually(lambda: len(endpoint.requests) > 2)
        (line,) = warnings_of(caplog)
        assert line.startswith(f"what answers at {endpoint.url} is not the fp8-safeguard service")
        assert f"({status} " in line
        recovers(guard, endpoint, accept, 3)

    def test_a_redirection_says_where_to(
        self, trained: Any, endpoint: Any, accept: Accept, caplog: Any
    ) -> None:
        endpoint.answer = lambda _: (302, "", {"Location": "https://portal.example/login"})
        trained(1)
        eventually(lambda: warnings_of(caplog))
        assert "(302 text/html and sends to https://portal.example/login)" in warnings_of(caplog)[0]

    def test_a_name_and_password_in_the_address_stay_out_of_the_log(
        self, trained: Any, endpoint: Any, caplog: Any
    ) -> None:
        endpoint.answer = lambda _: (403, "<html></html>")
        guard = trained(1, server=endpoint.url.replace("http://", "http://me:secret@"))
        eventually(lambda: warnings_of(caplog))
        assert endpoint.url in warnings_of(caplog)[0]
        assert not any("secret" in r.getMessage() for r in caplog.records)
        assert "secret" not in repr(guard)

    @pytest.mark.parametrize(
        ("status", "kind", "said"),
        [
            (401, "unauthorized", "set FP8_SAFEGUARD_TOKEN, or token= of attach(), to a token"),
            (403, "forbidden", "with the scope ingest"),
            (404, "not-found", "404 not-found"),
            (409, "schema", "409 schema"),
        ],
    )
    def test_what_a_person_has_to_mend_is_said_once_and_waits(
        self, trained: Any, endpoint: Any, accept: Accept, caplog: Any, status: int, kind: str, said: str
    ) -> None:
        endpoint.answer = lambda _: (status, {"type": kind, "status": status, "detail": "no"})
        guard = trained(3)
        eventually(lambda: warnings_of(caplog))
        assert guard._session.client._pause.left > 5  # it is asked again slowly
        (line,) = warnings_of(caplog)
        assert said in line
        assert "samples of run r wait in " in line
        recovers(guard, endpoint, accept, 3)

    def test_an_answer_that_never_ends_is_given_up_and_the_sample_is_sent_again(
        self, trained: Any, endpoint: Any, accept: Accept, monkeypatch: Any, caplog: Any
    ) -> None:
        monkeypatch.setattr(client_module, "REQUEST_SECONDS", 0.3)
        gate = threading.Event()

        def slow(body: dict[str, Any]) -> Any:
            if len(endpoint.requests) == 1:
                gate.wait(20)
            return 200, accept(body)

        endpoint.answer = slow
        guard = trained(2)
        assert guard.flush(10)
        gate.set()
        steps = [sample["step"] for sample in endpoint.samples]
        assert sorted(set(steps)) == [0, 1]
        assert steps[:2] == [0, 0]
        assert "no whole answer within 0.3 s" in warnings_of(caplog)[0]


class TestDraining:
    def test_a_long_backlog_goes_in_large_requests_and_the_newest_reply_is_handled(
        self, trained: Any, endpoint: Any, accept: Accept
    ) -> None:
        endpoint.answer = lambda body: (503, {})
        guard = trained(300)
        eventually(lambda: guard._session.client._backlog.count == 300 and endpoint.requests)
        recovers(guard, endpoint, accept, 300)
        assert [len(body.get("samples", [body])) for body in endpoint.requests] == [1, 256, 43]

    def test_a_request_is_bounded_in_bytes(
        self, trained: Any, endpoint: Any, accept: Accept, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr(client_module, "BATCH_BYTES", 5000)
        endpoint.answer = lambda body: (503, {})
        guard = trained(20)
        eventually(lambda: guard._session.client._backlog.count == 20 and endpoint.requests)
        recovers(guard, endpoint, accept, 20)
        sizes = [len(body.get("samples", [body])) for body in endpoint.requests]
        assert 1 < max(sizes) < 6

    def test_a_server_that_lost_its_database_gets_the_slot_lists_again(
        self, trained: Any, endpoint: Any, accept: Accept
    ) -> None:
        known: set[str] = set()

        def one(sample: dict[str, Any]) -> Any:
            if "slots" in sample:
                known.add("list")
            elif not known:
                return {"type": "slots-unknown", "status": 409}
            return accept(sample)

        def answer(body: dict[str, Any]) -> Any:
            if "samples" in body:
                return 200, {"results": [one(sample) for sample in body["samples"]]}
            return one(body).get("status", 200), one(body)

        endpoint.answer = answer
        guard = trained(2)
        assert guard.flush(10)
        endpoint.answer = lambda body: (503, {})
        for _ in range(5):
            guard._session.model()(torch.randn(2, 8)).sum().backward()
            guard.step()
        client = guard._session.client
        eventually(lambda: client._backlog.count == 5 and client._under_way is None)
        known.clear()
        endpoint.requests.clear()
        endpoint.answer = answer
        assert guard.flush(10)
        taken = [(sample["step"], "slots" in sample) for sample in endpoint.samples]
        by_digest = [(step, False) for step in range(2, 7)]
        assert taken == [*by_digest, (2, True), *by_digest[1:]]

    def test_replies_to_a_dead_attempts_samples_do_not_steer_this_one(
        self, trained: Any, endpoint: Any, accept: Accept
    ) -> None:
        endpoint.answer = lambda body: (503, {})
        trained(2).detach(timeout=0.1)
        stale = {"version": 9, "entries": []}

        def answer(body: dict[str, Any]) -> Any:
            old = body.get("samples", [body])[0]["attempt"]["id"] == "0"
            return 200, accept(body, plan=stale if old else None)

        endpoint.answer = answer
        guard = trained(1, attempt="1", mode="enforce")
        assert guard.flush(10)
        assert [s["attempt"]["id"] for s in endpoint.samples[-3:]] == ["0", "0", "1"]
        assert guard._session.controls._waiting is None
        assert guard.plan.version == 0


class TestLogLines:
    def test_a_server_that_comes_and_goes_fills_no_log(
        self, trained: Any, endpoint: Any, accept: Accept, watch: Watch, train: Train, caplog: Any
    ) -> None:
        endpoint.answer = lambda body: (503, {}) if len(endpoint.requests) % 2 else (200, accept(body))
        guard = trained(10)
        assert guard.flush(20)
        kinds = [line.partition(endpoint.url)[2][:14] for line in warnings_of(caplog)]
        assert sorted(kinds) == [" does not take", " is back: run "]

    def test_each_long_outage_has_its_two_lines(
        self, trained: Any, endpoint: Any, accept: Accept, monkeypatch: Any, caplog: Any
    ) -> None:
        monkeypatch.setattr(outage, "QUIET_SECONDS", 0.0)
        endpoint.answer = lambda body: (503, {})
        guard = trained(2)
        eventually(lambda: warnings_of(caplog))
        recovers(guard, endpoint, accept, 2)
        for _ in range(2):
            endpoint.answer = lambda body: (403, "<html></html>")
            guard._session.model()(torch.randn(2, 8)).sum().backward()
            guard.step()
            lines = len(warnings_of(caplog))
            eventually(lambda: len(warnings_of(caplog)) > lines)  # noqa: B023 (called at once)
            endpoint.answer = lambda body: (200, accept(body))
            assert guard.flush(10)
        starts = [line.replace(endpoint.url, "URL")[:19] for line in warnings_of(caplog)]
        back, portal = "URL is back: run r ", "what answers at URL"
        assert starts == ["URL does not take s", back, portal, back, portal, back]
