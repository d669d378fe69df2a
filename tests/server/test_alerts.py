"""An alert's life: raised once, held, resolved, raised again, silenced, and forgotten with a rewind."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from fp8_safeguard.monitor.alerts import COOL_DOWN_STEPS

API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"
Ill = dict[tuple[str, str], dict[str, Any]]
X_ROW, DGRAD = (BAD, "x row"), (BAD, "dgrad")
UNDERFLOW: Ill = {X_ROW: {"underflow": 700, "zeros": 700}}


on_both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


def off(error: float) -> dict[str, Any]:
    return {"sum_sq_err": 65536.0 * error**2}


@pytest.fixture
def post(client: TestClient, documents: Any) -> Callable[..., dict[str, Any]]:
    """Posts a step of an observed run of eight layers, healthy but for what `ill` says."""

    def post(
        step: int,
        ill: Ill | None = None,
        *,
        marks: Ill | None = None,
        worst_expert: int | None = None,
        **header: Any,
    ) -> dict[str, Any]:
        slots = documents.slots(8)
        if worst_expert is not None:
            slots += [{**slot, "expert": worst_expert} for slot in slots if slot["layer"] == BAD]
        named = [(slot["layer"], slot.get("gemm") or f"{slot['operand']} {slot['layout']}") for slot in slots]
        values = [
            documents.values(slot, **(ill or {}).get(name, {}))
            for slot, name in zip(slots, named, strict=True)
        ]
        for slot, name in zip(slots, named, strict=True):
            slot.update((marks or {}).get(name, {}))
        answer = client.post(f"{API}/samples", json=documents.sample(step, slots, values, **header))
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    return post


def alerts(client: TestClient, **filters: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get(f"{API}/alerts", params=filters).json()["items"]
    return listed


def one(client: TestClient) -> dict[str, Any]:
    (item,) = alerts(client)
    return item


def active(client: TestClient) -> dict[tuple[str, str], float]:
    """alerts_active by rule and severity."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.labels["rule"], sample.labels["severity"]): sample.value
        for family in families
        if family.name == "fp8_safeguard_alerts_active"
        for sample in family.samples
    }


def breach(post: Any, *steps: int, ill: Ill = UNDERFLOW, **header: Any) -> list[int]:
    """Ids that these steps raised, one list for all."""
    return [alert["id"] for step in steps for alert in post(step, ill, **header)["alerts"]]


def test_a_breach_is_one_alert_however_long_it_lasts_and_whatever_is_sent_again(
    client: TestClient, post: Any
) -> None:
    assert breach(post, 0, 1, 2, 3) == [1]
    assert breach(post, 1, 2, 3, 0) == []
    item = one(client)
    assert (item["state"], item["occurrences"], item["first_step"], item["step"], item["last_step"]) == (
        ("open", 1, 0, 1, 3)
    )
    assert (item["scope"], item["layer"], item["rule"], item["severity"]) == (
        "layer",
        BAD,
        "underflow",
        "watch",
    )
    assert (item["resolved"], item["resolved_by"], item["reopened_step"], item["what_if"]) == (
        None,
        None,
        None,
        False,
    )


def test_the_slots_of_a_layer_that_break_one_rule_are_one_alert_and_all_in_it(
    client: TestClient, post: Any
) -> None:
    errors = {(BAD, gemm): off(error) for gemm, error in (("fprop", 0.2), ("dgrad", 0.5))}
    (raised,) = post(0, errors)["alerts"]
    assert raised["slot"] == {"layer": BAD, "gemm": "dgrad"}
    assert raised["value"] == pytest.approx(0.5)
    assert [(part["slot"]["gemm"], part["value"], part["severity"]) for part in raised["slots"]] == [
        ("dgrad", pytest.approx(0.5), "act"),
        ("fprop", pytest.approx(0.2), "act"),
    ]
    # One of them clears: the alert goes on, and says which.
    for step in range(1, 4):
        post(step, {(BAD, "fprop"): off(0.2)})
    assert [(part["slot"]["gemm"], part["over"]) for part in one(client)["slots"]] == [
        ("fprop", False),
        ("dgrad", True),
    ]
    assert one(client)["state"] == "open"


