"""Samples are stored once, conflicts refused whole, faults named."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from sqlalchemy import Connection, event, text
from starlette.testclient import TestClient

from fp8_safeguard.monitor.slots import Slot, slots_id

URL = "/api/v1/runs/demo/samples"
JSON = {"Content-Type": "application/json"}
both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)


def layer_slots(count: int) -> list[dict[str, Any]]:
    return [{"index": n, "layer": f"layer.{n}", "operand": "x", "layout": "row"} for n in range(count)]


def counts(reply: dict[str, Any]) -> tuple[int, int]:
    return reply["inserted"], reply["duplicates"]


def stored_slots(client: TestClient) -> int:
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        lists = conn.execute(text("SELECT body FROM slot_lists JOIN samples ON slot_lists.id = slot_list_id"))
        return sum(len(json.loads(row.body)) for row in lists)


def test_a_sample_is_acknowledged_with_the_contract_members(client: TestClient, documents: Any) -> None:
    reply = client.post(URL, json=documents.sample(0))
    assert reply.status_code == 200
    assert reply.json() == {
        "accepted": True,
        "inserted": 16,
        "duplicates": 0,
        "plan_version": 0,
        "plan": None,
        "decisions": [],
        "alerts": [],
    }


@both
def test_b47_a_resent_batch_counts_duplicates_and_only_the_new_slot_is_added(
    client: TestClient, documents: Any
) -> None:
    batch = documents.sample(7, layer_slots(150))
    assert counts(client.post(URL, json=batch).json()) == (150, 0)
    assert counts(client.post(URL, json=batch).json()) == (0, 150)
    assert stored_slots(client) == 150
    mixed = documents.sample(7, layer_slots(151)[1:])
    assert counts(client.post(URL, json=mixed).json()) == (1, 149)
    assert stored_slots(client) == 151
    assert counts(client.post(URL, json=documents.sample(7, layer_slots(151))).json()) == (0, 151)


def test_b47_the_work_of_a_repeat_does_not_grow_with_the_history(
    client: TestClient, documents: Any, tmp_path: Path
) -> None:
    """Counted in instructions of SQLite's virtual machine: no load on the computer changes them."""
    batch = documents.sample(100_000, layer_slots(150))
    assert counts(client.post(URL, json=batch).json()) == (150, 0)
    short = instructions_of(client, lambda: client.post(URL, json=batch).json())
    assert counts(short[0]) == (0, 150)
    with sqlite3.connect(tmp_path / "store.db") as database:
        names = [row[1] for row in database.execute("PRAGMA table_info(samples)") if row[1] != "id"]
        columns = ", ".join(f'"{name}"' for name in names)
        values = ", ".join("history.step" if name == "step" else f'samples."{name}"' for name in names)
        database.execute(
            f"WITH RECURSIVE history(step) AS (SELECT 0 UNION ALL SELECT step + 1 FROM history WHERE step < 666) "
            f"INSERT INTO samples ({columns}) SELECT {values} FROM samples, history"
        )
    database.close()
    assert stored_slots(client) == 668 * 150 > 100_000
    long = instructions_of(client, lambda: client.post(URL, json=batch).json())
    assert counts(long[0]) == (0, 150)
    assert 0 < long[1] <= 2 * short[1]


