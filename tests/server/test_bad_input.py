"""Whatever is wrong is named by status and field, and nothing of it is stored."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from sqlalchemy import func, select
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.tables import metadata

URL = "/api/v1/runs/demo/samples"
JSON, MSGPACK = "application/json", "application/msgpack"
ODD_LAYER = 'a/b "c"\n%'
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, documents: Any
) -> Iterator[TestClient]:
    """A service that has a run, shared: what is refused leaves no trace."""
    if request.param == "sqlite":
        folder: Path = tmp_path_factory.mktemp("bad")
        url = f"sqlite:///{folder}/store.db"
    else:
        url = request.getfixturevalue("postgres").fresh()
    with TestClient(create_app(Settings(database_url=url)), raise_server_exceptions=False) as client:
        assert client.post(URL, json=documents.sample(0)).status_code == 200
        yield client


def rows(server: TestClient) -> dict[str, int]:
    with server.app.state.store.read() as conn:  # type: ignore[attr-defined]
        tables = metadata.sorted_tables
        return {
            table.name: conn.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        }


def refused(server: TestClient, body: Any, status: int, kind: str = JSON) -> dict[str, Any]:
    """The problem that a body is answered with; the store is as it was."""
    before = rows(server)
    answer = server.post(URL, content=body, headers={"Content-Type": kind})
    assert rows(server) == before
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == status
    return problem


def pointers(problem: dict[str, Any]) -> list[str]:
    return [error["pointer"] for error in problem["errors"]]


def set_in(path: str, value: Any) -> Change:
    """Put a value at a JSON pointer of the document."""

    def change(document: dict[str, Any]) -> None:
        *way, last = path.strip("/").split("/")
        place: Any = document
        for name in way:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = value

    return change


def without(name: str) -> Change:
    return lambda document: document.pop(name)


FAULTS: dict[str, tuple[Change, list[str]]] = {
    **{
        f"step {step!r}": (set_in("step", step), ["/step"])
        for step in (-1, 2**63, 10**20, 1.5, True, "7", None, [], "NaN")
    },
    **{
        f"no {name}": (without(name), [f"/{name}"])
        for name in ("schema", "attempt", "group", "slots", "columns")
    },
    "unknown operand": (set_in("slots/3/operand", "z"), ["/slots/3/operand"]),
    "unknown layout": (set_in("slots/0/layout", "diagonal"), ["/slots/0/layout"]),
    "unknown gemm": (set_in("slots/5/gemm", "fwd"), ["/slots/5/gemm"]),
    "gemm and operand": (set_in("slots/5/operand", "x"), ["/slots/5/gemm"]),
    "slot that is none": (set_in("slots/2", 7), ["/slots/2"]),
    "negative expert": (set_in("slots/0/expert", -1), ["/slots/0/expert"]),
    "column too short": (set_in("columns/zeros", [0] * 15), ["/columns/zeros"]),
    "column too long": (set_in("columns/amax", [1.0] * 17), ["/columns/amax"]),
    "column that is none": (set_in("columns/amax", 5), ["/columns/amax"]),
    "histogram too short": (set_in("columns/tile_sqnr_hist/0", [0] * 15), ["/columns/tile_sqnr_hist/0"]),
    "NaN count": (set_in("columns/count/4", "NaN"), ["/columns/count/4"]),
    "infinite count": (set_in("columns/saturated/1", "Infinity"), ["/columns/saturated/1"]),
    "negative count": (set_in("columns/nan/0", -1), ["/columns/nan/0"]),
    "half a count": (set_in("columns/zeros/0", 0.5), ["/columns/zeros/0"]),
    "count beyond int64": (set_in("columns/count/0", 2**63), ["/columns/count/0"]),
    "text for a number": (set_in("columns/amax/2", "1.5"), ["/columns/amax/2"]),
    "true for a number": (set_in("columns/amax/2", True), ["/columns/amax/2"]),
    "NUL in a layer": (set_in("slots/1/layer", "a\x00b"), ["/slots/1/layer"]),
    "layer that is a number": (set_in("slots/1/layer", 5), ["/slots/1/layer"]),
    "NUL in a group": (set_in("group", "\x00"), ["/group"]),
    "NUL in an attempt": (set_in("attempt/id", "\x00"), ["/attempt/id"]),
    "NUL in a batch id": (set_in("batch_id", "\x00"), ["/batch_id"]),
    "NUL in a run value": (set_in("run", {"a\x00": 1}), ["/run/a\x00"]),
    "NUL in a scalar": (set_in("scalars", [{"name": "\x00", "value": 1}]), ["/scalars/0/name"]),
    "attempt without id": (set_in("attempt", {}), ["/attempt/id"]),
    "attempt that is text": (set_in("attempt", "0"), ["/attempt"]),
    "no groups at all": (set_in("groups", 0), ["/groups"]),
    "mode of its own": (set_in("mode", "bold"), ["/mode"]),
    "run that is a list": (set_in("run", []), ["/run"]),
    "infinite learning rate": (set_in("run", {"learning_rate": "Infinity"}), ["/run/learning_rate"]),
    "infinite overhead": (set_in("overhead_ratio", "Infinity"), ["/overhead_ratio"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_422_with_its_field(server: TestClient, documents: Any, name: str) -> None:
    change, expected = FAULTS[name]
    document = json.loads(json.dumps(documents.sample(1)))
    change(document)
    assert pointers(refused(server, json.dumps(document), 422)) == expected


def test_all_faults_are_named_at_once(server: TestClient, documents: Any) -> None:
    document = {**documents.sample(-1), "mode": "bold"}
    document["columns"]["count"][4] = "NaN"
    assert pointers(refused(server, json.dumps(document), 422)) == ["/columns/count/4", "/step", "/mode"]


@pytest.mark.parametrize("body", [None, 5, "text", [], [1], True])
@pytest.mark.parametrize("kind", [JSON, MSGPACK])
def test_a_document_that_is_no_sample_is_422(server: TestClient, body: Any, kind: str) -> None:
    content = json.dumps(body) if kind == JSON else msgpack.packb(body)
    refused(server, content, 422, kind)


@pytest.mark.parametrize(
    "body",
    [
        *("", "{", "{]", '{"step": 1,}', '{"step": NaN}', '{"a": Infinity}', "'a'", "01", "nul"),
        *("[" * 200_000, '{"a":' * 100_000, "9" * 5000),
        *(b"\xff\xfe{}", b'{"a": "\xed\xa0\x80"}', '"\\ud800"', '{"\\udfff": 1}'),
        *('{"step": 1, "step": 2}', '{"attempt": {"id": "0", "id": "1"}}'),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_b54_what_is_not_json_is_400(server: TestClient, body: Any) -> None:
    assert refused(server, body, 400)["type"] == "bad-request"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"\xc1", b"\x81", b"\x81\xa1a", b"\x80\x80"),
        *(b"\x91" * 100_000, b"\xa3\xed\xa0\x80", b"\x81\x01\x02", b"\x82\xa1a\x01\xa1a\x02"),
    ],
    ids=lambda body: body[:8].hex() or "empty",
)
def test_what_is_not_msgpack_is_400(server: TestClient, body: bytes) -> None:
    assert refused(server, body, 400, MSGPACK)["type"] == "bad-request"


@pytest.mark.parametrize("name", ["step", "layer", "columns"])
def test_values_that_only_msgpack_can_say_are_422(server: TestClient, documents: Any, name: str) -> None:
    document = documents.sample(1)
    changes: dict[str, Change] = {
        "step": set_in("step", b"\x01"),
        "layer": set_in("slots/0/layer", b"blocks"),
        "columns": set_in("columns/amax", {"dtype": "float32", "data": b"\x00" * 64}),
    }
    changes[name](document)
    refused(server, msgpack.packb(document), 422, MSGPACK)


@pytest.mark.parametrize("size", [0, 8, 127, 129, 136])
def test_a_binary_column_of_the_wrong_length_is_422(server: TestClient, documents: Any, size: int) -> None:
    document = documents.sample(1)
    document["columns"]["amax"] = {"dtype": "float64", "data": bytes(size)}
    problem = refused(server, msgpack.packb(document), 422, MSGPACK)
    assert [pointer.split("/")[2] for pointer in pointers(problem)] == ["amax"]


def test_a_huge_wrong_value_is_not_quoted_whole(server: TestClient, documents: Any) -> None:
    document = documents.sample(1, mode="x" * 1_000_000, group=["y"] * 100_000)
    problem = refused(server, json.dumps(document), 422)
    assert len(json.dumps(problem)) < 10_000


def test_one_bad_sample_of_a_list_is_named_and_the_others_are_stored(
    server: TestClient, documents: Any
) -> None:
    good, bad = documents.sample(500), documents.sample(501)
    bad["columns"]["count"][4] = "NaN"
    before = rows(server)
    answer = server.post(URL, json={"samples": [good, bad]})
    stored, problem = answer.json()["results"]
    assert (stored["inserted"], problem["status"]) == (16, 422)
    assert pointers(problem) == ["/columns/count/4"]
    assert rows(server) == {**before, "samples": before["samples"] + 1}


def test_b62_a_layer_of_any_name_is_stored_and_found(server: TestClient, documents: Any) -> None:
    slots = [{"index": 0, "layer": ODD_LAYER, "operand": "x", "layout": "row"}]
    reply = server.post("/api/v1/runs/odd/samples", json=documents.sample(0, slots))
    assert reply.json()["inserted"] == 1
    params = {"layer": ODD_LAYER, "metric": "amax"}
    assert server.get("/api/v1/runs/odd/series", params=params).json()["values"] == [4.5]
    assert server.delete("/api/v1/runs/odd").status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/api/v1/runs/none", 404, "run-not-found"),
        ("GET", "/api/v1/runs/a%00b", 404, "not-found"),
        ("POST", "/api/v1/decisions/a%00b:approve", 404, "not-found"),
        ("POST", "/api/v1/decisions/none:approve", 404, "decision-not-found"),
        ("POST", "/api/v1/alerts/12345:ack", 404, "alert-not-found"),
        ("GET", "/api/v1/runs/demo/series?metric=amax&layer=none", 404, "layer-not-found"),
        ("GET", "/api/v1/runs/demo/series?metric=amax&layer=blocks.0.mlp&expert=3", 404, "slot-not-found"),
        ("GET", "/api/v1/runs/demo/heatmap?operand=w&layout=col", 404, "slot-not-found"),
        ("GET", "/api/v1/nothing", 404, "not-found"),
        ("GET", "/nothing/at/all", 404, "not-found"),
        ("GET", "/static/nothing.js", 404, "not-found"),
        ("PUT", "/api/v1/runs", 405, "method-not-allowed"),
        ("PATCH", "/api/v1/runs/demo:kill-switch", 405, "method-not-allowed"),
        ("GET", "/api/v1/runs/demo/layers?q=%00", 422, "validation"),
        ("GET", "/api/v1/runs/demo/decisions?layer=a%00", 422, "validation"),
        ("GET", "/api/v1/runs/demo/heatmap?from_step=-1", 422, "validation"),
        ("GET", "/api/v1/runs/demo/heatmap?to_step=99999999999999999999", 422, "validation"),
        ("GET", "/api/v1/runs/demo/heatmap?max_cols=0", 422, "validation"),
        ("GET", "/api/v1/runs/demo/heatmap?operand=z", 422, "validation"),
        ("GET", "/api/v1/runs/demo/series", 422, "validation"),
    ],
)
def test_every_refusal_is_a_problem_in_plain_words(
    server: TestClient, method: str, path: str, status: int, kind: str
) -> None:
    answer = server.request(method, path)
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (status, kind)
    # What Python would print of its own values is nothing for people.
    assert not any(mark in problem["detail"] for mark in ("{", "}", "None", "<", "object at"))
    if status == 422:
        (pointer,) = pointers(problem)
        assert pointer.startswith("/query/")
    if status == 405:
        assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


@pytest.mark.parametrize(
    ("method", "path", "pointer"),
    [
        ("PATCH", "/api/v1/runs/demo", "/mode"),
        ("PUT", "/api/v1/runs/demo/pins", "/layer"),
        ("POST", "/api/v1/alerts/1:silence", "/seconds"),
        ("POST", "/api/v1/alerts/1:ack", "/by"),
    ],
)
def test_bodies_of_other_routes_name_their_fields_too(
    server: TestClient, method: str, path: str, pointer: str
) -> None:
    before = rows(server)
    answer = server.request(method, path, json={pointer[1:]: {"wrong": "\x00"}})
    assert (answer.status_code, pointers(answer.json())) == (422, [pointer])
    for body, status in (("{", 400), ("[1]", 422), ('{"a":' * 50_000, 400)):
        answer = server.request(method, path, content=body, headers={"Content-Type": JSON})
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert rows(server) == before


def test_the_methods_of_an_address_are_all_named(server: TestClient) -> None:
    answer = server.put("/api/v1/runs/demo")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET, PATCH")
