"""Heatmaps and series against a brute force over the posted documents."""

import json
import math
import random
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import msgpack
import numpy as np
import pytest
from starlette.testclient import TestClient

URL = "/api/v1/runs/demo/samples"
GRADIENT = ({"operand": "dy"}, {"gemm": "dgrad"}, {"gemm": "wgrad"})
LOWER_IS_WORSE = ("cosine", "sqnr_db")


# The oracle: every number below is computed from the documents by loops, in plain Python.


def tensor(slot: dict[str, Any]) -> tuple[Any, ...]:
    return (slot["layer"], slot.get("operand"), slot.get("layout"), slot.get("gemm"))


def add(parts: Iterable[dict[str, Any]], name: str) -> float | None:
    values = [float(part[name]) for part in parts if part[name] is not None]
    if not values:
        return None
    if name != "amax":
        return sum(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def derived(metric: str, parts: list[dict[str, Any]]) -> float | None:
    def got(*names: str) -> list[float] | None:
        values = [add(parts, name) for name in names]
        return None if None in values else values  # type: ignore[return-value]

    if metric in ("cosine", "cosine_distortion", "gradient_distortion"):
        sums = got("sum_sq", "sum_sq_q", "sum_sq_err")
        if sums is None or sums[0] == 0:
            return None
        signal, quantised, error = sums
        cosine = 0.0 if quantised == 0 else (signal + quantised - error) / (2 * math.sqrt(signal * quantised))
        return cosine if metric == "cosine" else 1 - cosine
    if metric == "underflow_ratio":
        pair = got("underflow", "count")
        return None if pair is None or pair[1] == 0 else pair[0] / pair[1]
    if metric == "sqnr_db":
        pair = got("sum_sq", "sum_sq_err")
        if pair is None or pair[0] == 0:
            return None
        return math.inf if pair[1] == 0 else 10 * math.log10(pair[0] / pair[1])
    single = got(metric)
    return None if single is None else single[0]


def worst(metric: str, values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if any(map(math.isnan, known)):
        return math.nan
    return min(known) if metric in LOWER_IS_WORSE else max(known)


def cell(
    metric: str, layer: str, samples: list[dict[str, Any]], where: tuple[dict[str, str], ...] | None
) -> tuple[float | None, int, int]:
    """(value, nan, inf) of one layer at one step, from all groups' samples of that step."""
    merged: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        rows = [
            (slot, {name: column[place] for name, column in sample["columns"].items()})
            for place, slot in enumerate(sample["slots"])
            if slot["layer"] == layer and "variant" not in slot
        ]
        for key in {tensor(slot) for slot, _ in rows}:
            own = [row for slot, row in rows if tensor(slot) == key and "expert" not in slot]
            experts = [row for slot, row in rows if tensor(slot) == key and "expert" in slot]
            merged.setdefault(key, []).extend(own or experts)

    def chosen(key: tuple[Any, ...]) -> bool:
        fields = dict(zip(("operand", "layout", "gemm"), key[1:], strict=True))
        return where is None or any(all(fields[n] == v for n, v in kind.items()) for kind in where)

    parts = [rows for key, rows in merged.items() if chosen(key)]
    nan = max((int(add(rows, "nan") or 0) for rows in parts), default=0)
    inf = max((int(add(rows, "inf") or 0) for rows in parts), default=0)
    return worst(metric, (derived(metric, rows) for rows in parts)), nan, inf


def decoded(value: Any) -> float | None:
    return {"NaN": math.nan, "Infinity": math.inf}.get(value, value) if isinstance(value, str) else value


def same(metric: str, got: Any, expected: float | None) -> bool:
    got = decoded(got)
    if got is None or expected is None:
        return got is expected
    if math.isnan(expected):
        return math.isnan(got)
    # A cosine is a difference of nearly equal sums: the order of summation shows in its last digits.
    absolute = 1e-9 if metric in ("cosine", "gradient_distortion") else 0.0
    return math.isclose(got, expected, rel_tol=1e-9, abs_tol=absolute)


def random_values(rng: random.Random, documents: Any, slot: dict[str, Any]) -> dict[str, Any]:
    signal = 10 ** rng.uniform(-30, 3)
    values = documents.values(
        slot,
        underflow=rng.randrange(1000),
        amax=10 ** rng.uniform(-20, 2),
        sum_sq=signal,
        sum_sq_q=signal * rng.uniform(0.5, 1.5),
        sum_sq_err=signal * 10 ** rng.uniform(-4, -1),
        nan=rng.choice([0] * 20 + [3]),
        inf=rng.choice([0] * 20 + [1]),
    )
    chance = rng.random()
    if chance < 0.05:
        values.update(dict.fromkeys(values))
    elif chance < 0.10:
        values.update(sum_sq=0.0, sum_sq_q=0.0, sum_sq_err=0.0, amax=0.0)
    elif chance < 0.15:
        values.update(sum_sq_q=0.0, sum_sq_err=signal)
    elif chance < 0.20:
        values.update(sum_sq_err=0.0)
    elif chance < 0.23:
        values.update(amax="NaN", sum_sq="NaN")
    return values


def random_samples(documents: Any, seed: int) -> dict[int, list[dict[str, Any]]]:
    """Two groups, three layers of which one has experts, slot lists that change, steps with gaps."""
    rng = random.Random(seed)
    everything = documents.slots(3)
    experts = [
        {**slot, "index": slot["index"], "expert": expert}
        for slot in everything
        if slot["layer"] == "blocks.2.mlp"
        for expert in (0, 7)
    ]
    plain = [slot for slot in everything if slot["layer"] != "blocks.2.mlp"]
    aggregate = [slot for slot in everything if slot["layer"] == "blocks.2.mlp"]
    what_if = {**everything[0], "variant": "e5m2"}
    steps = sorted(rng.sample(range(0, 400, 4), 24))
    posted: dict[int, list[dict[str, Any]]] = {}
    for step in steps:
        for group in ("0", "1"):
            if rng.random() < 0.15:
                continue
            pool = [*plain, *experts, *(aggregate if rng.random() < 0.5 else []), what_if]
            slots = [slot for slot in pool if rng.random() < 0.7]
            rng.shuffle(slots)
            values = [random_values(rng, documents, slot) for slot in slots]
            sample = documents.sample(step, slots, values, group=group, groups=2)
            posted.setdefault(step, []).append(sample)
    return posted


FILTERS: list[tuple[dict[str, str], tuple[dict[str, str], ...] | None]] = [
    ({}, None),
    ({"operand": "dy"}, ({"operand": "dy"},)),
    ({"operand": "x", "layout": "row"}, ({"operand": "x", "layout": "row"},)),
    ({"gemm": "wgrad"}, ({"gemm": "wgrad"},)),
]
METRICS = ["gradient_distortion", "cosine", "sqnr_db", "underflow_ratio", "amax"]


@pytest.mark.parametrize(("seed", "part_steps"), [(11, None), (12, None), (12, 2)])
def test_heatmaps_and_series_equal_the_brute_force(
    client: TestClient, documents: Any, monkeypatch: pytest.MonkeyPatch, seed: int, part_steps: int | None
) -> None:
    if part_steps is not None:
        # A long run is read in parts; how many there are must not show.
        monkeypatch.setattr("fp8_safeguard.server.stepvalues.PART_STEPS", part_steps)
    posted = random_samples(documents, seed)
    order = [sample for samples in posted.values() for sample in samples]
    random.Random(seed).shuffle(order)
    answers = client.post(URL, json={"samples": order}).json()["results"]
    assert all(answer.get("accepted") for answer in answers), answers
    layers = [f"blocks.{n}.mlp" for n in range(3)]
    steps = sorted(posted)
    for metric in METRICS:
        for query, kinds in FILTERS:
            where = GRADIENT if kinds is None and metric == "gradient_distortion" else kinds
            cells = [[cell(metric, layer, posted[step], where) for step in steps] for layer in layers]
            check_full(client, metric, query, layers, steps, cells)
            check_zoomed_out(client, metric, query, steps, cells)


def check_full(
    client: TestClient, metric: str, query: dict[str, str], layers: list[str], steps: list[int], cells: Any
) -> None:
    params = {"metric": metric, **query}
    got = client.get("/api/v1/runs/demo/heatmap", params=params).json()
    assert (got["layers"], got["steps"], got["step_width"]) == (layers, steps, 4)
    assert got["agg"] == ("min" if metric in LOWER_IS_WORSE else "max")
    for r, row in enumerate(cells):
        for c, (value, _, _) in enumerate(row):
            assert same(metric, got["values"][r][c], value), (params, r, c, got["values"][r][c], value)
        series = client.get("/api/v1/runs/demo/series", params={**params, "layer": layers[r]}).json()
        shown = dict(zip(series["steps"], series["values"], strict=True))
        for step, (value, _, _) in zip(steps, row, strict=True):
            assert same(metric, shown.get(step), value), (params, step)
    marked = [
        [r, c, nan, inf] for r, row in enumerate(cells) for c, (_, nan, inf) in enumerate(row) if nan or inf
    ]
    assert got["nonfinite"] == marked


def check_zoomed_out(
    client: TestClient, metric: str, query: dict[str, str], steps: list[int], cells: Any
) -> None:
    got = client.get("/api/v1/runs/demo/heatmap", params={"metric": metric, "max_cols": 7, **query}).json()
    assert len(got["steps"]) <= 7
    covered = [[s for s in steps if first <= s < first + got["step_width"]] for first in got["steps"]]
    assert sorted(s for column in covered for s in column) == steps
    for r, row in enumerate(cells):
        by_step = dict(zip(steps, row, strict=True))
        for c, column in enumerate(covered):
            expected = worst(metric, (by_step[step][0] for step in column))
            assert same(metric, got["values"][r][c], expected), (metric, query, r, c)


def test_an_aggregate_is_not_counted_again_with_its_experts(client: TestClient, documents: Any) -> None:
    slot = {"layer": "moe.experts", "operand": "x", "layout": "row"}
    slots = [{**slot, "index": 0}, {**slot, "index": 1, "expert": 3}]
    values = [documents.values(slot, count=1000), documents.values(slot, count=10)]
    client.post(URL, json=documents.sample(0, slots, values))
    params = {"metric": "count"}
    assert client.get("/api/v1/runs/demo/heatmap", params=params).json()["values"] == [[1000.0]]
    params = {"metric": "count", "layer": "moe.experts", "operand": "x", "layout": "row", "expert": 3}
    assert client.get("/api/v1/runs/demo/series", params=params).json()["values"] == [10.0]


def test_rows_follow_the_slot_index(client: TestClient, documents: Any) -> None:
    def slot(index: int, layer: str) -> dict[str, Any]:
        return {"index": index, "layer": layer, "operand": "x", "layout": "row"}

    client.post(URL, json=documents.sample(0, [slot(4, "head"), slot(0, "embed")]))
    client.post(URL, json=documents.sample(1, [slot(0, "embed"), slot(2, "middle"), slot(4, "head")]))
    got = client.get("/api/v1/runs/demo/heatmap", params={"metric": "amax"}).json()
    assert got["layers"] == ["embed", "middle", "head"]
    assert got["values"] == [[4.5, 4.5], [None, 4.5], [4.5, 4.5]]


def test_a_two_step_spike_survives_any_zoom(client: TestClient, documents: Any) -> None:
    slots = [{"index": 0, "layer": "a", "operand": "dy", "layout": "row"}]
    samples = []
    for step in range(1, 301):
        error = 30_000.0 if step in (137, 138) else 43.3
        values = [documents.values(slots[0], sum_sq_err=error)]
        samples.append(documents.sample(step, slots, values))
    for start in (0, 150):
        client.post(URL, json={"samples": samples[start : start + 150]})
    spike = 1 - (65536 + 65540 - 30_000) / (2 * math.sqrt(65536 * 65540))
    for max_cols in (1, 3, 10, 100, 299, 300, 400):
        got = client.get("/api/v1/runs/demo/heatmap", params={"max_cols": max_cols}).json()
        assert len(got["steps"]) <= max_cols
        columns = {
            column
            for column, first in enumerate(got["steps"])
            for step in (137, 138)
            if first <= step < first + got["step_width"]
        }
        for column, value in enumerate(got["values"][0]):
            assert (value == pytest.approx(spike)) == (column in columns)


def test_a_range_of_steps_is_inclusive_and_an_empty_one_is_empty(client: TestClient, documents: Any) -> None:
    client.post(URL, json={"samples": [documents.sample(step) for step in (10, 20, 30, 40)]})
    got = client.get("/api/v1/runs/demo/heatmap", params={"from_step": 20, "to_step": 30}).json()
    assert got["steps"] == [20, 30]
    got = client.get("/api/v1/runs/demo/heatmap", params={"from_step": 41}).json()
    assert (got["steps"], got["values"]) == ([], [[], []])


def test_what_a_run_does_not_have_is_404_and_what_cannot_be_is_422(
    client: TestClient, documents: Any
) -> None:
    kinds = ({"operand": "x", "layout": "row"}, {"gemm": "fprop"})
    client.post(URL, json=documents.sample(0, documents.slots(1, kinds)))
    heatmap, series = "/api/v1/runs/demo/heatmap", "/api/v1/runs/demo/series"

    def kind(url: str, **params: Any) -> tuple[int, str]:
        answer = client.get(url, params=params)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code, answer.json()["type"]

    assert kind("/api/v1/runs/none/heatmap") == (404, "run-not-found")
    assert kind(heatmap, operand="dy") == (404, "slot-not-found")
    assert kind(heatmap, gemm="wgrad") == (404, "slot-not-found")
    assert kind(heatmap, operand="zz") == (422, "validation")
    assert kind(heatmap, metric="distortion") == (422, "validation")
    assert kind(heatmap, max_cols=0) == (422, "validation")
    assert kind(heatmap, from_step=2**63) == (422, "validation")
    assert kind(series, layer="none", metric="amax") == (404, "layer-not-found")
    assert kind(series, layer="blocks.0.mlp", metric="amax", operand="dy") == (404, "slot-not-found")
    assert kind(series, layer="blocks.0.mlp", metric="nothing") == (422, "validation")
    assert kind(series, metric="nothing") == (422, "validation")
    assert kind(series, layer="blocks.0.mlp") == (422, "validation")


def test_series_draws_the_thresholds_of_its_slot(client: TestClient, documents: Any) -> None:
    client.post(URL, json=documents.sample(0))
    params = {"layer": "blocks.0.mlp", "metric": "underflow_ratio", "operand": "w", "layout": "tile"}
    lines = client.get("/api/v1/runs/demo/series", params=params).json()["thresholds"]
    assert [(line["severity"], line["value"]) for line in lines] == [("watch", 0.001), ("act", 0.003)]
    assert all(line["origin"] for line in lines)


def test_run_values_and_layer_scalars_are_series(client: TestClient, documents: Any) -> None:
    losses: list[Any] = [2.0, "NaN", "Infinity", 1.5]
    for step, loss in enumerate(losses):
        scalars = [{"layer": "blocks.0.router", "name": "entropy", "value": 0.5 + step}]
        client.post(URL, json=documents.sample(step, run={"loss": loss}, scalars=scalars))
    url = "/api/v1/runs/demo/series"
    loss = client.get(url, params={"metric": "loss"}).json()
    assert loss == {
        "steps": [0, 1, 2, 3],
        "values": losses,
        "nonfinite": [[1, 1, 0], [2, 0, 1]],
        "thresholds": [],
    }
    entropy = client.get(url, params={"metric": "entropy", "layer": "blocks.0.router"}).json()
    assert entropy["values"] == [0.5, 1.5, 2.5, 3.5]
    few = client.get(url, params={"metric": "loss", "max_points": 2}).json()
    assert (few["steps"], few["values"]) == ([0, 2], ["NaN", "Infinity"])


NAMES = ["model.layers.0/attn", "a%2Fb", "a/b", "a?b#c", "..", "a b", "ü", 'a"b\n\\c', "<script>", "'; DROP"]


def test_b62_any_layer_name_is_a_query_parameter(client: TestClient, documents: Any) -> None:
    slots = [{"index": n, "layer": name, "operand": "x", "layout": "row"} for n, name in enumerate(NAMES)]
    values = [documents.values(slot, amax=float(n)) for n, slot in enumerate(slots)]
    client.post(URL, json=documents.sample(0, slots, values))
    for n, name in enumerate(NAMES):
        params = {"layer": name, "metric": "amax"}
        assert client.get("/api/v1/runs/demo/series", params=params).json()["values"] == [float(n)]
    assert client.get("/api/v1/runs/demo/heatmap", params={"metric": "amax"}).json()["layers"] == NAMES
    listed = client.get("/api/v1/runs/demo/layers", params={"order_by": "layer"}).json()["items"]
    assert [item["layer"] for item in listed] == NAMES


ODD = [*NAMES, "100%", "a_b", "axb", "a+b", "a&layer=b", "a;b", " ", "[/b]", "%00", "A/B", "层.0"]


def test_b62_every_route_that_takes_a_layer_name_takes_any(client: TestClient, documents: Any) -> None:
    """In addresses that are built by hand, as a link is, and in bodies; no name is mistaken for another."""
    kinds = ({"operand": "x", "layout": "row"}, {"gemm": "dgrad"})
    slots = [
        {"index": 2 * n + k, "layer": name, **kind}
        for n, name in enumerate(ODD)
        for k, kind in enumerate(kinds)
    ]
    values = [documents.values(slot, amax=float(slot["index"])) for slot in slots]
    scalars = [{"layer": name, "name": "entropy", "value": float(n)} for n, name in enumerate(ODD)]
    for row, slot in zip(values, slots, strict=True):
        if "gemm" in slot:
            row["sum_sq_err"] = row["sum_sq"] * 0.25
    run = "/api/v1/runs/demo"
    body = documents.sample(0, slots, values, scalars=scalars, mode="enforce")
    assert client.post(URL, json=body).status_code == 200
    for n, name in enumerate(ODD):
        layer = f"layer={quote(name, safe='')}"
        series = client.get(f"{run}/series?metric=amax&operand=x&{layer}")
        assert series.json()["values"] == [2.0 * n], name
        assert client.get(f"{run}/series?metric=entropy&{layer}").json()["values"] == [float(n)]
        found = client.get(f"{run}/layers?order_by=layer&page_size=100&q={quote(name, safe='')}").json()
        alike = [other for other in ODD if name.casefold() in other.casefold()]
        assert [item["layer"] for item in found["items"]] == alike
        pin = {"layer": name, "target": {"gemm": "wgrad"}, "action": "bf16_fallback"}
        assert client.put(f"{run}/pins", json=pin).json()["layer"] == name
        (decision,) = [
            item
            for item in client.get(f"{run}/decisions?page_size=100&{layer}").json()["items"]
            if item["rule"] == "pin"
        ]
        assert (decision["layer"], decision["target"]) == (name, {"gemm": "wgrad"})
    pinned = client.get(f"{run}/pins").json()["items"]
    assert sorted(pin["layer"] for pin in pinned) == sorted(ODD)
    entries = client.get(f"{run}/plan").json()["entries"]
    assert {entry["layer"] for entry in entries if entry["target"] == {"gemm": "wgrad"}} == set(ODD)
    alerts = client.get(f"{run}/alerts?page_size=100").json()["items"]
    assert {alert["layer"] for alert in alerts} == set(ODD)
    for name in ODD[::2]:
        gone = client.delete(f"{run}/pins?gemm=wgrad&layer={quote(name, safe='')}")
        assert gone.status_code == 200, name
    for name in ODD[1::2]:
        body = {"layer": name, "target": {"gemm": "wgrad"}}
        assert client.request("DELETE", f"{run}/pins", json=body).status_code == 200, name
    assert client.get(f"{run}/pins").json()["items"] == []


def test_b62_a_name_in_a_path_is_no_route(client: TestClient, documents: Any) -> None:
    client.post(URL, json=documents.sample(0))
    for name in ("a/b", "a%2Fb", "blocks.0.mlp"):
        for path in (f"/api/v1/runs/demo/layers/{name}", f"/api/v1/runs/demo/series/{name}"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["type"]) == (404, "not-found")


@pytest.mark.parametrize("body", ["json", "msgpack"])
def test_b80_nan_inf_and_missing_cells_are_told_apart_in_strict_json(
    client: TestClient, documents: Any, body: str
) -> None:
    """One layer a kind of cell; a list in JSON and the raw bytes of numpy arrays give the same answer."""
    words = ["NaN", "Infinity", "-Infinity", None, 1.5]
    slots = [{"index": n, "layer": f"l{n}", "operand": "x", "layout": "row"} for n in range(len(words))]
    values = [documents.values(slot, amax=word) for slot, word in zip(slots, words, strict=True)]
    values[0]["nan"], values[1]["inf"], values[2]["inf"] = 3, 2, 1
    sample = documents.sample(0, slots, values)
    if body == "json":
        answer = client.post(URL, json=sample)
    else:
        numbers = [0.0 if word is None else float(word) for word in words]
        raw = {"dtype": "float64", "data": np.array(numbers).tobytes(), "nulls": [3]}
        packed = msgpack.packb({**sample, "columns": {**sample["columns"], "amax": raw}})
        answer = client.post(URL, content=packed, headers={"Content-Type": "application/msgpack"})
    assert answer.status_code == 200, answer.text

    def refuse(name: str) -> Any:
        raise AssertionError(f"bare {name} in JSON")

    text = client.get("/api/v1/runs/demo/heatmap", params={"metric": "amax"}).text
    got = json.loads(text, parse_constant=refuse)
    assert got["values"] == [["NaN"], ["Infinity"], ["-Infinity"], [None], [1.5]]
    assert got["nonfinite"] == [[0, 0, 3, 0], [1, 0, 0, 2], [2, 0, 0, 1]]
