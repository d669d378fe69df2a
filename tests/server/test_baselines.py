"""Baselines over the API: learned, chosen, dropped, and what a run is judged by then."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs"
Ill = dict[tuple[str, str], dict[str, Any]]
HEAD = ("blocks.0.mlp", "dy row")
FLUSHED: Ill = {HEAD: {"underflow": 30_000, "zeros": 30_000}}
"""46 % of dy of one layer."""


@pytest.fixture
def fill(client: TestClient, documents: Any) -> Callable[..., list[dict[str, Any]]]:
    """Posts steps of an observed run of two layers in one request."""

    def fill(
        steps: range, ill: Ill | None = None, at: Mapping[int, Ill] = {}, layers: int = 2, **header: Any
    ) -> list[dict[str, Any]]:
        samples = []
        slots = documents.slots(layers)
        names = [(slot["layer"], slot.get("gemm") or f"{slot['operand']} {slot['layout']}") for slot in slots]
        for step in steps:
            sick = {**(ill or {}), **at.get(step, {})}
            pairs = zip(slots, names, strict=True)
            values = [documents.values(slot, **sick.get(name, {})) for slot, name in pairs]
            samples.append(documents.sample(step, slots, values, **{"run": {"loss": 2.0}, **header}))
        answer = client.post(f"{API}/demo/samples", json={"samples": samples})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        assert all("accepted" in result for result in results), results
        return results

    return fill


def alerts(client: TestClient) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{API}/demo/alerts", params={"state": "open"}).json()["items"]
    return items


def learn(client: TestClient, whose: str = "demo", status: int = 200, **wish: Any) -> dict[str, Any]:
    answer = client.post(f"{API}/{whose}/baselines", json={"from_step": 0, "to_step": 29, **wish})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def listed(client: TestClient, run: str = "demo") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{API}/{run}/baselines").json()["items"]
    return items


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_a_layer_that_is_always_flushed_stands_in_alert_no_more(client: TestClient, fill: Any) -> None:
    """With the preset alone an alert that never closes; with what was learned none, and a worse value still alerts."""
    fill(range(30), FLUSHED)
    assert [item["rule"] for item in alerts(client)] == ["underflow"]
    item = learn(client, by="ada")
    assert {name: item[name] for name in ("run", "from_step", "to_step", "steps", "used", "created_by")} == {
        "run": "demo",
        "from_step": 0,
        "to_step": 29,
        "steps": 30,
        "used": True,
        "created_by": "ada",
    }
    assert listed(client) == [item]
    fill(range(30, 34), FLUSHED)
    assert alerts(client) == []
    fill(range(34, 36), {HEAD: {"underflow": 50_000, "zeros": 50_000}})
    (alert,) = alerts(client)
    assert alert["threshold"] == pytest.approx(1.5 * 30_000 / 65536, rel=1e-5)
    assert alert["origin"].startswith("learned from run demo, steps 0 to 29; ")


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
def test_baselines_are_chosen_shown_and_dropped(client: TestClient, fill: Any) -> None:
    fill(range(30), FLUSHED)
    first = learn(client)
    second = learn(client, to_step=25, use=False)
    assert [(item["id"], item["used"]) for item in listed(client)] == [
        (second["id"], False),
        (first["id"], True),
    ]
    shown = client.get(f"{API}/demo/baselines/{second['id']}").json()
    assert shown["baseline"]["steps"] == shown["steps"] == 26
    assert shown["slots"] == len(shown["baseline"]["families"]) == 16
    answer = client.put(f"{API}/demo/baselines", json={"baseline": second["id"]})
    assert [item["used"] for item in answer.json()["items"]] == [True, False]
    assert client.delete(f"{API}/demo/baselines/{second['id']}").status_code == 204
    assert [(item["id"], item["used"]) for item in listed(client)] == [(first["id"], False)]
    gone = client.get(f"{API}/demo/baselines/{second['id']}")
    assert (gone.status_code, gone.json()["type"]) == (404, "baseline-not-found")
    client.put(f"{API}/demo/baselines", json={"baseline": first["id"]})
    assert client.put(f"{API}/demo/baselines", json={"baseline": None}).json()["items"][0]["used"] is False
    acts = [act for act in client.get(f"{API}/demo/audit").json()["items"] if act["what"] == "baseline"]
    assert len(acts) == 5
    assert client.delete(f"{API}/demo").status_code == 204


def test_a_baseline_of_one_run_judges_another(client: TestClient, fill: Any, documents: Any) -> None:
    fill(range(30), FLUSHED)
    client.post(f"{API}/other/samples", json=documents.sample(0)).raise_for_status()
    item = learn(client, "other", run="demo")
    assert (item["run"], item["used"]) == ("demo", True)
    assert listed(client) == []
    query = {"metric": "underflow_ratio", "layer": "blocks.0.mlp", "operand": "dy", "layout": "row"}
    lines = client.get(f"{API}/other/series", params=query).json()["thresholds"]
    assert lines == [
        {
            "value": pytest.approx(1.5 * 30_000 / 65536, rel=1e-5),
            "severity": "watch",
            "origin": "learned from run demo, steps 0 to 29",
        }
    ]
    plain = client.get(f"{API}/demo/series", params=query).json()["thresholds"]
    assert plain[0]["value"] == 0.005


def test_pages_show_the_levels_in_force(client: TestClient, fill: Any) -> None:
    """The list of layers and a layer's page judge by what was learned, and say so."""
    fill(range(30), FLUSHED)

    def page() -> dict[str, Any]:
        found: dict[str, Any] = client.get(f"{API}/demo/layer", params={"layer": HEAD[0]}).json()
        return next(
            slot for slot in found["slots"] if slot.get("operand") == "dy" and slot["layout"] == "row"
        )

    assert page()["breaches"] == {"underflow_ratio": "watch"}
    learn(client)
    learned = pytest.approx(1.5 * 30_000 / 65536, rel=1e-5)
    slot = page()
    assert slot["breaches"] == {}
    (line,) = slot["thresholds"]["underflow_ratio"]
    assert (line["value"], line["source"]) == (learned, "learned from demo")
    worst = {item["layer"]: item["worst"] for item in client.get(f"{API}/demo/layers").json()["items"]}
    # The slot that was worst is within its range now; what is left is the format's own noise.
    assert (worst[HEAD[0]]["metric"], worst[HEAD[0]]["threshold"]) == ("sqnr_db", 28.5)


