"""A layer that has not reported, or not in this attempt, is shown with nothing that was not measured."""

from typing import Any

import pytest
from starlette.testclient import TestClient

API = "/api/v1/runs/demo"


@pytest.fixture
def report(client: TestClient, documents: Any) -> Any:
    """Posts a healthy step of these layers of a run of eight."""

    def report(step: int, layers: set[int], **header: Any) -> None:
        slots = [slot for slot in documents.slots(8) if int(slot["layer"].split(".")[1]) in layers]
        answer = client.post(f"{API}/samples", json=documents.sample(step, slots, mode="enforce", **header))
        assert answer.status_code == 200, answer.text
        assert answer.json()["decisions"] == answer.json()["alerts"] == []

    return report


def standing(client: TestClient) -> dict[int, tuple[str, int | None]]:
    """State of each layer, and the step of its worst value."""
    items = client.get(f"{API}/layers", params={"order_by": "layer"}).json()["items"]
    return {
        int(item["layer"].split(".")[1]): (item["state"], (item["worst"] or {}).get("step")) for item in items
    }


def exported(client: TestClient) -> set[int]:
    """Layers of which the metrics page has a measured ratio."""
    lines = [
        line for line in client.get("/metrics").text.splitlines() if line.startswith("fp8_safeguard_layer_")
    ]
    return {number for number in range(8) if any(f'layer="blocks.{number}.mlp"' in line for line in lines)}


def test_b104_a_run_without_a_layer_and_one_whose_layers_come_later(client: TestClient, report: Any) -> None:
    assert client.get(f"{API}/layers").status_code == 404
    report(0, set())
    assert standing(client) == {}
    assert exported(client) == set()
    report(1, {0, 1})
    report(2, {0, 1, 2})
    assert standing(client) == {0: ("healthy", 2), 1: ("healthy", 2), 2: ("healthy", 2)}
    asked = {"layer": "blocks.2.mlp", "metric": "amax", "operand": "x", "layout": "row"}
    series = client.get(f"{API}/series", params=asked).json()
    # Nothing before its first step, not even a zero.
    assert (series["steps"], series["values"]) == ([2], [4.5])
    heatmap = client.get(f"{API}/heatmap", params={"metric": "underflow_ratio"}).json()
    assert heatmap["values"][2] == [None, None, 0.0][-len(heatmap["steps"]) :]
    for query in ("layer", "series", "layers"):
        params = {"layer": "blocks.7.mlp", "metric": "amax"}
        if query != "layers":
            assert client.get(f"{API}/{query}", params=params).status_code == 404


@pytest.mark.parametrize(
    ("attempt", "shared"),
    [
        ({"id": "1", "parent": "0", "from_step": 3}, True),
        ({"id": "1", "parent": None, "from_step": 0}, False),
    ],
    ids=["resumed", "begun anew"],
)
def test_b104_the_first_step_of_an_attempt_speaks_for_the_layers_that_it_has(
    client: TestClient, report: Any, attempt: dict[str, Any], shared: bool
) -> None:
    """Layer 1 has reported before the step that the attempts share, layer 2 only afterwards."""
    for step in range(3):
        report(step, {0, 1})
    report(3, {0, 1, 2})
    report(3, {0}, attempt=attempt)
    assert standing(client) == {
        0: ("healthy", 3),
        1: ("healthy", 2) if shared else ("stale", None),
        2: ("stale", None),
    }
    assert exported(client) == ({0, 1} if shared else {0})
