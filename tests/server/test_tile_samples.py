"""Samples whose operands were read in tiles: null columns everywhere a value is shown."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

LAYER = "blocks.1.mlp"
API = "/api/v1/runs/demo"
TOLD = ("count", "zeros", "underflow", "saturated", "nan", "inf")
PLACE = {"layer": LAYER, "operand": "dy", "layout": "row"}


@pytest.fixture
def tiled(client: TestClient, documents: Any) -> TestClient:
    """Steps 0 and 4 whole, the others with the operands of one layer read in tiles: one element in 17."""
    for step in range(6):
        slots = documents.slots()
        values = [documents.values(slot) for slot in slots]
        for slot, row in zip(slots, values, strict=True):
            if slot.get("operand") and slot["layer"] == LAYER and step % 4:
                row.update({name: None for name in row if name not in TOLD})
                lost = 0 if slot["operand"] == "w" else 8
                row.update(count=4096, underflow=lost, zeros=lost)
        answer = client.post(f"{API}/samples", json=documents.sample(step, slots, values))
        assert answer.status_code == 200, answer.text
    return client


def get(client: TestClient, path: str, **params: Any) -> Any:
    answer = client.get(f"{API}{path}", params=params)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def test_rates_are_there_at_every_step_and_the_rest_at_whole_ones(tiled: TestClient) -> None:
    underflow = get(tiled, "/series", metric="underflow_ratio", **PLACE)
    assert dict(zip(underflow["steps"], underflow["values"], strict=True)) == {
        step: (8 / 4096 if step % 4 else 0.0) for step in range(6)
    }
    for metric in ("cosine", "sqnr_db", "kurtosis", "amax", "tile_sqnr_p01_db", "rows_flushed_ratio"):
        found = get(tiled, "/series", metric=metric, **PLACE)
        held = [
            step for step, value in zip(found["steps"], found["values"], strict=True) if value is not None
        ]
        assert held == [0, 4], metric
        assert not any(found["nonfinite"]), metric


def test_the_map_shows_no_value_where_none_was_measured(tiled: TestClient) -> None:
    found = get(tiled, "/heatmap", metric="cosine_distortion", operand="dy", layout="row")
    row = found["values"][found["layers"].index(LAYER)]
    assert [value is not None for value in row] == [True, False, False, False, True, False]
    assert found["nonfinite"] == []
    # The recomputed gradients are measured at every step.
    worst = get(tiled, "/heatmap", metric="gradient_distortion")
    assert None not in worst["values"][worst["layers"].index(LAYER)]


def test_the_layer_is_healthy_by_its_newest_values(tiled: TestClient) -> None:
    assert {item["layer"]: item["state"] for item in get(tiled, "/layers")["items"]} == {
        "blocks.0.mlp": "healthy",
        LAYER: "healthy",
    }
    assert get(tiled, "/alerts")["items"] == []
    document = get(tiled, "/layer", layer=LAYER)
    assert document["layer"] == LAYER


def test_the_pages_are_drawn(tiled: TestClient) -> None:
    for path in ("/runs/demo", "/", f"/runs/demo?layer={LAYER}"):
        assert tiled.get(path).status_code == 200
    metrics = tiled.get("/metrics").text
    assert f'layer="{LAYER}"' in metrics
    assert not [line for line in metrics.splitlines() if line.endswith("NaN")]
