"""Acting on alerts and decisions from the command line."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.plan import Decision, Target
from fp8_safeguard.server import deciding
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings


@pytest.fixture
def server(tmp_path: Path, send_run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_server(Settings(database_url=f"sqlite:///{tmp_path}/store.db")) as url:
        send_run(url, "r1", 6, sick=True, mode="advise")
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", url)
        yield url


def first(cli: Callable[..., Any], what: str, **wanted: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = cli(what, "--json").json["items"]
    return next(item for item in items if wanted.items() <= item.items())


@pytest.mark.usefixtures("server")
def test_an_alert_is_acknowledged_in_the_name_of_who_does_it(cli: Callable[..., Any]) -> None:
    alert = first(cli, "alerts", state="open")
    said = cli("alert", "ack", str(alert["id"]), "--by", "Ada")
    assert said.code == 0
    assert said.out.startswith(f"Alert {alert['id']} ({alert['rule']}, ")
    assert first(cli, "alerts", id=alert["id"])["acknowledged_by"] == "Ada"
    assert "known to Ada" in cli("alerts").out


@pytest.mark.usefixtures("server")
def test_an_alert_is_silenced_for_as_long_as_said(cli: Callable[..., Any]) -> None:
    alert = str(first(cli, "alerts", state="open")["id"])
    for duration, seconds in (("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129600)):
        before = datetime.now().astimezone()
        item = cli("alert", "silence", alert, "--for", duration, "--json").json
        until = datetime.fromisoformat(item["silenced_until"])
        assert item["silenced"] is True
        assert seconds - 1 <= (until - before).total_seconds() <= seconds + 60
    assert cli("alert", "silence", alert, "--for", "0", "--json").json["silenced"] is False


@pytest.mark.parametrize("duration", ["", "-1h", "1w", "soon", "1h30m"])
def test_a_duration_that_is_none_is_a_usage_error(cli: Callable[..., Any], duration: str) -> None:
    said = cli("alert", "silence", "1", f"--for={duration}")
    assert said.code == 2
    assert "90s, 30m, 2h or 1d" in said.err


@pytest.mark.usefixtures("server")
def test_an_alert_is_resolved_by_hand(cli: Callable[..., Any]) -> None:
    alert = first(cli, "alerts", state="open")
    item = cli("alert", "resolve", str(alert["id"]), "--by", "Ada", "--json").json
    assert (item["state"], item["resolved_by"]) == ("resolved", "Ada")
    assert first(cli, "alerts", id=alert["id"])["state"] == "resolved"


@pytest.mark.usefixtures("server")
def test_a_proposed_decision_is_rejected_once(cli: Callable[..., Any]) -> None:
    decision = first(cli, "decisions", state="proposed")
    said = cli("decision", "reject", decision["id"], "--by", "Ada")
    assert said.code == 0
    assert said.out.endswith("rejected\n")
    assert first(cli, "decisions", id=decision["id"])["actor"] == "Ada"
    again = cli("decision", "reject", decision["id"])
    assert (again.code, again.out) == (1, "")
    assert "409" in again.err
    assert "is rejected; only proposed ones" in again.err


@pytest.mark.usefixtures("server")
def test_what_is_not_there_is_one_line(cli: Callable[..., Any]) -> None:
    for command in ("alert ack 999", "decision approve nope", "decision revert a/b?c"):
        said = cli(*command.split())
        assert (said.code, said.out) == (1, "")
        assert "404" in said.err
        assert said.err.count("\n") == 1


@pytest.mark.usefixtures("server")
def test_an_unprintable_name_is_refused_by_the_server_as_a_usage_error(cli: Callable[..., Any]) -> None:
    said = cli("alert", "ack", "1", "--by", "a\x1b[31m")
    assert said.code == 2
    assert "\x1b" not in said.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("alerts ack 3", "alert ack 3"), ("decisions approve r1-1", "decision approve r1-1")],
)
def test_the_plural_says_which_command_is_meant(cli: Callable[..., Any], typed: str, meant: str) -> None:
    said = cli(*typed.split())
    assert said.code == 2
    assert said.err == f"To act on one: fp8-safeguard {meant}\n"


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision of a step is a part of one remedy, and names a cause."""
    cause = {
        "name": "token-imbalance",
        "kind": "not-fp8",
        "layer": None,
        "slot": None,
        "summary": "loss weights",
    }

    def decide(state: Any, step: Any, config: Any) -> Any:
        # Each of the two layers is a sixth of the model: within the usual budget there is room for neither.
        state, made = policy.decide(state, step, replace(config, budget_ratio=1.0))
        more = {"remedy": {"id": "r1-1", "name": "pair", "entries": 2}, "cause": cause}
        return state, tuple(replace(one, evidence={**one.evidence, **more}) for one in made)

    monkeypatch.setattr(deciding, "decide", decide)


