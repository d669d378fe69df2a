"""One layer in full over HTTP: values, limits, precision history, figures, unknown layers."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.server.drilldown_series import load_series
from fp8_safeguard.server.routes.drilldown import LayerDocument
from fp8_safeguard.server.runlookup import find_run

LAYER = "blocks.1.mlp"
EDGES_DB = (-math.inf, 0, 4, 8, 12, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 38)
COUNTS = ("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed")
KINDS = ("metric", "amax", "blocks", "histogram", "precision")


def send(client: TestClient, run: str, document: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(f"/api/v1/runs/{run}/samples", json=document)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def layer_of(client: TestClient, run: str, layer: str = LAYER) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{run}/layer", params={"layer": layer})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def figure_of(client: TestClient, run: str, kind: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/runs/{run}/figures/layer/{kind}", params={"layer": LAYER, **query})
    assert answer.status_code == 200, answer.text
    figure: dict[str, Any] = json.loads(answer.text, parse_constant=pytest.fail)
    return figure


def slot_of(document: dict[str, Any], **place: Any) -> dict[str, Any]:
    wanted = {"operand": None, "layout": None, "gemm": None, "expert": None, **place}
    found = [slot for slot in document["slots"] if all(slot.get(k) == v for k, v in wanted.items())]
    assert len(found) == 1, found
    slot: dict[str, Any] = found[0]
    return slot


def random_values(documents: Any, slot: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A slot's columns at random, far from any threshold."""
    error = float(rng.uniform(20, 60))
    hist = [0] * 11 + [int(rng.integers(0, 9)) for _ in range(5)]
    changes: dict[str, Any] = {
        "amax": float(rng.uniform(3, 6)), "sum_sq_err": error, "sum_sq_q": 65536.0 - float(rng.uniform(0, 9))
    }  # fmt: skip
    if "gemm" not in slot:
        changes |= {"tile_sqnr_hist": hist, "underflow": int(rng.integers(0, 7))}
    values: dict[str, Any] = documents.values(slot, **changes)
    return values


