"""When the policy runs, what it changes, and what people may change."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"


@pytest.fixture
def post_to(documents: Any) -> Any:
    """Makes what posts steps of a run; `error` is the relative error of one layer's recomputed dgrad, or another gemm."""

    def of(client: TestClient, run: str = "demo") -> Any:
        def post(step: int, error: float = 0.025, gemm: str = "dgrad", **header: Any) -> dict[str, Any]:
            slots = documents.slots(8)
            values = [documents.values(slot) for slot in slots]
            for slot, row in zip(slots, values, strict=True):
                if slot["layer"] == BAD and slot.get("gemm") == gemm:
                    row["sum_sq_err"] = row["sum_sq"] * error**2
            sample = documents.sample(step, slots, values, **{"mode": "enforce", **header})
            answer = client.post(f"/api/v1/runs/{run}/samples", json=sample)
            assert answer.status_code == 200, answer.text
            reply: dict[str, Any] = answer.json()
            return reply

        return post

    return of


@pytest.fixture
def post(client: TestClient, post_to: Any) -> Any:
    return post_to(client)


def states(client: TestClient) -> list[str]:
    return [item["state"] for item in client.get(f"{API}/decisions").json()["items"]]


def test_with_one_group_the_decision_is_in_the_reply_that_caused_it(client: TestClient, post: Any) -> None:
    for step in range(4):
        assert post(step)["decisions"] == []
    reply = post(4, error=0.5)
    (decision,) = reply["decisions"]
    assert {name: decision[name] for name in ("run", "step", "layer", "target", "action", "state")} == {
        "run": "demo",
        "step": 4,
        "layer": BAD,
        "target": {"gemm": "dgrad"},
        "action": "bf16_fallback",
        "state": "sent",
    }
    assert decision["not_before_step"] == 5
    assert reply["plan_version"] == 1
    (entry,) = reply["plan"]["entries"]
    assert (entry["layer"], entry["decision_id"]) == (BAD, decision["id"])
    assert client.get(f"{API}/plan").json() == reply["plan"]
    assert [alert["layer"] for alert in reply["alerts"]] == [BAD]
    assert client.get(f"{API}/alerts").json()["items"] == reply["alerts"]


@pytest.mark.parametrize("mode", ["enforce", "advise"])
def test_at_the_last_step_that_there_is_decisions_and_pins_are_made(
    make_client: Any, post_to: Any, tmp_path: Any, mode: str
) -> None:
    last = 2**63 - 1
    policy = tmp_path / "policy.toml"
    policy.write_text("ttl_steps = 400\n", encoding="utf-8")
    client = make_client(policy_file=str(policy))
    assert post_to(client)(last - 300, error=0.5, mode=mode)["decisions"][0]["not_before_step"] == last - 299
    reply = post_to(client, "other")(last, error=0.5, mode=mode)
    assert {decision["not_before_step"] for decision in reply["decisions"]} == {last}
    if mode == "advise":
        for decision in (f"{run}-1" for run in ("demo", "other")):
            assert client.post(f"/api/v1/decisions/{decision}:approve", json={}).status_code == 200
        pin = {"layer": "blocks.5.mlp", "action": "bf16_fallback"}
        assert client.put("/api/v1/runs/other/pins", json=pin).status_code == 200
    assert client.get(f"{API}/plan").json()["entries"][0]["expires_step"] == last


def test_the_plan_is_sent_only_to_a_client_with_an_older_one(post: Any) -> None:
    assert post(0, error=0.5)["plan"]["version"] == 1
    assert post(1, plan_version=0)["plan"]["version"] == 1
    assert post(2, plan_version=1, effective_step=3)["plan"] is None
    assert post(3, plan_version=1)["plan_version"] == 1


