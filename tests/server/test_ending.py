"""A run ends when all its groups said so, and a run used twice is noted."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

URL = "/api/v1/runs/demo"
both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


def end(client: Any, attempt: str = "0", group: str = "0") -> Any:
    return client.post(f"{URL}:end", json={"attempt": attempt, "group": group})


def state(client: TestClient) -> str:
    return str(client.get(URL).json()["state"])


def conflicts(client: TestClient, attempt: str = "0") -> tuple[int, int | None]:
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        query = text("SELECT conflicts, last_conflict_step FROM attempts WHERE name = :name")
        row = conn.execute(query, {"name": attempt}).one()
    return row.conflicts, row.last_conflict_step


@both
def test_a_run_of_two_groups_ends_with_the_second(client: TestClient, documents: Any) -> None:
    for group in ("0", "1"):
        client.post(f"{URL}/samples", json=documents.sample(0, group=group, groups=2))
    for _ in range(2):
        assert end(client, group="0").json() == {"ended": False}
        assert state(client) == "healthy"
    for _ in range(2):
        assert end(client, group="1").json() == {"ended": True}
        assert state(client) == "ended"


@both
def test_a_later_sample_reopens_the_run_and_a_repeat_of_an_old_one_does_not(
    client: TestClient, documents: Any
) -> None:
    sample = documents.sample(0)
    client.post(f"{URL}/samples", json=sample)
    end(client)
    assert client.post(f"{URL}/samples", json=sample).json()["duplicates"] == 16
    assert state(client) == "ended"
    client.post(f"{URL}/samples", json=documents.sample(1))
    assert state(client) == "healthy"
    assert end(client).json() == {"ended": True}


def test_the_other_groups_need_not_say_it_again(client: TestClient, documents: Any) -> None:
    for group in ("0", "1"):
        client.post(f"{URL}/samples", json=documents.sample(0, group=group, groups=2))
        end(client, group=group)
    client.post(f"{URL}/samples", json=documents.sample(1, group="1", groups=2))
    assert state(client) == "healthy"
    assert end(client, group="1").json() == {"ended": True}


def test_only_the_newest_attempt_ends_the_run(client: TestClient, documents: Any) -> None:
    client.post(f"{URL}/samples", json=documents.sample(0))
    resumed = {"id": "1", "parent": "0", "from_step": 1}
    client.post(f"{URL}/samples", json=documents.sample(1, attempt=resumed))
    assert end(client, attempt="0").json() == {"ended": False}
    assert state(client) == "healthy"
    assert end(client, attempt="1").json() == {"ended": True}


def test_an_unknown_run_or_attempt_is_404(client: TestClient, documents: Any) -> None:
    assert (end(client).status_code, end(client).json()["type"]) == (404, "run-not-found")
    client.post(f"{URL}/samples", json=documents.sample(0))
    answer = end(client, attempt="7")
    assert (answer.status_code, answer.json()["type"]) == (404, "attempt-not-found")


@pytest.mark.parametrize(
    ("body", "pointers"),
    [
        ({}, ["/attempt", "/group"]),
        ({"attempt": 0, "group": "0"}, ["/attempt"]),
        ({"attempt": "0", "group": None}, ["/group"]),
        ({"attempt": "0", "group": "a\x00"}, ["/group"]),
        ([], [""]),
    ],
)
def test_a_body_that_names_no_group_is_422_with_its_fields(
    client: TestClient, documents: Any, body: Any, pointers: list[str]
) -> None:
    client.post(f"{URL}/samples", json=documents.sample(0))
    answer = client.post(f"{URL}:end", json=body)
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == pointers
    assert state(client) == "healthy"


def test_only_who_may_send_samples_may_end_a_run(
    make_client: Callable[..., TestClient], documents: Any
) -> None:
    client = make_client(tokens={"in": ["ingest"], "out": ["read", "control"]})
    bearer = {"Authorization": "Bearer in"}
    client.post(f"{URL}/samples", json=documents.sample(0), headers=bearer)
    body = {"attempt": "0", "group": "0"}
    for token, status in (("", 401), ("wrong", 401), ("out", 403), ("in", 200)):
        headers = {"Authorization": f"Bearer {token}"}
        assert client.post(f"{URL}:end", json=body, headers=headers).status_code == status


def test_the_end_is_told_to_those_who_watch(live: httpx2.Client, documents: Any) -> None:
    live.post(f"{URL}/samples", json=documents.sample(0))
    with live.stream("GET", f"{URL}/events") as response:
        lines = response.iter_lines()
        end(live)
        assert next(line for line in lines if "ended" in line) == 'data: {"ended":true}'


@both
def test_a_refused_sample_is_counted_with_its_attempt(client: TestClient, documents: Any) -> None:
    slots = documents.slots(1)
    other = [documents.values(slot, amax=9.0) for slot in slots]
    client.post(f"{URL}/samples", json=documents.sample(7, slots))
    client.post(f"{URL}/samples", json=documents.sample(8, slots, attempt={"id": "1"}))
    assert conflicts(client) == (0, None)
    clash = documents.sample(7, slots, other)
    assert client.post(f"{URL}/samples", json=clash).status_code == 409
    assert conflicts(client) == (1, 7)
    # One of a list is counted too, and those beside it are stored.
    answer = client.post(f"{URL}/samples", json={"samples": [documents.sample(6, slots), clash]})
    assert [result.get("status", 200) for result in answer.json()["results"]] == [200, 409]
    assert client.post(f"{URL}/samples", json=documents.sample(9, slots)).status_code == 200
    assert conflicts(client) == (2, 7)
    assert conflicts(client, "1") == (0, None)
    # Refused for other reasons, a sample says nothing about a second client.
    client.post(f"{URL}/samples", json=documents.sample(-1, slots))
    client.post(f"{URL}/samples", json=documents.sample(9, slots, groups=3))
    assert conflicts(client) == (2, 7)
