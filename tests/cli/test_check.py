"""`fp8-safeguard check`: a twin passes, a fault does not, and what cannot be compared is wrong use."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(params=["server", "database"])
def source(request: pytest.FixtureRequest, recipes: Any) -> tuple[str, str]:
    return (
        ("--server", recipes.url) if request.param == "server" else ("--database-url", recipes.database_url)
    )


def test_a_twin_passes(cli: Callable[..., Any], source: tuple[str, str]) -> None:
    said = cli("check", "good-twin", "--baseline", "good", *source)
    assert said.code == 0, said.out
    lines = said.out.splitlines()
    assert lines[0] == "good-twin against good: passes"
    assert "over 60 shared steps" in lines[1]
    assert "numerics: 16 slots compared" in lines


def test_a_fault_fails_with_a_line_for_each_breach(cli: Callable[..., Any], source: tuple[str, str]) -> None:
    said = cli("check", "faulty", "--baseline", "good", *source)
    assert said.code == 1
    breaches = [line for line in said.out.splitlines() if line.startswith("BREACH ")]
    kinds = [line.split()[1].rstrip(":") for line in breaches]
    assert sorted(set(kinds)) == ["alerts", "decisions", "loss", "numerics"]
    (loss,) = (line for line in breaches if " loss: " in line)
    assert "above the reference in steps" in loss
    (numerics,) = (line for line in breaches if " numerics: " in line)
    assert numerics.startswith("BREACH numerics: layers.3 dgrad: relative_error 20 % is beyond")
    # The flushed dy of the last layer is the reference's, too.
    assert "layers.7" not in said.out
    found = cli("check", "faulty", "--baseline", "good", *source, "--json")
    assert (found.code, found.json["ok"], len(found.json["breaches"])) == (1, False, len(breaches))
    assert found.json["loss"]["mean_gap_ratio"] == pytest.approx(0.025, abs=0.003)


def test_the_null_may_come_from_twins_or_be_given(recipes: Any, cli: Callable[..., Any]) -> None:
    ask = ("check", "good-twin", "--baseline", "good", "--server", recipes.url, "--json")
    found = cli(*ask, "--null", "good-other", "--null", "good-twin")
    assert found.json["loss"]["null"] == "from 2 windows of 2 twins"
    strict = cli(*ask, "--max-loss-gap", "0.0000001", "--steps", "0:40")
    assert strict.json["loss"]["windows"][0]["limit"] == 1e-7
    assert strict.json["loss"]["shared_steps"] == 41
    assert cli(*ask, "--max-loss-gap", "1.5").code == 2


def test_a_gap_of_nothing_may_be_asked_for(cli: Callable[..., Any], recipes: Any) -> None:
    """Limit 0: every window whose loss is higher is over it."""
    asked = ("check", "good", "--baseline", "good-twin", "--max-loss-gap", "0", "--json")
    said = cli(*asked, "--database-url", recipes.database_url)
    assert said.code == 1
    worst = said.json["loss"]["worst"]
    assert (worst["limit"], worst["gap_ratio"] > 0) == (0.0, True)


def test_a_learned_baseline_is_a_reference_too(recipes: Any, cli: Callable[..., Any], tmp_path: Any) -> None:
    file = tmp_path / "good.json"
    made = cli(
        "baseline",
        "learn",
        "--run",
        "good",
        "--steps",
        "0:59",
        "--output",
        str(file),
        "--server",
        recipes.url,
    )
    assert made.code == 0, made.err
    twin = cli("check", "good-twin", "--baseline", str(file), "--server", recipes.url, "--json")
    # A baseline stands for a window without decisions and alerts, and the preset has one for the flushed layer.
    assert [breach["kind"] for breach in twin.json["breaches"]] == ["alerts"]
    assert twin.json["loss"]["shared_steps"] == 60
    faulty = cli("check", "faulty", "--baseline", str(file), "--server", recipes.url, "--json").json
    assert {breach["kind"] for breach in faulty["breaches"]} == {"alerts", "decisions", "loss", "numerics"}
    late = cli("check", "late", "--baseline", str(file), "--server", recipes.url, "--json").json
    assert late["loss"] is None
    assert "the loss was not compared" in late["notes"][0]


@pytest.mark.parametrize(
    ("run", "baseline", "said"),
    [
        ("nobody", "good", "has no run 'nobody'"),
        ("good", "gooood", "has no run 'gooood' (404). Did you mean good"),
        ("good", "77", "has no baseline 77"),
        ("good", "late", "they share no step: good has 0 to 59, late has 5000 to 5000"),
    ],
)
def test_what_cannot_be_compared_is_wrong_use(
    cli: Callable[..., Any], source: tuple[str, str], run: str, baseline: str, said: str
) -> None:
    answer = cli("check", run, "--baseline", baseline, *source)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_other_data_is_told_before_the_loss(recipes: Any, cli: Callable[..., Any]) -> None:
    import httpx2

    for step in range(8):
        slots = [{"index": 0, "layer": "layers.0", "gemm": "dgrad"}]
        columns = {name: [1] for name in ("count", "amax", "sum_sq", "sum_sq_q", "sum_sq_err", "nan", "inf")}
        columns |= {name: [None] for name in ("zeros", "underflow", "saturated")}
        columns["sum_sq_err"] = [1e-4]
        body = {
            "schema": 1,
            "attempt": {"id": "0"},
            "group": "0",
            "step": step,
            "slots": slots,
            "columns": columns,
        }
        body["run"] = {"loss": 2.0, "tokens": 8192}
        assert httpx2.post(f"{recipes.url}/api/v1/runs/other-data/samples", json=body).status_code == 200
    said = cli("check", "other-data", "--baseline", "good", "--server", recipes.url)
    assert said.code == 1
    assert "BREACH data: tokens differ at 8 of 8 steps: 8192 against 4096 at step 0" in said.out
    assert "15 of the reference's 16 slots were not measured in the run" in said.out.replace("\n  ", " ")
