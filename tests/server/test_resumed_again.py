"""A run that is resumed a second time from one checkpoint goes on from what the first try has left."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
BEGUN = 5


def nonfinite(layer: int) -> Any:
    return {(f"blocks.{layer}.mlp", "fprop"): {"nan": 5}}


def decisions(client: TestClient) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.get(f"{API}/decisions").json()["items"]
    return [item for item in items if item["action"] != "advice"]


@pytest.fixture
def tries(post: Any) -> Any:
    """Posts a try to resume from the checkpoint, in which a layer breaks at once."""

    def begin(name: str, layer: int | None, *, mode: str, from_step: int = BEGUN) -> None:
        attempt = {"id": name, "parent": "0", "from_step": from_step}
        ill = None if layer is None else nonfinite(layer)
        for step in range(from_step, from_step + 3):
            post(step, ill, mode=mode, attempt=attempt)

    return begin


@pytest.mark.parametrize("from_step", [BEGUN, 3], ids=["resumed", "rewound"])
def test_every_try_gives_its_decisions_numbers_of_their_own(
    client: TestClient, post: Any, tries: Any, from_step: int
) -> None:
    for step in range(BEGUN):
        post(step, mode="enforce")
    for name, layer in (("1", 2), ("2", 4), ("3", 6)):
        tries(name, layer, mode="enforce", from_step=from_step)
    found = {item["layer"]: item["id"] for item in decisions(client)}
    assert set(found) == {"blocks.2.mlp", "blocks.4.mlp", "blocks.6.mlp"}
    assert len(set(found.values())) == 3


@pytest.fixture
def asked(client: TestClient, post: Any, tries: Any) -> Any:
    """The decision that the first try to resume asked a person about."""
    for step in range(BEGUN):
        post(step, mode="advise")
    tries("1", 2, mode="advise")
    (made,) = decisions(client)
    return made


def test_what_waits_for_a_person_since_the_first_try_still_waits(
    client: TestClient, tries: Any, asked: Any
) -> None:
    tries("2", 2, mode="advise")
    (still,) = decisions(client)
    assert (still["id"], still["state"]) == (asked["id"], "proposed")
    assert client.post(f"/api/v1/decisions/{asked['id']}:approve").status_code == 200
    assert [entry["decision_id"] for entry in client.get(f"{API}/plan").json()["entries"]] == [asked["id"]]


def test_what_a_person_rejected_in_the_first_try_is_not_asked_again_in_the_second(
    client: TestClient, tries: Any, asked: Any
) -> None:
    client.post(f"/api/v1/decisions/{asked['id']}:reject")
    tries("2", 2, mode="advise")
    assert [(item["id"], item["state"]) for item in decisions(client)] == [(asked["id"], "rejected")]
