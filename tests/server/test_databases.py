"""SQLite and PostgreSQL give the same answers to the same history."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.settings import Settings

API = "/api/v1"
URL = f"{API}/runs/demo/samples"
both = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
ODD_LAYER = 'a/b "c"\n%ü\\'
Told = list[tuple[str, int, Any]]


class Recorder:
    """Sends requests and keeps what they were answered."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.told: Told = []

    def __call__(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        answer = self.client.request(method, API + path, json=body, params=params)
        content = answer.json() if answer.content else None
        self.told.append((f"{method} {path} {params}", answer.status_code, content))
        return content


@pytest.fixture
def recorders(tmp_path: Path, postgres: Any, clock: Any) -> Iterator[dict[str, Recorder]]:
    """A client of each database, both at the same time."""
    urls = {"sqlite": f"sqlite:///{tmp_path}/store.db", "postgresql": postgres.fresh()}
    apps = {name: create_app(Settings(database_url=url), clock=clock) for name, url in urls.items()}
    with TestClient(apps["sqlite"]) as sqlite, TestClient(apps["postgresql"]) as postgresql:
        yield {"sqlite": Recorder(sqlite), "postgresql": Recorder(postgresql)}


def broken(documents: Any, step: int, layers: int = 8, **header: Any) -> dict[str, Any]:
    """A sample whose first layer has a bad dgrad."""
    slots = documents.slots(layers)
    values = [documents.values(slot) for slot in slots]
    values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
    sample: dict[str, Any] = documents.sample(step, slots, values, **header)
    return sample


def enforced(call: Recorder, documents: Any) -> None:
    for step in range(3):
        call("POST", "/runs/enforced/samples", broken(documents, step, mode="enforce"))
    plan = {"plan_version": 1, "effective_step": 4}
    for step in range(3, 8):
        call("POST", "/runs/enforced/samples", documents.sample(step, documents.slots(8), **plan))
    call("POST", "/runs/enforced/samples", broken(documents, 2, groups=1))
    call("POST", "/runs/enforced/samples", documents.sample(2, documents.slots(8)))
    call("POST", "/runs/enforced:end", {"attempt": "0", "group": "0"})


def advised(call: Recorder, documents: Any) -> None:
    reply = call("POST", "/runs/advised/samples", broken(documents, 0, mode="advise"))
    made = [decision["id"] for decision in reply["decisions"]]
    assert made
    call("POST", f"/decisions/{made[0]}:approve", {"by": "ada"})
    call("POST", f"/decisions/{made[0]}:approve")
    call("POST", f"/decisions/{made[0]}:revert")
    call("POST", "/runs/advised/samples", broken(documents, 1, attempt={"id": "1", "from_step": 1}))
    for layer in ("blocks.1.mlp", "blocks.2.mlp", "none"):
        call("PUT", "/runs/advised/pins", {"layer": layer, "action": "bf16_fallback"})
    call("DELETE", "/runs/advised/pins", layer="blocks.1.mlp")
    alert = call("GET", "/runs/advised/alerts")["items"][0]["id"]
    call("POST", f"/alerts/{alert}:ack", {"by": "ada"})
    call("POST", f"/alerts/{alert}:silence", {"seconds": 60})
    call("POST", "/alerts/999:ack")
    call("POST", "/runs/advised:kill-switch")


def measured(call: Recorder, documents: Any) -> None:
    """Groups, a rewind, non-finite values, large numbers, and names of every sort."""
    url = "/runs/measured/samples"
    slots = [{"index": 0, "layer": ODD_LAYER, "operand": "x", "layout": "row"}, *documents.slots(1)[1:]]
    for step in (3, 1, 2, 2**31 + 5, 2**63 - 1):
        values = [documents.values(slot, amax="NaN", nan=step % 5, sum_sq="Infinity") for slot in slots]
        values[0].update(count=2**63 - 1, zeros=2**53 + 1, underflow=0)
        run = {"tokens": 6_800_000_000, "loss": "Infinity", "loss_scale": 2.0**31}
        scalars = [{"layer": ODD_LAYER, "name": 'n"\n', "value": "-Infinity"}]
        sample = documents.sample(step, slots, values, groups=2, run=run, scalars=scalars)
        call("POST", url, sample)
        call("POST", url, {**sample, "group": 'g"\n%'})
    call("POST", url, documents.sample(2, attempt={"id": "1", "parent": "0", "from_step": 2}))
    call("POST", url, {"samples": [documents.sample(step, attempt={"id": "1"}) for step in (4, 3, 5)]})
    for bad in (2**63, -1, 10**20):
        call("POST", url, documents.sample(bad))


def reads(call: Recorder) -> None:
    for run in ("enforced", "advised", "measured", "gone", "a%00b"):
        for part in (
            "",
            "/attempts",
            "/layers",
            "/heatmap",
            "/plan",
            "/decisions",
            "/alerts",
            "/pins",
            "/export",
        ):
            call("GET", f"/runs/{run}{part}")
        call("GET", f"/runs/{run}/layers", state="unstable", order_by="name", q="blocks")
        for metric in ("loss", "tokens", "gradient_norm"):
            call("GET", f"/runs/{run}/series", metric=metric)
        for metric in ("amax", "count", 'n"\n'):
            call("GET", f"/runs/{run}/series", metric=metric, layer=ODD_LAYER)
        call("GET", f"/runs/{run}/decisions", layer="\x00")
        call("GET", f"/runs/{run}/alerts", state="open")
    for params in ({}, {"page_size": 2}, {"page_token": "x"}):
        call("GET", "/runs", **params)
    call("GET", "/compare", a="enforced", b="measured")


def test_b51_b52_b72_b76_b77_both_databases_answer_the_same(
    recorders: dict[str, Recorder], documents: Any
) -> None:
    parts: tuple[Callable[[Recorder, Any], None], ...] = (enforced, advised, measured)
    for call in recorders.values():
        for part in parts:
            part(call, documents)
        call("POST", "/runs/gone/samples", documents.sample(0))
        call("DELETE", "/runs/gone")
        reads(call)
    sqlite, postgresql = (recorders[name].told for name in ("sqlite", "postgresql"))
    assert len(sqlite) == len(postgresql) > 100
    for one, other in zip(sqlite, postgresql, strict=True):
        assert one == other
    statuses = {status for _, status, _ in sqlite}
    assert statuses == {200, 204, 404, 409, 422}


@both
def test_deleting_a_run_leaves_nothing_of_it_and_all_of_the_others(
    client: TestClient, documents: Any
) -> None:
    for run in ("demo", "kept"):
        client.post(f"{API}/runs/{run}/samples", json=broken(documents, 0, mode="enforce"))
    tables = ("runs", "attempts", "samples", "slot_lists", "run_slot_lists", "decisions", "alerts")
    counts = []
    for run in ("demo", "kept"):
        counts.append(rows(client, tables))
        assert client.delete(f"{API}/runs/{run}").status_code == 204
    both, one, none = *counts, rows(client, tables)
    assert set(none.values()) == {0}
    assert one["slot_lists"] == both["slot_lists"] == 1
    assert all(both[name] == 2 * one[name] > 0 for name in tables if name != "slot_lists")


def rows(client: TestClient, tables: tuple[str, ...]) -> dict[str, int]:
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        return {name: conn.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in tables}


def layer_slots(count: int) -> list[dict[str, Any]]:
    return [{"index": n, "layer": f"layer.{n}", "operand": "x", "layout": "row"} for n in range(count)]


def counts(reply: dict[str, Any]) -> tuple[int, int]:
    return reply["inserted"], reply["duplicates"]


@both
def test_b51_a_key_twice_in_one_body_is_422_on_both_databases(client: TestClient, documents: Any) -> None:
    """The report's batch: one layer and step twice, with the values 1 and 2."""
    slots = layer_slots(1)
    twice = documents.sample(7, slots * 2, [documents.values(slots[0], amax=value) for value in (1.0, 2.0)])
    answer = client.post(URL, json=twice)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/slots/1")
    two = [documents.sample(7, slots, [documents.values(slots[0], amax=value)]) for value in (1.0, 2.0)]
    first, second = client.post(URL, json={"samples": two}).json()["results"]
    assert (first["inserted"], second["status"]) == (1, 422)
    assert second["errors"][0]["pointer"] == "/samples/1/slots/0"
    assert rows(client, ("samples",)) == {"samples": 1}


@both
def test_b54_non_finite_values_come_back_as_they_were_sent(client: TestClient, documents: Any) -> None:
    """In the columns, the run's values, a list of scalars and the ranks: one encoding, decoded again by float()."""
    words = ("NaN", "Infinity", "-Infinity")
    slots = layer_slots(3)
    values = [documents.values(slot, amax=word) for slot, word in zip(slots, words, strict=True)]
    scalars = [{"layer": "r", "name": word, "value": word} for word in words]
    rank = {"rank": 0, "host": "h", "layer": "a", "operand": "x", "metric": "amax", "value": "NaN"}
    run = dict(zip(("loss", "gradient_norm", "loss_scale"), words, strict=True))
    sample = documents.sample(1, slots, values, scalars=scalars, run=run, ranks=[rank])
    assert counts(client.post(URL, json=sample).json()) == (3, 0)
    (stored,) = client.get("/api/v1/runs/demo/export").json()["samples"]
    assert stored["columns"]["amax"] == list(words)
    assert (stored["run"], stored["scalars"]) == (run, scalars)
    # Sent again as what came out, it is the same sample.
    assert counts(client.post(URL, json=stored).json()) == (0, 3)


@both
def test_b76_a_single_precision_number_is_kept_as_what_it_is(client: TestClient, documents: Any) -> None:
    slots = layer_slots(1)
    sample = documents.sample(1, slots, [documents.values(slots[0], amax=0.1)])
    body = msgpack.packb(sample, use_single_float=True)
    assert client.post(URL, content=body, headers={"Content-Type": "application/msgpack"}).status_code == 200
    params = {"layer": "layer.0", "metric": "amax"}
    stored = client.get("/api/v1/runs/demo/series", params=params).json()["values"]
    assert stored == [float(np.float32(0.1))] == [0.10000000149011612]
