"""What was acknowledged is on disk, wherever the server is killed."""

import http.client
import json
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

RUN = "/api/v1/runs/demo"
GROUPS = 4
STEPS = 250
KILLS = 3


def body_of(documents: Any, step: int, group: int) -> dict[str, Any]:
    """A sample whose values are its own, so that no other can stand for it; one layer is bad for a while."""
    slots = documents.slots(1)
    values = [documents.values(slot, amax=1 + step + group / GROUPS, count=65536 + step) for slot in slots]
    if 60 <= step < 200:
        values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
    run = {"loss": 9 - step / STEPS, "tokens": step}
    sample: dict[str, Any] = documents.sample(
        step, slots, values, group=str(group), groups=GROUPS, mode="enforce", run=run
    )
    return sample


class Poster(threading.Thread):
    """Sends one group's samples in order, as fast as it can; what fails is not sent again."""

    def __init__(self, bodies: list[dict[str, Any]], gate: "Gate") -> None:
        super().__init__()
        self.bodies, self.gate = bodies, gate
        self.acknowledged: set[int] = set()

    def run(self) -> None:
        server: http.client.HTTPConnection | None = None
        for body in self.bodies:
            host = self.gate.host()
            server = server or http.client.HTTPConnection(host, timeout=30)
            try:
                server.request(
                    "POST", f"{RUN}/samples", json.dumps(body), {"Content-Type": "application/json"}
                )
                answer = server.getresponse()
                reply = json.loads(answer.read())
            except (OSError, http.client.HTTPException):
                self.gate.shut(host)
                server.close()
                server = None
                continue
            if answer.status == 200:
                self.acknowledged.add(body["step"])
            self.gate.count(None if answer.status == 200 else reply)
        if server is not None:
            server.close()


class Gate:
    """Where the server is, and how many samples it has acknowledged."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._host: str | None = None
        self.acknowledged = 0
        self.refused: list[Any] = []

    def host(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self._host is not None, timeout=60)
            assert self._host is not None
            return self._host

    def open(self, host: str) -> None:
        with self._changed:
            self._host = host
            self._changed.notify_all()

    def shut(self, host: str) -> None:
        with self._changed:
            if self._host == host:
                self._host = None

    def count(self, refused: Any = None) -> None:
        with self._changed:
            self.acknowledged += 1
            if refused is not None:
                self.refused.append(refused)
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.acknowledged >= number, timeout=60)
            assert self.refused == []


@pytest.mark.slow
def test_what_was_acknowledged_is_stored_whatever_kills_the_server(
    serve: Callable[..., Any], documents: Any, tmp_path: Path
) -> None:
    chance = random.Random(20)
    bodies = [[body_of(documents, step, group) for step in range(STEPS)] for group in range(GROUPS)]
    gate = Gate()
    posters = [Poster(mine, gate) for mine in bodies]
    server = serve()
    gate.open(server.url.removeprefix("http://"))
    for poster in posters:
        poster.start()
    for kill in sorted(chance.sample(range(40, GROUPS * STEPS - 100), KILLS)):
        gate.wait(kill)
        server.process.kill()
        server.process.wait()
        gate.shut(server.url.removeprefix("http://"))
        check_store(tmp_path / "store.db")
        server = serve()
        gate.open(server.url.removeprefix("http://"))
    for poster in posters:
        poster.join()
    assert gate.refused == []
    check_store(tmp_path / "store.db")
    acknowledged = {(step, group) for group in range(GROUPS) for step in posters[group].acknowledged}
    # At most what every thread had under way at each kill went without an answer.
    assert GROUPS * STEPS - GROUPS * KILLS <= len(acknowledged) < GROUPS * STEPS
    stored = check_values(server.url, bodies)
    assert acknowledged <= stored
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        for mine in bodies:
            replies = client.post(f"{RUN}/samples", json={"samples": mine}).json()["results"]
            counted = [(reply["inserted"], reply["duplicates"]) for reply in replies]
            expected = [(body["step"], int(body["group"])) in stored for body in mine]
            assert counted == [(0, 8) if known else (8, 0) for known in expected]
    everything = {(step, group) for group in range(GROUPS) for step in range(STEPS)}
    assert check_values(server.url, bodies) == everything
    check_store(tmp_path / "store.db")


def check_values(url: str, bodies: list[list[dict[str, Any]]]) -> set[tuple[int, int]]:
    """(step, group) of every stored sample; each is there once, with the values that were sent."""
    found: set[tuple[int, int]] = set()
    with httpx2.stream("GET", f"{url}{RUN}/export", params={"format": "jsonl"}, timeout=60) as answer:
        for line in answer.iter_lines():
            sample = json.loads(line)
            if sample["type"] != "sample":
                continue
            key = (sample["step"], int(sample["group"]))
            assert key not in found
            found.add(key)
            sent = bodies[key[1]][key[0]]
            assert sample["slots"] == sent["slots"]
            assert sample["columns"] == sent["columns"]
            assert sample["run"] == sent["run"]
    return found


def check_store(path: Path) -> None:
    """Nothing is half there: neither rows, nor the policy's memory of what was decided."""
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
        sizes = {
            (len(row["columns"]), len(json.loads(row["body"])))
            for row in database.execute(
                'SELECT "columns", body FROM samples JOIN slot_lists ON slot_lists.id = slot_list_id'
            )
        }
        (attempt,) = database.execute("SELECT * FROM attempts").fetchall()
        (run,) = database.execute("SELECT * FROM runs").fetchall()
        (decisions,) = database.execute("SELECT count(*) FROM decisions").fetchone()
        arrived = database.execute(
            'SELECT step, count(DISTINCT "group") AS groups FROM samples GROUP BY step ORDER BY step'
        ).fetchall()
    database.close()
    # 13 columns of 8 bytes and 14 null marks for each of 8 slots.
    assert sizes == {((13 * 8 + 14) * 8, 8)}
    assert attempt["run_id"] == run["id"]
    assert attempt["last_decided_step"] == last_ready(arrived)
    state = json.loads(attempt["policy_state"])
    assert state["last_step"] == attempt["last_decided_step"]
    assert state["decisions_made"] == decisions
    assert state["plan"]["version"] == run["plan_version"]


def last_ready(arrived: list[Any]) -> int | None:
    """The last step that the contract lets the policy decide on: all groups are there, or four newer steps."""
    last = None
    for place, row in enumerate(arrived):
        if row["groups"] < GROUPS and len(arrived) - 1 - place < 4:
            break
        last = row["step"]
    return last