@on_both
def test_it_resolves_by_itself_once_clear_and_opens_again_within_the_cool_down(
    client: TestClient, post: Any, clock: Any
) -> None:
    breach(post, 0, 1)
    clock.now += 60
    for step in (2, 3, 4):
        post(step)
    item = one(client)
    assert (item["state"], item["resolved_by"], item["resolved_reason"]) == ("resolved", None, "clear again")
    assert item["resolved"] == "2023-11-14T22:14:20.000Z"
    last = 4 + COOL_DOWN_STEPS
    assert breach(post, last - 1, last) == [1]
    again = one(client)
    assert (again["state"], again["occurrences"], again["resolved"]) == ("open", 2, None)
    assert (again["first_step"], again["step"], again["reopened_step"]) == (0, 1, last)


def test_after_the_cool_down_it_is_another_alert(client: TestClient, post: Any) -> None:
    breach(post, 0, 1)
    for step in (2, 3, 4):
        post(step)
    last = 5 + COOL_DOWN_STEPS
    assert breach(post, last - 1, last) == [2]
    assert [(item["id"], item["state"], item["occurrences"]) for item in alerts(client)] == [
        (2, "open", 1),
        (1, "resolved", 1),
    ]


def test_what_a_person_resolves_stays_so_until_it_clears_and_comes_again(
    client: TestClient, post: Any
) -> None:
    breach(post, 0, 1)
    resolved = client.post("/api/v1/alerts/1:resolve", json={"by": "ada"}).json()
    assert (resolved["state"], resolved["resolved_by"]) == ("resolved", "ada")
    assert client.get(API).json()["state"] == "healthy"
    assert breach(post, 2, 3, 4) == []
    assert one(client)["resolved_by"] == "ada"
    # Another person finds it resolved already.
    assert client.post("/api/v1/alerts/1:resolve", json={"by": "bob"}).json()["resolved_by"] == "ada"
    for step in (5, 6, 7):
        post(step)
    assert breach(post, 8, 9) == [1]
    assert (one(client)["state"], one(client)["occurrences"], one(client)["resolved_by"]) == ("open", 2, None)


@pytest.mark.parametrize(
    "worse", [{X_ROW: {"underflow": 20000, "zeros": 20000}, (BAD, "w tile"): {"underflow": 300}}]
)
def test_what_a_person_resolved_is_raised_again_when_it_grows_to_act(
    client: TestClient, post: Any, worse: Ill
) -> None:
    breach(post, 0, 1)
    client.post("/api/v1/alerts/1:resolve")
    (raised,) = post(2, worse)["alerts"]
    assert (raised["id"], raised["severity"], raised["state"], raised["occurrences"]) == (1, "act", "open", 2)


def test_an_alert_that_worsens_is_in_the_reply_again(post: Any) -> None:
    some, many = {X_ROW: {"saturated": 20}}, {X_ROW: {"saturated": 2000}}
    assert breach(post, 0, ill=some) == []
    assert breach(post, 1, ill=some) == [1]
    assert breach(post, 2, ill=many) == [1]
    assert breach(post, 3, ill=many) == []


def test_silence_is_about_a_rule_of_a_layer_and_outlasts_its_alerts(
    client: TestClient, post: Any, clock: Any
) -> None:
    breach(post, 0, 1)
    silenced = client.post("/api/v1/alerts/1:silence", json={"seconds": 200, "by": "ada"}).json()
    assert (silenced["silenced"], silenced["silenced_by"], silenced["state"]) == (True, "ada", "open")
    assert client.get(API).json()["alerts"] == {"open": 0, "held": 0, "silenced": 1}
    assert active(client) == {("underflow", "watch"): 0}
    # Silence heals nothing.
    assert client.get(API).json()["state"] == "watch"
    for step in (2, 3, 4):
        post(step)
    late = 60 + COOL_DOWN_STEPS
    assert breach(post, late, late + 1) == [2]
    newest = alerts(client)[0]
    assert (newest["id"], newest["silenced"], newest["silenced_by"]) == (2, True, "ada")
    clock.now += 201
    assert alerts(client)[0]["silenced"] is False
    assert client.get(API).json()["alerts"] == {"open": 1, "held": 0, "silenced": 0}
    assert active(client) == {("underflow", "watch"): 1}
    client.post("/api/v1/alerts/2:silence")
    assert client.post("/api/v1/alerts/2:silence", json={"seconds": 0}).json()["silenced"] is False


