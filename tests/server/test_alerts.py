"""An alert's life: raised once, resolved, raised again, silenced, told."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor.alerts import COOL_DOWN_STEPS

on_both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"
Ill = dict[tuple[str, str], dict[str, Any]]
X_ROW, DGRAD = (BAD, "x row"), (BAD, "dgrad")


def off(error: float) -> dict[str, Any]:
    return {"sum_sq_err": 65536.0 * error**2}


def test_a_breach_is_one_alert_however_long_it_lasts_and_whatever_is_sent_again(
    client: TestClient, post: Any
) -> None:
    assert post.breach(0, 1, 2, 3) == [1]
    assert post.breach(1, 2, 3, 0) == []
    item = post.one()
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
    assert [(part["slot"]["gemm"], part["over"]) for part in post.one()["slots"]] == [
        ("fprop", False),
        ("dgrad", True),
    ]
    assert post.one()["state"] == "open"


@on_both
def test_it_resolves_by_itself_once_clear_and_opens_again_within_the_cool_down(
    client: TestClient, post: Any, clock: Any
) -> None:
    post.breach(0, 1)
    clock.now += 60
    for step in (2, 3, 4):
        post(step)
    item = post.one()
    assert (item["state"], item["resolved_by"], item["resolved_reason"]) == ("resolved", None, "clear again")
    assert item["resolved"] == "2023-11-14T22:14:20.000Z"
    last = 4 + COOL_DOWN_STEPS
    assert post.breach(last - 1, last) == [1]
    again = post.one()
    assert (again["state"], again["occurrences"], again["resolved"]) == ("open", 2, None)
    assert (again["first_step"], again["step"], again["reopened_step"]) == (0, 1, last)


def test_after_the_cool_down_it_is_another_alert(client: TestClient, post: Any) -> None:
    post.breach(0, 1)
    for step in (2, 3, 4):
        post(step)
    last = 5 + COOL_DOWN_STEPS
    assert post.breach(last - 1, last) == [2]
    assert [(item["id"], item["state"], item["occurrences"]) for item in post.alerts()] == [
        (2, "open", 1),
        (1, "resolved", 1),
    ]


def test_what_a_person_resolves_stays_so_until_it_clears_and_comes_again(
    client: TestClient, post: Any
) -> None:
    post.breach(0, 1)
    resolved = client.post("/api/v1/alerts/1:resolve", json={"by": "ada"}).json()
    assert (resolved["state"], resolved["resolved_by"]) == ("resolved", "ada")
    assert client.get(API).json()["state"] == "healthy"
    assert post.breach(2, 3, 4) == []
    assert post.one()["resolved_by"] == "ada"
    # Another person finds it resolved already.
    assert client.post("/api/v1/alerts/1:resolve", json={"by": "bob"}).json()["resolved_by"] == "ada"
    for step in (5, 6, 7):
        post(step)
    assert post.breach(8, 9) == [1]
    assert (post.one()["state"], post.one()["occurrences"], post.one()["resolved_by"]) == ("open", 2, None)


@pytest.mark.parametrize(
    "worse", [{X_ROW: {"underflow": 20000, "zeros": 20000}, (BAD, "w tile"): {"underflow": 300}}]
)
def test_what_a_person_resolved_is_raised_again_when_it_grows_to_act(
    client: TestClient, post: Any, worse: Ill
) -> None:
    post.breach(0, 1)
    client.post("/api/v1/alerts/1:resolve")
    (raised,) = post(2, worse)["alerts"]
    assert (raised["id"], raised["severity"], raised["state"], raised["occurrences"]) == (1, "act", "open", 2)


def test_an_alert_that_worsens_is_in_the_reply_again(post: Any) -> None:
    some, many = {X_ROW: {"saturated": 20}}, {X_ROW: {"saturated": 2000}}
    assert post.breach(0, ill=some) == []
    assert post.breach(1, ill=some) == [1]
    assert post.breach(2, ill=many) == [1]
    assert post.breach(3, ill=many) == []


def test_silence_is_about_a_rule_of_a_layer_and_outlasts_its_alerts(
    client: TestClient, post: Any, clock: Any
) -> None:
    post.breach(0, 1)
    silenced = client.post("/api/v1/alerts/1:silence", json={"seconds": 200, "by": "ada"}).json()
    assert (silenced["silenced"], silenced["silenced_by"], silenced["state"]) == (True, "ada", "open")
    assert client.get(API).json()["alerts"] == {"open": 0, "held": 0, "silenced": 1}
    assert post.active() == {("underflow", "watch"): 0}
    # Silence heals nothing.
    assert client.get(API).json()["state"] == "watch"
    for step in (2, 3, 4):
        post(step)
    late = 60 + COOL_DOWN_STEPS
    assert post.breach(late, late + 1) == [2]
    newest = post.alerts()[0]
    assert (newest["id"], newest["silenced"], newest["silenced_by"]) == (2, True, "ada")
    clock.now += 201
    assert post.alerts()[0]["silenced"] is False
    assert client.get(API).json()["alerts"] == {"open": 1, "held": 0, "silenced": 0}
    assert post.active() == {("underflow", "watch"): 1}
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
    post.breach(0, 1)
    before = post.one()
    answer = client.post(
        f"/api/v1/alerts/1:{action}", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, [fault["pointer"] for fault in answer.json()["errors"]]) == (422, [pointer])
    assert post.one() == before


@pytest.mark.parametrize("action", ["ack", "silence", "resolve"])
def test_an_unknown_alert_is_404_and_an_empty_body_is_enough(
    client: TestClient, post: Any, action: str
) -> None:
    assert client.post(f"/api/v1/alerts/1:{action}").json()["type"] == "alert-not-found"
    post.breach(0, 1)
    assert client.post(f"/api/v1/alerts/1:{action}").status_code == 200


def test_readers_of_the_stream_hear_of_every_change(client: TestClient, post: Any) -> None:
    heard: list[tuple[str, Any]] = []
    broadcast = client.app.state.context.events  # type: ignore[attr-defined]
    publish = broadcast.publish

    def note(events: Any) -> None:
        listed = list(events)
        heard.extend((event.kind, event.data) for event in listed)
        publish(listed)

    broadcast.publish = note
    post.breach(0, 1)
    for step in (2, 3, 4):
        post(step)
    post.breach(5, 6)
    client.post("/api/v1/alerts/1:resolve")
    told = [(data["state"], data["occurrences"]) for kind, data in heard if kind == "alert"]
    assert told == [("open", 1), ("resolved", 1), ("open", 2), ("resolved", 2)]
    counts = [data["open_alerts"] for kind, data in heard if kind == "state" and "open_alerts" in data]
    assert counts == [1, 0, 1]
