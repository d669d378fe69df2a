"""Causes that stand: in the run's detail, its verdict, on its page, and gone once they are over."""

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.plan import Decision, Target
from fp8_safeguard.monitor.state import place
from fp8_safeguard.server import deciding

API = "/api/v1/runs/demo"
DGRAD = {("blocks.0.mlp", "dgrad"): {"sum_sq_err": 16384.0}}


def named(cause: str, kind: str, layer: str | None, **more: Any) -> dict[str, Any]:
    slot = None if layer is None else {"layer": layer, "operand": "x", "layout": "row"}
    fields = {"slot": slot, "summary": f"it is {cause}", "evidence": {}, "advice": None, "value": None}
    return {"name": cause, "kind": kind, "layer": layer, **fields, **more}


class Diagnosing:
    """A policy that names the causes it is given: of its decisions, and in advice that lasts while it is given."""

    def __init__(self) -> None:
        self.of_decisions: dict[str, Any] | None = None
        self.advice: dict[str, Any] | None = None
        self.restores = False
        """Whether nothing is left in the plan, as once all has been restored."""

    def decide(self, state: Any, step: Any, config: Any) -> Any:
        after, made = policy.decide(state, step, config)
        if self.of_decisions is not None:
            made = tuple(replace(one, evidence={**one.evidence, "cause": self.of_decisions}) for one in made)
        advised = {key: last for key, last in after.advised.items() if not key.startswith("(run)|")}
        if self.advice is not None:
            key = place("(run)", Target(), self.advice["name"])
            if key not in state.advised:
                made += (self._advice(after, step.step, config),)
                after = replace(after, decisions_made=after.decisions_made + 1)
            advised[key] = step.step
        plan = after.plan.emptied() if self.restores else after.plan
        return replace(after, advised=advised, plan=plan), made

    def _advice(self, state: Any, step: int, config: Any) -> Decision:
        assert self.advice is not None
        return Decision(
            id=f"{config.run}-{state.decisions_made + 1}",
            run=config.run,
            step=step,
            layer="(run)",
            target=Target(),
            action="advice",
            rule=self.advice["name"],
            reason=self.advice["summary"],
            evidence={"cause": self.advice},
            mode=config.mode,
            state="proposed",
            not_before_step=step + 1,
        )


@pytest.fixture
def diagnosing(monkeypatch: pytest.MonkeyPatch) -> Diagnosing:
    made = Diagnosing()
    monkeypatch.setattr(deciding, "decide", made.decide)
    return made


