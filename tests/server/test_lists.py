"""Lists: pages that neither skip nor repeat, order, filters; comparison and export."""

import json
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor.prescribing import LOOK_WAIT

API = "/api/v1/runs"


def pages(client: TestClient, url: str, size: int, between: Any = lambda: None, **params: Any) -> list[Any]:
    items: list[Any] = []
    token = None
    while True:
        query = {"page_size": size, **params, **({"page_token": token} if token else {})}
        page = client.get(url, params=query).json()
        assert len(page["items"]) <= size
        items += page["items"]
        token = page["next_page_token"]
        if token is None:
            return items
        between()


def test_b63_pages_of_decisions_are_complete_and_stable_while_rows_are_added(
    client: TestClient, documents: Any
) -> None:
    slots = documents.slots(12)
    values = [documents.values(slot) for slot in slots]
    for slot, row in zip(slots, values, strict=True):
        if "gemm" in slot:
            row["sum_sq_err"] = row["sum_sq"]
    step = iter(range(1000))

    def post(attempt: str) -> None:
        # More than the budget holds: the policy waits for close looks, then decides all in one sample, at one step and time.
        for _ in range(LOOK_WAIT):
            sample = documents.sample(next(step), slots, values, attempt={"id": attempt})
            decided = client.post(f"{API}/demo/samples", json=sample).json()["decisions"]
        assert decided

    post("0")
    url = f"{API}/demo/decisions"
    before = [item["id"] for item in pages(client, url, 1000)]
    assert len(before) == len(set(before)) > 20
    attempts = iter(range(1, 1000))
    seen = [item["id"] for item in pages(client, url, 7, lambda: post(str(next(attempts))))]
    assert seen == before
    alerts = pages(client, f"{API}/demo/alerts", 11)
    assert len({item["id"] for item in alerts}) == len(alerts) > 11


def test_pages_of_runs_and_layers(client: TestClient, documents: Any) -> None:
    for n in range(7):
        client.post(f"{API}/run-{n}/samples", json=documents.sample(0, documents.slots(5)))
    assert [item["id"] for item in pages(client, API, 3)] == [f"run-{n}" for n in reversed(range(7))]

    def newer() -> None:
        client.post(f"{API}/run-0/samples", json=worse)

    slots = documents.slots(5)
    values = [documents.values(slot, underflow=6000 if n >= 32 else 0) for n, slot in enumerate(slots)]
    worse = documents.sample(1, slots, values)
    got = [item["layer"] for item in pages(client, f"{API}/run-0/layers", 2, newer)]
    assert sorted(got) == [f"blocks.{n}.mlp" for n in range(5)]
    first = client.get(f"{API}/run-0/layers", params={"page_size": 1}).json()["items"][0]
    assert first["layer"] == "blocks.4.mlp"


@pytest.mark.parametrize(("order", "first"), [("severity", 3), ("layer", 0), ("name", 0)])
def test_layers_are_ordered_and_searched(client: TestClient, documents: Any, order: str, first: int) -> None:
    slots = documents.slots(4)
    values = [documents.values(slot) for slot in slots]
    # w of the last layer: 0.2 %, over the watch level and under the act level.
    values[26]["underflow"] = 131
    for step in range(2):
        client.post(f"{API}/demo/samples", json=documents.sample(step, slots, values))
    url = f"{API}/demo/layers"
    items = client.get(url, params={"order_by": order}).json()["items"]
    assert items[0]["layer"] == f"blocks.{first}.mlp"
    assert {item["layer"]: item["state"] for item in items} == {
        **{f"blocks.{n}.mlp": "healthy" for n in range(3)},
        "blocks.3.mlp": "watch",
    }
    assert client.get(API + "/demo").json()["state"] == "watch"
    worst = next(item["worst"] for item in items if item["layer"] == "blocks.3.mlp")
    assert (worst["metric"], worst["operand"], worst["layout"]) == ("underflow_ratio", "w", "tile")
    assert [item["layer"] for item in client.get(url, params={"q": "S.3"}).json()["items"]] == [
        "blocks.3.mlp"
    ]
    assert client.get(url, params={"state": "odd"}).status_code == 422
    assert client.get(url, params={"order_by": "odd"}).status_code == 422


