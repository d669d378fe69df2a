"""The readiness route: over stored samples, on both databases, bounded, merged over groups."""

import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from fp8_safeguard.server import readiness

URL = "/api/v1/runs/demo"
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"], indirect=True)
HEALTHY_ERROR = math.sqrt(43.3 / 65536)
LAYER = "blocks.0.mlp"


def report(client: TestClient, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{URL}/readiness", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def rows(answer: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(item["layer"], item["gemm"]): item for item in answer["items"]}


def error(value: float) -> dict[str, float]:
    return {"sum_sq_err": value**2 * 65536.0}


@BOTH
def test_a_healthy_run_is_ready_and_a_fault_shows_with_its_step(client: TestClient, post: Any) -> None:
    for step in range(0, 60, 10):
        post(step)
    answer = report(client)
    assert (answer["run"], answer["from_step"], answer["to_step"]) == ("demo", 0, 50)
    assert (answer["steps_used"], answer["steps_in_range"]) == (6, 6)
    assert answer["summary"]["sentence"] == "ready for FP8"
    assert answer["summary"]["counts"] == {"keep_bf16": 0, "watch": 0, "unknown": 0, "safe": 24}
    assert [item["layer"] for item in answer["items"]][::3] == [f"blocks.{n}.mlp" for n in range(8)]
    assert rows(answer)[LAYER, "fprop"]["error_median"] == pytest.approx(HEALTHY_ERROR, rel=1e-12)
    lost = {"underflow": 6553, "rows_flushed": 16}
    post(60, {(LAYER, "dgrad"): error(0.4), (LAYER, "dy row"): lost})
    post(70)
    item = rows(report(client))[LAYER, "dgrad"]
    assert (item["verdict"], item["samples"]) == ("keep_bf16", 8)
    assert item["error_worst"] == pytest.approx(0.4)
    assert (item["error_worst_step"], item["error_latest_step"]) == (60, 70)
    assert item["error_median"] == pytest.approx(HEALTHY_ERROR)
    assert (item["underflow"], item["underflow_slot"], item["underflow_step"]) == (6553 / 65536, "dy row", 60)
    assert item["rows_flushed"] == 0.25
    assert report(client)["summary"]["keep_bf16_layers"] == [LAYER]


def test_a_range_of_steps_leaves_the_others_out(client: TestClient, post: Any) -> None:
    for step in range(10):
        post(step, {(LAYER, "fprop"): error(0.4)} if step == 2 else {})
    answer = report(client, from_step=3, to_step=8)
    assert (answer["from_step"], answer["to_step"], answer["steps_in_range"]) == (3, 8, 6)
    assert rows(answer)[LAYER, "fprop"]["verdict"] == "safe"
    assert rows(report(client, to_step=5))[LAYER, "fprop"]["error_worst_step"] == 2
    nothing = report(client, from_step=50)
    assert (nothing["from_step"], nothing["to_step"], nothing["steps_used"]) == (None, None, 0)
    assert nothing["summary"]["verdict"] == "not_ready"
    assert client.get(f"{URL}/readiness", params={"from_step": -1}).status_code == 422
    assert client.get("/api/v1/runs/other/readiness").status_code == 404


def test_of_a_long_range_the_newest_steps_are_used_and_counted(
    client: TestClient, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "MOST_STEPS", 5)
    monkeypatch.setattr(readiness, "PART_STEPS", 2)
    for step in range(12):
        post(step, {(LAYER, "fprop"): error(0.4)} if step in (1, 8) else {})
    answer = report(client)
    assert (answer["steps_used"], answer["steps_in_range"]) == (5, 12)
    assert (answer["from_step"], answer["to_step"]) == (7, 11)
    item = rows(answer)[LAYER, "fprop"]
    assert (item["samples"], item["error_worst_step"], item["error_latest_step"]) == (5, 8, 11)
    monkeypatch.setattr(readiness, "MOST_BYTES", 1)
    assert report(client)["steps_used"] == 2


def test_the_parts_of_a_range_make_the_same_report_as_one(
    client: TestClient, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(11):
        post(step, {(LAYER, "fprop"): error(0.02 + 0.002 * step), (LAYER, "x row"): {"underflow": 7 * step}})
    whole = report(client)
    monkeypatch.setattr(readiness, "PART_STEPS", 3)
    assert report(client) == whole


@BOTH
def test_groups_merge_as_sums_and_rewound_steps_do_not_count(client: TestClient, post: Any) -> None:
    for step in range(6):
        for group, value in (("a", 0.03), ("b", 0.01)):
            post(step, {(LAYER, "fprop"): error(value)}, group=group, groups=2)
    merged = rows(report(client))[LAYER, "fprop"]
    assert merged["error_median"] == pytest.approx(math.sqrt((0.03**2 + 0.01**2) / 2))
    attempt = {"attempt": {"id": "1", "parent": "0", "from_step": 2}}
    for step in range(2, 5):
        post(step, {(LAYER, "fprop"): error(0.02)}, **attempt)
    item = rows(report(client))[LAYER, "fprop"]
    assert (item["samples"], item["error_latest_step"]) == (5, 4)
    assert item["error_median"] == pytest.approx(0.02)
    assert rows(report(client, attempt="0"))[LAYER, "fprop"]["samples"] == 6


def bf16(documents: Any, step: int, variants: dict[str, dict[str, float]] | None = None) -> dict[str, Any]:
    """A sample of a foreign layer in BF16: real output, emulated gradients, and what-ifs by gemm and name."""
    slots = [
        {"index": 0, "layer": "lin", "operand": "x", "layout": "row"},
        {"index": 1, "layer": "lin", "gemm": "fprop"},
        {"index": 2, "layer": "lin", "gemm": "dgrad", "emulated": True},
    ]
    errors = [None, 0.002, 0.03]
    for gemm, found in (variants or {}).items():
        for name, value in found.items():
            place = {"fprop": 1, "dgrad": 2}[gemm]
            slots.append({"index": place, "layer": "lin", "gemm": gemm, "variant": name, "emulated": True})
            errors.append(value)
    values = [
        documents.values(slot, **({} if value is None else error(value)))
        for slot, value in zip(slots, errors, strict=True)
    ]
    sample: dict[str, Any] = documents.sample(step, slots, values)
    return sample


def test_a_bf16_run_is_judged_by_its_shadow_variant_only(client: TestClient, documents: Any) -> None:
    for step in range(5):
        assert client.post(f"{URL}/samples", json=bf16(documents, step)).status_code == 200
    found = rows(report(client))
    assert (found["lin", "fprop"]["verdict"], found["lin", "dgrad"]["verdict"]) == ("unknown", "safe")
    assert "shadow=True" in report(client)["summary"]["sentence"]
    for step in range(5, 10):
        # What-ifs stand in some samples and not in others.
        whatif = {"fprop": {"fp8": 0.3, **({"e5m2": 0.06, "pow2": 0.33} if step != 7 else {})}}
        assert client.post(f"{URL}/samples", json=bf16(documents, step, whatif)).status_code == 200
    item = rows(report(client))["lin", "fprop"]
    assert (item["verdict"], item["source"], item["samples"]) == ("keep_bf16", "shadow", 5)
    assert item["error_median"] == pytest.approx(0.3)
    assert item["best"]["variant"] == "e5m2"
    assert (item["best"]["samples"], item["remedy"]) == (4, "safe with e5m2")
    assert len(report(client)["items"]) == 2


def test_a_result_that_overflowed_is_infinite_and_nan_is_counted(client: TestClient, post: Any) -> None:
    for step in range(5):
        post(step, {(LAYER, "fprop"): {"nan": 3}} if step == 1 else {})
    item = rows(report(client))[LAYER, "fprop"]
    assert (item["verdict"], item["nonfinite_samples"]) == ("watch", 1)
    post(5, {(LAYER, "dgrad"): {"sum_sq_err": "Infinity"}})
    post(6, {(LAYER, "wgrad"): {"sum_sq_err": "NaN"}})
    found = rows(report(client))
    assert found[LAYER, "dgrad"]["error_worst"] == "Infinity"
    assert found[LAYER, "dgrad"]["verdict"] == "keep_bf16"
    assert (found[LAYER, "wgrad"]["nonfinite_samples"], found[LAYER, "wgrad"]["samples"]) == (1, 6)


@BOTH
def test_what_coverage_calls_not_observed_makes_the_run_not_ready(client: TestClient, post: Any) -> None:
    seen = {"name": LAYER, "shape": [8, 8], "status": "observed", "reason": ""}
    compiled = {"name": "qkv", "shape": [8, 8], "status": "not observed", "reason": "compiled: by function"}
    for step in range(5):
        post(step, groups=2, coverage=[seen])
    assert report(client)["summary"]["verdict"] == "ready"
    post(5, groups=2, coverage=[seen, compiled])
    summary = report(client)["summary"]
    assert (summary["verdict"], summary["sentence"]) == (
        "not_ready",
        "not ready: 1 weight matrix was not observed: qkv",
    )
    assert summary["unobserved"] == [{"name": "qkv", "reason": "compiled: by function"}]
    # What another group observes is observed.
    post(5, group="1", groups=2, coverage=[{**seen, "name": "qkv"}])
    assert report(client)["summary"]["unobserved"] == []


def test_an_ended_run_is_not_told_to_run_on(client: TestClient, post: Any) -> None:
    for step in range(3):
        post(step)
    assert report(client)["summary"]["sentence"].endswith("let it run on")
    assert client.patch(URL, json={"ended": True}).status_code == 200
    assert report(client)["summary"]["sentence"] == (
        "not ready: 24 of 24 GEMMs are not known; the run has ended, and they lack up to 1 sample; "
        "attach(recompute=N) recomputes more weight gradients a sample"
    )


def test_a_slot_is_judged_as_it_was_sent_last(client: TestClient, post: Any) -> None:
    for step in range(8):
        coarse = {(LAYER, "fprop"): {"fmt": "e5m2"}} if step >= 4 else {}
        post(step, {(LAYER, "fprop"): error(0.07)}, marks=coarse)
    item = rows(report(client))[LAYER, "fprop"]
    assert (item["verdict"], item["threshold"]) == ("safe", 0.1)
