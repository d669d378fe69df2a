"""Alerts about values that are no numbers: losses, norms, sums."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
BAD = "blocks.0.mlp"
Ill = dict[tuple[str, str], dict[str, Any]]
X_ROW, DGRAD = (BAD, "x row"), (BAD, "dgrad")


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
    assert post.active() == {("nonfinite-loss", "act"): 1}
    json.loads(client.get(f"{API}/alerts").text, parse_constant=pytest.fail)
    for step in (2, 3, 4):
        post(step, run={"loss": 2.0})
    assert post.one()["state"] == "resolved"


def test_one_overflow_of_a_gradient_scaler_is_no_alert(client: TestClient, post: Any) -> None:
    post(0, run={"gradient_norm": 1.0, "loss_scale": 65536.0})
    for step, scale in enumerate((32768.0, 16384.0, 8192.0, 4096.0), start=1):
        assert post(step, run={"gradient_norm": "Infinity", "loss_scale": scale})["alerts"] == []
    assert post(5, run={"gradient_norm": "NaN", "loss_scale": 4096.0})["alerts"] == []
    (raised,) = post(6, run={"gradient_norm": "NaN", "loss_scale": 4096.0})["alerts"]
    assert (raised["rule"], raised["severity"], raised["layer"]) == ("nonfinite-gradient-norm", "watch", None)
    for step in range(7, 10):
        post(step, run={"gradient_norm": "NaN", "loss_scale": 4096.0})
    assert post.one()["severity"] == "act"


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
