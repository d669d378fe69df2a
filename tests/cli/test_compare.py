"""`fp8-safeguard compare`: two runs side by side, from a server and from its database."""

import math
import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from fp8_safeguard.cli.compare import numerics


def compare(cli: Callable[..., Any], recipes: Any, *more: str) -> Any:
    return cli("compare", *more, "--server", recipes.url)


def test_json_holds_what_the_server_answers_about_both(recipes: Any, cli: Callable[..., Any]) -> None:
    said = compare(cli, recipes, "good", "faulty", "--json")
    assert (said.code, said.err) == (0, "")
    found = said.json
    assert [found[side]["id"] for side in "ab"] == ["good", "faulty"]
    assert found["loss"] == recipes.get("/compare", a="good", b="faulty")
    assert found["plans"] == [recipes.get(f"/runs/{run}/plan") for run in ("good", "faulty")]
    assert (found["from_step"], found["to_step"], found["notes"]) == (0, 59, [])
    local = cli("compare", "good", "faulty", "--json", "--database-url", recipes.database_url)
    assert {**local.json, "a": None, "b": None} == {**found, "a": None, "b": None}


def test_the_layer_that_went_bad_comes_first_with_its_worst_values(
    recipes: Any, cli: Callable[..., Any]
) -> None:
    """Against the errors that the fixture puts in: sqrt(2621 / 65536) from the onset on, sqrt(43.3 / 65536) in health."""
    first, *others = compare(cli, recipes, "good", "faulty", "--json").json["numerics"]
    healthy, wrong = math.sqrt(43.3 / 65536), math.sqrt(2621 / 65536)
    assert first["layer"] == "layers.3"
    assert first["error"] == pytest.approx([healthy, wrong], rel=1e-6)
    assert first["error_ratio"] == pytest.approx(wrong / healthy, rel=1e-6)
    assert {item["layer"] for item in others} == {f"layers.{number}" for number in range(8)} - {"layers.3"}
    assert [item["error_ratio"] for item in others] == [pytest.approx(1.0)] * 7
    underflow = {item["layer"]: item["underflow"] for item in (first, *others)}
    assert underflow["layers.7"] == [30_000 / 65536] * 2


def test_what_was_decided_stands_with_its_step_in_both(recipes: Any, cli: Callable[..., Any]) -> None:
    items = compare(cli, recipes, "good", "faulty", "--json").json["decisions"]
    stored = recipes.get("/runs/faulty/decisions")["items"]
    assert sum(len(item["steps"][1]) for item in items) == len(stored) > 0
    assert {item["layer"] for item in items} == {"layers.3"}
    assert [item["steps"][0] for item in items] == [[]] * len(items)
    (turned,) = compare(cli, recipes, "faulty", "faulty", "--json").json["decisions"][:1]
    assert turned["steps"][0] == turned["steps"][1]


def test_the_text_tells_config_loss_numerics_and_decisions(recipes: Any, cli: Callable[..., Any]) -> None:
    said = compare(cli, recipes, "good", "faulty")
    assert said.code == 0
    lines = [re.split(r" {2,}", line) for line in said.out.splitlines()]
    assert lines[0] == ["a: good, b: faulty"]
    table = {line[0]: line[1:] for line in lines[1 : 1 + 14]}
    assert table["what"] == ["a", "b"]
    assert table["mode"] == ["observe", "enforce"]
    assert table["last step"] == ["59", "59"]
    assert table["decisions"][0] == "none"
    assert "bf16_fallback" in table["decisions"][1]
    loss = recipes.get("/compare", a="good", b="faulty")
    assert [
        f"loss: mean gap {100 * loss['mean_gap_ratio']:+.3g} % over 60 shared steps (0 to 59), "
        f"largest {100 * loss['max_abs_gap_ratio']:.3g} %, last {100 * loss['last_gap_ratio']:+.3g} %"
    ] in lines
    header = ["layer", "error a", "error b", "distortion a", "distortion b"]
    at = lines.index([*header, "underflow a", "underflow b", "error b/a"])
    assert lines[at + 1][0] == "layers.3"
    assert ["layer", "target", "action", "value", "step a", "step b"] in lines


def test_runs_without_a_step_in_common_say_so(recipes: Any, cli: Callable[..., Any]) -> None:
    said = compare(cli, recipes, "good", "late")
    assert said.code == 0
    assert "loss: nothing to compare" in said.out
    assert "note: the two share no step: numerics are those of all steps of each" in said.out
    found = compare(cli, recipes, "good", "late", "--json").json
    assert (found["from_step"], found["to_step"]) == (None, None)
    assert all(None not in item["error"] for item in found["numerics"])


def test_what_is_not_finite_in_one_of_the_two_comes_first(service: Any, cli: Callable[..., Any]) -> None:
    bundle = service.get("/runs/healthy-7b/export")["samples"]
    layer = bundle[-1]["slots"][1]["layer"]
    bundle[-1]["columns"]["nan"][1] = 7
    answer = httpx2.post(f"{service.url}/api/v1/runs/nan-7b/samples", json={"samples": bundle})
    assert answer.status_code == 200, answer.text
    said = cli("compare", "healthy-7b", "nan-7b", "--json", "--server", service.url)
    first = said.json["numerics"][0]
    assert (first["layer"], first["error"][1], first["error_ratio"]) == (layer, "non-finite", None)
    assert first["error"][0] is not None
    shown = cli("compare", "healthy-7b", "nan-7b", "--server", service.url)
    assert "\x1b" not in shown.out


def test_an_unknown_run_is_named_whichever_it_is(recipes: Any, cli: Callable[..., Any]) -> None:
    for pair in (("good", "fauty"), ("fauty", "good")):
        said = compare(cli, recipes, *pair)
        assert (said.code, said.out) == (1, "")
        assert "Did you mean faulty?" in said.err


def test_a_layer_that_differs_in_underflow_alone_comes_before_noise() -> None:
    """And what is next to nothing on both sides is none, whatever its ratio."""
    one = {
        "a": {"error": 0.036, "distortion": 1e-3, "underflow": 6e-5},
        "b": {"error": 0.03, "distortion": 1e-3, "underflow": 1e-7},
    }
    other = {
        "a": {"error": 0.036, "distortion": 1e-3, "underflow": 0.19},
        "b": {"error": 0.031, "distortion": 1e-3, "underflow": 1e-5},
    }
    assert [item["layer"] for item in numerics([one, other])] == ["a", "b"]
    assert [item["layer"] for item in numerics([{**one, "a": one["b"]}, {**other, "a": one["b"]}])] == [
        "b",
        "a",
    ]