def test_a_reported_effective_step_makes_decisions_applied(client: TestClient, post: Any) -> None:
    post(0, error=0.5)
    post(1, plan_version=0)
    assert states(client) == ["sent"]
    post(2, plan_version=1, effective_step=3)
    (decision,) = client.get(f"{API}/decisions").json()["items"]
    assert (decision["state"], decision["effective_step"]) == ("applied", 3)
    post(4, plan_version=1, effective_step=9)
    assert client.get(f"{API}/decisions").json()["items"][0]["effective_step"] == 3


def test_layers_and_run_show_the_fallback(client: TestClient, post: Any) -> None:
    post(0)
    assert client.get(API).json()["state"] == "healthy"
    post(1, error=0.5)
    listed = {item["layer"]: item for item in client.get(f"{API}/layers").json()["items"]}
    assert listed[BAD]["state"] == "fallback"
    assert listed[BAD]["precision"] == {"fprop": "fp8", "dgrad": "bf16", "wgrad": "fp8"}
    assert listed[BAD]["worst"] == {
        "metric": "relative_error",
        "operand": None,
        "layout": None,
        "gemm": "dgrad",
        "value": pytest.approx(0.5),
        "threshold": 0.05,
        "step": 1,
    }
    assert listed["blocks.1.mlp"]["state"] == "healthy"
    assert client.get(f"{API}/layers").json()["items"][0]["layer"] == BAD
    detail = client.get(API).json()
    assert (detail["state"], detail["verdict"]["state"]) == ("fallback", "fallback")
    assert 0 < detail["fallback_budget_used_ratio"] <= 1
    filtered = client.get(f"{API}/layers", params={"state": "fallback"}).json()["items"]
    assert [item["layer"] for item in filtered] == [BAD]


def test_observe_stores_proposals_and_leaves_the_plan(client: TestClient, post: Any) -> None:
    reply = post(0, error=0.5, mode="observe")
    assert [decision["state"] for decision in reply["decisions"]] == ["proposed"]
    assert (reply["plan_version"], reply["plan"]) == (0, None)
    refused = client.post(f"/api/v1/decisions/{reply['decisions'][0]['id']}:approve")
    assert (refused.status_code, refused.json()["type"]) == (409, "mode-conflict")
    assert client.get(f"{API}/plan").json() == {"version": 0, "entries": []}
    assert client.get(API).json()["state"] == "unstable"


def test_advise_waits_for_a_person(client: TestClient, post: Any) -> None:
    made = post(0, error=0.5, mode="advise")["decisions"][0]
    assert made["state"] == "proposed"
    approved = client.post(f"/api/v1/decisions/{made['id']}:approve", json={"by": "ada"}).json()
    assert (approved["state"], approved["actor"]) == ("approved", "ada")
    assert post(1)["plan"]["entries"][0]["decision_id"] == made["id"]
    assert states(client) == ["sent"]
    again = client.post(f"/api/v1/decisions/{made['id']}:approve")
    assert (again.status_code, again.json()["type"]) == (409, "decision-state")
    post(2, plan_version=1, effective_step=4)
    assert states(client) == ["applied"]
    assert client.post(f"/api/v1/decisions/{made['id']}:revert").json()["state"] == "reverted"
    assert client.get(f"{API}/plan").json() == {"version": 2, "entries": []}


def test_a_rejected_proposal_rests(client: TestClient, post: Any) -> None:
    made = post(0, error=0.5, mode="advise")["decisions"][0]
    assert client.post(f"/api/v1/decisions/{made['id']}:reject").json()["state"] == "rejected"
    assert post(1, error=0.5)["decisions"] == []
    assert client.post("/api/v1/decisions/demo-99:reject").json()["type"] == "decision-not-found"
    assert client.post("/api/v1/decisions/demo-99:reject").status_code == 404


def test_the_kill_switch_empties_the_plan_and_only_observes(client: TestClient, post: Any) -> None:
    post(0, error=0.5)
    answer = client.post(f"{API}:kill-switch")
    assert answer.status_code == 200
    assert answer.json()["plan"] == {"version": 2, "entries": []}
    assert answer.json()["run"]["mode"] == "observe"
    assert states(client) == ["reverted"]
    assert post(1, error=0.5, plan_version=1)["plan"] == {"version": 2, "entries": []}


