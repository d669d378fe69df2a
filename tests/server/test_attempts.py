"""Attempts are a tree: queries show the live branch and never mix two attempts at one step."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"
SLOT = {"index": 0, "layer": "a", "operand": "x", "layout": "row"}


@pytest.fixture
def post(client: TestClient, documents: Any) -> Any:
    """Posts steps of an attempt whose amax says which attempt measured it."""

    def post(
        attempt: str, steps: range, mark: float, parent: str | None = None, from_step: int = 0, **header: Any
    ) -> None:
        told = {"id": attempt, "parent": parent, "from_step": from_step}
        samples = [
            documents.sample(
                step,
                [SLOT],
                [documents.values(SLOT, amax=mark)],
                attempt=told,
                run={"loss": mark},
                **header,
            )
            for step in steps
        ]
        for start in range(0, len(samples), 256):
            answer = client.post(f"{API}/samples", json={"samples": samples[start : start + 256]}).json()
            assert all(result.get("accepted") for result in answer["results"]), answer

    return post


def shown(client: TestClient) -> dict[int, float]:
    series = client.get(f"{API}/series", params={"layer": "a", "metric": "amax"}).json()
    heatmap = client.get(f"{API}/heatmap", params={"metric": "amax", "max_cols": 2000}).json()
    assert (heatmap["steps"], heatmap["values"][0]) == (series["steps"], series["values"])
    loss = client.get(f"{API}/series", params={"metric": "loss"}).json()
    assert (loss["steps"], loss["values"]) == (series["steps"], series["values"])
    return dict(zip(series["steps"], series["values"], strict=True))


def test_b72_a_resumed_run_shows_the_new_attempt_from_its_checkpoint(client: TestClient, post: Any) -> None:
    post("0", range(0, 521, 5), 1.0)
    post("1", range(505, 531, 5), 2.0, parent="0", from_step=501)
    assert shown(client) == {step: 1.0 if step <= 500 else 2.0 for step in range(0, 531, 5)}
    detail = client.get(API).json()
    assert (detail["attempt"], detail["first_step"], detail["last_step"]) == ("1", 0, 530)


def test_b72_what_an_abandoned_attempt_measured_can_still_be_asked_for(client: TestClient, post: Any) -> None:
    """As reported: steps 0 to 520, and again 501 to 530 with other values. Nothing that was accepted is lost."""
    post("0", range(0, 521), 1.0)
    post("1", range(501, 531), 2.0, parent="0", from_step=501)
    for attempt, marks in (
        ("0", dict.fromkeys(range(521), 1.0)),
        ("1", {step: 1.0 if step <= 500 else 2.0 for step in range(531)}),
    ):
        for path, slot in (("series", {"layer": "a"}), ("heatmap", {})):
            query = {"metric": "amax", "attempt": attempt, "max_points": 2000, "max_cols": 2000, **slot}
            found = client.get(f"{API}/{path}", params=query).json()
            values = found["values"][0] if path == "heatmap" else found["values"]
            assert dict(zip(found["steps"], values, strict=True)) == marks
        loss = client.get(f"{API}/series", params={"metric": "loss", "attempt": attempt, "max_points": 2000})
        assert loss.json()["values"] == list(marks.values())
        (layer,) = client.get(f"{API}/layers", params={"attempt": attempt}).json()["items"]
        assert (layer["layer"], layer["worst"]["step"]) == ("a", max(marks))
    # The choice is the request's own: the next one sees the run as it goes on.
    assert client.get(f"{API}/series", params={"metric": "loss"}).json()["steps"][-1] == 530
    for path in ("series", "heatmap", "layers"):
        answer = client.get(f"{API}/{path}", params={"metric": "loss", "attempt": "2"})
        assert (answer.status_code, answer.json()["type"]) == (404, "attempt-not-found")


def test_b72_each_attempt_says_what_it_has(client: TestClient, post: Any) -> None:
    post("0", range(0, 521, 40), 1.0)
    post("1", range(501, 531, 29), 2.0, parent="0", from_step=501)
    listed = client.get(f"{API}/attempts").json()["items"]
    assert [(item["first_step"], item["last_step"], item["conflicts"]) for item in listed] == [
        (0, 520, 0),
        (501, 530, 0),
    ]


def test_b72_out_of_order_steps_are_stored_and_returned_sorted(client: TestClient, post: Any) -> None:
    for step in (3, 1, 2):
        post("0", range(step, step + 1), float(step))
    assert shown(client) == {1: 1.0, 2: 2.0, 3: 3.0}


def test_a_chain_of_rewinds_ends_each_ancestor_where_its_child_began(client: TestClient, post: Any) -> None:
    post("a", range(0, 10), 1.0)
    post("b", range(8, 20), 2.0, parent="a", from_step=8)
    # c goes back behind the point where b left a.
    post("c", range(5, 12), 3.0, parent="b", from_step=5)
    assert shown(client) == {step: 1.0 if step <= 4 else 3.0 for step in range(12)}
    items = client.get(f"{API}/attempts").json()["items"]
    assert [(item["id"], item["parent"], item["from_step"], item["live"]) for item in items] == [
        ("a", None, 0, True),
        ("b", "a", 8, True),
        ("c", "b", 5, True),
    ]
    assert [(item["first_step"], item["last_step"]) for item in items] == [(0, 9), (8, 19), (5, 11)]


def test_two_branches_of_one_parent_are_never_mixed(client: TestClient, post: Any) -> None:
    post("0", range(0, 10), 1.0)
    post("left", range(6, 10), 2.0, parent="0", from_step=6)
    post("right", range(8, 10), 3.0, parent="0", from_step=8)
    assert shown(client) == {step: 1.0 if step <= 7 else 3.0 for step in range(10)}
    live = {item["id"]: item["live"] for item in client.get(f"{API}/attempts").json()["items"]}
    assert live == {"0": True, "left": False, "right": True}


def test_an_attempt_without_a_parent_starts_over(client: TestClient, post: Any) -> None:
    post("0", range(0, 10), 1.0)
    post("1", range(0, 3), 2.0)
    assert shown(client) == {0: 2.0, 1: 2.0, 2: 2.0}
    assert client.get(API).json()["last_step"] == 2


@pytest.mark.parametrize("parent", ["1", "never seen"])
def test_a_parent_that_is_none_does_not_loop(client: TestClient, post: Any, parent: str) -> None:
    post("0", range(0, 3), 1.0)
    post("1", range(5, 7), 2.0, parent=parent, from_step=4)
    assert shown(client) == {5: 2.0, 6: 2.0}


def test_from_step_is_the_first_step_of_the_new_attempt(client: TestClient, post: Any) -> None:
    post("0", range(0, 16), 1.0)
    post("1", range(10, 13), 2.0, parent="0", from_step=10)
    assert shown(client) == {step: 1.0 if step < 10 else 2.0 for step in range(13)}


def test_the_parents_step_from_step_is_gone_even_where_the_child_has_no_sample_of_it(
    client: TestClient, post: Any
) -> None:
    post("0", range(0, 16), 1.0)
    post("1", range(11, 13), 2.0, parent="0", from_step=10)
    assert shown(client) == {**dict.fromkeys(range(10), 1.0), 11: 2.0, 12: 2.0}


def test_a_child_from_step_0_shares_nothing(client: TestClient, post: Any) -> None:
    post("0", range(0, 3), 1.0)
    post("1", range(1, 3), 2.0, parent="0")
    assert shown(client) == {1: 2.0, 2: 2.0}


def test_a_step_that_both_attempts_have_is_the_newer_ones(client: TestClient, post: Any) -> None:
    """A client that names too late a step: what it sends itself still goes first."""
    post("0", range(0, 6), 1.0)
    post("1", range(3, 6), 2.0, parent="0", from_step=4)
    assert shown(client) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
