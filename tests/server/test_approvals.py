"""What is said of an approval: why it is refused and what to do, and since when it holds."""

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor import policy
from fp8_safeguard.server import deciding

API = "/api/v1/runs/demo"
DGRAD = {("blocks.0.mlp", "dgrad"): {"sum_sq_err": 16384.0}}


def test_a_run_that_is_only_observed_says_how_its_proposals_can_be_approved(
    client: TestClient, post: Any
) -> None:
    (made,) = post(0, DGRAD, mode="observe")["decisions"]
    refused = client.post(f"/api/v1/decisions/{made['id']}:approve")
    assert (refused.status_code, refused.json()["type"]) == (409, "mode-conflict")
    assert refused.json()["detail"] == (
        "run 'demo' is only observed, its plan does not change: set its mode to advise or enforce first (Mode on its page, "
        "or PATCH /api/v1/runs/demo)"
    )
    client.patch(API, json={"mode": "advise"})
    assert client.post(f"/api/v1/decisions/{made['id']}:approve").json()["state"] == "approved"


@pytest.fixture
def advising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decision is a word to people."""

    def decide(*given: Any) -> Any:
        state, made = policy.decide(*given)
        return state, tuple(replace(one, action="advice", state="proposed") for one in made)

    monkeypatch.setattr(deciding, "decide", decide)


@pytest.mark.usefixtures("advising")
def test_advice_in_an_observed_run_has_nothing_to_approve_in_any_mode(client: TestClient, post: Any) -> None:
    (made,) = post(0, DGRAD, mode="observe")["decisions"]
    refused = client.post(f"/api/v1/decisions/{made['id']}:approve")
    assert (refused.status_code, refused.json()["type"], refused.json()["state"]) == (
        409, "decision-state", "proposed",
    )  # fmt: skip
    # Another mode would change nothing.
    assert "mode" not in refused.json()["detail"]
    assert "advice for people" in refused.json()["detail"]
    assert client.post(f"/api/v1/decisions/{made['id']}:reject").json()["state"] == "rejected"


@pytest.mark.parametrize("mode", ["observe", "advise"])
@pytest.mark.usefixtures("advising")
def test_pages_offer_no_approval_of_advice(client: TestClient, post: Any, mode: str) -> None:
    post(0, DGRAD, mode=mode)
    drawer = client.get("/runs/demo/layer", params={"layer": "blocks.0.mlp"}).text
    page = client.get("/runs/demo").text
    for text in (drawer, page):
        assert "for people, no answer is needed" in text
        assert ":approve" not in text
        assert 'data-act="approve"' not in text
    assert "advice</span>" in drawer


@pytest.mark.parametrize(("mode", "offered"), [("observe", False), ("advise", True)])
def test_pages_offer_an_approval_only_where_it_changes_the_plan(
    client: TestClient, post: Any, mode: str, offered: bool
) -> None:
    post(0, DGRAD, mode=mode)
    drawer = client.get("/runs/demo/layer", params={"layer": "blocks.0.mlp"}).text
    page = client.get("/runs/demo").text
    assert (":approve" in drawer, 'data-act="approve"' in page) == (offered, offered)
    for text in (drawer, page):
        assert ("nothing comes of it" in text) != offered
    client.patch(API, json={"ended": True})
    assert ":approve" not in client.get("/runs/demo/layer", params={"layer": "blocks.0.mlp"}).text
    assert 'data-act="approve"' not in client.get("/runs/demo").text
