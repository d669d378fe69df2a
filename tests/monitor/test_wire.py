"""The wire: round trips in both encodings, and every fault named by its place."""

import copy
import json
import math
from typing import Any

import msgpack
import numpy as np
import pytest

from fp8_safeguard.monitor import wire
from fp8_safeguard.monitor.columns import StatsTable, merge_tables
from fp8_safeguard.monitor.numbers import NumberError
from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.monitor.stats import COLUMNS, TensorStats, compare, measure
from fp8_safeguard.monitor.wire import WireError, parse_sample, sample_to_wire


@pytest.fixture
def body() -> dict[str, Any]:
    """The document of the contract, with all columns."""
    return {
        "schema": 1,
        "batch_id": "b-1",
        "attempt": {"id": "0", "parent": None, "from_step": 0},
        "group": "0",
        "groups": 1,
        "step": 120,
        "mode": "enforce",
        "plan_version": 3,
        "effective_step": 118,
        "overhead_ratio": 0.004,
        "dropped": 0,
        "slots": [
            {"index": 0, "layer": "blocks.3.mlp.down", "operand": "x", "layout": "row"},
            {"index": 1, "layer": "blocks.3.mlp.down", "gemm": "wgrad"},
        ],
        "columns": {
            "count": [65536, 4096],
            "zeros": [12, None],
            "underflow": [10, None],
            "saturated": [0, None],
            "nan": [0, 1],
            "inf": [0, 0],
            "rows": [64, None],
            "rows_flushed": [0, None],
            "amax": [3.5, "NaN"],
            "sum_sq": [65000, 4.0],
            "sum_sq_q": [64990.5, "Infinity"],
            "sum_sq_err": [40.25, "-Infinity"],
            "sum_4th": [190000.0, None],
            "tile_sqnr_hist": [[0] * 12 + [510, 2, 0, 0], None],
        },
        "run": {
            "loss": 2.31,
            "gradient_norm": "NaN",
            "learning_rate": 0.0003,
            "tokens": 4096,
            "loss_scale": 1.0,
        },
        "scalars": [{"layer": "blocks.3.router", "name": "entropy", "value": 0.81}],
        "ranks": [
            {"rank": 3, "host": "n1", "layer": "a", "operand": "x", "metric": "amax", "value": "Infinity"}
        ],
    }


def faults(document: Any) -> dict[str, str]:
    with pytest.raises(WireError) as caught:
        parse_sample(document)
    assert caught.value.kind == "validation"
    return dict(caught.value.errors)


def assert_same(left: Any, right: Any) -> None:
    for name in (*COLUMNS, "tile_sqnr_hist"):
        np.testing.assert_array_equal(left.columns[name], right.columns[name])
        np.testing.assert_array_equal(left.nulls[name], right.nulls[name])
    for name in (
        "slots",
        "indices",
        "step",
        "attempt",
        "group",
        "groups",
        "mode",
        "plan_version",
        "effective_step",
    ):
        assert getattr(left, name) == getattr(right, name)
    assert sample_to_wire(left, binary=False) == sample_to_wire(right, binary=False)


def test_the_contracts_example_parses(body: Any) -> None:
    sample = parse_sample(body)
    assert (sample.step, sample.mode, sample.plan_version, sample.effective_step) == (120, "enforce", 3, 118)
    assert sample.left_out == frozenset()
    assert sample.slots[0] == Slot("blocks.3.mlp.down", operand="x", layout="row")
    assert sample.columns["count"].dtype == np.int64
    assert sample.columns["tile_sqnr_hist"].shape == (2, 16)
    operand, gemm = wire.columns_for(sample, 0), wire.columns_for(sample, 1)
    assert (operand.count, operand.underflow, operand.rows, operand.sum_sq) == (65536, 10, 64, 65000.0)
    assert operand.histogram[12:14] == (510, 2)
    assert (gemm.zeros, gemm.histogram, gemm.sum_sq_q, gemm.sum_sq_err) == (None, None, math.inf, -math.inf)
    assert math.isnan(gemm.amax)
    assert math.isnan(sample.run["gradient_norm"])
    assert sample.scalars[0]["value"] == 0.81
    assert sample.ranks[0]["value"] == math.inf


def test_b80_json_round_trip_is_strict_json(body: Any) -> None:
    sample = parse_sample(body)
    text = json.dumps(sample_to_wire(sample, binary=False), allow_nan=False)
    assert_same(parse_sample(json.loads(text)), sample)