def test_b104_a_layer_of_which_nothing_could_be_judged_is_unknown_not_healthy(
    client: TestClient, documents: Any
) -> None:
    """An expert without a token, say: every ratio is 0 / 0."""
    slots = documents.slots(2)
    empty = {name: 0 for name, value in documents.values(slots[0]).items() if not isinstance(value, list)}
    values = [documents.values(slot, **(empty if slot["layer"] == "blocks.1.mlp" else {})) for slot in slots]
    for value in values[8:]:
        value["tile_sqnr_hist"] = None
    assert client.post(f"{API}/demo/samples", json=documents.sample(0, slots, values)).status_code == 200
    listed = client.get(f"{API}/demo/layers", params={"order_by": "layer"}).json()["items"]
    assert [item["state"] for item in listed] == ["healthy", "unknown"]
    assert listed[1]["worst"] is None
    named = client.get(f"{API}/demo/layers", params={"state": "unknown"}).json()["items"]
    assert [item["layer"] for item in named] == ["blocks.1.mlp"]
    document = client.get(f"{API}/demo/layer", params={"layer": "blocks.1.mlp"}).json()
    assert (document["state"], document["worst"]) == ("unknown", None)
    # It is sampled all the same, and healthy once it has something to show.
    client.post(f"{API}/demo/samples", json=documents.sample(1, slots))
    listed = client.get(f"{API}/demo/layers").json()["items"]
    assert {item["state"] for item in listed} == {"healthy"}


def test_a_layer_that_dropped_out_of_the_samples_is_stale(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0, documents.slots(3)))
    samples = [documents.sample(step, documents.slots(2)) for step in range(1, 41)]
    client.post(f"{API}/demo/samples", json={"samples": samples})
    items = client.get(f"{API}/demo/layers", params={"order_by": "layer"}).json()["items"]
    assert [item["state"] for item in items] == ["healthy", "healthy", "stale"]
    assert items[2]["worst"] is None


def test_run_detail_has_what_the_pages_show(client: TestClient, documents: Any) -> None:
    header = {"overhead_ratio": 0.004, "dropped": 2, "run": {"loss": 2.5, "gradient_norm": "NaN"}}
    client.post(f"{API}/demo/samples", json=documents.sample(20, **header))
    detail = client.get(f"{API}/demo").json()
    expected = {
        "id": "demo",
        "state": "healthy",
        "mode": "observe",
        "attempt": "0",
        "groups": 1,
        "first_step": 20,
        "last_step": 20,
        "loss": 2.5,
        "gradient_norm": "NaN",
        "last_report": "2023-11-14T22:13:20.000Z",
        "overhead_ratio": 0.004,
        "dropped": 2,
        "fallback_budget_used_ratio": 0.0,
        "nonfinite_steps": 1,
        "plan_version": 0,
        "thresholds": "floor",
    }
    assert {name: detail[name] for name in expected} == expected
    assert set(detail["verdict"]) == {"state", "why", "next"}
    assert client.get(API).json() == {"items": [detail], "next_page_token": None}
    assert client.get(f"{API}/demo/baselines").json() == {"items": [], "next_page_token": None}


@pytest.mark.parametrize(
    "change", [{}, {"mode": "bold"}, {"mode": None}, {"color": "red"}, {"ended": 1.5}, {"mode": ["observe"]}]
)
def test_a_change_that_cannot_be_made_is_422(client: TestClient, documents: Any, change: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0))
    assert client.patch(f"{API}/demo", json=change).status_code == 422
    assert client.get(f"{API}/demo").json()["mode"] == "observe"


def test_thresholds_of_a_run_can_be_changed(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0))
    assert client.patch(f"{API}/demo", json={"thresholds": "seed"}).json()["thresholds"] == "seed"
    params = {"layer": "blocks.0.mlp", "metric": "cosine", "operand": "x", "layout": "row"}
    lines = client.get(f"{API}/demo/series", params=params).json()["thresholds"]
    assert {line["value"] for line in lines} == {0.995}


