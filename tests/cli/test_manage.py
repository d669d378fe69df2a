"""Changing and deleting a whole run from the command line."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings


@pytest.fixture(autouse=True)
def server(tmp_path: Path, send_run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/store.db")) as url:
        send_run(url, "r1", 3, sick=False, mode="observe")
        send_run(url, "r2", 3, sick=False, mode="observe")
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", url)
        yield


def test_a_mode_is_set(cli: Callable[..., Any]) -> None:
    assert cli("run", "mode", "r1", "enforce").out.endswith("mode enforce\n")
    assert cli("status", "r1", "--json").json["mode"] == "enforce"
    assert cli("run", "mode", "r1", "advise", "--json").json["mode"] == "advise"


def test_a_mode_that_is_none_is_a_usage_error(cli: Callable[..., Any]) -> None:
    said = cli("run", "mode", "r1", "auto")
    assert said.code == 2
    assert "'auto'" in said.err
    assert "observe, advise, enforce" in said.err


def test_a_run_is_ended_by_hand(cli: Callable[..., Any]) -> None:
    assert "ended" in cli("run", "end", "r1").out
    assert cli("status", "r1", "--json").json["state"] == "ended"


def test_a_run_is_deleted_and_no_other(cli: Callable[..., Any]) -> None:
    assert cli("run", "delete", "r1", "--yes").code == 0
    assert [item["id"] for item in cli("runs", "--json").json["items"]] == ["r2"]


def test_nothing_is_deleted_without_a_yes(cli: Callable[..., Any]) -> None:
    assert cli("run", "delete", "r1").code != 0
    assert len(cli("runs", "--json").json["items"]) == 2


def test_an_unknown_run_is_named(cli: Callable[..., Any]) -> None:
    said = cli("run", "end", "r3")
    assert said.code == 1
    assert "r3" in said.err
