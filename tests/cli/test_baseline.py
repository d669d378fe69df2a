"""`fp8-safeguard baseline`: the false alarms before it is accepted, and what a run is judged by after."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest


def learn(cli: Callable[..., Any], recipes: Any, *more: str) -> Any:
    return cli("baseline", "learn", "--run", "good", "--steps", "10:49", "--server", recipes.url, *more)


def test_the_false_alarms_are_shown_before_it_is_accepted(recipes: Any, cli: Callable[..., Any]) -> None:
    said = learn(cli, recipes)
    assert said.code == 2
    assert "Nothing is stored without --yes" in said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert said.out.startswith("good, steps 10 to 49: 40 sampled steps, 16 slots\n")
    # The flushed layer alerts at step 1, before the window, so the window itself opens none.
    table = {tuple(line[:-2]): line[-2:] for line in lines[2:6]}
    assert table[("window", "(false", "alarms)", "preset", "floor")] == ["0", "0"]
    assert table[("the", "other", "20", "preset", "floor")] == ["1", "0"]
    assert table[("the", "other", "20", "with", "this", "baseline")] == ["0", "0"]
    assert recipes.get("/runs/good/baselines")["items"] == []


def test_a_window_from_the_start_names_its_false_alarms(recipes: Any, cli: Callable[..., Any]) -> None:
    said = cli("baseline", "learn", "--run", "good", "--steps", ":29", "--server", recipes.url)
    assert "false alarms, preset floor, by rule: underflow 1" in said.out
    assert "false alarms, preset floor, by layer: layers.7 1" in said.out
    assert "false alarms, with this baseline" not in said.out


@pytest.mark.parametrize("where", ["server", "database"])
def test_a_preview_is_the_same_from_a_server_and_from_its_database(
    recipes: Any, cli: Callable[..., Any], where: str, tmp_path: Path
) -> None:
    source = ("--server", recipes.url) if where == "server" else ("--database-url", recipes.database_url)
    file = tmp_path / "b.json"
    said = cli(
        "baseline", "learn", "--run", "good", "--steps", "10:49", *source, "--output", str(file), "--json"
    )
    assert said.code == 0, said.err
    document = json.loads(file.read_text())
    assert document["steps"] == 40
    assert said.json["window"]["baseline"]["alerts"] == 0
    assert said.json["baseline"]["digest"] == json.loads(Path(tmp_path / "b.json").read_text()).get(
        "digest", said.json["baseline"]["digest"]
    )
    again = cli("baseline", "learn", "--run", "good", "--steps", "10:49", *source, "--output", str(file))
    assert again.code == 1
    assert "exists" in again.err
    kept = cli(
        "baseline",
        "learn",
        "--run",
        "good",
        "--steps",
        "10:49",
        "--database-url",
        recipes.database_url,
        "--yes",
    )
    assert kept.code == 1
    assert "is only read here: give --output FILE" in kept.err


def test_learned_used_shown_and_dropped(
    recipes: Any, cli: Callable[..., Any], at_terminal: Callable[..., Any]
) -> None:
    made = learn(cli, recipes, "--for", "good-other", "--yes")
    assert made.code == 0, made.err
    (item,) = recipes.get("/runs/good-other/baselines")["items"]
    number = str(item["id"])
    assert f"Baseline {number} judges good-other from its next sample on." in made.out
    at = ("--run", "good-other", "--server", recipes.url)
    listed = cli("baseline", "list", "good-other", "--server", recipes.url)
    assert listed.out.splitlines()[2].split()[:3] == [number, "yes", "good"]
    shown = cli("baseline", "show", number, *at, "--q", "layers.7")
    assert f"baseline {number}, learned from run good, steps 10 to 49" in shown.out
    assert any(
        line.split()[:5] == ["layers.7", "dy", "row", "underflow_ratio", "40"]
        for line in shown.out.splitlines()
    )
    assert "layers.3" not in shown.out
    local = cli(
        "baseline", "show", number, "--run", "good-other", "--database-url", recipes.database_url, "--json"
    )
    assert local.json == cli("baseline", "show", number, *at, "--json").json
    Path("b.json").write_text("kept", encoding="utf-8")
    kept = cli("baseline", "show", number, *at, "--output", "b.json")
    assert (kept.code, kept.err) == (
        1,
        "b.json exists. Choose another name, or replace it with --force.\n",
    )
    assert Path("b.json").read_text(encoding="utf-8") == "kept"
    assert cli("baseline", "show", number, *at, "--output", "b.json", "--force").code == 0
    assert json.loads(Path("b.json").read_text(encoding="utf-8")) == local.json["baseline"]
    refused = cli("baseline", "drop", number, *at)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "Nothing is dropped without --yes where nobody can be asked.\n"
    asked = at_terminal("n\n", "baseline", "drop", number, *at)
    assert (asked.code, asked.out.strip()) == (1, "")
    assert f"Drop baseline {number}" in asked.err
    assert "its preset alone" in cli("baseline", "use", "none", *at).out
    assert recipes.get("/runs/good-other/baselines")["items"][0]["used"] is False
    assert f"baseline {number}" in cli("baseline", "use", number, *at).out
    assert cli("baseline", "use", "x", *at).code == 2
    assert cli("baseline", "drop", "999", *at, "--yes").code == 1
    assert f"Baseline {number} of good-other is dropped" in cli("baseline", "drop", number, *at, "--yes").out
    assert recipes.get("/runs/good-other/baselines")["items"] == []
    assert "good-other: no baselines." in cli("baseline", "list", "good-other", "--server", recipes.url).out


def test_an_ended_run_is_learned_from_and_nobody_promises_a_next_sample(
    recipes: Any, cli: Callable[..., Any], at_terminal: Callable[..., Any]
) -> None:
    bundle = recipes.get("/runs/good/export")["samples"]
    url = f"{recipes.url}/api/v1/runs/over"
    for start in range(0, len(bundle), 20):
        answer = httpx2.post(f"{url}/samples", json={"samples": bundle[start : start + 20]})
        assert answer.status_code == 200, answer.text
    assert httpx2.patch(url, json={"ended": True}).status_code == 200
    at = ("--run", "over", "--server", recipes.url)
    refused = at_terminal("n\n", "baseline", "learn", "--steps", "10:49", *at)
    assert "over has ended. Store this baseline for it all the same?" in refused.err
    made = cli("baseline", "learn", "--steps", "10:49", *at, "--yes")
    assert made.code == 0, made.err
    (item,) = recipes.get("/runs/over/baselines")["items"]
    assert item["used"]
    assert (
        f"Baseline {item['id']} is stored for over, which has ended: nothing is judged by it unless"
        in made.out
    )
    assert f"fp8-safeguard baseline show {item['id']} --run over --output FILE" in made.out
    assert "next sample" not in made.out
    assert cli("baseline", "use", str(item["id"]), *at).out == (
        f"over is judged by baseline {item['id']}, should it go on: it has ended.\n"
    )
    other = cli("baseline", "learn", "--steps", "10:49", *at, "--for", "good-other", "--yes")
    assert "judges good-other from its next sample on." in other.out
    (left,) = recipes.get("/runs/good-other/baselines")["items"]
    assert (
        cli("baseline", "drop", str(left["id"]), "--run", "good-other", "--server", recipes.url, "--yes").code
        == 0
    )
    assert httpx2.delete(url).status_code in (200, 204)


@pytest.mark.parametrize(("answer", "code", "stored"), [("n\n", 1, 0), ("y\n", 0, 1)])
def test_a_person_at_a_terminal_is_asked(
    recipes: Any, at_terminal: Callable[..., Any], answer: str, code: int, stored: int
) -> None:
    window = ("--steps", "10:49", "--for", "late", "--server", recipes.url)
    said = at_terminal(answer, "baseline", "learn", "--run", "good", *window)
    assert (said.code, len(recipes.get("/runs/late/baselines")["items"])) == (code, stored), said.err
    assert "Judge late by this baseline from now on? [y/N]" in said.err
    assert said.out.startswith("good, steps 10 to 49")


def test_a_window_with_a_fallback_in_force_is_refused(recipes: Any, cli: Callable[..., Any]) -> None:
    said = cli("baseline", "learn", "--run", "faulty", "--steps", "0:59", "--yes", "--server", recipes.url)
    assert (said.code, said.out) == (1, "")
    assert (
        "Nothing can be learned from steps 0 to 59 of faulty:\n  decision faulty-1 (bf16_fallback of layers.3)"
        in said.err
    )
    short = cli("baseline", "learn", "--run", "good", "--steps", "0:5", "--yes", "--server", recipes.url)
    assert "holds 6 sampled steps and needs 20" in short.err


@pytest.mark.parametrize("steps", ["10", "a:b", ":", "9:3", "-1:5"])
def test_steps_that_are_none_are_wrong_use(recipes: Any, cli: Callable[..., Any], steps: str) -> None:
    said = cli("baseline", "learn", "--run", "good", f"--steps={steps}", "--server", recipes.url)
    assert said.code == 2
    assert "--steps" in said.err