@pytest.mark.usefixtures("paired", "server")
def test_half_a_remedy_says_what_waits(cli: Callable[..., Any]) -> None:
    ids = [item["id"] for item in cli("decisions", "--state", "proposed", "--json").json["items"]]
    assert len(ids) > 1
    said = cli("decision", "approve", ids[0], "--by", "Ada")
    assert (said.code, said.out.endswith("approved\n")) == (0, True)
    assert all(other in said.err for other in ids[1:])
    assert "--all-of-remedy" in said.err


@pytest.mark.usefixtures("paired", "server")
def test_all_of_a_remedy_is_approved_at_once(cli: Callable[..., Any]) -> None:
    ids = [item["id"] for item in cli("decisions", "--state", "proposed", "--json").json["items"]]
    said = cli("decision", "approve", ids[-1], "--all-of-remedy")
    assert (said.code, said.err) == (0, "")
    assert cli("decisions", "--state", "proposed").out == "r1: no decisions.\n"
    assert {entry["decision_id"] for entry in cli("plan", "--json").json["entries"]} == set(ids)


@pytest.fixture
def advising(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that gives people one piece of advice, and decides nothing else."""

    def decide(state: Any, step: Any, config: Any) -> Any:
        made = Decision(
            id=f"{config.run}-{state.decisions_made + 1}",
            run=config.run,
            step=step.step,
            layer="blocks.0.mlp.up",
            target=Target(),
            action="advice",
            rule="norm-gain",
            reason="the gain is 18.2; set it back to 1.14",
            mode=config.mode,
            state="proposed",
            not_before_step=step.step + 1,
        )
        after = replace(state, last_step=step.step, decisions_made=state.decisions_made + 1)
        return after, (made,)

    monkeypatch.setattr(deciding, "decide", decide)


@pytest.mark.usefixtures("advising", "server")
@pytest.mark.parametrize(("answer", "state"), [("approve", "approved"), ("reject", "rejected")])
def test_an_answer_to_advice_says_that_nothing_was_switched(
    cli: Callable[..., Any], answer: str, state: str
) -> None:
    said = cli("decision", answer, "r1-1")
    assert (said.code, said.out.endswith(f"{state}\n")) == (0, True)
    assert said.err == (
        "It is advice, for people: your answer is noted, the plan stays as it is. "
        "It said: the gain is 18.2; set it back to 1.14\n"
    )
    assert cli("plan", "--json").json["entries"] == []


@pytest.mark.usefixtures("paired", "server")
def test_causes_are_told_by_every_reading_command(cli: Callable[..., Any]) -> None:
    assert "not FP8: loss weights; " in cli("status").out
    assert "token-imbalanced gradients (not FP8)" in cli("decisions").out
    lines = [line for line in cli("status").out.splitlines() if line.strip().startswith("cause")]
    assert len(lines) == 1
    assert "token-imbalanced gradients (not FP8), since step" in lines[0]
    # An alert that blames FP8 is none of its doing; the others are.
    rows = cli("alerts").out.splitlines()
    assert [("act" in row.split(), "token-imbalanced" in row) for row in rows[2:]].count((True, True)) == 0
    assert any("token-imbalanced" in row for row in rows) == any("watch" in row.split() for row in rows)
