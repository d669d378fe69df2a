"""Coverage and sampling reports: round trips, bounds, and reports that merge."""

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from fp8_safeguard.monitor import coverage
from fp8_safeguard.monitor.wire import WireError, parse_sample, sample_to_wire

ROWS = [
    {"name": "blocks.0.mlp.up", "shape": [512, 128], "status": "observed", "reason": ""},
    {"name": "", "shape": [3], "status": "adapted", "reason": "weight stored as [in, out]"},
    {"name": 'a/b.<i>&"\u00e9\U0001f600', "shape": [], "status": "not observed", "reason": "embedding"},
]
SAMPLING = {
    "budget": 0.01,
    "every": 40,
    "overhead_ratio": 0.0093,
    "layers_per_sample": 8,
    "layers": 32,
    "tile_stride": 17,
    "full_coverage_steps": 160,
}


@pytest.fixture
def body() -> dict[str, Any]:
    columns = {key: [4] for key in ("count", "zeros", "underflow", "saturated", "nan", "inf")}
    sums = {key: [1.0] for key in ("amax", "sum_sq", "sum_sq_q", "sum_sq_err")}
    return {
        "schema": 1,
        "attempt": {"id": "0"},
        "group": "0",
        "step": 3,
        "slots": [{"layer": "a", "gemm": "fprop"}],
        "columns": {**columns, **sums},
        "coverage": [dict(row) for row in ROWS],
        "sampling": dict(SAMPLING),
    }


def faults(document: Any) -> dict[str, str]:
    with pytest.raises(WireError) as caught:
        parse_sample(document)
    return dict(caught.value.errors)


@pytest.mark.parametrize("binary", [False, True])
def test_both_encodings_carry_coverage_and_sampling_unchanged(body: Any, binary: bool) -> None:
    document = sample_to_wire(parse_sample(body), binary=binary)
    carried = (
        msgpack.unpackb(msgpack.packb(document))
        if binary
        else json.loads(json.dumps(document, allow_nan=False))
    )
    again = parse_sample(carried)
    assert again.coverage == tuple(ROWS)
    assert again.sampling == SAMPLING


def test_what_a_sample_does_not_say_is_not_written(body: Any) -> None:
    del body["coverage"], body["sampling"]
    quiet = parse_sample(body)
    assert (quiet.coverage, quiet.sampling) == (None, None)
    assert not {"coverage", "sampling"} & set(sample_to_wire(quiet, binary=False))
    nulls = parse_sample({**body, "coverage": None, "sampling": {"budget": None, "every": 5}})
    assert (nulls.coverage, nulls.sampling) == (None, {"every": 5})


def test_a_model_without_a_weight_matrix_reports_an_empty_list(body: Any) -> None:
    body["coverage"] = []
    assert sample_to_wire(parse_sample(body), binary=False)["coverage"] == []


def test_unknown_keys_are_left_alone(body: Any) -> None:
    body["coverage"][0]["later"] = object()
    body["sampling"]["later"] = object()
    sample = parse_sample(body)
    assert sample.coverage == tuple(ROWS)
    assert sample.sampling == SAMPLING


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("coverage", {}),
        ("coverage", "all"),
        ("coverage/1", None),
        ("coverage/1/name", None),
        ("coverage/1/name", 3),
        ("coverage/1/name", "a\x00"),
        ("coverage/1/name", "a\ud800"),
        ("coverage/1/name", "x" * 4097),
        ("coverage/1/shape", None),
        ("coverage/1/shape", "3x3"),
        ("coverage/1/shape", [3, -1]),
        ("coverage/1/shape", [True]),
        ("coverage/1/shape", [1.5]),
        ("coverage/1/shape", [1] * 65),
        ("coverage/1/status", None),
        ("coverage/1/status", "seen"),
        ("coverage/1/status", ["observed"]),
        ("coverage/1/reason", 7),
        ("coverage/1/reason", "x" * 4097),
        ("sampling", []),
        ("sampling/budget", "NaN"),
        ("sampling/budget", float("nan")),
        ("sampling/budget", True),
        ("sampling/budget", -0.1),
        ("sampling/overhead_ratio", "Infinity"),
        ("sampling/overhead_ratio", "much"),
        ("sampling/every", 0),
        ("sampling/every", 1.5),
        ("sampling/tile_stride", 0),
        ("sampling/layers", -1),
        ("sampling/layers_per_sample", True),
        ("sampling/full_coverage_steps", 2**63),
    ],
)
def test_each_fault_is_named_by_its_pointer(body: Any, pointer: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in pointer.split("/")]
    parent = body
    for part in parents:
        parent = parent[part]
    parent[last] = value
    assert set(faults(body)) == {f"/{pointer}"}


def test_more_rows_than_are_taken_is_one_fault_that_says_how_many(body: Any) -> None:
    body["coverage"] = [ROWS[0]] * 20_000
    assert len(parse_sample(body).coverage or ()) == 20_000
    body["coverage"].append(ROWS[0])
    found = faults(body)
    assert set(found) == {"/coverage"}
    assert "20001" in found["/coverage"]
    assert "20000" in found["/coverage"]


def test_what_does_not_fit_is_cut_with_the_unobserved_first(body: Any) -> None:
    many = [{**ROWS[0], "name": f"w{place}"} for place in range(20_500)]
    many[20_300] = {**ROWS[2], "reason": "y" * 5000}
    sent = coverage.fitting(many)
    assert parse_sample({**body, "coverage": sent}).coverage == tuple(sent)
    assert sent[0]["name"] == ROWS[2]["name"]
    assert sent[1]["name"] == "w0"
    assert coverage.fitting(ROWS) == ROWS


def test_sizes_and_ratios_of_numpy_travel_as_plain_numbers(body: Any) -> None:
    sample = parse_sample(body)
    measured = {**ROWS[0], "shape": tuple(np.array([512, 128]))}
    vars(sample).update(coverage=(measured,), sampling={**SAMPLING, "overhead_ratio": np.float64(0.25)})
    carried = json.loads(json.dumps(sample_to_wire(sample, binary=False)))
    assert carried["coverage"] == [ROWS[0]]
    assert carried["sampling"]["overhead_ratio"] == 0.25


def test_observed_anywhere_wins_when_reports_merge() -> None:
    def row(name: str, status: str) -> dict[str, Any]:
        return {"name": name, "shape": [2, 2], "status": status, "reason": f"{name} {status}"}

    first = [row("a", "not observed"), row("b", "observed"), row("c", "not observed")]
    second = [row("d", "adapted"), row("c", "not observed"), row("a", "adapted"), row("b", "not observed")]
    third = [row("a", "observed")]
    assert [(item["name"], item["status"]) for item in coverage.merged([first, second])] == [
        ("a", "adapted"),
        ("b", "observed"),
        ("c", "not observed"),
        ("d", "adapted"),
    ]
    assert coverage.merged([first, second, third])[0]["reason"] == "a observed"
    assert coverage.merged([]) == []
