"""Alerts about what runs in BF16: open until it does, held then."""

from typing import Any

import pytest
from starlette.testclient import TestClient

on_both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"
Ill = dict[tuple[str, str], dict[str, Any]]
X_ROW, DGRAD = (BAD, "x row"), (BAD, "dgrad")


def off(error: float) -> dict[str, Any]:
    return {"sum_sq_err": 65536.0 * error**2}


@on_both
def test_an_alert_is_open_until_the_client_applies_the_fallback_that_was_decided_with_it(
    client: TestClient, post: Any
) -> None:
    reply = post(0, {DGRAD: off(0.5)}, mode="enforce")
    assert [(made["action"], made["state"]) for made in reply["decisions"]] == [("bf16_fallback", "sent")]
    for step in (1, 2):
        assert (post.one()["state"], post.active()) == ("open", {("gemm-error", "act"): 1})
        assert [item["id"] for item in post.alerts(state="open")] == [reply["alerts"][0]["id"]]
        # Layers and runs speak of what was decided.
        assert client.get(API).json()["state"] == "fallback"
        assert client.get(f"{API}/layers", params={"state": "fallback"}).json()["items"][0]["layer"] == BAD
        assert client.get(f"{API}/layer", params={"layer": BAD}).json()["state"] == "fallback"
        # It has the plan, but runs in FP8 still.
        assert post(step, {DGRAD: off(0.5)}, mode="enforce", plan_version=1)["alerts"] == []
    post(3, {DGRAD: off(0.5)}, mode="enforce", plan_version=1, effective_step=3)
    assert (post.one()["state"], post.active()) == ("held", {("gemm-error", "act"): 0})
    detail = client.get(API).json()
    assert (detail["state"], detail["alerts"]) == ("fallback", {"open": 0, "held": 1, "silenced": 0})


def test_readers_of_the_stream_hear_when_an_alert_is_held(client: TestClient, post: Any) -> None:
    heard: list[Any] = []
    publish = client.app.state.context.events.publish  # type: ignore[attr-defined]

    def note(events: Any) -> None:
        listed = list(events)
        heard.extend((event.kind, event.data) for event in listed)
        publish(listed)

    client.app.state.context.events.publish = note  # type: ignore[attr-defined]
    post(0, {DGRAD: off(0.5)}, mode="enforce")
    post(1, {DGRAD: off(0.5)}, mode="enforce", plan_version=1, effective_step=2)
    assert [data["state"] for kind, data in heard if kind == "alert"] == ["open", "held"]
    assert [data["open_alerts"] for kind, data in heard if kind == "state"] == [1, 0]


@on_both
def test_page_verdict_metrics_and_list_count_the_same(client: TestClient, post: Any) -> None:
    ill: Ill = {DGRAD: off(0.5), ("blocks.1.mlp", "x row"): {"underflow": 700}}
    post(0, ill, mode="enforce")
    post(1, ill, mode="enforce", plan_version=1, effective_step=2)
    states = {item["layer"]: item["state"] for item in post.alerts()}
    assert states == {BAD: "held", "blocks.1.mlp": "open"}
    detail = client.get(API).json()
    assert (detail["alerts"], detail["state"]) == ({"open": 1, "held": 1, "silenced": 0}, "fallback")
    assert post.active() == {("gemm-error", "act"): 0, ("underflow", "watch"): 1}
    assert [item["layer"] for item in post.alerts(state="open")] == ["blocks.1.mlp"]
    assert [item["layer"] for item in post.alerts(state="held")] == [BAD]
    assert post.alerts(state="resolved") == []
    assert [item["layer"] for item in post.alerts(layer=BAD)] == [BAD]
    assert client.get(f"{API}/alerts", params={"state": "over"}).status_code == 422


@on_both
def test_an_alert_is_held_only_where_the_fallback_covers_what_it_is_about(
    client: TestClient, post: Any
) -> None:
    errors = {DGRAD: off(0.3), (BAD, "wgrad"): off(0.95)}
    post(0, errors)
    pin = {"layer": BAD, "target": {"gemm": "dgrad"}, "action": "bf16_fallback"}
    client.patch(API, json={"mode": "advise"})

    def states() -> tuple[str, str, str]:
        listed = client.get(f"{API}/layers").json()["items"]
        of_layer = {item["layer"]: item["state"] for item in listed}[BAD]
        return post.one()["state"], client.get(API).json()["state"], of_layer

    client.put(f"{API}/pins", json=pin)
    post(1, errors, plan_version=1, effective_step=1)
    assert states() == ("open", "unstable", "unstable")
    client.put(f"{API}/pins", json={**pin, "target": {"layer": True}})
    assert states() == ("open", "fallback", "fallback")
    post(2, errors, plan_version=2, effective_step=2)
    assert states() == ("held", "fallback", "fallback")
    # What held it goes: it is open again.
    client.post(f"{API}:kill-switch")
    assert states() == ("open", "unstable", "unstable")