@pytest.mark.parametrize(
    ("action", "body", "pointer"),
    [
        ("silence", '{"seconds": "long"}', "/seconds"),
        ("silence", '{"seconds": -1}', "/seconds"),
        ("silence", '{"seconds": NaN}', "/seconds"),
        ("silence", '{"seconds": true}', "/seconds"),
        ("silence", '{"seconds": null}', "/seconds"),
        ("silence", '{"seconds": 1e9}', "/seconds"),
        ("silence", f'{{"seconds": 1{"0" * 400}}}', "/seconds"),
        ("silence", '{"by": 5}', "/by"),
        ("ack", '{"by": ""}', "/by"),
        ("ack", '{"by": "\\ud800"}', "/by"),
        ("resolve", '{"by": ["ada"]}', "/by"),
    ],
)
def test_a_body_that_cannot_be_used_names_its_field_and_changes_nothing(
    client: TestClient, post: Any, action: str, body: str, pointer: str
) -> None:
    breach(post, 0, 1)
    before = one(client)
    answer = client.post(
        f"/api/v1/alerts/1:{action}", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, [fault["pointer"] for fault in answer.json()["errors"]]) == (422, [pointer])
    assert one(client) == before


@pytest.mark.parametrize("action", ["ack", "silence", "resolve"])
def test_an_unknown_alert_is_404_and_an_empty_body_is_enough(
    client: TestClient, post: Any, action: str
) -> None:
    assert client.post(f"/api/v1/alerts/1:{action}").json()["type"] == "alert-not-found"
    breach(post, 0, 1)
    assert client.post(f"/api/v1/alerts/1:{action}").status_code == 200


@on_both
def test_page_verdict_metrics_and_list_count_the_same(client: TestClient, post: Any) -> None:
    post(0, {DGRAD: off(0.5), ("blocks.1.mlp", "x row"): {"underflow": 700}}, mode="enforce")
    post(1, {DGRAD: off(0.5), ("blocks.1.mlp", "x row"): {"underflow": 700}}, mode="enforce", plan_version=1)
    states = {item["layer"]: item["state"] for item in alerts(client)}
    assert states == {BAD: "held", "blocks.1.mlp": "open"}
    detail = client.get(API).json()
    assert (detail["alerts"], detail["state"]) == ({"open": 1, "held": 1, "silenced": 0}, "fallback")
    assert active(client) == {("gemm-error", "act"): 0, ("underflow", "watch"): 1}
    assert [item["layer"] for item in alerts(client, state="open")] == ["blocks.1.mlp"]
    assert [item["layer"] for item in alerts(client, state="held")] == [BAD]
    assert alerts(client, state="resolved") == []
    assert [item["layer"] for item in alerts(client, layer=BAD)] == [BAD]
    assert client.get(f"{API}/alerts", params={"state": "over"}).status_code == 422


@on_both
def test_an_alert_is_held_only_where_the_fallback_covers_what_it_is_about(
    client: TestClient, post: Any
) -> None:
    errors = {DGRAD: off(0.3), (BAD, "wgrad"): off(0.95)}
    post(0, errors)
    pin = {"layer": BAD, "target": {"gemm": "dgrad"}, "action": "bf16_fallback"}
    client.patch(API, json={"mode": "advise"})
    client.put(f"{API}/pins", json=pin)
    assert one(client)["state"] == "open"
    assert client.get(API).json()["state"] == "unstable"
    listed = client.get(f"{API}/layers").json()["items"]
    assert {item["layer"]: item["state"] for item in listed}[BAD] == "unstable"
    client.put(f"{API}/pins", json={**pin, "target": {"layer": True}})
    assert one(client)["state"] == "held"
    # What held it goes: it is open again.
    client.post(f"{API}:kill-switch")
    assert one(client)["state"] == "open"