def test_a_refused_window_says_why_and_what_to_do(client: TestClient, fill: Any) -> None:
    fill(range(40), at={12: {HEAD: {"nan": 7}}})
    short = learn(client, status=409, to_step=10)
    assert (short["type"], short["reasons"]) == (
        "baseline-refused",
        ["the window holds 11 sampled steps and needs 20; widen it, or sample more often"],
    )
    sick = learn(client, status=409)["detail"]
    assert "blocks.0.mlp dy row has 7 non-finite values at step 12; choose steps before or after it" in sick
    assert learn(client, from_step=14, to_step=39)["steps"] == 26
    assert "0 sampled steps" in learn(client, status=409, from_step=5000, to_step=6000)["detail"]
    assert "0 sampled steps" in learn(client, status=409, from_step=20, to_step=10)["detail"]


@pytest.mark.parametrize("at", ["during", "before"])
def test_a_window_with_a_decision_in_force_is_refused(client: TestClient, fill: Any, at: str) -> None:
    broken = {("blocks.0.mlp", "dgrad"): {"sum_sq_err": 16384.0}}
    onset = 3 if at == "before" else 28
    fill(range(34), at={onset: broken}, layers=8, mode="enforce")
    (decision,) = [
        item for item in client.get(f"{API}/demo/decisions").json()["items"] if item["action"] != "advice"
    ]
    assert decision["action"] == "bf16_fallback"
    # The window is after the fallback in one case, and has it at its end in the other.
    refused = learn(client, status=409, from_step=10, to_step=33)["detail"]
    assert f"decision {decision['id']} (bf16_fallback of blocks.0.mlp) was in force from step" in refused
    if at == "during":
        assert learn(client, from_step=0, to_step=27)["steps"] == 28


@pytest.mark.parametrize(
    ("body", "pointers"),
    [
        ({}, ["/from_step", "/to_step"]),
        ({"from_step": -1, "to_step": 2.5}, ["/from_step", "/to_step"]),
        ({"from_step": 0, "to_step": 9, "steps": 3}, ["/steps"]),
        ({"from_step": 0, "to_step": 9, "run": 3, "use": "yes"}, ["/run", "/use"]),
    ],
)
def test_a_wish_that_is_none_is_refused(
    client: TestClient, fill: Any, body: dict[str, Any], pointers: list[str]
) -> None:
    fill(range(1))
    answer = client.post(f"{API}/demo/baselines", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == pointers
    for wish in ({}, {"baseline": True}, {"baseline": 0}, {"baseline": "3"}, {"baseline": 1, "more": 1}):
        assert client.put(f"{API}/demo/baselines", json=wish).status_code == 422
    assert client.put(f"{API}/demo/baselines", json={"baseline": 99}).status_code == 404
    assert learn(client, "nobody", 404)["type"] == "run-not-found"
    assert learn(client, status=404, run="nobody")["type"] == "run-not-found"


def test_only_who_may_control_may_learn(make_client: Callable[..., TestClient], documents: Any) -> None:
    client = make_client(tokens={"reader": ["read", "ingest"], "boss": ["control"]})
    reader = {"Authorization": "Bearer reader"}
    client.post(f"{API}/demo/samples", json=documents.sample(0), headers=reader).raise_for_status()
    body = {"from_step": 0, "to_step": 9}
    assert client.post(f"{API}/demo/baselines", json=body, headers=reader).status_code == 403
    assert client.put(f"{API}/demo/baselines", json={"baseline": None}, headers=reader).status_code == 403
    assert client.delete(f"{API}/demo/baselines/1", headers=reader).status_code == 403
    boss = {"Authorization": "Bearer boss"}
    assert client.post(f"{API}/demo/baselines", json=body, headers=boss).status_code == 409


def test_samples_come_in_step_order_whatever_order_they_came_in(client: TestClient, documents: Any) -> None:
    """Of a run that went back, the live branch alone; each line can be posted again."""
    for step in (0, 2, 1, 3):
        client.post(f"{API}/demo/samples", json=documents.sample(step, run={"loss": 1.0})).raise_for_status()
    again = {"attempt": {"id": "1", "parent": "0", "from_step": 2}}
    client.post(f"{API}/demo/samples", json=documents.sample(2, **again)).raise_for_status()
    answer = client.get(f"{API}/demo/samples")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [(line["step"], line["attempt"]["id"]) for line in lines] == [(0, "0"), (1, "0"), (2, "1")]
    part = client.get(f"{API}/demo/samples", params={"from_step": 1, "to_step": 1}).text
    assert [json.loads(line)["step"] for line in part.splitlines()] == [1]
    for line in lines:
        client.post(f"{API}/copy/samples", json=line).raise_for_status()
    assert client.get(f"{API}/copy/samples").text == answer.text
    assert client.get(f"{API}/nobody/samples").status_code == 404