def test_compare_aligns_two_runs_by_step(client: TestClient, documents: Any) -> None:
    losses: dict[str, dict[int, Any]] = {
        "a": {0: 2.0, 1: 1.0, 2: 4.0, 3: "NaN"},
        "b": {1: 1.5, 2: 3.0, 3: 1.0, 9: 5.0},
    }
    for run, by_step in losses.items():
        samples = [documents.sample(step, run={"loss": loss}) for step, loss in by_step.items()]
        client.post(f"{API}/{run}/samples", json={"samples": samples})
    got = client.get("/api/v1/compare", params={"a": "a", "b": "b"}).json()
    assert (got["steps"], got["values_a"], got["values_b"]) == ([1, 2, 3], [1.0, 4.0, "NaN"], [1.5, 3.0, 1.0])
    assert got["gap_ratio"] == [0.5, -0.25, "NaN"]
    assert got["mean_gap_ratio"] == pytest.approx(0.125)
    assert (got["max_abs_gap_ratio"], got["last_gap_ratio"]) == (0.5, "NaN")
    assert client.get("/api/v1/compare", params={"a": "a", "b": "none"}).status_code == 404


def test_an_export_can_be_posted_again(client: TestClient, documents: Any) -> None:
    slots = documents.slots(2)
    values = [documents.values(slot) for slot in slots]
    values[0].update(amax="NaN", nan=1)
    samples = [
        documents.sample(0, slots, values, run={"loss": "Infinity", "tokens": 4096}, mode="advise"),
        documents.sample(1, scalars=[{"layer": "r", "name": "entropy", "value": 0.5}]),
        documents.sample(2, attempt={"id": "1", "parent": "0", "from_step": 0}),
    ]
    client.post(f"{API}/demo/samples", json={"samples": samples})
    bundle = client.get(f"{API}/demo/export").json()
    assert set(bundle) == {"run", "plan", "attempts", "decisions", "alerts", "samples"}
    again = client.post(f"{API}/copy/samples", json={"samples": bundle["samples"]}).json()["results"]
    assert [reply["inserted"] for reply in again] == [16, 16, 16]
    for path in ("heatmap", "layers", "attempts", "series?metric=loss"):
        assert client.get(f"{API}/copy/{path}").json() == client.get(f"{API}/demo/{path}").json()
    lines = client.get(f"{API}/demo/export", params={"format": "jsonl"}).text.splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["type"] for record in records if record["type"] != "alert"] == [
        *("run", "plan", "attempt", "attempt"),
        *("sample", "sample", "sample"),
    ]


def refuse(name: str) -> Any:
    raise AssertionError(f"bare {name} in JSON")


def test_b54_b80_every_answer_is_strict_json_whatever_was_measured(
    client: TestClient, documents: Any
) -> None:
    slots = documents.slots(2)
    for step, word in enumerate(("NaN", "Infinity", "-Infinity")):
        values = [
            documents.values(slot, amax=word, sum_sq=word, sum_sq_err=word, nan=1, inf=1) for slot in slots
        ]
        scalars = [{"layer": "r", "name": "entropy", "value": word}]
        ranks = [{"rank": 0, "host": "h", "layer": "a", "operand": "x", "metric": "amax", "value": word}]
        sample = documents.sample(
            step, slots, values, run={"loss": word, "gradient_norm": word}, scalars=scalars, ranks=ranks
        )
        assert client.post(f"{API}/demo/samples", json=sample).status_code == 200
    slot = "layer=blocks.0.mlp&operand=x&layout=row"
    for path in (
        *("", "/layers", "/heatmap", "/heatmap?metric=amax", "/heatmap?metric=sqnr_db&gemm=fprop"),
        *(f"/series?metric=amax&{slot}", f"/series?metric=cosine&{slot}", "/series?metric=loss"),
        *("/series?layer=r&metric=entropy", "/decisions", "/alerts", "/plan", "/export", "/attempts"),
    ):
        text = client.get(f"{API}/demo{path}").text
        json.loads(text, parse_constant=refuse)
    amax = client.get(f"{API}/demo/series?metric=amax&{slot}").json()
    assert amax["values"] == ["NaN", "Infinity", "-Infinity"]
    assert amax["nonfinite"] == [[0, 1, 1], [1, 1, 1], [2, 1, 1]]
    assert math.isnan(float(client.get(f"{API}/demo/series?metric=loss").json()["values"][0]))