def test_a_gemm_in_fallback_raises_nothing_about_what_fp8_would_do(client: TestClient, post: Any) -> None:
    drift: Ill = {X_ROW: {"underflow": 20000, "zeros": 20000}, (BAD, "w tile"): {"underflow": 300}}
    assert post.breach(0, ill=drift, mode="enforce") == [1]
    decided = client.get(f"{API}/plan").json()["entries"]
    assert [entry["target"]["gemm"] for entry in decided] == ["dgrad", "fprop"]
    marks = {(BAD, gemm): {"emulated": True} for gemm in ("fprop", "dgrad")}
    worse = {**drift, (BAD, "fprop"): off(0.7), DGRAD: off(0.3)}
    applied = {"mode": "enforce", "plan_version": 2, "effective_step": 1}
    for step in range(1, 6):
        assert post(step, worse, marks=marks, **applied)["alerts"] == []
    assert (post.one()["state"], client.get(API).json()["state"]) == ("held", "fallback")


GEMMS = ("fprop", "dgrad", "wgrad")


@pytest.mark.parametrize(
    ("marked", "error", "precision"),
    [
        # One of our layers, configured to BF16 throughout.
        (GEMMS, 0.025, "bf16"),
        # A plain layer: its own output is nearer to the exact one than FP8 can be.
        (("dgrad", "wgrad"), 0.002, "high"),
    ],
)
def test_a_layer_in_high_precision_is_not_unstable_for_what_fp8_would_do(
    client: TestClient, post: Any, marked: tuple[str, ...], error: float, precision: str
) -> None:
    marks = {(BAD, gemm): {"emulated": True} for gemm in marked}
    ill: Ill = {(BAD, "fprop"): off(error), DGRAD: off(0.5)}
    for step in range(3):
        post(step, ill, marks=marks, worst_expert=3)
    item = post.one()
    assert (item["rule"], item["severity"], item["state"], item["what_if"]) == (
        "gemm-error", "act", "held", True,
    )  # fmt: skip
    layer = next(item for item in client.get(f"{API}/layers").json()["items"] if item["layer"] == BAD)
    assert (layer["state"], set(layer["precision"].values())) == ("watch", {precision})
    detail = client.get(API).json()
    assert (detail["state"], detail["alerts"]["open"]) == ("watch", 0)
    assert "runs in high precision" in detail["verdict"]["why"]
    assert "keep that layer in high precision" in detail["verdict"]["next"]
    client.patch(API, json={"ended": True})
    assert "would have been in trouble in FP8" in client.get(API).json()["verdict"]["why"]


def test_what_would_only_be_watched_in_fp8_is_called_no_trouble(client: TestClient, post: Any) -> None:
    marks = {(layer, gemm): {"emulated": True} for layer in (BAD, "blocks.1.mlp") for gemm in GEMMS}
    lost: Ill = {X_ROW: {"underflow": 400, "zeros": 400}}
    for step in range(3):
        post(step, lost, marks=marks)
    item = post.one()
    assert (item["severity"], item["state"], item["what_if"]) == ("watch", "held", True)
    verdict = client.get(API).json()["verdict"]
    assert verdict["why"].startswith(
        "in FP8 this would be worth watching, but the layer runs in high precision: 'blocks.0.mlp' x row"
    )
    assert verdict["next"] == "watch that layer when it goes to FP8 with the others"
    client.patch(API, json={"ended": True})
    assert "would have been worth watching, no more, in FP8" in client.get(API).json()["verdict"]["why"]
    # Of several the one that would be trouble speaks, however young it is.
    for step in (3, 4):
        post(step, lost | {("blocks.1.mlp", "dgrad"): off(0.5)}, marks=marks)
    assert (
        client.get(API)
        .json()["verdict"]["why"]
        .startswith(
            "in FP8 this would be trouble, but the layer runs in high precision: 'blocks.1.mlp' dgrad"
        )
    )


def test_precision_is_unknown_where_the_wire_cannot_tell(client: TestClient, post: Any) -> None:
    marks = {(BAD, gemm): {"emulated": True} for gemm in ("dgrad", "wgrad")}
    post(0, {(BAD, "fprop"): off(0.036)}, marks=marks)
    layers = {item["layer"]: item["precision"] for item in client.get(f"{API}/layers").json()["items"]}
    assert layers[BAD] == {"fprop": "fp8", "dgrad": None, "wgrad": None}
    assert layers["blocks.1.mlp"] == dict.fromkeys(GEMMS, "fp8")