def test_msgpack_round_trip_tells_nan_from_null(body: Any) -> None:
    sample = parse_sample(body)
    packed = msgpack.packb(sample_to_wire(sample, binary=True))
    again = parse_sample(msgpack.unpackb(packed))
    assert_same(again, sample)
    amax, fourth = msgpack.unpackb(packed)["columns"]["amax"], msgpack.unpackb(packed)["columns"]["sum_4th"]
    assert (amax["dtype"], "nulls" in amax, fourth["nulls"]) == ("float64", False, [1])
    assert np.isnan(np.frombuffer(amax["data"], "<f8")[1])


def test_the_writer_sends_what_measure_measured() -> None:
    rng = np.random.default_rng(0)
    stats = [measure(rng.standard_normal((9, 130)), layout="row"), compare(rng.random(5), rng.random(5))]
    table = StatsTable.from_stats(stats)
    slots = (Slot("a", operand="x", layout="row"), Slot("a", gemm="fprop"))
    sample = wire.Sample(step=1, slots=slots, columns=table.columns, nulls=table.nulls)
    for binary in (False, True):
        again = parse_sample(sample_to_wire(sample, binary=binary))
        assert [wire.columns_for(again, at) for at in range(2)] == stats


def test_only_required_fields_are_required(body: Any) -> None:
    least = {name: body[name] for name in ("schema", "group", "step", "slots")}
    required = {name: body["columns"][name] for name in wire.REQUIRED_COLUMNS}
    sample = parse_sample({**least, "attempt": {"id": "7"}, "columns": required})
    assert (sample.mode, sample.groups, sample.plan_version, sample.attempt.id) == ("observe", 1, 0, "7")
    assert sample.nulls["rows"].all()
    assert wire.columns_for(sample, 0).histogram is None
    assert sample.left_out == {"parent", "from_step", "groups"}
    assert sample_to_wire(sample, binary=False)["attempt"] == {"id": "7"}
    assert "groups" not in sample_to_wire(sample, binary=False)
    missing = faults({})
    assert set(missing) == {"/schema", "/attempt", "/group", "/step", "/slots"}


def test_each_missing_required_column_is_named(body: Any) -> None:
    body["columns"] = {"count": body["columns"]["count"], "rows": None}
    assert set(faults(body)) == {f"/columns/{name}" for name in wire.REQUIRED_COLUMNS if name != "count"}


def test_all_faults_come_at_once(body: Any) -> None:
    body["step"], body["group"], body["mode"] = -1, 0, "on"
    body["columns"]["count"] = [1]
    body["columns"]["zeros"][0] = 1.5
    body["columns"]["tile_sqnr_hist"][0] = [0] * 15
    body["slots"][1]["gemm"] = "bprop"
    body["run"]["a/b~c"] = True
    body["scalars"][0]["name"] = None
    assert set(faults(body)) == {
        *("/step", "/group", "/mode", "/columns/count", "/columns/zeros/0", "/columns/tile_sqnr_hist/0"),
        *("/slots/1/gemm", "/run/a~1b~0c", "/scalars/0/name"),
    }


@pytest.mark.parametrize("bad", ["NaN", math.nan, math.inf, -1, 1.5, True, "1", 2**63, [1], {}])
@pytest.mark.parametrize("column", ["count", "rows_flushed", "nan"])
def test_counts_take_whole_numbers_only(body: Any, column: Any, bad: Any) -> None:
    body["columns"][column][0] = bad
    assert set(faults(body)) == {f"/columns/{column}/0"}


@pytest.mark.parametrize("bad", [True, "nan", "Inf", -0.5, "", [1.0], 10**400])
def test_sums_take_numbers_and_the_three_words(body: Any, bad: Any) -> None:
    body["columns"]["sum_sq"][1] = bad
    assert set(faults(body)) == {"/columns/sum_sq/1"}


@pytest.mark.parametrize("count", [0, 2**63 - 1, 3.0])
def test_counts_span_int64(body: Any, count: Any) -> None:
    body["columns"]["count"][0] = count
    assert parse_sample(body).columns["count"][0] == int(count)


