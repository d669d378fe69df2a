"""`fp8-safeguard top`: live on a terminal, one table on a pipe."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.cli import top
from fp8_safeguard.cli.api import UnreachableError
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

PATIENCE_SECONDS = 60.0


class Screen:
    """A command on a terminal of 200 columns, and everything that it has shown so far."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "fp8_safeguard.cli.main", *arguments]
        environment = {**os.environ, "COLUMNS": "200", "LINES": "40", "TERM": "xterm"}
        self.process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Read on until the words stand there."""
        end = time.monotonic() + PATIENCE_SECONDS
        while words not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # Linux says so when the other end is closed.
                    break
        assert words in self.text, self.text

    def close(self) -> None:
        os.close(self._master)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def screen() -> Iterator[Callable[..., Screen]]:
    opened: list[Screen] = []

    def start(*arguments: str) -> Screen:
        opened.append(Screen(*arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/live.db")) as url:
        yield url


def test_a_pipe_gets_one_plain_table(service: Any, cli: Callable[..., Any]) -> None:
    said = cli("top", "sick-7b", "--server", service.url)
    assert (said.code, said.err) == (0, "")
    title, header, *rows = said.out.splitlines()
    assert title == "sick-7b: UNSTABLE, step 5, loss 2.5; layers, worst first"
    assert re.split(r" {2,}", header) == ["layer", "state", "slot", "metric", "value", "limit", "note"]
    layers = service.get("/runs/sick-7b/layers")["items"]
    assert rows[0].split("  ")[0] == layers[0]["layer"]
    assert len(rows) == len(layers)
    assert len(cli("top", "sick-7b", "--limit", "1", "--server", service.url).out.splitlines()) == 3


def test_json_is_the_run_and_its_layers(service: Any, cli: Callable[..., Any]) -> None:
    for where in (("--server", service.url), ("--database-url", service.database_url)):
        found = cli("top", "sick-7b", "--json", *where).json
        assert found["run"]["id"] == "sick-7b"
        assert found["items"] == service.get("/runs/sick-7b/layers")["items"]


def test_a_terminal_follows_the_run_until_somebody_interrupts(
    server: str, send_run: Callable[..., None], screen: Callable[..., Screen]
) -> None:
    send_run(server, "live", 2, sick=False, mode="observe")
    shown = screen("top", "live", "--every", "0.2", "--server", server)
    shown.wait_for("HEALTHY, step 1")
    assert shown.process.poll() is None
    send_run(server, "live", 6, sick=False, mode="observe")
    shown.wait_for("step 5")
    shown.process.send_signal(signal.SIGINT)
    assert shown.process.wait(30) == 0
    assert "Traceback" not in shown.text


def test_the_end_of_the_run_ends_it(
    server: str, send_run: Callable[..., None], screen: Callable[..., Screen], cli: Callable[..., Any]
) -> None:
    send_run(server, "short", 2, sick=False, mode="observe")
    shown = screen("top", "short", "--every", "0.2", "--server", server)
    shown.wait_for("HEALTHY, step 1")
    assert cli("run", "end", "short", "--server", server).code == 0
    shown.wait_for("ENDED, step 1")
    assert shown.process.wait(30) == 0


def test_a_server_that_restarts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen last stays, with what is wrong; an answer of another kind is an error still."""
    answers: list[Any] = [UnreachableError("No answer."), {"state": "healthy"}, {"state": "ended"}]

    class Asked:
        def run(self, name: str) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def layers(self, name: str, *, limit: int | None = None) -> list[Any]:
            return []

    slept: list[float] = []
    monkeypatch.setattr(top.time, "sleep", slept.append)
    before = top.Seen({"state": "watch"}, [])
    told = list(top.again(Asked(), "r", 3, before, 2.0))  # type: ignore[arg-type]
    assert [seen.detail["state"] for seen, _ in told] == ["watch", "healthy", "ended"]
    assert [bool(trouble) for _, trouble in told] == [True, False, False]
    assert slept == [2.0] * 3


def test_an_unknown_run_is_an_error_and_no_picture(service: Any, cli: Callable[..., Any]) -> None:
    said = cli("top", "sik-7b", "--server", service.url)
    assert (said.code, said.out) == (1, "")
    assert "Did you mean sick-7b" in said.err


@pytest.mark.parametrize("every", ["0", "-1", "x"])
def test_a_pause_that_is_none_is_a_usage_error(cli: Callable[..., Any], every: str) -> None:
    assert cli("top", "r", "--every", every).code == 2
