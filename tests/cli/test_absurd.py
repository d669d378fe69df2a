"""Numbers, names and files beyond sense are answered in printable words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BEYOND, LONG = str(2**63), "9" * 5000
HEAD = {"schema": 1, "run": "a", "attempt": "0", "preset": "floor", "from_step": 0, "to_step": 9, "steps": 10}


@pytest.fixture(params=["server", "database"])
def source(request: pytest.FixtureRequest, service: Any) -> tuple[str, str]:
    if request.param == "server":
        return "--server", service.url
    return "--database-url", service.database_url


@pytest.mark.parametrize(
    "question",
    [
        ("replay", "sick-7b", "--to"),
        ("replay", "sick-7b", "--from"),
        ("report", "sick-7b", "--from-step"),
        ("report", "sick-7b", "--to-step"),
        ("check", "sick-7b", "--baseline", "healthy-7b", "--steps"),
        ("baseline", "learn", "--run", "sick-7b", "--output", "out.json", "--steps"),
        ("baseline", "show", "--run", "sick-7b"),
        ("check", "sick-7b", "--baseline"),
    ],
    ids=" ".join,
)
def test_a_number_that_no_database_holds_is_refused_in_words(
    cli: Callable[..., Any], source: tuple[str, str], question: tuple[str, ...]
) -> None:
    for number in (BEYOND, LONG):
        told = f"0:{number}" if question[-1] == "--steps" else number
        said = cli(*question, told, *source)
        assert (said.code, said.out) == (2, "")
        assert said.err
        assert "Traceback" not in said.err


def test_a_baseline_that_is_chosen_by_such_a_number_is_refused(cli: Callable[..., Any], service: Any) -> None:
    for number in (BEYOND, LONG):
        said = cli("baseline", "use", number, "--run", "sick-7b", "--server", service.url)
        assert (said.code, said.out) == (2, "")
        assert "give the id of a baseline, or none" in said.err


def test_steps_may_be_written_with_any_number_of_zeros(cli: Callable[..., Any], service: Any) -> None:
    span = f"{'0' * 5000}:{'0' * 5000}3"
    said = cli("check", "sick-7b", "--baseline", "healthy-7b", "--steps", span, "--server", service.url)
    assert said.code in (1, 2)
    assert "--steps" not in said.err


def test_a_layer_in_a_refusal_steers_no_terminal(
    cli: Callable[..., Any], service: Any, send_run: Callable[..., None]
) -> None:
    send_run(service.url, "enforced", 2, sick=True, mode="enforce")
    for layer in service.get("/runs/enforced/layers")["items"]:
        pin = ("run", "pin", "enforced", layer["layer"], "--on", "dgrad", "--action", "bf16_fallback")
        assert cli(*pin, "--server", service.url).code == 0
    send_run(service.url, "enforced", 4, sick=True, mode="enforce")
    wanted = ("baseline", "learn", "--run", "enforced", "--steps", "0:3", "--output", "out.json")
    said = cli(*wanted, "--database-url", service.database_url)
    assert (said.code, said.out) == (1, "")
    assert r"\x1b[31m" in said.err
    assert "\x1b" not in said.err


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.toml", "a=" + "[" * 5000, "nested too deeply"),
        ("a.toml", f"dwell_steps = {LONG}", "not TOML"),
        ("a.toml", f"ttl_steps = {10**9 + 1}", "ttl_steps is at most 1000000000"),
        ("a.json", '{"thresholds": {"gemm-error": {"act": 1' + "0" * 400 + "}}}", "act of gemm-error"),
        ("a.json", '{"thresholds": {"underflow": {"min_count": 1000000001}}}', "from 0 to 1000000000"),
        ("a.json", '{"thresholds": []}', "thresholds is a table"),
        ("a.json", '{"baseline": 0}', "not 0"),
        ("a.json", '{"ttl_steps": 5, "ttl_steps": 6}', "the name 'ttl_steps' stands twice"),
        ("a.json", '{"thresholds": {"gemm-error": {"act": 1, "act": 2}}}', "the name 'act' stands twice"),
        ("a.toml", "ttl_steps = 5\nttl_steps = 6", "not TOML"),
        ("a.json", f'{{"baseline": {BEYOND}}}', BEYOND),
    ],
)
def test_a_file_that_is_no_policy_is_refused_in_words(
    cli: Callable[..., Any], service: Any, name: str, text: str, why: str
) -> None:
    Path(name).write_text(text, encoding="utf-8")
    said = cli("replay", "sick-7b", "--policy", name, "--database-url", service.database_url)
    assert (said.code, said.out) == (2, "")
    assert why in said.err
    assert len(said.err) < 1000


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**HEAD, "steps": 1, "families": {}}).replace('"steps": 1', '"steps": Infinity'),
        json.dumps({**HEAD, "families": {"x": {"fmt": None, "metrics": {"a": [1, 10**400, 1, 1]}}}}),
        "[" * 100_000,
    ],
    ids=["infinite", "huge", "deep"],
)
def test_a_file_that_is_no_baseline_is_refused_in_words(
    cli: Callable[..., Any], service: Any, text: str
) -> None:
    Path("b.json").write_text(text, encoding="utf-8")
    said = cli("check", "sick-7b", "--baseline", "b.json", "--database-url", service.database_url)
    assert (said.code, said.out) == (2, "")
    assert "b.json" in said.err
