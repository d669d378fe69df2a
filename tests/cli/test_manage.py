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


QUESTIONS = pytest.mark.parametrize(
    ("command", "otherwise"),
    [
        (("run", "kill-switch", "r1", "--json"), "The plan stays as it is"),
        (("run", "delete", "r1"), "Nothing is deleted"),
    ],
)
"""`baseline learn` and `baseline drop` ask as these do."""


@QUESTIONS
def test_where_nobody_can_be_asked_a_yes_is_needed(
    cli: Callable[..., Any], command: tuple[str, ...], otherwise: str
) -> None:
    said = cli(*command)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"{otherwise} without --yes where nobody can be asked.\n"


@QUESTIONS
def test_a_question_stands_on_standard_error(
    at_terminal: Callable[..., Any], command: tuple[str, ...], otherwise: str
) -> None:
    said = at_terminal("n\n", *command)
    # click reads the answer behind a space of its own, which JSON allows.
    assert (said.code, said.out.strip()) == (1, "")
    assert "[y/N]" in said.err
    assert said.err.endswith(f"{otherwise}.\n")


def test_a_yes_at_a_terminal_does_it(cli: Callable[..., Any], at_terminal: Callable[..., Any]) -> None:
    assert at_terminal("y\n", "run", "delete", "r1").code == 0
    assert [item["id"] for item in cli("runs", "--json").json["items"]] == ["r2"]


def test_an_unknown_run_is_named(cli: Callable[..., Any]) -> None:
    said = cli("run", "end", "r3")
    assert said.code == 1
    assert "r3" in said.err


def test_a_mode_is_logged_in_the_name_of_who_sets_it(cli: Callable[..., Any]) -> None:
    cli("run", "mode", "r1", "advise", "--by", "Ada")
    (item,) = cli("audit", "r1", "--json").json["items"]
    assert (item["actor"], item["what"], item["facts"]) == (
        "Ada",
        "mode",
        {"from": "observe", "to": "advise"},
    )
    assert "observe to advise" in cli("audit", "r1").out
    assert cli("audit", "r2").out == "r2: no audit log.\n"


def test_a_layer_is_pinned_and_released(cli: Callable[..., Any]) -> None:
    cli("run", "mode", "r1", "advise")
    layer = "blocks.0.mlp.up"
    said = cli("run", "pin", "r1", layer, "--on", "x row", "--action", "scale_multiplier", "--value", "0.5")
    assert (said.code, said.out) == (0, f"Pinned {layer} x row: scale_multiplier 0.5\n")
    assert cli("run", "pin", "r1", layer, "--by", "Ada").out == f"Pinned {layer} layer\n"
    pinned = cli("run", "pins", "r1", "--json").json["items"]
    assert [(item["target"], item["value"]) for item in pinned] == [
        ({"layer": True}, None),
        ({"operand": "x", "layout": "row"}, 0.5),
    ]
    assert "left alone" in cli("run", "pins", "r1").out
    assert "scale_multiplier" in cli("plan", "r1").out
    assert cli("run", "unpin", "r1", layer, "--on", "x row").code == 0
    assert cli("run", "unpin", "r1", layer).code == 0
    assert cli("run", "pins", "r1").out == "r1: no pins.\n"
    assert cli("plan", "r1").out.endswith("no deviation from the configured precision.\n")
    again = cli("run", "unpin", "r1", layer)
    assert again.code == 1
    assert "no pin" in again.err


@pytest.mark.parametrize("place", ["fprop dgrad", "x", "x diagonal", ""])
def test_a_place_that_is_none_is_a_usage_error(cli: Callable[..., Any], place: str) -> None:
    said = cli("run", "pin", "r1", "blocks.0.mlp.up", "--on", place)
    assert said.code == 2
    assert '"x row"' in said.err


def test_what_the_server_refuses_to_pin_is_said(cli: Callable[..., Any]) -> None:
    said = cli("run", "pin", "r1", "blocks.0.mlp.up", "--action", "bf16_fallback")
    assert said.code == 1
    assert "only observed" in said.err
    assert said.err.endswith("`fp8-safeguard run mode r1 advise`\n")
    said = cli("run", "pin", "r1", "blocks.0.mlp.up", "--action", "format", "--value", "fp4")
    assert said.code == 2
    assert "e4m3, e5m2" in said.err


def test_the_kill_switch_empties_the_plan_and_is_kept(cli: Callable[..., Any]) -> None:
    cli("run", "mode", "r1", "advise")
    cli("run", "pin", "r1", "blocks.0.mlp.up", "--on", "dgrad", "--action", "bf16_fallback")
    assert cli("run", "kill-switch", "r1").code != 0
    assert len(cli("plan", "r1", "--json").json["entries"]) == 1
    said = cli("run", "kill-switch", "r1", "--yes", "--by", "Eve")
    assert (said.code, said.out) == (0, "Run r1: plan emptied (version 2), mode observe\n")
    assert cli("plan", "r1", "--json").json["entries"] == []
    told = {item["what"]: item for item in cli("audit", "r1", "--json").json["items"]}
    assert told["kill-switch"]["actor"] == "Eve"
    assert "1 entry and 1 pin dropped" in cli("audit", "r1").out
