"""The exposition: complete, escaped, capped, and gone with its run."""

import math
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

API = "/api/v1/runs"
PREFIX = "fp8_safeguard_"
CONTRACT = {
    "layer_gradient_distortion_ratio": ("gauge", {"run", "layer"}),
    "layer_gemm_error_ratio": ("gauge", {"run", "layer", "gemm"}),
    "layer_underflow_ratio": ("gauge", {"run", "layer", "operand", "layout"}),
    "layer_saturation_ratio": ("gauge", {"run", "layer", "operand", "layout"}),
    "nonfinite_values": ("counter", {"run", "layer", "operand"}),
    "run_step": ("gauge", {"run"}),
    "run_loss": ("gauge", {"run"}),
    "run_gradient_norm": ("gauge", {"run"}),
    "run_last_report_timestamp_seconds": ("gauge", {"run"}),
    "run_fallback_budget_used_ratio": ("gauge", {"run"}),
    "run_nonfinite_steps": ("counter", {"run"}),
    "run_health_state": ("gauge", {"run", "state"}),
    "decisions": ("counter", {"run", "action", "mode"}),
    "alerts_active": ("gauge", {"run", "rule", "severity"}),
    "ingest_samples": ("counter", set()),
    "ingest_duration_seconds": ("histogram", set()),
    "series_truncated": ("gauge", {"run"}),
    "build_info": ("gauge", {"version"}),
}
Scrape = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(client: TestClient) -> Scrape:
    """Samples by name and labels, as the reference parser reads them."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.endswith("\n")
    found: Scrape = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            values = found.setdefault(sample.name.removeprefix(PREFIX), {})
            assert labels not in values, "one series twice"
            values[labels] = sample.value
    return found


def value(found: Scrape, name: str, **labels: str) -> float:
    return found[name][tuple(sorted(labels.items()))]


@pytest.fixture
def bad(documents: Any) -> Callable[..., dict[str, Any]]:
    """A sample of eight layers whose first dgrad has a relative error of 50 %."""

    def bad(step: int, **header: Any) -> dict[str, Any]:
        slots = documents.slots(8)
        values = [documents.values(slot) for slot in slots]
        values[6]["sum_sq_err"] = values[6]["sum_sq"] * 0.25
        sample: dict[str, Any] = documents.sample(step, slots, values, mode="enforce", **header)
        return sample

    return bad


def test_every_family_of_the_contract_is_there_before_the_first_sample(client: TestClient) -> None:
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, (kind, _) in CONTRACT.items():
        assert families[PREFIX + name].type == kind
        assert families[PREFIX + name].documentation
    found = scrape(client)
    assert value(found, "ingest_samples_total") == 0
    assert value(found, "ingest_duration_seconds_count") == 0
    assert list(found["build_info"].values()) == [1.0]


def test_a_run_is_described_with_the_labels_of_the_contract(
    client: TestClient, clock: Any, documents: Any, bad: Any
) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0, documents.slots(8), mode="enforce"))
    found = scrape(client)
    assert value(found, "decisions_total", run="demo", action="bf16_fallback", mode="enforce") == 0
    assert value(found, "nonfinite_values_total", run="demo", layer="blocks.0.mlp", operand="x") == 0
    client.post(f"{API}/demo/samples", json=bad(1, run={"loss": 2.5, "gradient_norm": "Infinity"}))
    found = scrape(client)
    families = text_string_to_metric_families(client.get("/metrics").text)
    for family in families:
        kind, labels = CONTRACT[family.name.removeprefix(PREFIX)]
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, (family.name, kind)
    first = {"run": "demo", "layer": "blocks.0.mlp"}
    assert value(found, "layer_gemm_error_ratio", gemm="dgrad", **first) == pytest.approx(0.5)
    cosine = (2 * 65536 + 4 - 0.25 * 65536) / (2 * math.sqrt(65536 * 65540))
    assert value(found, "layer_gradient_distortion_ratio", **first) == pytest.approx(1 - cosine)
    assert value(found, "layer_underflow_ratio", operand="dy", layout="col", **first) == 0
    assert value(found, "run_step", run="demo") == 1
    assert value(found, "run_loss", run="demo") == 2.5
    assert value(found, "run_gradient_norm", run="demo") == math.inf
    assert value(found, "run_last_report_timestamp_seconds", run="demo") == clock.now
    assert 0 < value(found, "run_fallback_budget_used_ratio", run="demo") < 1
    assert value(found, "decisions_total", run="demo", action="bf16_fallback", mode="enforce") == 1
    assert value(found, "alerts_active", run="demo", rule="gemm-error", severity="act") == 1
    # Once the client applies the fallback it is held: named, but not open.
    in_force = {"plan_version": 1, "effective_step": 3}
    client.post(
        f"{API}/demo/samples", json=bad(2, run={"loss": 2.5, "gradient_norm": "Infinity"}, **in_force)
    )
    found = scrape(client)
    assert value(found, "alerts_active", run="demo", rule="gemm-error", severity="act") == 0
    assert value(found, "ingest_samples_total") == 3
    states = {labels[1][1]: on for labels, on in found["run_health_state"].items()}
    assert states == {
        "healthy": 0,
        "watch": 0,
        "unstable": 0,
        "fallback": 1,
        "stale": 0,
        "ended": 0,
    }


def test_nonfinite_values_are_counted_once_each(client: TestClient, documents: Any) -> None:
    for step in range(3):
        slots = documents.slots(1)
        values = [documents.values(slot) for slot in slots]
        # x in rows and x in columns are the same elements.
        values[0].update(nan=2, inf=1)
        values[1].update(nan=2, inf=1)
        sample = documents.sample(step, slots, values)
        client.post(f"{API}/demo/samples", json=sample)
        client.post(f"{API}/demo/samples", json=sample)
    found = scrape(client)
    assert value(found, "nonfinite_values_total", run="demo", layer="blocks.0.mlp", operand="x") == 9
    assert value(found, "nonfinite_values_total", run="demo", layer="blocks.0.mlp", operand="dy") == 0


def test_nonfinite_values_of_experts_count_unless_their_layer_already_says_so(
    client: TestClient, documents: Any
) -> None:
    slot = {"operand": "x", "layout": "row"}
    slots = [
        {"index": 0, "layer": "whole", **slot},
        *({"index": 1, "layer": layer, "expert": e, **slot} for layer in ("whole", "parts") for e in (2, 5)),
    ]
    values = [documents.values(slot, nan=4 if n == 0 else 2) for n, slot in enumerate(slots)]
    client.post(f"{API}/demo/samples", json=documents.sample(0, slots, values))
    found = scrape(client)
    for layer in ("whole", "parts"):
        assert value(found, "nonfinite_values_total", run="demo", layer=layer, operand="x") == 4


NAMES = ['a"b\n\\c', "ends in \\", "ü/%20{}", "a.b", "a_b"]


def test_b64_any_layer_name_survives_the_text_format(client: TestClient, documents: Any) -> None:
    slots = [{"index": n, "layer": name, "operand": "dy", "layout": "row"} for n, name in enumerate(NAMES)]
    values = [documents.values(slot, underflow=n) for n, slot in enumerate(slots)]
    client.post(f"{API}/demo/samples", json=documents.sample(0, slots, values))
    found = scrape(client)
    for n, name in enumerate(NAMES):
        labels = {"run": "demo", "layer": name, "operand": "dy", "layout": "row"}
        assert value(found, "layer_underflow_ratio", **labels) == n / 65536


def test_non_finite_values_are_written_as_prometheus_reads_them(client: TestClient, documents: Any) -> None:
    client.post(
        f"{API}/demo/samples", json=documents.sample(0, run={"loss": "NaN", "gradient_norm": "-Infinity"})
    )
    lines = client.get("/metrics").text.splitlines()
    assert 'fp8_safeguard_run_loss{run="demo"} NaN' in lines
    assert 'fp8_safeguard_run_gradient_norm{run="demo"} -Inf' in lines


def test_promtool_finds_nothing(client: TestClient, bad: Any) -> None:
    client.post(f"{API}/demo/samples", json=bad(0, run={"loss": "NaN"}))
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        text = client.get("/metrics", headers={"Accept": accept}).text
        if accept == "text/plain":
            ran = subprocess.run(
                ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
            )
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
        else:
            assert text.endswith("# EOF\n")


def test_the_series_of_a_silent_run_go_away_and_stale_says_so_first(
    client: TestClient, clock: Any, bad: Any
) -> None:
    client.post(f"{API}/demo/samples", json=bad(0))
    clock.now += 299
    assert value(scrape(client), "run_step", run="demo") == 0
    clock.now += 2
    found = scrape(client)
    assert [name for name in found if any(("run", "demo") in labels for labels in found[name])] == [
        "run_health_state"
    ]
    assert value(found, "run_health_state", run="demo", state="stale") == 1
    assert client.get(f"{API}/demo").json()["state"] == "stale"
    clock.now += 600
    assert "run_health_state" not in scrape(client)
    client.post(f"{API}/demo/samples", json=bad(1))
    assert value(scrape(client), "run_step", run="demo") == 1


def test_the_series_of_an_ended_run_go_away(client: TestClient, documents: Any) -> None:
    client.post(f"{API}/demo/samples", json=documents.sample(0))
    assert client.patch(f"{API}/demo", json={"ended": True}).json()["state"] == "ended"
    found = scrape(client)
    assert "layer_underflow_ratio" not in found
    assert value(found, "run_health_state", run="demo", state="ended") == 1
    client.post(f"{API}/demo/samples", json=documents.sample(1))
    assert client.get(f"{API}/demo").json()["state"] == "healthy"


def test_b67_the_cap_keeps_the_worst_layers_and_counts_the_rest(
    make_client: Callable[..., TestClient], documents: Any
) -> None:
    client = make_client(metrics_max_series=30)
    slots = [
        {"index": n, "layer": f"layer.{n}", "operand": "x", "layout": "row", "expert": None, "rank": 3}
        for n in range(100)
    ]
    values = [documents.values(slot, underflow=n) for n, slot in enumerate(slots)]
    # The worst ones are in the middle.
    for n in range(40, 50):
        values[n].update(underflow=6000)
    client.post(f"{API}/demo/samples", json=documents.sample(0, slots, values))
    found = scrape(client)
    kept = {dict(labels)["layer"] for labels in found["layer_underflow_ratio"]}
    assert kept == {f"layer.{n}" for n in range(40, 50)}
    # Underflow, saturation and the non-finite counter of each of the other 90.
    assert value(found, "series_truncated", run="demo") == 270