def test_a_layer_that_holds_nan_is_never_healthy_and_its_origin_comes_first(
    client: TestClient, documents: Any
) -> None:
    """It began in the input of the third of four layers; an update later every weight holds it, but one layer's."""
    slots = documents.slots(5)
    states = []
    for step in range(3):
        bad = [
            slot.get("operand") == "w" and slot["layer"] != "blocks.4.mlp"
            if step
            else (slot["layer"], slot.get("operand")) == ("blocks.2.mlp", "x")
            for slot in slots
        ]
        values = [documents.values(slot, nan=9 * ill) for slot, ill in zip(slots, bad, strict=True)]
        client.post(f"{API}/demo/samples", json=documents.sample(step, slots, values))
        items = client.get(f"{API}/demo/layers").json()["items"]
        states.append({item["layer"]: item["state"] for item in items})
    others = ["blocks.0.mlp", "blocks.1.mlp", "blocks.3.mlp"]
    assert [item["layer"] for item in items] == ["blocks.2.mlp", *others, "blocks.4.mlp"]
    assert [item["follows_from"] for item in items] == [None, *["blocks.2.mlp"] * 3, None]
    # One sample is worth watching, two in a row are trouble, wherever it shows.
    healthy = {f"blocks.{n}.mlp": "healthy" for n in range(5)}
    assert states[0] == {**healthy, "blocks.2.mlp": "watch"}
    assert states[2] == {**dict.fromkeys(healthy, "unstable"), "blocks.4.mlp": "healthy"}
    documents_of = [client.get(f"{API}/demo/layer", params={"layer": layer}).json() for layer in healthy]
    assert {found["layer"]: found["state"] for found in documents_of} == states[2]
    # A person's word closes the alert, and heals no tensor.
    for alert in client.get(f"{API}/demo/alerts").json()["items"]:
        client.post(f"/api/v1/alerts/{alert['id']}:resolve")
    items = client.get(f"{API}/demo/layers").json()["items"]
    assert {item["state"] for item in items if item["worst"]["metric"] == "nonfinite_count"} == {"watch"}


def test_a_layer_in_trouble_is_the_worst_however_near_others_are(client: TestClient, documents: Any) -> None:
    """One layer's result is NaN; a healthy one before it is nearer to its limits than that one's other tensors."""
    slots = documents.slots(4)
    values = [documents.values(slot) for slot in slots]
    for slot, held in zip(slots, values, strict=True):
        if slot["layer"] == "blocks.2.mlp" and slot.get("gemm") == "fprop":
            held["nan"] = 9
        if slot["layer"] == "blocks.1.mlp" and slot.get("operand") == "w":
            held["underflow"] = held["zeros"] = 6000
    for step in range(2):
        client.post(f"{API}/demo/samples", json=documents.sample(step, slots, values))
    items = client.get(f"{API}/demo/layers").json()["items"]
    assert [item["layer"] for item in items[:2]] == ["blocks.2.mlp", "blocks.1.mlp"]
    assert items[0]["state"] == "unstable"
    assert items[0]["worst"] == {
        "metric": "nonfinite_count",
        "operand": None,
        "layout": None,
        "gemm": "fprop",
        "value": 9,
        "threshold": 0,
        "step": 1,
    }
    # Clean again, but the alert stays open until that was seen for some samples.
    values = [{**held, "nan": 0} for held in values]
    client.post(f"{API}/demo/samples", json=documents.sample(2, slots, values))
    again = client.get(f"{API}/demo/layers").json()["items"]
    assert again[0]["layer"] == "blocks.2.mlp"
    assert again[0]["worst"]["metric"] != "nonfinite_count"