def test_a_pin_enters_the_plan_and_is_left_alone(client: TestClient, post: Any) -> None:
    post(0)
    pin = {"layer": BAD, "target": {"gemm": "wgrad"}, "action": "bf16_fallback", "by": "ada"}
    put = client.put(f"{API}/pins", json=pin)
    assert put.status_code == 200, put.text
    assert client.get(f"{API}/plan").json()["entries"][0]["target"] == {"gemm": "wgrad"}
    assert post(1, error=0.5)["decisions"] == []
    assert client.get(f"{API}/pins").json()["items"][0]["actor"] == "ada"
    gone = client.delete(f"{API}/pins", params={"layer": BAD, "gemm": "wgrad"})
    assert gone.json() == {"items": [], "next_page_token": None}
    assert client.get(f"{API}/plan").json()["entries"] == []
    assert client.delete(f"{API}/pins", params={"layer": BAD}).json()["type"] == "pin-not-found"
    assert client.put(f"{API}/pins", json={"layer": "none"}).status_code == 404
    assert client.put(f"{API}/pins", json={"target": {}}).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        '{"layer": "blocks.0.mlp", "action": "dance"}',
        '{"layer": "blocks.0.mlp", "action": ["bf16_fallback"]}',
        '{"layer": "blocks.0.mlp", "action": "scale_multiplier", "value": NaN}',
        '{"layer": "blocks.0.mlp", "action": "scale_multiplier", "value": 1e999}',
        '{"layer": "blocks.0.mlp", "action": "format", "value": "\\ud800"}',
        '{"layer": "blocks.0.mlp", "action": "scale_multiplier", "value": true}',
        '{"layer": "blocks.0.mlp", "target": {"gemm": "none"}}',
        '{"layer": "blocks.0.mlp", "target": "all"}',
        '{"layer": "blocks.0.mlp", "by": "\\ud800"}',
        '{"layer": 5}',
        '{"layer": ["\\ud800"]}',
        "[]",
    ],
)
def test_a_pin_that_cannot_be_one_is_422(client: TestClient, post: Any, body: str) -> None:
    post(0)
    answer = client.put(f"{API}/pins", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["type"]) == (422, "validation")


X_ROW = {"operand": "x", "layout": "row"}


@pytest.mark.parametrize(
    ("field", "target", "action", "value"),
    [
        ("/value", X_ROW, "scale_multiplier", None),
        ("/value", X_ROW, "scale_multiplier", "abc"),
        ("/value", X_ROW, "scale_multiplier", 3),
        ("/value", X_ROW, "scale_multiplier", 0),
        ("/value", X_ROW, "scale_multiplier", -0.5),
        ("/value", X_ROW, "scale_multiplier", 10**400),
        ("/target", {"gemm": "fprop"}, "scale_multiplier", 0.5),
        ("/target", X_ROW, "bf16_fallback", None),
        ("/value", {"gemm": "fprop"}, "bf16_fallback", 1.0),
        ("/value", {"layer": True}, None, 1.0),
        ("/value", X_ROW, "format", "int8"),
        ("/value", X_ROW, "format", None),
        ("/target", {"gemm": "wgrad"}, "format", "e5m2"),
        ("/value", X_ROW, "scale_rounding", 2.0),
        ("/value", X_ROW, "amax_history", 1.5),
        ("/value", X_ROW, "amax_history", 0),
        ("/value", X_ROW, "margin", "wide"),
        ("/value", {"layer": True}, "gradient_smoothing", 1.0),
    ],
)
def test_a_pin_whose_action_cannot_be_done_names_the_field(
    client: TestClient, post: Any, field: str, target: Any, action: Any, value: Any
) -> None:
    post(0)
    pin = {"layer": BAD, "target": target, "action": action, "value": value}
    answer = client.put(f"{API}/pins", json=pin)
    assert (answer.status_code, [fault["pointer"] for fault in answer.json()["errors"]]) == (422, [field])
    assert client.get(f"{API}/plan").json() == {"version": 0, "entries": []}
    assert client.get(f"{API}/pins").json()["items"] == []


