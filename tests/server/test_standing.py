"""What an alert says of the present: one that nothing has shown since a remedy waits, and is no evidence of trouble."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.plan import Decision, Target
from fp8_safeguard.server import deciding

API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"
OTHER = ("blocks.1.mlp", "dy", "col")
WGRAD, DGRAD = (BAD, "wgrad"), (BAD, "dgrad")


def off(error: float) -> dict[str, Any]:
    return {"sum_sq_err": 65536.0 * error**2}


@pytest.fixture
def treated(client: TestClient, documents: Any) -> Callable[..., None]:
    """Posts a step of one layer; `wgrad` is its error, None where its turn has not come."""

    def send(
        step: int,
        wgrad: float | None = None,
        dgrad: float = 0.025,
        other_underflow: int = 0,
        **header: Any,
    ) -> None:
        slots = documents.slots(2)
        if wgrad is None:
            slots = [slot for slot in slots if (slot["layer"], slot.get("gemm")) != WGRAD]
            slots = [{**slot, "index": at} for at, slot in enumerate(slots)]
        errors = {WGRAD: wgrad, DGRAD: dgrad}
        values = [
            documents.values(slot, **({} if error is None else off(error)))
            for slot in slots
            for error in [errors.get((slot["layer"], slot.get("gemm", "")))]
        ]
        for slot, value in zip(slots, values, strict=True):
            if other_underflow and (slot["layer"], slot.get("operand"), slot.get("layout")) == OTHER:
                value["underflow"] = other_underflow
        answer = client.post(f"{API}/samples", json=documents.sample(step, slots, values, **header))
        assert answer.status_code == 200, answer.text

    return send


def pin(client: TestClient, operand: str, action: str = "format", value: Any = "e5m2") -> str:
    """A person's remedy, for it is the same whoever asks for it; its decision."""
    target = {"operand": operand, "layout": "tile" if operand == "w" else "row"}
    body = {"layer": BAD, "target": target, "action": action, "value": value}
    answer = client.put(f"{API}/pins", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["decision_id"])


def states(client: TestClient) -> tuple[str, str, str]:
    """Of the run, of the layer in the list, and of the layer in its document."""
    listed = {item["layer"]: item["state"] for item in client.get(f"{API}/layers").json()["items"]}
    document = client.get(f"{API}/layer", params={"layer": BAD}).json()
    return client.get(API).json()["state"], listed[BAD], document["state"]


def waits(client: TestClient) -> list[Any]:
    in_list = [item["waits_since"] for item in client.get(f"{API}/alerts").json()["items"]]
    document = client.get(f"{API}/layer", params={"layer": BAD}).json()
    assert [item["waits_since"] for item in document["alerts"]] == in_list
    return in_list


def test_a_wgrad_whose_turn_has_not_come_since_its_remedy_is_no_present_instability(
    client: TestClient, treated: Callable[..., None]
) -> None:
    treated(0, wgrad=0.5, mode="advise")
    made = pin(client, "x")
    assert (states(client), waits(client)) == (("unstable",) * 3, [None])
    # It has the plan, and says from which step on; that step has not come.
    treated(1, mode="advise", plan_version=1, effective_step=2)
    assert (states(client), waits(client)) == (("unstable",) * 3, [None])
    treated(2, mode="advise", plan_version=1, effective_step=2)
    assert (states(client), waits(client)) == (("watch",) * 3, [{"decision": made, "step": 2}])
    verdict = client.get(API).json()["verdict"]
    assert verdict["why"] == (
        f"'blocks.0.mlp' wgrad waits for its next measurement: no breach of it since decision {made} took effect at step 2 "
        "(the last: GEMM error 50 % (limit 8 %) at step 0)"
    )
    assert verdict["next"] == (
        "nothing to do: a few clear measurements resolve it, a breach makes the run unstable again"
    )
    # The alert itself goes on as it did.
    (alert,) = client.get(f"{API}/alerts").json()["items"]
    assert (alert["state"], alert["severity"], client.get(API).json()["alerts"]["open"]) == ("open", "act", 1)
    client.patch(API, json={"ended": True})
    detail = client.get(API).json()
    assert (detail["state"], detail["health"]) == ("ended", "watch")
    assert detail["verdict"]["why"] == (
        "ended healthy as far as it was measured: 'blocks.0.mlp' wgrad was not measured enough to tell: no breach of it "
        f"since decision {made} took effect at step 2 (the last: GEMM error 50 % (limit 8 %) at step 0), alert 1; last "
        "sample at step 2"
    )


def test_pages_tell_an_alert_that_waits_from_one_in_breach(
    client: TestClient, treated: Callable[..., None]
) -> None:
    def shown() -> tuple[str, list[bool]]:
        labels = client.get("/runs/demo/figures/heatmap").json()["layout"]["yaxis"]["ticktext"]
        texts = [client.get("/runs/demo").text, client.get("/runs/demo/layer", params={"layer": BAD}).text]
        words = "waits for its next measurement: no breach since decision demo-1 took effect at step 1"
        return labels[0], [words in text for text in texts]

    treated(0, wgrad=0.5, mode="advise")
    assert shown() == (f"{BAD} ▲", [False, False])
    pin(client, "x")
    treated(1, mode="advise", plan_version=1, effective_step=1)
    assert shown() == (f"{BAD} △", [True, True])


