"""What-ifs are stored and never leak: a run with them reads as its twin without them does."""

import json
import logging
import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.monitor.slots import Slot, slots_id

API = "/api/v1"
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
LAYER = "blocks.1.mlp"
# Beyond every level there is, and not even finite.
AWFUL = {"nan": 5, "inf": 2, "amax": 1e30, "sum_sq": 1.0, "sum_sq_q": 0.0, "sum_sq_err": 1e6}
OPERAND = {**AWFUL, "underflow": 60000, "zeros": 60000, "saturated": 5000, "rows_flushed": 64}
READS = (
    "layers",
    "alerts",
    "decisions",
    "plan",
    "attempts",
    "heatmap",
    "heatmap?metric=relative_error&gemm=fprop",
    "heatmap?metric=nonfinite_count",
    "heatmap?metric=underflow_ratio",
    "heatmap?metric=saturation_ratio&operand=x&layout=row",
    f"series?layer={LAYER}&metric=gradient_distortion",
    f"series?layer={LAYER}&metric=relative_error&gemm=dgrad",
    f"series?layer={LAYER}&metric=underflow_ratio&operand=x&layout=row",
    f"series?layer={LAYER}&metric=amax",
    f"layer?layer={LAYER}",
    "",
)


def send(client: TestClient, run: str, sample: dict[str, Any]) -> None:
    answer = client.post(f"{API}/runs/{run}/samples", json=sample)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["alerts"], answer.json()["decisions"]) == ([], [])


def with_what_ifs(documents: Any, step: int, names: tuple[str, ...]) -> dict[str, Any]:
    """A healthy sample of two layers; behind the model's slots those of what-ifs, at their gemm's index."""
    slots = documents.slots()
    # The layer of the what-ifs runs in BF16: what it really does says so.
    slots[8:] = [{**slot, "emulated": True} if "gemm" in slot else slot for slot in slots[8:]]
    values = [documents.values(slot) for slot in slots]
    tried = [slot for slot in slots[8:] if "gemm" in slot or slot["operand"] == "x"]
    tried.append({"index": 11, "layer": LAYER, "operand": "dy", "layout": "tile"})
    for name in names:
        for slot in tried:
            slots.append({**slot, "variant": name, "emulated": "gemm" not in slot, "fmt": "e5m2"})
            values.append(documents.values(slot, **(AWFUL if "gemm" in slot else OPERAND)))
    sample: dict[str, Any] = documents.sample(step, slots, values, run={"loss": 2.0 - 0.1 * step})
    return sample


@pytest.fixture
def twins(client: TestClient, documents: Any) -> TestClient:
    """Two runs of eleven steps; `whatif` has what-ifs in some samples, others in other ones."""
    for step in range(11):
        names = ((), ("fp8", "e5m2"), ("pow2",))[step % 3]
        send(client, "whatif", with_what_ifs(documents, step, names))
        send(client, "plain", with_what_ifs(documents, step, ()))
    return client


def read(client: TestClient, run: str, path: str) -> Any:
    answer = client.get(f"{API}/runs/{run}/{path}".rstrip("/"))
    assert answer.status_code == 200, (path, answer.text)
    return json.loads(answer.text.replace(run, "RUN"))


@BOTH
def test_every_read_of_a_run_is_as_if_it_had_no_what_ifs(twins: TestClient) -> None:
    for path in READS:
        assert read(twins, "whatif", path) == read(twins, "plain", path), path


def test_metrics_figures_pages_and_comparisons_tell_of_no_what_if(twins: TestClient) -> None:
    lines = twins.get("/metrics").text.splitlines()
    told = {
        run: sorted(line.replace(run, "RUN") for line in lines if f'"{run}"' in line)
        for run in ("whatif", "plain")
    }
    assert len(told["plain"]) > 20
    assert told["whatif"] == told["plain"]
    charts = (
        *("figures/heatmap?metric=relative_error", "figures/loss", "figures/timeline"),
        f"figures/layer/all?layer={LAYER}",
    )
    for path in charts:
        shown = [twins.get(f"/runs/{run}/{path}") for run in ("whatif", "plain")]
        assert [answer.status_code for answer in shown] == [200, 200]
        assert shown[0].text == shown[1].text, path
    page = twins.get("/runs/whatif").text
    assert not [name for name in ("e5m2", "pow2", "dy tile") if name in page]
    found = twins.get(f"{API}/compare", params={"a": "whatif", "b": "plain"}).json()
    assert (found["steps"], found["max_abs_gap_ratio"]) == (list(range(11)), 0)


def test_the_log_tells_of_no_what_if(
    client: TestClient, documents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fp8_safeguard.server")
    for run, names in (("whatif", ("fp8",)), ("plain", ())):
        send(client, run, with_what_ifs(documents, 0, names))
    told = [record.getMessage().partition("worst")[2] for record in caplog.records if "worst" in record.msg]
    assert len(told) == 2
    assert told[0] == told[1]


def test_a_what_if_is_read_by_its_name_at_the_steps_that_have_it(twins: TestClient) -> None:
    query = {"layer": LAYER, "metric": "relative_error", "gemm": "fprop", "variant": "fp8"}
    found = twins.get(f"{API}/runs/whatif/series", params=query).json()
    assert found["steps"] == [1, 4, 7, 10]
    assert found["values"] == [pytest.approx(math.sqrt(1e6))] * 4
    query["variant"] = "never"
    assert twins.get(f"{API}/runs/whatif/series", params=query).status_code == 404


def test_slot_lists_with_and_without_what_ifs_go_by_their_digests(client: TestClient, documents: Any) -> None:
    lists = [(), ("fp8",), ("fp8", "e5m2"), ("pow2",)]
    for step, names in enumerate(lists):
        send(client, "whatif", with_what_ifs(documents, step, names))
    for step, names in enumerate(reversed(lists), start=4):
        sample = with_what_ifs(documents, step, names)
        sample["slots_id"] = slots_id([Slot.from_wire(slot) for slot in sample.pop("slots")])
        send(client, "whatif", sample)
    exported = client.get(f"{API}/runs/whatif/export").json()["samples"]
    assert [len(sample["slots"]) for sample in exported] == [16, 22, 28, 22, 22, 28, 22, 16]
    for one, other in zip(exported[:4], reversed(exported[4:]), strict=True):
        assert (one["slots"], one["columns"]) == (other["slots"], other["columns"])
    # What was sent is a duplicate when it comes again, what-ifs too.
    again = client.post(f"{API}/runs/whatif/samples", json=with_what_ifs(documents, 1, ("fp8",))).json()
    assert (again["inserted"], again["duplicates"]) == (0, 22)
    later = client.post(
        f"{API}/runs/whatif/samples", json=with_what_ifs(documents, 1, ("fp8", "pow2"))
    ).json()
    assert (later["inserted"], later["duplicates"]) == (6, 22)
