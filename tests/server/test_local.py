"""What a client decided alone is recorded once, taken into the run's plan, and the policy's own from then on."""

from typing import Any

import pytest
from starlette.testclient import TestClient

RUN = "/api/v1/runs/demo"
ILL = "blocks.1.mlp"
ID = "demo-local-0-2-1"


def decision(**changes: Any) -> dict[str, Any]:
    fixed = {
        "id": ID, "run": "demo", "step": 2, "layer": ILL, "target": {"gemm": "fprop"}, "action": "bf16_fallback",
        "value": None, "rule": "non-finite", "reason": "the product is not finite", "evidence": {"signals": [], "local_plan_version": 1},
        "mode": "enforce", "state": "sent", "actor": "client", "not_before_step": 3,
    }  # fmt: skip
    return {**fixed, **changes}


def nonfinite(layer: str = ILL) -> Any:
    """A product that is not finite."""
    return {(layer, "fprop"): {"nan": 5}}


@pytest.fixture
def away(post: Any) -> Any:
    """A client that was away: it made plan 1 by itself at step 2, in force since step 4."""

    def send(step: int, *decisions: dict[str, Any], version: int = 1, **header: Any) -> dict[str, Any]:
        header = {"mode": "enforce", "plan_version": version, "effective_step": 4, **header}
        reply: dict[str, Any] = post(step, local_decisions=list(decisions), **header)
        return reply

    post(0, mode="enforce")
    return send


def decisions(client: TestClient) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{RUN}/decisions").json()["items"]
    return items


def places(plan: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(e["layer"], e["target"].get("gemm"), e["decision_id"]) for e in plan["entries"]]


def test_it_is_recorded_as_the_clients_and_its_entry_joins_the_plan_above_both(
    client: TestClient, away: Any
) -> None:
    reply = away(3, decision())
    assert reply["local_decisions"] == [ID]
    assert reply["plan"]["version"] == reply["plan_version"] == 2
    assert places(reply["plan"]) == [(ILL, "fprop", ID)]
    (item,) = decisions(client)
    assert (item["id"], item["actor"], item["state"], item["rule"]) == (ID, "client", "sent", "non-finite")
    assert [shown["id"] for shown in reply["decisions"]] == [ID]


def test_the_sample_that_made_it_ran_before_the_clients_plan_and_says_its_version(away: Any) -> None:
    reply = away(2, decision(evidence={"local_plan_version": 3}), version=0, effective_step=None)
    assert reply["plan"]["version"] == 4


def test_a_repeat_changes_nothing_and_says_when_it_took_effect(client: TestClient, away: Any) -> None:
    away(3, decision())
    again = away(3, decision())
    assert (again["local_decisions"], again["decisions"]) == ([ID], [])
    assert again["plan"]["version"] == 2
    later = away(4, decision(effective_step=4))
    assert later["plan"]["version"] == 2
    (item,) = decisions(client)
    assert (item["state"], item["effective_step"]) == ("applied", 4)
    # The client's own plan bears number 1, which is no plan of the server's.
    assert away(5, decision(effective_step=4))["plan_version"] == 2


def test_the_policy_leaves_the_spot_alone_and_makes_no_decision_of_its_own_there(
    client: TestClient, post: Any, away: Any
) -> None:
    post(1, nonfinite(), mode="enforce")
    reply = post(
        2, nonfinite(), mode="enforce", plan_version=0, effective_step=None, local_decisions=[decision()]
    )
    for step in range(3, 8):
        post(step, nonfinite(), mode="enforce", plan_version=2, effective_step=5)
    assert places(reply["plan"]) == [(ILL, "fprop", ID)]
    changed = [item for item in decisions(client) if item["action"] != "advice"]
    assert [item["id"] for item in changed] == [ID]
    assert client.get(f"{RUN}/plan").json()["version"] == 2


def test_without_it_the_policy_decides_there_itself(client: TestClient, post: Any) -> None:
    for step in range(4):
        post(step, nonfinite() if step else None, mode="enforce")
    (item,) = (item for item in decisions(client) if item["action"] != "advice")
    assert (item["actor"], item["layer"], item["target"]) == ("policy", ILL, {"gemm": "fprop"})