def test_a_measurement_since_then_decides(client: TestClient, treated: Callable[..., None]) -> None:
    treated(0, wgrad=0.5, mode="advise")
    pin(client, "dy")
    applied = {"mode": "advise", "plan_version": 1, "effective_step": 1}
    treated(1, **applied)
    assert states(client) == ("watch",) * 3
    # Clear once: not yet resolved, and less than ever evidence of trouble.
    treated(2, wgrad=0.025, **applied)
    assert states(client) == ("watch",) * 3
    treated(3, wgrad=0.5, **applied)
    assert (states(client), waits(client)) == (("unstable",) * 3, [None])


def test_a_remedy_of_what_it_does_not_read_changes_nothing(
    client: TestClient, treated: Callable[..., None]
) -> None:
    treated(0, wgrad=0.5, mode="advise")
    pin(client, "w")
    treated(1, mode="advise", plan_version=1, effective_step=1)
    assert (states(client), waits(client)) == (("unstable",) * 3, [None])


def test_a_remedy_that_a_person_took_back_is_none(client: TestClient, treated: Callable[..., None]) -> None:
    treated(0, wgrad=0.5, mode="advise")
    made = pin(client, "x")
    treated(1, mode="advise", plan_version=1, effective_step=1)
    assert states(client) == ("watch",) * 3
    client.post(f"/api/v1/decisions/{made}:revert")
    assert (states(client), waits(client)) == (("unstable",) * 3, [None])


def restoring(monkeypatch: pytest.MonkeyPatch, at: int, rule: str) -> None:
    """The policy restores x of the layer by that rule, on the evidence of that step."""

    def decide(state: Any, step: Any, config: Any) -> Any:
        after, made = policy.decide(state, step, config)
        if step.step != at:
            return after, made
        undone = Decision(
            id="demo-9",
            run="demo",
            step=at,
            layer=BAD,
            target=Target(operand="x", layout="row"),
            action="restore",
            rule=rule,
            reason="it was healthy, or did not help",
            mode=config.mode,
            state="sent",
            not_before_step=at + 1,
        )
        return replace(after, plan=after.plan.with_decision(undone)), (*made, undone)

    monkeypatch.setattr(deciding, "decide", decide)


@pytest.mark.parametrize(
    ("rule", "state", "since"),
    [
        # What was seen before a remedy says nothing of the time after it either.
        ("probation", "watch", {"decision": "demo-9", "step": 4}),
        # It was applied, and is no more: the fault is where it was.
        ("no-help", "unstable", None),
    ],
)
def test_a_remedy_that_is_over_speaks_for_health_only_where_it_had_helped(
    client: TestClient,
    treated: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    state: str,
    since: dict[str, Any] | None,
) -> None:
    restoring(monkeypatch, 2, rule)
    treated(0, wgrad=0.5, mode="advise")
    pin(client, "x")
    treated(1, mode="advise", plan_version=1, effective_step=1)
    assert states(client) == ("watch",) * 3
    treated(2, mode="advise", plan_version=1, effective_step=1)
    for step in (3, 4):
        treated(step, mode="advise", plan_version=2, effective_step=4)
    assert {item["id"]: item["state"] for item in client.get(f"{API}/decisions").json()["items"]} == {
        "demo-1": "applied",
        "demo-9": "applied",
    }
    assert client.get(f"{API}/plan").json()["entries"] == []
    assert (states(client), waits(client)) == ((state,) * 3, [since])


def test_what_is_in_breach_still_speaks_for_an_alert_that_waits_for_another_slot(
    client: TestClient, treated: Callable[..., None]
) -> None:
    for step in range(4):
        treated(step, mode="advise")
    treated(4, wgrad=0.95, dgrad=0.045, mode="advise")
    treated(5, dgrad=0.045, mode="advise")
    pin(client, "x")
    applied = {"mode": "advise", "plan_version": 1, "effective_step": 6}
    treated(6, dgrad=0.045, **applied)
    # dgrad reads no x, and is worth watching only.
    assert (states(client), waits(client)) == (("watch",) * 3, [None])
    why = client.get(API).json()["verdict"]["why"]
    assert why.startswith("'blocks.0.mlp' dgrad: GEMM error 4.5 % (limit 4 %) since step 4")
    treated(7, dgrad=0.5, **applied)
    assert states(client) == ("unstable",) * 3


def test_a_warning_beside_it_does_not_hide_what_waits(
    client: TestClient, treated: Callable[..., None]
) -> None:
    treated(0, wgrad=0.5, mode="advise")
    pin(client, "x")
    applied = {"mode": "advise", "plan_version": 1, "effective_step": 1}
    for step in (1, 2):
        treated(step, other_underflow=1500, **applied)
    detail = client.get(API).json()
    assert detail["state"] == "watch"
    waits_words = "'blocks.0.mlp' wgrad waits for its next measurement"
    assert detail["verdict"]["why"].startswith(
        f"'blocks.1.mlp' dy col: underflow 2.29 % (limit 2 %) since step 1; {waits_words}"
    )
    client.patch(API, json={"ended": True})
    why = client.get(API).json()["verdict"]["why"]
    assert why.startswith("ended with an alert worth watching: 'blocks.1.mlp' dy col")
    assert "'blocks.0.mlp' wgrad was not measured enough to tell" in why
