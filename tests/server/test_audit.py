"""Who did what when is kept for good: states, modes, pins, kill switch; grades; remedies of several decisions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor import policy
from fp8_safeguard.server import deciding

API = "/api/v1/runs/demo"
OFF = {"sum_sq_err": 16384.0}
"""A recomputed result that is half off."""
DGRAD = {("blocks.0.mlp", "dgrad"): OFF}
BOTH = {**DGRAD, ("blocks.0.mlp", "fprop"): OFF}


def acts(client: TestClient, **filters: str) -> list[tuple[str, str]]:
    """(who, what), the oldest first."""
    items = client.get(f"{API}/audit", params=filters).json()["items"]
    return [(item["actor"], item["what"]) for item in reversed(items)]


def newest(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"{API}/decisions").json()["items"][0]
    return found


def test_everybody_who_touched_a_decision_is_kept(client: TestClient, post: Any, clock: Any) -> None:
    (made,) = post(0, DGRAD, mode="advise")["decisions"]
    clock.now += 60
    approved = client.post(f"/api/v1/decisions/{made['id']}:approve", json={"by": "Ada"}).json()
    post(1)
    post(2, plan_version=1, effective_step=3)
    client.post(f"/api/v1/decisions/{made['id']}:revert", json={"by": "Bob"})
    history = newest(client)["history"]
    assert [(act["actor"], act["what"], act["step"]) for act in history] == [
        ("policy", "proposed", 0),
        ("Ada", "approved", 0),
        ("policy", "sent", None),
        ("client", "applied", 3),
        ("Bob", "reverted", 2),
    ]
    assert history[0]["at"] < history[1]["at"] == "2023-11-14T22:14:20.000Z"
    assert [act["what"] for act in approved["history"]] == ["proposed", "approved"]
    assert acts(client, decision=made["id"]) == [(act["actor"], act["what"]) for act in history]


def test_a_proposal_that_nobody_answers_is_expired_by_the_policy(client: TestClient, post: Any) -> None:
    post(0, DGRAD, mode="advise")
    # One sample that does not ask again is no sign that it is over, however late it comes.
    post(60)
    assert newest(client)["state"] == "proposed"
    for step in range(61, 66):
        post(step)
    assert newest(client)["state"] == "expired"
    assert acts(client)[-1] == ("policy", "expired")


def test_modes_and_thresholds_are_logged_with_what_they_were(client: TestClient, post: Any) -> None:
    post(0, mode="observe")
    client.patch(API, json={"mode": "advise", "by": "Ada"})
    client.patch(API, json={"thresholds": "seed"})
    items = client.get(f"{API}/audit").json()["items"]
    assert [(item["actor"], item["what"], item["facts"]) for item in items] == [
        ("person", "thresholds", {"from": "floor", "to": "seed"}),
        ("Ada", "mode", {"from": "observe", "to": "advise"}),
    ]
    refused = client.patch(API, json={"by": "Ada"})
    assert refused.status_code == 422
    assert client.patch(API, json={"mode": "enforce", "by": 7}).status_code == 422
    assert client.get(API).json()["mode"] == "advise"


def test_pins_and_the_kill_switch_say_what_they_took_away(client: TestClient, post: Any) -> None:
    post(0, mode="advise")
    pin = {"layer": "blocks.1.mlp", "target": {"gemm": "dgrad"}, "action": "bf16_fallback", "by": "Ada"}
    put = client.put(f"{API}/pins", json=pin)
    assert put.status_code == 200, put.text
    client.put(f"{API}/pins", json={"layer": "blocks.2.mlp", "by": "Ada"})
    client.request("DELETE", f"{API}/pins", json={"layer": "blocks.2.mlp", "by": "Bob"})
    assert client.post(f"{API}:kill-switch", json={"by": "Eve"}).status_code == 200
    assert acts(client) == [
        ("Ada", "approved"),
        ("Ada", "pin"),
        ("Ada", "pin"),
        ("Bob", "release"),
        ("Eve", "kill-switch"),
        ("Eve", "reverted"),
    ]
    item = next(item for item in client.get(f"{API}/audit").json()["items"] if item["what"] == "kill-switch")
    assert item["facts"]["mode"] == {"from": "advise", "to": "observe"}
    assert [entry["layer"] for entry in item["facts"]["plan"]["entries"]] == ["blocks.1.mlp"]
    assert [pinned["layer"] for pinned in item["facts"]["pins"]] == ["blocks.1.mlp"]


def test_the_log_comes_in_pages_and_goes_with_its_run(client: TestClient, post: Any) -> None:
    post(0)
    for mode in ("advise", "enforce", "observe"):
        client.patch(API, json={"mode": mode})
    page = client.get(f"{API}/audit", params={"page_size": 2}).json()
    rest = client.get(f"{API}/audit", params={"page_size": 2, "page_token": page["next_page_token"]}).json()
    told = [item["facts"]["to"] for item in (*page["items"], *rest["items"])]
    assert (told, rest["next_page_token"]) == (["observe", "enforce", "advise"], None)
    assert client.get("/api/v1/runs/other/audit").status_code == 404
    client.delete(API)
    post(0)
    assert acts(client) == []


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Says what the policy grades from now on."""
    given: dict[str, str] = {}

    def decide(*arguments: Any) -> Any:
        state, made = policy.decide(*arguments)
        return replace(state, grades=dict(given)), made

    monkeypatch.setattr(deciding, "decide", decide)

    def grade(grades: dict[str, str]) -> None:
        given.clear()
        given.update(grades)

    return grade