def instructions_of(client: TestClient, call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call answers, and how many instructions SQLite ran for it."""
    seen = 0

    def count() -> int:
        nonlocal seen
        seen += 1
        return 0

    def watch(connection: Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        driver.set_progress_handler(count, 1)
        watched.append(driver)

    watched: list[Any] = []
    engine = client.app.state.store.engine  # type: ignore[attr-defined]
    event.listen(engine, "begin", watch)
    try:
        answer = call()
    finally:
        event.remove(engine, "begin", watch)
        for driver in watched:
            driver.set_progress_handler(None, 1)
    return answer, seen


@both
def test_b47_a_nan_equals_itself(client: TestClient, documents: Any) -> None:
    slots = layer_slots(2)
    values = [documents.values(slot, amax="NaN", sum_sq="Infinity") for slot in slots]
    sample = documents.sample(3, slots, values)
    assert counts(client.post(URL, json=sample).json()) == (2, 0)
    assert counts(client.post(URL, json=sample).json()) == (0, 2)


@both
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("underflow", 1),
        ("amax", 4.5000001),
        ("sum_sq", "NaN"),
        ("rows", None),
        ("zeros", None),
        ("tile_sqnr_hist", None),
    ],
)
def test_a_differing_slot_is_refused_and_nothing_of_the_sample_is_stored(
    client: TestClient, documents: Any, column: str, value: Any
) -> None:
    client.post(URL, json=documents.sample(7, layer_slots(3)))
    slots = layer_slots(5)
    values = [documents.values(slot) for slot in slots]
    values[2][column] = value
    answer = client.post(URL, json=documents.sample(7, slots, values))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "sample-conflict"
    assert [error["pointer"] for error in answer.json()["errors"]] == ["/slots/2"]
    assert stored_slots(client) == 3


@both
def test_same_values_of_another_attempt_group_or_step_are_new(client: TestClient, documents: Any) -> None:
    sample = documents.sample(7, groups=2)
    assert counts(client.post(URL, json=sample).json()) == (16, 0)
    assert counts(client.post(URL, json={**sample, "group": "1"}).json()) == (16, 0)
    assert counts(client.post(URL, json={**sample, "step": 8}).json()) == (16, 0)
    attempt = {"id": "1", "parent": "0", "from_step": 6}
    assert counts(client.post(URL, json={**sample, "attempt": attempt}).json()) == (16, 0)


def test_a_slot_twice_in_a_body_names_both_places(client: TestClient, documents: Any) -> None:
    slots = [*layer_slots(3), {**layer_slots(3)[1], "index": 3}]
    answer = client.post(URL, json=documents.sample(7, slots))
    assert answer.status_code == 422
    assert "/slots/3" in answer.json()["detail"]
    assert "/slots/1" in answer.json()["detail"]


@both
def test_a_slot_twice_in_two_samples_of_a_body_names_both_places(client: TestClient, documents: Any) -> None:
    sample = documents.sample(7, layer_slots(2))
    first, second = client.post(URL, json={"samples": [sample, sample]}).json()["results"]
    assert first["inserted"] == 2
    assert second["status"] == 422
    assert "/samples/1/slots/0" in second["detail"]
    assert "/samples/0/slots/0" in second["detail"]


def test_each_sample_of_a_list_has_its_own_result_in_order(client: TestClient, documents: Any) -> None:
    good, bad = documents.sample(1), documents.sample(2)
    del bad["step"]
    answer = client.post(URL, json={"samples": [good, bad, documents.sample(3), 5]})
    assert answer.status_code == 200
    first, second, third, fourth = answer.json()["results"]
    assert first["accepted"]
    assert third["accepted"]
    assert (second["status"], second["type"]) == (422, "validation")
    assert fourth["status"] == 422


def test_a_list_of_more_than_256_samples_is_refused(client: TestClient, documents: Any) -> None:
    samples = [documents.sample(step, []) for step in range(257)]
    assert client.post(URL, json={"samples": samples}).status_code == 422
    assert client.post(URL, json={"samples": samples[:256]}).status_code == 200
    assert client.post(URL, json={"samples": {}}).status_code == 422
    assert client.post(URL, json={"samples": []}).json() == {"results": []}


@both
def test_slots_id_is_usable_once_the_list_was_accepted(client: TestClient, documents: Any) -> None:
    full = documents.sample(1)
    digest = slots_id([Slot.from_wire(slot) for slot in full["slots"]])
    short = {name: value for name, value in documents.sample(2).items() if name != "slots"}
    short["slots_id"] = digest
    unknown = client.post(URL, json=short)
    assert (unknown.status_code, unknown.json()["type"]) == (409, "slots-unknown")
    client.post(URL, json=full)
    assert counts(client.post(URL, json=short).json()) == (16, 0)
    resent = {**documents.sample(2), "slots": full["slots"]}
    assert counts(client.post(URL, json=resent).json()) == (0, 16)


def test_an_unknown_schema_is_refused_with_the_accepted_ones(client: TestClient, documents: Any) -> None:
    answer = client.post(URL, json=documents.sample(1, schema=9))
    assert (answer.status_code, answer.json()["type"]) == (409, "schema")
    assert answer.json()["accepted_schemas"] == [1]


def test_a_refused_sample_makes_no_run(client: TestClient, documents: Any) -> None:
    client.post(URL, json={**documents.sample(1), "step": -1})
    assert client.get("/api/v1/runs/demo").status_code == 404


@pytest.mark.parametrize("run", ["-demo", ".demo", "a b", "a" * 129, "ü", "a%3Ab"])
def test_a_run_id_outside_the_pattern_is_refused(client: TestClient, documents: Any, run: str) -> None:
    assert client.post(f"/api/v1/runs/{run}/samples", json=documents.sample(0)).status_code == 422


def test_a_run_id_of_128_characters_is_accepted(client: TestClient, documents: Any) -> None:
    run = "A." + "_-9" * 42
    assert len(run) == 128
    assert client.post(f"/api/v1/runs/{run}/samples", json=documents.sample(0)).status_code == 200
    assert client.get(f"/api/v1/runs/{run}").json()["id"] == run


@both
@pytest.mark.parametrize("step", [2**31 + 5, 2**63 - 1])
def test_b77_large_steps_are_stored_exactly(client: TestClient, documents: Any, step: int) -> None:
    run = {"tokens": 6_800_000_000, "loss": 1.0}
    assert client.post(URL, json=documents.sample(step, run=run)).status_code == 200
    assert client.get("/api/v1/runs/demo").json()["last_step"] == step
    assert client.get("/api/v1/runs/demo/heatmap").json()["steps"] == [step]
    series = client.get("/api/v1/runs/demo/series", params={"metric": "tokens", "from_step": step}).json()
    assert (series["steps"], series["values"]) == ([step], [6.8e9])


@both
@pytest.mark.parametrize("step", [-1, 2**63, 10**20, True, 1.5, "7", None])
def test_b77_b76_steps_that_are_none_are_422(client: TestClient, documents: Any, step: Any) -> None:
    answer = client.post(URL, json={**documents.sample(0), "step": step})
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == ["/step"]


@both
def test_b77_counts_up_to_int64_are_kept_exactly(client: TestClient, documents: Any) -> None:
    slots = layer_slots(1)
    values = [documents.values(slots[0], count=2**63 - 1, zeros=2**53 + 1)]
    sample = documents.sample(1, slots, values)
    assert client.post(URL, json=sample).status_code == 200
    values[0]["zeros"] = 2**53
    assert client.post(URL, json=documents.sample(1, slots, values)).status_code == 409


@both
def test_b52_one_nan_stores_all_records_and_marks_the_non_finite(client: TestClient, documents: Any) -> None:
    slots = layer_slots(100)
    values = [documents.values(slot) for slot in slots]
    values[3].update(nan=2, amax="NaN")
    values[8].update(inf=1, amax="Infinity")
    answer = client.post(URL, json=documents.sample(1, slots, values, run={"loss": "NaN"}))
    assert counts(answer.json()) == (100, 0)
    heatmap = client.get("/api/v1/runs/demo/heatmap", params={"metric": "amax"}).json()
    column = [row[0] for row in heatmap["values"]]
    assert (column[3], column[8]) == ("NaN", "Infinity")
    assert heatmap["nonfinite"] == [[3, 0, 2, 0], [8, 0, 0, 1]]
    assert all(value == 4.5 for n, value in enumerate(column) if n not in (3, 8))


@pytest.mark.parametrize("body", ['{"step": NaN}', '{"step": 1', "[" * 100_000, '"\\ud800"', b"\xff\xfe"])
def test_b54_documents_that_are_not_json_are_400(client: TestClient, body: Any) -> None:
    answer = client.post(URL, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["type"]) == (400, "bad-request")


def test_msgpack_raw_columns_store_the_same_as_json(client: TestClient, documents: Any) -> None:
    sample = documents.sample(5)
    assert client.post(URL, json=sample).status_code == 200
    packed = {**sample, "columns": {name: raw_column(name, sample) for name in sample["columns"]}}
    headers = {"Content-Type": "application/msgpack"}
    answer = client.post(URL, content=msgpack.packb(packed), headers=headers)
    assert counts(answer.json()) == (0, 16)


def raw_column(name: str, sample: dict[str, Any]) -> dict[str, Any]:
    listed = sample["columns"][name]
    whole = name in ("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed")
    kind = "int64" if whole or name == "tile_sqnr_hist" else "float64"
    empty = [0] * 16 if name == "tile_sqnr_hist" else 0
    data = np.array([empty if value is None else value for value in listed], dtype=kind)
    nulls = [place for place, value in enumerate(listed) if value is None]
    return {"dtype": kind, "data": data.tobytes(), **({"nulls": nulls} if nulls else {})}


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonx"])
def test_other_content_types_are_415(client: TestClient, documents: Any, kind: str) -> None:
    answer = client.post(URL, content=json.dumps(documents.sample(0)), headers={"Content-Type": kind})
    assert (answer.status_code, answer.json()["type"]) == (415, "unsupported-media-type")


def test_the_first_header_sets_the_thresholds_and_a_later_one_does_not(
    client: TestClient, documents: Any
) -> None:
    for step, preset in enumerate(("seed", "floor")):
        body = documents.sample(step, thresholds=preset)
        assert client.post("/api/v1/runs/r/samples", json=body).status_code == 200
    assert client.get("/api/v1/runs/r").json()["thresholds"] == "seed"
    refused = client.post("/api/v1/runs/r/samples", json=documents.sample(9, thresholds="loose"))
    assert refused.status_code == 422
    assert [fault["pointer"] for fault in refused.json()["errors"]] == ["/thresholds"]


def test_a_run_belongs_to_the_mode_of_its_first_header(client: TestClient, documents: Any) -> None:
    client.post(URL, json=documents.sample(0, mode="advise"))
    client.post(URL, json=documents.sample(1, mode="enforce"))
    assert client.get("/api/v1/runs/demo").json()["mode"] == "advise"
    assert client.patch("/api/v1/runs/demo", json={"mode": "enforce"}).json()["mode"] == "enforce"
    client.post(URL, json=documents.sample(2, mode="observe"))
    assert client.get("/api/v1/runs/demo").json()["mode"] == "enforce"


def test_an_attempt_announced_differently_is_refused(client: TestClient, documents: Any) -> None:
    client.post(URL, json=documents.sample(0, attempt={"id": "1", "parent": "0", "from_step": 5}))
    answer = client.post(URL, json=documents.sample(1, attempt={"id": "1", "parent": "0", "from_step": 6}))
    assert (answer.status_code, answer.json()["type"]) == (409, "attempt-conflict")


@both
def test_what_the_first_sample_said_of_its_attempt_holds_for_those_that_do_not_say_it(
    client: TestClient, documents: Any
) -> None:
    first = documents.sample(6, attempt={"id": "b", "parent": "a", "from_step": 5}, groups=2)
    assert client.post(URL, json=first).status_code == 200
    assert client.post(URL, json=documents.sample(6, attempt={"id": "b"}, group="1")).status_code == 200
    (attempt,) = client.get("/api/v1/runs/demo/attempts").json()["items"]
    assert (attempt["parent"], attempt["from_step"]) == ("a", 5)
    for said in (
        {"attempt": {"id": "b", "parent": "c"}},
        {"attempt": {"id": "b", "parent": None}},
        {"attempt": {"id": "b", "from_step": 0}},
        {"attempt": {"id": "b"}, "groups": 1},
    ):
        answer = client.post(URL, json=documents.sample(7, **said))
        assert (answer.status_code, answer.json()["type"]) == (409, "attempt-conflict"), said


@pytest.mark.parametrize("schema", [-1, 0, 2, 2**63])
def test_a_schema_that_is_not_accepted_is_409_with_those_that_are(
    client: TestClient, documents: Any, schema: int
) -> None:
    answer = client.post(URL, json=documents.sample(0, schema=schema))
    assert (answer.status_code, answer.json()["type"]) == (409, "schema")
    assert answer.json()["accepted_schemas"] == [1]


@both
def test_run_values_that_a_repeat_brings_first_are_kept(client: TestClient, documents: Any) -> None:
    client.post(URL, json=documents.sample(0, run={"loss": 2.0}))
    client.post(URL, json=documents.sample(0, run={"loss": 9.0, "gradient_norm": 0.5}))
    detail = client.get("/api/v1/runs/demo").json()
    assert (detail["loss"], detail["gradient_norm"]) == (2.0, 0.5)


def test_acknowledged_means_on_disk(
    settings: Any, documents: Any, make_client: Callable[..., TestClient]
) -> None:
    client = make_client()
    client.post(URL, json=documents.sample(0))
    # Another process' view: a connection of its own, no checkpoint, no clean shutdown.
    again = make_client()
    assert again.get("/api/v1/runs/demo").json()["last_step"] == 0
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        pragmas = {
            name: conn.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30000, "foreign_keys": 1}
