"""`fp8-safeguard replay`: the stored decisions again, another policy's, and what it cannot know."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIELDS = ("step", "layer", "target", "action", "value", "rule", "reason")


@pytest.mark.parametrize("where", ["server", "database"])
def test_without_changes_the_stored_decisions_come_out_again(
    recipes: Any, cli: Callable[..., Any], where: str
) -> None:
    """Ids, steps, targets and values, from the wire and from the file."""
    source = ("--server", recipes.url) if where == "server" else ("--database-url", recipes.database_url)
    said = cli("replay", "faulty", *source, "--json")
    assert said.code == 0, said.err
    found = said.json
    stored = list(reversed(recipes.get("/runs/faulty/decisions")["items"]))
    assert any(item["action"] == "bf16_fallback" for item in stored)
    items = found["decisions"]["items"]
    assert [{name: item[name] for name in FIELDS} for item in items] == [
        {name: item[name] for name in FIELDS} for item in stored
    ]
    assert [item["stored_id"] for item in items] == [item["id"] for item in stored]
    assert found["decisions"]["counts"] == {
        **dict.fromkeys(("earlier", "later", "only_here", "only_stored"), 0),
        "same": len(stored),
    }
    assert found["alerts"]["counts"]["same"] == len(recipes.get("/runs/faulty/alerts")["items"])
    assert (found["steps"], found["first_different_step"], found["policy"]["mode"]) == (60, None, "enforce")


def test_a_server_and_its_database_say_the_same(
    recipes: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text(
        'mode = "observe"\n[thresholds."gemm-error"]\nact = 0.3\nact_over_median = "off"\ninstant = 0.4\n'
    )
    served, read = (
        cli("replay", "faulty", "--policy", str(policy), *source, "--json")
        for source in (("--server", recipes.url), ("--database-url", recipes.database_url))
    )
    assert served.json == read.json
    counts = served.json["decisions"]["counts"]
    assert counts["same"] == 0
    assert counts["only_stored"] >= 1
    assert served.json["first_different_step"] == served.json["decisions"]["items"][0]["stored_step"]


def test_what_is_a_guess_has_a_question_mark(recipes: Any, cli: Callable[..., Any], tmp_path: Path) -> None:
    policy = tmp_path / "p.json"
    policy.write_text('{"thresholds": {"underflow dy row": {"watch": 0.9}, "gemm-error": {"act": "off"}}}')
    said = cli("replay", "faulty", "--policy", str(policy), "--server", recipes.url)
    assert said.code == 0
    assert said.out.startswith("faulty: 60 steps under preset floor, mode enforce\n")
    assert "only stored" in said.out
    assert "The plans differ from step 3" in said.out
    part = cli(
        "replay", "faulty", "--policy", str(policy), "--server", recipes.url, "--to", "20", "--json"
    ).json
    assert (part["steps"], part["decisions"]["items"], part["first_different_step"]) == (21, [], None)
    late = cli("replay", "faulty", "--server", recipes.url, "--from", "55", "--json").json
    assert (late["steps"], late["decisions"]["items"]) == (60, [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.toml", "mode = ", "is not TOML"),
        ("p.json", "{", "is not JSON"),
        ("p.toml", "dwell = 3", "'dwell' is no setting of a policy"),
        ("p.toml", "baseline = true", "baseline is the id of one"),
        ("p.toml", 'baseline = "none.json"', "cannot be read"),
        ("p.toml", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_policy_is_wrong_use(
    recipes: Any, cli: Callable[..., Any], tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    answer = cli("replay", "faulty", "--policy", str(tmp_path / name), "--server", recipes.url)
    assert answer.code == 2
    assert said in answer.err
    assert answer.out == ""


def test_wrong_questions(recipes: Any, cli: Callable[..., Any]) -> None:
    assert cli("replay", "nobody", "--server", recipes.url).code == 1
    assert cli("replay", "faulty", "--server", recipes.url, "--from", "9", "--to", "3").code == 2
