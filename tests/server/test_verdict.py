"""What a run's state means, in words: ended apart from stale, refused samples, what to do next."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"


@pytest.fixture
def post(client: TestClient, documents: Any) -> Any:
    """Posts a step; `error` is that of the first layer's recomputed dgrad."""

    def post(step: int, error: float = 0.025, **header: Any) -> Any:
        slots = documents.slots(8)
        values = [documents.values(slot) for slot in slots]
        values[6]["sum_sq_err"] = values[6]["sum_sq"] * error**2
        header = {"mode": "enforce", **header}
        return client.post(f"{API}/samples", json=documents.sample(step, slots, values, **header))

    return post


def test_how_a_run_ended_is_kept_apart_from_its_silence(client: TestClient, post: Any, clock: Any) -> None:
    post(0)
    client.patch(API, json={"ended": True})
    ended = client.get(API).json()
    assert (ended["state"], ended["health"], ended["ended"]) == (
        "ended",
        "healthy",
        "2023-11-14T22:13:20.000Z",
    )
    assert ended["verdict"] == {
        "state": "ended",
        "why": "the trainer said that the run has ended, after step 0, healthy",
        "next": "compare it, or export it",
    }
    clock.now += 10_000
    assert client.get(API).json()["state"] == "ended"
    post(1, error=0.5)
    assert client.get(API).json()["ended"] is None
    client.patch(API, json={"ended": True})
    detail = client.get(API).json()
    assert (detail["state"], detail["health"]) == ("ended", "fallback")
    assert detail["verdict"]["why"].endswith("with its faults held by the plan: blocks.0.mlp in BF16")


def test_a_run_that_ended_in_trouble_says_so(client: TestClient, post: Any) -> None:
    post(0, error=0.5, mode="observe")
    client.patch(API, json={"ended": True})
    assert client.get(API).json()["verdict"]["why"].endswith("unstable: with open alerts that nothing held")


def test_a_stale_run_says_what_it_was_and_what_to_do(client: TestClient, post: Any, clock: Any) -> None:
    post(0, error=0.5)
    clock.now += 600
    detail = client.get(API).json()
    assert (detail["state"], detail["health"], detail["ended"]) == ("stale", "fallback", None)
    assert detail["verdict"]["why"] == (
        "no sample for 10.0 min: the trainer stopped, or the network is down; before that it was fallback"
    )
    assert "spool" in detail["verdict"]["next"]
    assert "mark the run as ended" in detail["verdict"]["next"]


def test_a_stale_run_of_which_some_groups_ended_names_the_others(
    client: TestClient, post: Any, clock: Any
) -> None:
    for group in ("0", "1"):
        post(0, group=group, groups=2)
    client.post(f"{API}:end", json={"attempt": "0", "group": "0"})
    clock.now += 600
    assert "1 of 2 groups have ended, 1 stopped without a word" in client.get(API).json()["verdict"]["why"]


def test_a_run_id_that_is_used_twice_is_in_the_verdict(client: TestClient, post: Any) -> None:
    post(0)
    post(1)
    assert client.get(API).json()["conflicts"] == 0
    assert post(1, error=0.03).status_code == 409
    detail = client.get(API).json()
    assert (detail["conflicts"], detail["last_conflict_step"], detail["state"]) == (1, 1, "healthy")
    assert detail["verdict"]["why"].endswith(
        "; 1 sample was refused (the last at step 1): this run id and attempt are used twice"
    )
    assert detail["verdict"]["next"].startswith("give each trainer its own run id")
    assert post(0, error=0.03).status_code == 409
    assert "2 samples were refused (the last at step 0)" in client.get(API).json()["verdict"]["why"]
    (attempt,) = client.get(f"{API}/attempts").json()["items"]
    assert (attempt["conflicts"], attempt["last_conflict_step"]) == (2, 0)
    # A new attempt begins without them.
    post(2, attempt={"id": "1", "parent": "0", "from_step": 2})
    assert client.get(API).json()["conflicts"] == 0


def test_a_verdict_names_how_many_tensors_an_alert_is_about(client: TestClient, documents: Any) -> None:
    slots = documents.slots(1)
    values = [documents.values(slot) for slot in slots]
    for place in (5, 6):
        values[place]["sum_sq_err"] = values[place]["sum_sq"] * 0.25
    client.post(f"{API}/samples", json=documents.sample(0, slots, values))
    assert client.get(API).json()["verdict"]["why"] == (
        "blocks.0.mlp dgrad: GEMM error 50 % (limit 5 %) since step 0, and 1 more of its tensors"
    )


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"ended": 1}, "/ended"),
        ({"ended": "yes"}, "/ended"),
        ({"ended": None}, "/ended"),
        ({"mode": "Observe"}, "/mode"),
        ({"mode": ["observe"]}, "/mode"),
        ({"thresholds": 10**400}, "/thresholds"),
        ({"a/b~": 1}, "/a~1b~0"),
    ],
)
def test_a_change_that_cannot_be_made_names_its_field(
    client: TestClient, post: Any, change: dict[str, Any], pointer: str
) -> None:
    post(0)
    before = client.get(API).json()
    answer = client.patch(API, json=change)
    assert (answer.status_code, [fault["pointer"] for fault in answer.json()["errors"]]) == (422, [pointer])
    assert client.get(API).json() == before