def test_what_the_plan_holds_already_is_not_put_into_it_twice(
    client: TestClient, post: Any, away: Any
) -> None:
    """The server had decided the same, and its reply was lost."""
    for step in (1, 2):
        post(step, nonfinite(), mode="enforce")
    held = client.get(f"{RUN}/plan").json()
    assert held["version"] == 1
    reply = away(3, decision())
    assert reply["plan"]["entries"] == held["entries"]
    assert reply["plan"]["version"] == 2  # the client has a plan 1 of its own
    away(4, decision(effective_step=4))
    (item,) = (item for item in decisions(client) if item["id"] == ID)
    assert held["entries"][0]["decision_id"] in item["outcome"]
    assert (item["state"], item["effective_step"]) == ("applied", 4)


def test_a_pinned_layer_and_a_mode_that_changes_nothing_are_respected(client: TestClient, away: Any) -> None:
    pin = {"layer": ILL, "target": {"gemm": "fprop"}, "action": "bf16_fallback", "value": None}
    assert client.put(f"{RUN}/pins", json=pin).status_code == 200
    pinned = away(3, decision(id="demo-local-0-3-1"))
    client.patch(RUN, json={"mode": "observe"})
    observed = away(4, decision(id="demo-local-0-4-1", layer="blocks.2.mlp"), version=5)
    client_ids = {item["id"]: item for item in decisions(client) if item["actor"] == "client"}
    assert {item["state"] for item in client_ids.values()} == {"reverted"}
    assert "pinned" in client_ids["demo-local-0-3-1"]["outcome"]
    assert "observe" in client_ids["demo-local-0-4-1"]["outcome"]
    # The client is told to leave its own plan all the same.
    assert pinned["plan"]["version"] > 1
    assert observed["plan"]["version"] == 6
    assert all(entry["decision_id"] not in client_ids for entry in observed["plan"]["entries"])


def test_of_an_attempt_that_is_over_it_is_recorded_and_no_more(
    client: TestClient, post: Any, away: Any
) -> None:
    post(3, mode="enforce", attempt={"id": "1", "parent": "0", "from_step": 3})
    reply = away(4, decision())
    assert reply["plan"] is None
    assert client.get(f"{RUN}/plan").json() == {"version": 0, "entries": []}
    (item,) = decisions(client)
    assert (item["state"], item["actor"]) == ("expired", "client")


def test_people_can_undo_it_and_it_does_not_come_back(client: TestClient, away: Any) -> None:
    away(3, decision())
    assert client.post(f"/api/v1/decisions/{ID}:revert").status_code == 200
    reply = away(4, decision())
    assert (reply["plan"]["version"], reply["plan"]["entries"]) == (3, [])
    (item,) = decisions(client)
    assert item["state"] == "reverted"


@pytest.mark.parametrize(
    "wrong",
    [
        decision(action="restore"),
        decision(action="advice"),
        decision(step="two"),
        decision(target={"gemm": "sideways"}),
        decision(id="../../etc"),
        decision(evidence=[1]),
        decision(state="done"),
        decision(evidence={"local_plan_version": "one"}),
        {"id": ID},
        "no decision",
    ],
)
def test_what_is_no_decision_is_refused_by_name(client: TestClient, documents: Any, wrong: Any) -> None:
    answer = client.post(f"{RUN}/samples", json=documents.sample(0, local_decisions=[wrong]))
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == ["/local_decisions/0"]


def test_a_worst_slot_may_be_a_gemm(client: TestClient, documents: Any) -> None:
    worst = {"rank": 1, "host": "a", "layer": ILL, "gemm": "fprop", "metric": "relative_error", "value": 0.3}
    client.post(f"{RUN}/samples", json=documents.sample(0, ranks=[worst]))
    (shown,) = client.get(RUN).json()["ranks"]
    assert {name: value for name, value in shown.items() if value is not None} == worst