def test_b52_one_nan_rejects_nothing(body: Any) -> None:
    body["columns"]["sum_sq"] = [math.nan, 1.0]
    body["run"]["loss"] = "NaN"
    sample = parse_sample(body)
    assert np.isnan(sample.columns["sum_sq"][0])
    assert not sample.nulls["sum_sq"][0]
    assert sample.columns["count"].tolist() == [65536, 4096]


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("step", True),
        ("step", 1.0),
        ("step", 2**63),
        ("groups", 0),
        ("plan_version", -1),
        ("effective_step", "1"),
        ("dropped", 0.5),
        ("overhead_ratio", "NaN"),
        ("overhead_ratio", True),
        ("batch_id", 3),
        ("group", "a\ud800"),
        ("run", []),
        ("run/learning_rate", "NaN"),
        ("run/tokens", "Infinity"),
        ("run/loss", True),
        ("scalars", {}),
        ("scalars/0", 1),
        ("scalars/0/value", "x"),
        ("ranks/0/rank", -1),
        ("ranks/0/host", 5),
        ("columns", []),
        ("columns/amax", 3.0),
        ("columns/tile_sqnr_hist/0/3", -1),
        ("columns/tile_sqnr_hist/0/3", None),
        ("columns/tile_sqnr_hist/0/3", 2**63),
        ("attempt/id", ""),
        ("attempt/id", 0),
        ("attempt/parent", 0),
        ("attempt/from_step", -1),
        ("slots", {}),
        ("slots/0", None),
        ("slots/0/index", -1),
        ("slots/0/layer", None),
        ("schema", "1"),
        ("schema", True),
        ("schema", 2.0),
        ("slots_id", "0" * 64),
    ],
)
def test_each_fault_is_named_by_its_pointer(body: Any, pointer: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in pointer.split("/")]
    parent = body
    for part in parents:
        parent = parent[part]
    parent[last] = value
    assert set(faults(body)) == {f"/{pointer}"}


def test_a_body_that_is_no_object_is_refused() -> None:
    for document in (None, [], "x", 3):
        assert set(faults(document)) == {""}


def test_a_slot_twice_names_both_places(body: Any) -> None:
    body["slots"].append(dict(body["slots"][0], emulated=True))
    for name, column in body["columns"].items():
        body["columns"][name] = [*column, column[0]]
    found = faults(body)
    assert set(found) == {"/slots/2"}
    assert "/slots/0" in found["/slots/2"]


@pytest.mark.parametrize("schema", [0, 2, 99, -1, 2**63])
def test_another_schema_is_a_fault_of_its_own_kind(body: Any, schema: Any) -> None:
    body["schema"], body["step"] = schema, "later schemas may differ in anything"
    with pytest.raises(WireError, match="accepted: 1") as caught:
        parse_sample(body)
    assert caught.value.kind == "schema"


def test_slots_id_stands_for_an_accepted_list(body: Any) -> None:
    sample = parse_sample(body)
    accepted = {sample.slots_id: sample.slots}
    short = sample_to_wire(sample, binary=False, by_id=True)
    assert "slots" not in short
    assert parse_sample(short, known_slots=accepted.get).slots == sample.slots
    for known in (None, {}.get):
        with pytest.raises(WireError) as caught:
            parse_sample(short, known_slots=known)
        assert caught.value.kind == "slots-unknown"
    both = {**body, "slots_id": slots_id(sample.slots)}
    assert parse_sample(both).slots == sample.slots


def test_columns_follow_the_list_whatever_the_indices(body: Any) -> None:
    body["slots"][0]["index"], body["slots"][1]["index"] = 41, 7
    sample = parse_sample(body)
    assert sample.indices == (41, 7)
    assert sample.columns["count"].tolist() == [65536, 4096]
    del body["slots"][1]["index"]
    assert parse_sample(body).indices == (41, 1)


