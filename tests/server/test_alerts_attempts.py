"""Alerts and attempts: taken over, forgotten with a rewind."""

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


def test_a_resumed_attempt_takes_over_the_open_alerts(client: TestClient, post: Any) -> None:
    post.breach(0, 1, 2)
    assert post.breach(3, 4, attempt={"id": "1", "parent": "0", "from_step": 3}) == []
    item = post.one()
    assert (item["state"], item["occurrences"], item["last_step"]) == ("open", 1, 4)


def test_what_a_person_resolved_stays_so_in_the_next_attempt(client: TestClient, post: Any) -> None:
    post.breach(0, 1, 2)
    client.post("/api/v1/alerts/1:resolve", json={"by": "ada"})
    assert post.breach(3, 4, attempt={"id": "1", "parent": "0", "from_step": 3}) == []
    assert post.one()["resolved_by"] == "ada"


@on_both
def test_a_rewind_resolves_what_did_not_happen_and_opens_what_had_not_been_resolved_yet(
    client: TestClient, post: Any
) -> None:
    post.breach(0, 1)
    for step in (2, 3, 4):
        post(step)
    post.breach(5, 6, ill={DGRAD: off(0.045)})
    assert {item["rule"]: item["state"] for item in post.alerts()} == {
        "gemm-error": "open",
        "underflow": "resolved",
    }
    post(3, attempt={"id": "1", "parent": "0", "from_step": 3})
    after = {item["rule"]: item for item in post.alerts()}
    assert after["gemm-error"]["state"] == "resolved"
    assert after["gemm-error"]["resolved_reason"].startswith("steps from 3 on did not happen")
    # At step 2 the underflow had been seen clear once only.
    assert (after["underflow"]["state"], after["underflow"]["occurrences"]) == ("open", 1)
    post(4, attempt={"id": "1", "parent": "0", "from_step": 3})
    assert {item["rule"]: item["state"] for item in post.alerts()}["underflow"] == "resolved"


def test_an_attempt_that_starts_over_begins_without_alerts(client: TestClient, post: Any) -> None:
    post.breach(0, 1)
    post(0, attempt={"id": "again"})
    assert post.one()["resolved_reason"] == "attempt 'again' starts over"
