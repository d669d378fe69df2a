"""What `serve` says before it serves, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli.serving import access
from fp8_safeguard.server.settings import Settings


@contextmanager
def served(*arguments: str) -> Iterator[list[str]]:
    """The lines that a server says, the last one with its address; it is up then."""
    command = [sys.executable, "-m", "fp8_safeguard.cli.main", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line.rstrip())
            if "serves http" in line:
                break
        try:
            yield lines
        finally:
            server.terminate()
            server.wait(30)


def test_it_says_database_access_dashboard_and_address(tmp_path: Path) -> None:
    with served("--database-url", f"sqlite:///{tmp_path}/new.db") as lines:
        url = lines[-1].rsplit(" ", 1)[1]
        assert httpx2.get(url).status_code == 200
    said = dict(line.split(maxsplit=1) for line in lines[:-1])
    assert said["database"] == f"{tmp_path}/new.db (new)"
    assert said["access"] == "anybody on this machine, without a token"
    assert "dashboard" in said


def test_it_counts_the_tokens_that_work(
    tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    cli("db", "upgrade", "--database-url", url)
    for name in ("a", "b"):
        assert cli("token", "create", name, "--scope", "read", "--database-url", url).code == 0
    assert cli("token", "revoke", "b", "--database-url", url).code == 0
    monkeypatch.setenv("FP8_SAFEGUARD_TOKEN", "mine")
    with served("--database-url", url) as lines:
        said = dict(line.split(maxsplit=1) for line in lines[:-1])
    assert said["access"] == "2 tokens; requests without one are refused"


def test_revoked_tokens_leave_nobody_in(cli: Callable[..., Any], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    cli("db", "upgrade", "--database-url", url)
    cli("token", "create", "a", "--scope", "read", "--database-url", url)
    cli("token", "revoke", "a", "--database-url", url)
    assert access(Settings(database_url=url), True).startswith("nobody: all tokens are revoked")


def test_several_workers_are_refused_with_a_reason(cli: Callable[..., Any]) -> None:
    said = cli("serve", "--workers", "4")
    assert (said.code, said.out) == (2, "")
    assert "--workers is 4" in said.err


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FP8_SAFEGUARD_PORT", "eighty", "FP8_SAFEGUARD_PORT is 'eighty'"),
        ("FP8_SAFEGUARD_RUN_STALE_SECONDS", "-1", "FP8_SAFEGUARD_RUN_STALE_SECONDS is '-1'"),
        ("FP8_SAFEGUARD_TOKENS", "{", "JSON"),
    ],
)
def test_a_bad_variable_is_named(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    said = cli("serve")
    assert (said.code, said.out) == (2, "")
    assert words in said.err


@pytest.mark.parametrize("command", ["status --database-url sqlite:///x.db", "db status", "token list"])
def test_a_bad_variable_is_named_by_every_command_that_reads_it(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    (tmp_path / "x.db").touch()
    monkeypatch.setenv("FP8_SAFEGUARD_RUN_STALE_SECONDS", "long")
    said = cli(*command.split())
    assert (said.code, said.out) == (2, "")
    assert "FP8_SAFEGUARD_RUN_STALE_SECONDS is 'long'" in said.err


def test_a_bad_database_url_is_one_line(cli: Callable[..., Any]) -> None:
    said = cli("serve", "--port", "0", "--database-url", "nowhere")
    assert said.code == 2
    assert "sqlite:///nowhere" in said.err


def test_an_address_that_is_not_ours_is_one_line(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8_SAFEGUARD_TOKEN", "mine")
    said = cli("serve", "--host", "192.0.2.1", "--database-url", f"sqlite:///{tmp_path}/x.db")
    assert said.code == 1
    assert "192.0.2.1" in said.err