def test_a_cause_stands_as_long_as_its_decision(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    diagnosing.of_decisions = named("outlier-channels", "fp8", "blocks.0.mlp")
    post(0, mode="advise")
    assert client.get(API).json()["causes"] == []
    (made,) = post(1, DGRAD)["decisions"]
    detail = client.get(API).json()
    (cause,) = detail["causes"]
    assert (cause["name"], cause["first_step"], cause["decisions"]) == ("outlier-channels", 1, [made["id"]])
    why = detail["verdict"]["why"]
    assert why.startswith("'blocks.0.mlp' dgrad: GEMM error")
    assert why.endswith("; cause: outlier channels (FP8)")
    assert (cause["found_step"], cause["step"]) == (1, 1)
    client.post(f"/api/v1/decisions/{made['id']}:approve")
    assert len(client.get(API).json()["causes"]) == 1
    client.post(f"/api/v1/decisions/{made['id']}:revert")
    assert client.get(API).json()["causes"] == []


def test_a_cause_is_over_once_what_was_decided_on_it_is_restored(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    diagnosing.of_decisions = named("outlier-channels", "fp8", "blocks.0.mlp")
    post(0, DGRAD, mode="enforce")
    post(1, plan_version=1, effective_step=2)
    assert len(client.get(API).json()["causes"]) == 1
    diagnosing.restores = True
    post(2, plan_version=1)
    # The decision is stored as applied still: it was.
    assert client.get(f"{API}/decisions").json()["items"][-1]["state"] == "applied"
    assert client.get(API).json()["causes"] == []


WATCHED = {"underflow": 1400, "zeros": 1400}
"""2.1 %: over the watch level of dy in columns, which has no act level."""


def test_a_verdict_names_a_cause_only_with_an_alert_that_follows_from_it(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    """A watch of the first layer is older than the scale of the third that is to blame for something else."""
    first = {("blocks.0.mlp", "dy col"): WATCHED}
    for step in range(3):
        post(step, first, mode="observe")
    (old,) = client.get(f"{API}/alerts").json()["items"]
    slot = {"layer": "blocks.2.mlp", "operand": "x", "layout": "col"}
    diagnosing.of_decisions = named("scale-too-small", "fp8", "blocks.2.mlp", slot=slot)
    sick = {("blocks.2.mlp", "fprop"): {"sum_sq_err": 16384.0}}
    post(3, {**first, **sick})
    # Of two that act, the one with the cause; a watch never goes before it.
    assert client.get(API).json()["verdict"]["why"].startswith("'blocks.2.mlp' fprop: GEMM error")
    fprop = next(item for item in client.get(f"{API}/alerts").json()["items"] if item["id"] != old["id"])
    client.post(f"/api/v1/alerts/{fprop['id']}:resolve")
    detail = client.get(API).json()
    assert [cause["name"] for cause in detail["causes"]] == ["scale-too-small"]
    assert detail["verdict"]["why"] == "'blocks.0.mlp' dy col: underflow 2.14 % (limit 2 %) since step 0"
    # A younger watch downstream of the cause is the one to tell, and says whose the cause is.
    later = {("blocks.4.mlp", "x row"): {"underflow": 400, "zeros": 400}}
    for step in range(4, 7):
        post(step, {**first, **later})
    why = client.get(API).json()["verdict"]["why"]
    assert why == (
        "'blocks.4.mlp' x row: underflow 0.61 % (limit 0.5 %) since step 4; "
        "cause: scale too small (FP8) of layer 'blocks.2.mlp'"
    )


def test_a_verdict_on_what_the_plan_holds_names_its_cause(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    diagnosing.of_decisions = named("outlier-channels", "fp8", "blocks.0.mlp")
    post(0, DGRAD, mode="enforce")
    verdict = client.get(API).json()["verdict"]
    assert verdict["state"] == "fallback"
    assert verdict["why"].endswith("; cause: outlier channels (FP8)")
    assert verdict["next"] == (
        "look at the cause: it is outlier-channels (demo-1); a gemm returns to FP8 once its numbers are healthy again"
    )


def test_a_watch_beside_a_plan_in_force_does_not_say_that_nothing_is_decided(
    client: TestClient, post: Any
) -> None:
    first = {("blocks.0.mlp", "dy col"): WATCHED}
    post(0, mode="enforce")
    for step in (1, 2):
        post(step, first, mode="enforce")
    assert client.get(API).json()["verdict"]["next"] == "watch it: nothing is decided on this alone"
    pin = {"layer": "blocks.2.mlp", "action": "scale_multiplier", "value": 0.5}
    assert client.put(f"{API}/pins", json=pin).status_code == 200
    verdict = client.get(API).json()["verdict"]
    assert (verdict["state"], verdict["next"]) == (
        "watch",
        "watch it; what is decided and in force, 'blocks.2.mlp' with other scales, stays so meanwhile",
    )
    for alert in client.get(f"{API}/alerts").json()["items"]:
        client.post(f"/api/v1/alerts/{alert['id']}:resolve")
    verdict = client.get(API).json()["verdict"]
    assert (verdict["state"], verdict["why"]) == (
        "healthy",
        "every judged slot is within its thresholds; the plan holds 'blocks.2.mlp' with other scales",
    )


def test_what_is_not_fp8_is_said_even_of_healthy_numerics_and_goes_when_it_is_over(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    advice = "look at the batch of step 1"
    diagnosing.advice = named("data-spike", "not-fp8", None, advice=advice)
    for step in range(3):
        post(step)
    detail = client.get(API).json()
    assert detail["state"] == "healthy"
    assert detail["verdict"]["why"] == (
        "not FP8: it is data-spike; in FP8 every judged slot is within its thresholds"
    )
    assert detail["verdict"]["next"] == f"{advice}; no precision helps"
    (made,) = client.get(f"{API}/decisions").json()["items"]
    # It is stored as proposed, and waits for nobody's answer.
    count = client.get("/runs/demo").text.partition('id="decisions-count"')[2].partition("</span>")[0]
    assert (made["state"], count.partition(">")[2].split()) == ("proposed", ["1"])
    diagnosing.advice = None
    post(3)
    detail = client.get(API).json()
    assert (detail["causes"], detail["verdict"]["next"]) == ([], "nothing to do")


def test_a_broken_machine_goes_before_the_other_causes(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    diagnosing.of_decisions = named("outlier-channels", "fp8", "blocks.0.mlp")
    diagnosing.advice = named("one-rank", "hardware", None, advice="look at host n7")
    post(0, DGRAD, mode="enforce")
    detail = client.get(API).json()
    assert [cause["kind"] for cause in detail["causes"]] == ["hardware", "fp8"]
    assert detail["verdict"]["why"].startswith("hardware: it is one-rank (and 1 more cause); ")
    assert detail["verdict"]["next"] == "look at host n7"


def test_the_page_folds_what_follows_and_shows_the_worst_ranks(
    client: TestClient, post: Any, diagnosing: Diagnosing
) -> None:
    diagnosing.of_decisions = named("outlier-channels", "fp8", "blocks.0.mlp")
    sick = {(f"blocks.{number}.mlp", "x row"): {"underflow": 700, "zeros": 700} for number in range(1, 6)}
    rank = {"rank": 3, "host": "n7", "layer": "blocks.0.mlp", "operand": "x", "metric": "amax", "value": 1e9}
    for step in range(3):
        post(step, {**DGRAD, **sick}, mode="advise", ranks=[rank])
    (shown,) = client.get(API).json()["ranks"]
    assert rank.items() <= shown.items()
    page = client.get("/runs/demo").text
    assert 'data-cause="outlier-channels"' in page
    assert "Following from it: 5 alerts in 5 layers" in page
    assert "<b>rank 3</b> on n7: <code>blocks.0.mlp</code>" in page
    # Not one of them stands beside the incident as an alert of its own.
    incidents, _, rest = page.partition('id="tab-decisions"')[2].partition("</details>\n          </li>")
    assert incidents.count("data-ids=") == 6
    assert rest.count("data-ids=") == 0
    assert 'href="/causes#outlier-channels"' in page
    layer = client.get("/runs/demo/layer", params={"layer": "blocks.0.mlp"})
    assert "outlier channels" in layer.text or layer.status_code == 404


def test_the_page_of_causes_has_a_place_for_each(client: TestClient) -> None:
    page = client.get("/causes")
    assert page.status_code == 200
    for name in ("outlier-channels", "norm-gain", "one-rank"):
        assert f'id="{name}"' in page.text