def test_a_grade_becomes_the_decisions_outcome_once(
    client: TestClient, post: Any, graded: Callable[[dict[str, str]], None]
) -> None:
    (made,) = post(0, DGRAD, mode="enforce")["decisions"]
    assert newest(client)["outcome"] is None
    graded({made["id"]: "signal recovered", "demo-99": "of no decision"})
    post(1)
    graded({made["id"]: "signal recovered; loss recovered"})
    post(2)
    post(3)
    item = newest(client)
    assert item["outcome"] == "signal recovered; loss recovered"
    told = [act["facts"]["outcome"] for act in item["history"] if act["what"] == "graded"]
    assert told == ["signal recovered", "signal recovered; loss recovered"]
    bundle = client.get(f"{API}/export", params={"format": "json"}).json()
    assert bundle["decisions"][0]["outcome"] == item["outcome"]


@pytest.fixture
def of_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision of one step belongs to one remedy."""

    def decide(*given: Any) -> Any:
        state, made = policy.decide(*given)
        return state, tuple(replace(one, evidence={**one.evidence, "remedy": "bf16-pair"}) for one in made)

    monkeypatch.setattr(deciding, "decide", decide)


@pytest.mark.usefixtures("of_a_remedy")
def test_half_a_remedy_says_what_waits(client: TestClient, post: Any) -> None:
    first, second = (made["id"] for made in post(0, BOTH, mode="advise")["decisions"])
    half = client.post(f"/api/v1/decisions/{first}:approve", json={"by": "Ada"}).json()
    assert (half["state"], half["waiting"]) == ("approved", [second])
    assert [entry["decision_id"] for entry in client.get(f"{API}/plan").json()["entries"]] == [first]


@pytest.mark.usefixtures("of_a_remedy")
def test_a_remedy_is_approved_at_once_where_that_is_asked(client: TestClient, post: Any) -> None:
    first, second = (made["id"] for made in post(0, BOTH, mode="advise")["decisions"])
    refused = client.post(f"/api/v1/decisions/{first}:approve", json={"all_of_remedy": "yes"})
    assert refused.status_code == 422
    body = {"by": "Ada", "all_of_remedy": True}
    whole = client.post(f"/api/v1/decisions/{first}:approve", json=body).json()
    assert (whole["state"], whole["waiting"]) == ("approved", [])
    gemms = sorted(entry["target"]["gemm"] for entry in client.get(f"{API}/plan").json()["entries"])
    assert gemms == ["dgrad", "fprop"]
    assert acts(client, decision=second)[-1] == ("Ada", "approved")


def test_decisions_without_a_remedy_wait_for_nobody(client: TestClient, post: Any) -> None:
    first, _ = (made["id"] for made in post(0, BOTH, mode="advise")["decisions"])
    assert client.post(f"/api/v1/decisions/{first}:approve").json()["waiting"] == []


def test_b104_a_layer_that_never_reported_has_no_series_and_is_unknown(
    client: TestClient, documents: Any
) -> None:
    """An expert without a token: nothing to judge, so nothing is said of it, and never a first value."""
    slots = documents.slots(2)
    empty = dict.fromkeys(("count", "rows", "amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th"), 0)
    silent = {**empty, "tile_sqnr_hist": [0] * 16}
    values = [
        documents.values(slot, **(silent if slot["layer"] == "blocks.1.mlp" else {}))
        if "gemm" not in slot
        else {**documents.values(slot), **dict.fromkeys(documents.values(slot))}
        if slot["layer"] == "blocks.1.mlp"
        else documents.values(slot)
        for slot in slots
    ]
    assert client.post(f"{API}/samples", json=documents.sample(0, slots, values)).status_code == 200
    told = {item["layer"]: item for item in client.get(f"{API}/layers").json()["items"]}
    assert told["blocks.0.mlp"]["state"] == "healthy"
    assert (told["blocks.1.mlp"]["state"], told["blocks.1.mlp"]["worst"]) == ("unknown", None)
    lines = client.get("/metrics").text.splitlines()
    judged = [line for line in lines if line.startswith("fp8_safeguard_layer_")]
    assert any("blocks.0.mlp" in line for line in judged)
    assert [line for line in judged if "blocks.1.mlp" in line] == []