def test_a_gemm_in_fallback_raises_nothing_about_what_fp8_would_do(client: TestClient, post: Any) -> None:
    drift: Ill = {X_ROW: {"underflow": 20000, "zeros": 20000}, (BAD, "w tile"): {"underflow": 300}}
    assert breach(post, 0, ill=drift, mode="enforce") == [1]
    decided = client.get(f"{API}/plan").json()["entries"]
    assert [entry["target"]["gemm"] for entry in decided] == ["dgrad", "fprop"]
    marks = {(BAD, gemm): {"emulated": True} for gemm in ("fprop", "dgrad")}
    worse = {**drift, (BAD, "fprop"): off(0.7), DGRAD: off(0.3)}
    for step in range(1, 6):
        assert post(step, worse, marks=marks, mode="enforce", plan_version=1)["alerts"] == []
    assert (one(client)["state"], client.get(API).json()["state"]) == ("held", "fallback")


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
    item = one(client)
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


def test_precision_is_unknown_where_the_wire_cannot_tell(client: TestClient, post: Any) -> None:
    marks = {(BAD, gemm): {"emulated": True} for gemm in ("dgrad", "wgrad")}
    post(0, {(BAD, "fprop"): off(0.036)}, marks=marks)
    layers = {item["layer"]: item["precision"] for item in client.get(f"{API}/layers").json()["items"]}
    assert layers[BAD] == {"fprop": "fp8", "dgrad": None, "wgrad": None}
    assert layers["blocks.1.mlp"] == dict.fromkeys(GEMMS, "fp8")


def test_a_loss_that_is_no_number_is_an_alert_of_the_run(client: TestClient, post: Any) -> None:
    (raised,) = post(0, run={"loss": "NaN"})["alerts"]
    assert (raised["rule"], raised["scope"], raised["layer"], raised["slot"]) == (
        "nonfinite-loss", "run", None, None,
    )  # fmt: skip
    assert (raised["value"], raised["severity"]) == ("NaN", "watch")
    (worse,) = post(1, run={"loss": "Infinity"})["alerts"]
    assert (worse["id"], worse["severity"], worse["value"]) == (raised["id"], "act", "Infinity")
    detail = client.get(API).json()
    assert detail["state"] == "unstable"
    assert detail["verdict"]["why"].startswith("the whole run: ")
    assert active(client) == {("nonfinite-loss", "act"): 1}
    json.loads(client.get(f"{API}/alerts").text, parse_constant=pytest.fail)
    for step in (2, 3, 4):
        post(step, run={"loss": 2.0})
    assert one(client)["state"] == "resolved"


def test_one_overflow_of_a_gradient_scaler_is_no_alert(client: TestClient, post: Any) -> None:
    post(0, run={"gradient_norm": 1.0, "loss_scale": 65536.0})
    for step, scale in enumerate((32768.0, 16384.0, 8192.0, 4096.0), start=1):
        assert post(step, run={"gradient_norm": "Infinity", "loss_scale": scale})["alerts"] == []
    assert post(5, run={"gradient_norm": "NaN", "loss_scale": 4096.0})["alerts"] == []
    (raised,) = post(6, run={"gradient_norm": "NaN", "loss_scale": 4096.0})["alerts"]
    assert (raised["rule"], raised["severity"], raised["layer"]) == ("nonfinite-gradient-norm", "watch", None)
    for step in range(7, 10):
        post(step, run={"gradient_norm": "NaN", "loss_scale": 4096.0})
    assert one(client)["severity"] == "act"