@pytest.mark.parametrize(
    ("target", "action", "value"),
    [
        (X_ROW, "scale_multiplier", 0.25),
        ({"layer": True}, "scale_multiplier", 2),
        (X_ROW, "scale_rounding", "pow2"),
        (X_ROW, "format", "e5m2"),
        (X_ROW, "amax_history", 16),
        (X_ROW, "margin", 1),
        ({"layer": True}, "gradient_smoothing", 0.1),
        ({"layer": True}, "bf16_fallback", None),
    ],
)
def test_a_pin_whose_action_can_be_done_enters_the_plan(
    client: TestClient, post: Any, target: Any, action: str, value: Any
) -> None:
    post(0)
    pin = {"layer": BAD, "target": target, "action": action, "value": value}
    assert client.put(f"{API}/pins", json=pin).status_code == 200
    (entry,) = client.get(f"{API}/plan").json()["entries"]
    assert (entry["target"], entry["action"], entry["value"]) == (target, action, value)


def test_alerts_are_acknowledged_and_silenced(client: TestClient, post: Any, clock: Any) -> None:
    alert = post(0, error=0.5)["alerts"][0]
    url = f"/api/v1/alerts/{alert['id']}"
    assert client.post(f"{url}:ack", json={"by": "ada"}).json()["acknowledged_by"] == "ada"
    assert client.post(f"{url}:silence", json={"seconds": 60}).json()["silenced"] is True
    clock.now += 61
    assert client.get(f"{API}/alerts").json()["items"][0]["silenced"] is False
    assert client.post(f"{url}:silence", json={"seconds": "long"}).status_code == 422
    assert client.post("/api/v1/alerts/999:ack").json()["type"] == "alert-not-found"


def test_an_alert_is_resolved_once_its_slot_is_seen_healthy(client: TestClient, post: Any) -> None:
    post(0, error=0.5)
    for step in range(1, 8):
        post(step)
    assert [item["state"] for item in client.get(f"{API}/alerts").json()["items"]] == ["resolved"]
    assert client.get(f"{API}/alerts", params={"state": "open"}).json()["items"] == []


def test_a_step_is_decided_when_its_last_group_arrives(post: Any) -> None:
    assert post(0, error=0.5, groups=2)["decisions"] == []
    reply = post(0, error=0.5, group="1", groups=2)
    assert [decision["step"] for decision in reply["decisions"]] == [0]


def test_a_step_without_a_group_is_decided_after_four_newer_ones(post: Any) -> None:
    for step in range(4):
        assert post(step, error=0.5, groups=2)["decisions"] == []
    assert [decision["step"] for decision in post(4, error=0.5, groups=2)["decisions"]] == [0]


def test_steps_are_decided_in_order(post: Any) -> None:
    post(1, groups=2)
    # Step 2 is complete first, and waits for step 1.
    post(2, error=0.5, groups=2)
    assert post(2, error=0.5, group="1", groups=2)["decisions"] == []
    assert [made["step"] for made in post(1, group="1", groups=2)["decisions"]] == [2]


def test_older_steps_than_the_last_decided_are_stored_and_never_decided(
    client: TestClient, post: Any
) -> None:
    post(5)
    assert post(3, error=0.5)["decisions"] == []
    assert post(4, error=0.5)["decisions"] == []
    heatmap = client.get(f"{API}/heatmap", params={"metric": "relative_error", "gemm": "dgrad"}).json()
    assert heatmap["steps"] == [3, 4, 5]
    assert heatmap["values"][0][0] == pytest.approx(0.5)