def oracle(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of merged columns by their definitions, one number at a time."""
    total = {
        name: sum(part[name] for part in parts) for name in ("count", "sum_sq", "sum_sq_q", "sum_sq_err")
    }
    found = {
        "count": total["count"],
        "amax": max(part["amax"] for part in parts),
        "relative_error": math.sqrt(total["sum_sq_err"] / total["sum_sq"]),
        "sqnr_db": 10 * math.log10(total["sum_sq"] / total["sum_sq_err"]),
        "cosine": (total["sum_sq"] + total["sum_sq_q"] - total["sum_sq_err"])
        / (2 * math.sqrt(total["sum_sq"] * total["sum_sq_q"])),
    }
    if parts[0]["tile_sqnr_hist"] is not None:
        bins = [sum(column) for column in zip(*(part["tile_sqnr_hist"] for part in parts), strict=True)]
        found |= {"underflow_ratio": sum(part["underflow"] for part in parts) / total["count"], "bins": bins}
        rank, seen = math.ceil(0.01 * sum(bins)), 0
        for edge, held in zip(EDGES_DB, bins, strict=True):
            seen += held
            if seen >= rank:
                found["p01"] = edge
                break
    return found


def test_newest_values_equal_a_brute_force_merge_of_groups(client: TestClient, documents: Any) -> None:
    rng = np.random.default_rng(7)
    slots = documents.slots()
    for step in range(3):
        sent = {}
        for group in ("0", "1"):
            sent[group] = [random_values(documents, slot, rng) for slot in slots]
            send(client, "r", documents.sample(step, slots, sent[group], group=group, groups=2))
    document = layer_of(client, "r")
    for place, slot in enumerate(slots):
        if slot["layer"] != LAYER:
            continue
        expected = oracle([sent[group][place] for group in ("0", "1")])
        kind = {name: slot[name] for name in ("operand", "layout", "gemm") if name in slot}
        shown = slot_of(document, **kind)
        assert shown["step"] == 2
        for name in ("count", "amax", "relative_error", "sqnr_db", "cosine"):
            assert shown["metrics"][name] == pytest.approx(expected[name], rel=1e-12), (kind, name)
        assert shown["tile_sqnr_hist"] == expected.get("bins")
        if "bins" in expected:
            assert shown["metrics"]["underflow_ratio"] == pytest.approx(
                expected["underflow_ratio"], rel=1e-12
            )
            assert shown["metrics"]["tile_sqnr_p01_db"] == expected["p01"]
            assert shown["format_max"] == 448
        else:
            assert shown["metrics"]["underflow_ratio"] is None
            assert shown["format_max"] is None


def test_every_metric_equals_the_monitor_s_own(client: TestClient, documents: Any) -> None:
    rng = np.random.default_rng(11)
    slots = documents.slots()
    values = [random_values(documents, slot, rng) for slot in slots]
    send(client, "r", documents.sample(0, slots, values))
    for shown in layer_of(client, "r")["slots"]:
        place = next(
            at for at, slot in enumerate(slots)
            if slot["layer"] == LAYER and all(shown.get(n) == slot.get(n) for n in ("operand", "layout", "gemm"))
        )  # fmt: skip
        sent = dict(values[place])
        bins = sent.pop("tile_sqnr_hist")
        own = TensorStats(**sent, histogram=None if bins is None else tuple(bins))
        finite = sent["count"] - sent["nan"] - sent["inf"]
        means = {"mse": float(np.float64(sent["sum_sq_err"]) / finite)}  # TensorStats has no property for it
        for name, value in shown["metrics"].items():
            expected = {**values[place], **means}[name] if name in {*sent, *means} else getattr(own, name)
            assert value == (None if expected is None else pytest.approx(expected, rel=1e-12)), name


def test_a_layer_reads_as_in_the_list_of_layers(client: TestClient, documents: Any) -> None:
    """State, worst signal and precision have one definition."""
    slots = documents.slots(3)
    for step in range(4):
        ill = [
            documents.values(
                slot, **({"sum_sq_err": 900.0} if slot.get("gemm") == "dgrad" and place > 16 else {})
            )
            for place, slot in enumerate(slots)
        ]
        send(client, "r", documents.sample(step, slots, ill, mode="enforce", plan_version=0))
    listed = client.get("/api/v1/runs/r/layers", params={"order_by": "layer"}).json()["items"]
    assert {item["state"] for item in listed} == {"healthy", "fallback"}
    for place, item in enumerate(listed):
        document = layer_of(client, "r", item["layer"])
        assert (document["state"], document["precision"]) == (item["state"], item["precision"])
        assert {name: document["worst"][name] for name in item["worst"]} == item["worst"]
        assert document["previous"] == (listed[place - 1]["layer"] if place else None)
        assert document["next"] == (listed[place + 1]["layer"] if place + 1 < len(listed) else None)
        assert (document["position"], document["layers"]) == (place + 1, len(listed))


def test_a_slot_that_is_recomputed_in_rotation_keeps_its_own_step(client: TestClient, documents: Any) -> None:
    slots = documents.slots()
    without = [slot for slot in slots if slot.get("gemm") != "wgrad"]
    send(client, "r", documents.sample(0, slots))
    for step in range(1, 41):
        send(client, "r", documents.sample(step, without))
    document = layer_of(client, "r")
    assert slot_of(document, gemm="wgrad")["step"] == 0
    assert slot_of(document, gemm="dgrad")["step"] == 40
    assert document["worst"]["step"] == 40


def test_the_worst_expert_is_a_slot_of_its_own(client: TestClient, documents: Any) -> None:
    own = documents.slots()
    for step, number in enumerate((3, 7)):
        slots = [*own, {"index": len(own), "layer": LAYER, "operand": "x", "layout": "row", "expert": number}]
        values = [documents.values(slot) for slot in slots]
        values[-1] |= {"underflow": 6553, "zeros": 6553}
        send(client, "r", documents.sample(step, slots, values))
    document = layer_of(client, "r")
    assert [slot["expert"] for slot in document["slots"] if slot.get("expert") is not None] == [7]
    assert slot_of(document, operand="x", layout="row")["metrics"]["underflow"] == 0
    expert = slot_of(document, operand="x", layout="row", expert=7)
    assert expert["metrics"]["underflow_ratio"] == 6553 / 65536
    assert expert["breaches"] == {"underflow_ratio": "watch"}


def test_limits_tell_their_source_and_what_is_beyond_them(client: TestClient, documents: Any) -> None:
    slots = documents.slots()
    for step in range(6):
        values = [
            documents.values(
                slot,
                **({"sum_sq_err": 65536.0 * 0.035**2} if slot.get("gemm") == "fprop" else {}),
                **({"underflow": 700} if step == 5 and slot.get("operand") == "x" and slot["layout"] == "row" else {}),
            )
            for slot in slots
        ]  # fmt: skip
        send(client, "r", documents.sample(step, slots, values))
    document = layer_of(client, "r")
    row = slot_of(document, operand="x", layout="row")
    lines = {
        (line["severity"], line["value"]): line["source"] for line in row["thresholds"]["underflow_ratio"]
    }
    assert lines == {("watch", 0.005): "floor", ("act", 0.2): "floor"}
    assert row["breaches"] == {"underflow_ratio": "watch"}
    (jump,) = row["thresholds"]["amax"]
    assert (jump["source"], jump["value"]) == ("own median ×16", pytest.approx(16 * 4.5))
    watch, act = slot_of(document, gemm="fprop")["thresholds"]["relative_error"]
    assert (watch["source"], watch["value"]) == ("own median ×1.3", pytest.approx(1.3 * 0.035))
    assert (act["source"], act["value"]) == ("own median ×2", pytest.approx(0.07))
    assert document["worst"]["metric"] == "underflow_ratio"
    assert (document["worst"]["beyond"], document["worst"]["severity"]) == (True, "watch")


def test_non_finite_values_travel_as_words(client: TestClient, documents: Any) -> None:
    slots = documents.slots()
    sick = {
        "amax": "NaN",
        "sum_sq": "NaN",
        "sum_sq_q": "NaN",
        "sum_sq_err": "NaN",
        "sum_4th": "Infinity",
        "nan": 3,
    }
    values = [documents.values(slot, **(sick if slot.get("operand") == "dy" else {})) for slot in slots]
    send(client, "r", documents.sample(0, slots, values))
    metrics = slot_of(layer_of(client, "r"), operand="dy", layout="row")["metrics"]
    assert (metrics["amax"], metrics["cosine"], metrics["nonfinite_count"]) == ("NaN", "NaN", 3)
    for kind in KINDS:
        figure_of(client, "r", kind, layer_metric="amax")
    marks = next(
        t for t in figure_of(client, "r", "metric", layer_metric="amax")["data"] if t.get("name") == "NaN"
    )
    assert marks["x"] == [0, 0]


@pytest.mark.parametrize("preset", ["floor", "seed"])
def test_both_presets_are_explained(client: TestClient, documents: Any, preset: str) -> None:
    send(client, "r", documents.sample(0))
    client.patch("/api/v1/runs/r", json={"thresholds": preset})
    sources = {
        line["source"]
        for slot in layer_of(client, "r")["slots"]
        for lines in slot["thresholds"].values()
        for line in lines
    }
    assert sources == {preset}


def test_an_unknown_layer_is_404_and_names_what_is_close(client: TestClient, documents: Any) -> None:
    send(client, "r", documents.sample(0))
    for path in ("/api/v1/runs/r/layer", "/runs/r/layer", "/runs/r/figures/layer/all"):
        answer = client.get(path, params={"layer": "blocks.1.mpl"})
        assert (answer.status_code, answer.json()["type"]) == (404, "layer-not-found")
        assert "did you mean 'blocks.1.mlp'" in answer.json()["detail"]
        assert client.get(path, params={"layer": "zzz"}).status_code == 404
        assert client.get(path.replace("/r/", "/none/"), params={"layer": LAYER}).status_code == 404
        assert client.get(path).status_code == 422


@pytest.mark.parametrize(
    "name", ['a/b "c"\n%', "🔥 é", "<script>alert(1)</script>", "..", "'; --", "{{ 7*7 }}", " "]
)
def test_any_layer_name_is_found_and_shown_as_text(client: TestClient, documents: Any, name: str) -> None:
    slots = [{**slot, "layer": name} for slot in documents.slots(1)]
    send(client, "r", documents.sample(0, slots))
    assert layer_of(client, "r", name)["layer"] == name
    page = client.get("/runs/r/layer", params={"layer": name})
    assert page.status_code == 200
    assert "<script" not in page.text
    assert "49" not in page.text or "7*7" in page.text
    assert client.get("/runs/r/figures/layer/all", params={"layer": name}).status_code == 200


def test_a_reverted_fallback_ends_where_the_trainer_says(client: TestClient, documents: Any) -> None:
    slots = documents.slots(4)

    def post(step: int, bad: bool = False, **header: Any) -> dict[str, Any]:
        values = [
            documents.values(
                slot,
                **(
                    {"sum_sq_err": 3000.0}
                    if bad and slot.get("gemm") == "dgrad" and slot["layer"] == LAYER
                    else {}
                ),
            )
            for slot in slots
        ]
        return send(client, "r", documents.sample(step, slots, values, mode="enforce", **header))

    versions = [post(step, bad=True, plan_version=0)["plan_version"] for step in range(4)]
    version, step = versions[-1], len(versions)
    assert version > 0
    post(step + 2, plan_version=version, effective_step=step + 1)
    mine = [made for made in layer_of(client, "r")["decisions"] if made["action"] == "bf16_fallback"]
    for made in mine:
        assert client.post(f"/api/v1/decisions/{made['id']}:revert").status_code == 200
    newest = client.get("/api/v1/runs/r/plan").json()["version"]
    post(step + 5, plan_version=newest, effective_step=step + 4)
    periods = [item for item in layer_of(client, "r")["precision_history"] if item["gemm"] == "dgrad"]
    assert [(p["from_step"], p["to_step"], p["precision"]) for p in periods] == [
        (0, step, "fp8"),
        (step + 1, step + 3, "bf16"),
        (step + 4, None, "fp8"),
    ]


def send_spike(client: TestClient, documents: Any, *, steps: int, spike: int) -> None:
    """Weights only, every second step, with one step in which most of them vanish."""
    slots = [{**slot, "layer": LAYER} for slot in documents.slots(1, ({"operand": "w", "layout": "tile"},))]
    samples = [
        documents.sample(
            2 * at, slots, [documents.values(slots[0], **({"underflow": 60000} if 2 * at == spike else {}))]
        )
        for at in range(steps)
    ]
    answer = client.post("/api/v1/runs/r/samples", json={"samples": samples})
    assert answer.status_code == 200, answer.text


def test_figures_show_the_steps_of_the_page(client: TestClient, documents: Any) -> None:
    send_spike(client, documents, steps=140, spike=71)
    part = figure_of(client, "r", "metric", layer_metric="underflow_ratio", from_step=60, to_step=80)
    assert part["layout"]["xaxis"]["range"] == [59.5, 80.5]
    assert part["layout"]["meta"] == {"first_step": 0, "last_step": 278}
    blocks = figure_of(client, "r", "blocks", at=72)
    assert 72 in blocks["data"][0]["x"]
    assert len(blocks["data"][0]["x"]) < 140
    assert [figure_of(client, "r", kind)["layout"]["xaxis"]["range"] for kind in KINDS[:3]] == [
        [-0.5, 278.5]
    ] * 3


def test_a_spike_survives_when_points_stand_for_several_steps(client: TestClient, documents: Any) -> None:
    send_spike(client, documents, steps=60, spike=70)
    with client.app.state.store.read() as conn:  # type: ignore[attr-defined]
        (line,) = load_series(conn, find_run(conn, "r"), LAYER).metric("underflow_ratio", most=10)
    assert len(line["steps"]) <= 10
    assert max(line["values"]) == 60000 / 65536
    start = line["steps"][line["values"].index(60000 / 65536)]
    assert start <= 70 < start + line["step_width"]


def test_all_figures_come_in_one_answer(client: TestClient, documents: Any) -> None:
    send(client, "r", documents.sample(0))
    together = figure_of(client, "r", "all")
    assert set(together) == set(KINDS)
    for kind in KINDS:
        assert together[kind] == figure_of(client, "r", kind)
    assert client.get("/runs/r/figures/layer/pie", params={"layer": LAYER}).status_code == 422
    bad = client.get("/runs/r/figures/layer/metric", params={"layer": LAYER, "layer_metric": "beauty"})
    assert bad.status_code == 422


def test_reading_takes_the_scope_read(make_client: Callable[..., TestClient], documents: Any) -> None:
    send(make_client(), "r", documents.sample(0))
    closed = make_client(tokens={"t-ingest": ["ingest"], "t-read": ["read"]})
    for path in ("/api/v1/runs/r/layer", "/runs/r/layer", "/runs/r/figures/layer/all"):
        answers = [
            closed.get(
                path, params={"layer": LAYER}, headers={"Authorization": f"Bearer {token}"}
            ).status_code
            for token in ("t-read", "t-ingest", "nobody")
        ]
        assert answers == [200, 403, 401]


def test_the_answer_fits_the_schema_that_openapi_gives(client: TestClient, documents: Any) -> None:
    send(client, "r", documents.sample(0))
    schema = client.get("/openapi.json").json()["paths"]["/api/v1/runs/{run}/layer"]["get"]["responses"][
        "200"
    ]
    assert schema["content"]["application/json"]["schema"]["$ref"].endswith("LayerDocument")
    LayerDocument.model_validate(layer_of(client, "r"), strict=True)