@pytest.mark.parametrize(
    ("column", "broken"), [("sum_sq_err", "NaN"), ("sum_sq_q", "Infinity"), ("amax", "NaN")]
)
def test_a_sum_that_is_no_number_among_finite_elements_is_an_alert(
    client: TestClient, post: Any, column: str, broken: str
) -> None:
    (raised,) = post(0, {X_ROW: {column: broken}})["alerts"]
    assert (raised["rule"], raised["severity"], raised["metric"], raised["value"]) == (
        "nonfinite-statistics",
        "watch",
        column,
        broken,
    )
    assert post(1, {X_ROW: {column: broken}})["alerts"] == []


def test_a_sum_that_a_rule_speaks_of_is_no_second_alert(post: Any) -> None:
    (raised,) = post(0, {X_ROW: {"sum_sq_err": "Infinity"}})["alerts"]
    assert (raised["rule"], raised["value"]) == ("sqnr", "-Infinity")


def test_a_resumed_attempt_takes_over_the_open_alerts(client: TestClient, post: Any) -> None:
    breach(post, 0, 1, 2)
    assert breach(post, 3, 4, attempt={"id": "1", "parent": "0", "from_step": 3}) == []
    item = one(client)
    assert (item["state"], item["occurrences"], item["last_step"]) == ("open", 1, 4)


def test_what_a_person_resolved_stays_so_in_the_next_attempt(client: TestClient, post: Any) -> None:
    breach(post, 0, 1, 2)
    client.post("/api/v1/alerts/1:resolve", json={"by": "ada"})
    assert breach(post, 3, 4, attempt={"id": "1", "parent": "0", "from_step": 3}) == []
    assert one(client)["resolved_by"] == "ada"


@on_both
def test_a_rewind_resolves_what_did_not_happen_and_opens_what_had_not_been_resolved_yet(
    client: TestClient, post: Any
) -> None:
    breach(post, 0, 1)
    for step in (2, 3, 4):
        post(step)
    breach(post, 5, 6, ill={DGRAD: off(0.045)})
    assert {item["rule"]: item["state"] for item in alerts(client)} == {
        "gemm-error": "open",
        "underflow": "resolved",
    }
    post(3, attempt={"id": "1", "parent": "0", "from_step": 3})
    after = {item["rule"]: item for item in alerts(client)}
    assert after["gemm-error"]["state"] == "resolved"
    assert after["gemm-error"]["resolved_reason"].startswith("steps from 3 on did not happen")
    # At step 2 the underflow had been seen clear once only.
    assert (after["underflow"]["state"], after["underflow"]["occurrences"]) == ("open", 1)
    post(4, attempt={"id": "1", "parent": "0", "from_step": 3})
    assert {item["rule"]: item["state"] for item in alerts(client)}["underflow"] == "resolved"


def test_an_attempt_that_starts_over_begins_without_alerts(client: TestClient, post: Any) -> None:
    breach(post, 0, 1)
    post(0, attempt={"id": "again"})
    assert one(client)["resolved_reason"] == "attempt 'again' starts over"


def test_readers_of_the_stream_hear_of_every_change(client: TestClient, post: Any) -> None:
    heard: list[tuple[str, Any]] = []
    broadcast = client.app.state.context.events  # type: ignore[attr-defined]
    publish = broadcast.publish

    def note(events: Any) -> None:
        listed = list(events)
        heard.extend((event.kind, event.data) for event in listed)
        publish(listed)

    broadcast.publish = note
    breach(post, 0, 1)
    for step in (2, 3, 4):
        post(step)
    breach(post, 5, 6)
    client.post("/api/v1/alerts/1:resolve")
    told = [(data["state"], data["occurrences"]) for kind, data in heard if kind == "alert"]
    assert told == [("open", 1), ("resolved", 1), ("open", 2), ("resolved", 2)]
    counts = [data["open_alerts"] for kind, data in heard if kind == "state" and "open_alerts" in data]
    assert counts == [1, 0, 1]