def test_groups_are_judged_as_one(post: Any) -> None:
    # 0.5 in one of four groups is sqrt(0.25 / 4) over all: 25 %, still far beyond 5 %.
    for group in ("0", "1", "2"):
        assert post(0, groups=4, group=group)["decisions"] == []
    decision = post(0, error=0.5, groups=4, group="3")["decisions"][0]
    value = decision["evidence"]["signals"][0]["value"]
    assert value == pytest.approx((0.25 / 4 + 3 / 4 * 0.025**2) ** 0.5)


def test_a_new_attempt_is_decided_on_from_its_first_step(client: TestClient, post: Any) -> None:
    for step in range(10):
        post(step)
    rewound = {"id": "1", "parent": "0", "from_step": 5}
    reply = post(5, error=0.5, attempt=rewound)
    assert [decision["step"] for decision in reply["decisions"]] == [5]
    # The abandoned attempt may still speak; nobody listens.
    assert post(10, error=0.5)["decisions"] == []
    assert client.get(API).json()["last_step"] == 5


@pytest.mark.parametrize("last", [9, 10, 15])
@pytest.mark.parametrize("from_step", [0, 10])
def test_the_first_step_of_a_rewind_is_decided_in_its_own_reply(post: Any, last: int, from_step: int) -> None:
    """Whether the parent stopped before that step, with it, or after it."""
    for step in range(last + 1):
        post(step)
    child = {"id": "1", "parent": "0", "from_step": from_step}
    reply = post(from_step, error=0.95, gemm="wgrad", attempt=child)
    assert [(made["step"], made["target"]) for made in reply["decisions"]] == [(from_step, {"gemm": "wgrad"})]
    assert [(alert["layer"], alert["severity"]) for alert in reply["alerts"]] == [(BAD, "act")]


def test_a_rewind_to_the_start_has_decided_on_no_step_yet(client: TestClient, post: Any) -> None:
    post(0)
    post(0, groups=2, attempt={"id": "1", "parent": "0", "from_step": 0})
    pin = {"layer": BAD, "target": {"gemm": "wgrad"}, "action": "bf16_fallback"}
    assert client.put(f"{API}/pins", json=pin).status_code == 200
    (made,) = client.get(f"{API}/decisions").json()["items"]
    assert (made["step"], made["not_before_step"]) == (0, 1)


def test_a_rewind_learns_nothing_from_the_step_that_it_repeats(client: TestClient, post: Any) -> None:
    for step in range(6):
        post(step, error=0.06 if step == 5 else 0.025)
    # The fourth sample decides, with no close look at hand, but the first did not happen in this attempt.
    reply = post(5, error=0.06, attempt={"id": "1", "parent": "0", "from_step": 5})
    assert reply["decisions"] == []
    replies = [post(step, error=0.06, attempt={"id": "1"}) for step in (6, 7, 8)]
    assert [made["step"] for reply in replies for made in reply["decisions"]] == [8]


def test_a_rewind_forgets_what_the_abandoned_steps_taught(client: TestClient, post: Any) -> None:
    for step in range(6):
        post(step)
    for step in range(6, 12):
        post(step, error=0.5)
    assert client.get(f"{API}/alerts", params={"state": "open"}).json()["items"]
    post(6, attempt={"id": "1", "parent": "0", "from_step": 6})
    (alert,) = client.get(f"{API}/alerts").json()["items"]
    assert (alert["state"], alert["resolved_by"]) == ("resolved", None)
    assert alert["resolved_reason"] == "steps from 6 on did not happen: attempt '1' went back"
    # The plan is the run's and outlives the attempt.
    assert len(client.get(f"{API}/plan").json()["entries"]) == 1


def test_decision_ids_stay_unique_over_attempts(client: TestClient, post: Any) -> None:
    post(0, error=0.5, mode="observe")
    post(0, error=0.5, mode="observe", attempt={"id": "fresh"})
    ids = [item["id"] for item in client.get(f"{API}/decisions").json()["items"]]
    assert ids == ["demo-2", "demo-1"]