@pytest.mark.parametrize(
    ("column", "raw", "pointer"),
    [
        ("count", {"dtype": "int32", "data": b"\0" * 16}, "/columns/count/dtype"),
        ("count", {"dtype": "int64", "data": b"\0" * 15}, "/columns/count/data"),
        ("count", {"dtype": "int64", "data": "AAAA"}, "/columns/count/data"),
        ("count", {"dtype": "int64", "data": np.array([1, -1]).tobytes()}, "/columns/count/data"),
        ("count", {"dtype": "float64", "data": np.array([1, np.nan]).tobytes()}, "/columns/count/data"),
        ("count", {"dtype": "float64", "data": np.array([1, 0.5]).tobytes()}, "/columns/count/data"),
        ("count", {"dtype": "float64", "data": np.array([1, 2.0**63]).tobytes()}, "/columns/count/data"),
        ("sum_sq", {"dtype": "float64", "data": np.array([1, -0.5]).tobytes()}, "/columns/sum_sq/data"),
        ("zeros", {"dtype": "int64", "data": b"\0" * 16, "nulls": [2]}, "/columns/zeros/nulls"),
        ("zeros", {"dtype": "int64", "data": b"\0" * 16, "nulls": [True]}, "/columns/zeros/nulls"),
        ("zeros", {"dtype": "int64", "data": b"\0" * 16, "nulls": 1}, "/columns/zeros/nulls"),
        ("tile_sqnr_hist", {"dtype": "int64", "data": b"\0" * 16}, "/columns/tile_sqnr_hist/data"),
    ],
)
def test_raw_columns_are_checked_as_lists_are(body: Any, column: Any, raw: Any, pointer: str) -> None:
    body["columns"][column] = raw
    assert set(faults(body)) == {pointer}


def test_raw_columns_take_whole_float64_counts_and_ignore_what_stands_under_a_null(body: Any) -> None:
    body["columns"]["count"] = {"dtype": "<f8", "data": np.array([5.0, np.nan]).tobytes(), "nulls": [1]}
    body["columns"]["sum_sq"] = {"dtype": "float64", "data": np.array([2.0, -3.0]).tobytes(), "nulls": [1]}
    sample = parse_sample(body)
    assert sample.columns["count"].tolist() == [5, 0]
    assert sample.nulls["count"].tolist() == [False, True]
    assert np.isnan(sample.columns["sum_sq"][1])


def test_the_number_of_faults_is_bounded(body: Any) -> None:
    body["columns"]["sum_sq"] = {"dtype": "float64", "data": np.full(2, -1.0).tobytes()}
    body["slots"] = [7] * 5000
    with pytest.raises(WireError) as caught:
        parse_sample(body)
    assert len(caught.value.errors) <= 1000


def test_parsing_changes_nothing_in_the_document(body: Any) -> None:
    before = copy.deepcopy(body)
    parse_sample(body)
    assert body == before


@pytest.mark.parametrize("run", ["a", "0", "llama-3.1_8b", "x" * 128])
def test_run_ids_that_are_allowed(run: Any) -> None:
    assert wire.check_run_id(run) == run


@pytest.mark.parametrize("run", ["", ".a", "-a", "a/b", "a b", "x" * 129, "a\n", "é", None, 3])
def test_b62_run_ids_that_would_break_an_address(run: Any) -> None:
    with pytest.raises(wire.RunIdError, match="letters, digits"):
        wire.check_run_id(run)


def test_numbers_travel_as_words_only_where_they_must() -> None:
    values = [None, 0, -3, 1.5, math.nan, math.inf, -math.inf, np.float64(2.5), np.int64(7)]
    encoded = [wire.encode_number(value) for value in values]
    assert encoded == [None, 0, -3, 1.5, "NaN", "Infinity", "-Infinity", 2.5, 7]
    assert type(encoded[-1]) is int
    assert [wire.decode_number(value) for value in encoded[5:7]] == [math.inf, -math.inf]
    assert math.isnan(wire.decode_number("NaN"))
    for bad in (True, "nan", "1", [], "+Infinity"):
        with pytest.raises(NumberError):
            wire.decode_number(bad)


def test_groups_merge_as_tensor_stats_do() -> None:
    rng = np.random.default_rng(1)
    names = ["a", "b", "c"]
    groups = []
    for present in (("a", "b"), ("c", "a")):
        parts = {name: measure(rng.standard_normal((4, 200)), layout="row") for name in present}
        if present[0] == "a":
            parts["b"] = compare([1.0, 2.0], [1.0, 2.5])
        groups.append(parts)
    broken = dict(vars(groups[1]["a"]), amax=math.nan)
    groups[1]["a"] = TensorStats(**broken)
    slots, table = merge_tables(
        [
            ([Slot(name, gemm="fprop") for name in parts], StatsTable.from_stats(list(parts.values())))
            for parts in groups
        ]
    )
    assert [slot.layer for slot in slots] == names
    for at, name in enumerate(names):
        expected = TensorStats.merge([parts[name] for parts in groups if name in parts])
        assert table.stats(at).nulls == expected.nulls
        np.testing.assert_array_equal(table.stats(at).to_vector(), expected.to_vector())
