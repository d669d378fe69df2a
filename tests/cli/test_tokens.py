"""Access tokens from the command line, and what they open on a real server."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings


@pytest.fixture
def database_url(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("FP8_SAFEGUARD_DATABASE_URL", url)
    assert cli("db", "upgrade").code == 0
    return url


def reads(server: str, secret: str) -> int:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    return httpx2.get(f"{server}/api/v1/runs", headers=headers).status_code


def test_a_token_opens_what_it_allows_until_it_is_revoked(cli: Callable[..., Any], database_url: str) -> None:
    made = cli("token", "create", "grafana", "--scope", "read")
    assert made.code == 0
    assert "from now on its server asks for one" in made.err
    assert "from now on" not in cli("token", "create", "second", "--scope", "read").err
    secret = made.out.removesuffix("\n")
    assert re.fullmatch(r"\S{20,}", secret)
    with running_server(Settings(database_url=database_url)) as server:
        assert (reads(server, ""), reads(server, "guess"), reads(server, secret)) == (401, 401, 200)
        said = cli("alert", "ack", "1", "--server", server, "--token", secret)
        assert said.code == 1
        assert "scope control" in said.err
        assert cli("token", "revoke", "grafana").code == 0
        assert reads(server, secret) == 401


def test_the_secret_is_shown_once_and_stored_nowhere(
    cli: Callable[..., Any], database_url: str, tmp_path: Path
) -> None:
    made = cli("token", "create", "trainer", "--scope", "ingest", "--scope", "read", "--json")
    secret = made.json["token"]
    assert made.json["scopes"] == ["ingest", "read"]
    (listed,) = cli("token", "list", "--json").json["items"]
    assert "token" not in listed
    assert (listed["name"], listed["state"], listed["revoked"]) == ("trainer", "active", None)
    assert listed["created"].endswith("Z")
    for path in tmp_path.iterdir():
        assert secret.encode() not in path.read_bytes()


def test_a_table_shows_state_and_age(cli: Callable[..., Any], database_url: str) -> None:
    assert "No tokens" in cli("token", "list").out
    cli("token", "create", "old", "--scope", "read", "--expires-in-days", "1e-9")
    cli("token", "create", "gone", "--scope", "read")
    cli("token", "revoke", "gone")
    states = {line.split()[0]: line.split()[1] for line in cli("token", "list").out.splitlines()[2:]}
    assert states == {"old": "expired", "gone": "revoked"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", "t"],
        ["create", "t", "--scope", "everything"],
        ["create", "", "--scope", "read"],
        ["create", "t", "--scope", "read", "--expires-in-days", "-1"],
    ],
    ids=" ".join,
)
def test_a_token_that_makes_no_sense_is_a_usage_error(
    cli: Callable[..., Any], database_url: str, arguments: list[str]
) -> None:
    said = cli("token", *arguments)
    assert (said.code, said.out) == (2, "")
    assert cli("token", "list", "--json").json["items"] == []


def test_a_name_is_used_once_and_an_unknown_one_is_named(cli: Callable[..., Any], database_url: str) -> None:
    assert cli("token", "create", "t", "--scope", "read").code == 0
    again = cli("token", "create", "t", "--scope", "read")
    assert again.code != 0
    assert "'t'" in again.err
    unknown = cli("token", "revoke", "nobody")
    assert (unknown.code, unknown.out) == (1, "")
    assert "nobody" in unknown.err


def test_an_old_schema_is_not_changed_in_passing(cli: Callable[..., Any], tmp_path: Path) -> None:
    said = cli(
        "token", "create", "t", "--scope", "read", "--database-url", f"sqlite:///{tmp_path}/missing.db"
    )
    assert said.code == 1
    assert "fp8-safeguard serve" in said.err
    assert list(tmp_path.iterdir()) == []
