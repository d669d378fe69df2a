"""Slots: validation, identity and the digest of a slot list."""

import hashlib
import pickle
from typing import Any

import pytest

from fp8_safeguard.monitor.slots import GEMM_OPERANDS, GEMMS, LAYOUTS, OPERANDS, Slot, SlotError, slots_id


def test_names_are_the_contract() -> None:
    assert (OPERANDS, LAYOUTS, GEMMS) == (
        ("x", "w", "dy"),
        ("row", "col", "tile"),
        ("fprop", "dgrad", "wgrad"),
    )
    assert GEMM_OPERANDS["wgrad"] == (("dy", "col"), ("x", "col"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"layer": 3, "gemm": "fprop"}, "layer"),
        ({"layer": "a"}, "operand"),
        ({"layer": "a", "operand": "x"}, "layout"),
        ({"layer": "a", "operand": "y", "layout": "row"}, "operand"),
        ({"layer": "a", "operand": "x", "layout": "rows"}, "layout"),
        ({"layer": "a", "operand": ["x"], "layout": "row"}, "operand"),
        ({"layer": "a", "gemm": "bprop"}, "gemm"),
        ({"layer": "a", "gemm": "fprop", "operand": "x", "layout": "row"}, "gemm"),
        ({"layer": "a", "gemm": "fprop", "expert": -1}, "expert"),
        ({"layer": "a", "gemm": "fprop", "expert": True}, "expert"),
        ({"layer": "a", "gemm": "fprop", "expert": 2**63}, "expert"),
        ({"layer": "a", "gemm": "fprop", "variant": 1}, "variant"),
        ({"layer": "a", "gemm": "fprop", "emulated": "yes"}, "emulated"),
        ({"layer": "a", "gemm": "fprop", "fmt": "int8"}, "fmt"),
        ({"layer": "a\ud800", "gemm": "fprop"}, "layer"),
        ({"layer": "a\x00b", "gemm": "fprop"}, "layer"),
    ],
)
def test_a_slot_that_names_nothing_is_refused_by_its_field(fields: Any, field: Any) -> None:
    with pytest.raises(SlotError) as caught:
        Slot(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("layer", ["", "a/b-c%20d", 'quo"te\n', "层.0", "😀", "a|b", "💥" * 300, "\u2028"])
def test_b62_layer_names_may_hold_any_character(layer: str) -> None:
    slot = Slot(layer, operand="x", layout="row")
    assert Slot.from_wire(slot.to_wire()) == slot
    assert len({slot.key, Slot(layer + "x", operand="x", layout="row").key, slot.family}) == 2


def test_wire_form_holds_only_what_is_set() -> None:
    assert Slot("a", gemm="wgrad").to_wire() == {"layer": "a", "gemm": "wgrad"}
    slot = Slot("a", operand="x", layout="row", expert=0, variant="e5m2", emulated=True, fmt="e5m2")
    assert Slot.from_wire({"index": 4, "unknown": [], **slot.to_wire()}) == slot


def test_key_tells_slots_apart_and_ignores_how_they_were_measured() -> None:
    slots = [
        Slot("a", operand="x", layout="row"),
        Slot("a", operand="x", layout="col"),
        Slot("a", gemm="fprop"),
        Slot("a", gemm="fprop", expert=0),
        Slot("a", gemm="fprop", expert=1),
        Slot("a", gemm="fprop", variant="v"),
    ]
    assert len({slot.key for slot in slots}) == 6
    assert slots[3].family == slots[4].family != slots[2].family
    assert Slot("a", gemm="fprop", emulated=True).key == Slot("a", gemm="fprop").key


def test_slots_survive_pickle_and_hash() -> None:
    slot = Slot("a", gemm="fprop")
    assert len(slot.key) > 0
    assert pickle.loads(pickle.dumps(slot)) == slot
    assert len({slot, Slot("a", gemm="fprop")}) == 1


def test_slots_id_is_sha256_of_canonical_json() -> None:
    slots = [Slot("é", operand="x", layout="row"), Slot("b", gemm="wgrad", expert=3)]
    text = '[{"layer":"é","layout":"row","operand":"x"},{"expert":3,"gemm":"wgrad","layer":"b"}]'
    assert slots_id(slots) == hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert slots_id(reversed(slots)) != slots_id(slots)


def test_label_is_for_people() -> None:
    assert Slot("m.0", operand="dy", layout="col").label == "m.0 dy col"
    assert Slot("m.0", gemm="wgrad", expert=7, variant="e5m2").label == "m.0 wgrad, expert 7, e5m2"
