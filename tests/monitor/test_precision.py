"""What samples say about the precision of each GEMM."""

import math
from typing import Any

import pytest

from fp8_safeguard.monitor.precision import precisions_of
from fp8_safeguard.monitor.slots import Slot

NAN = math.nan
FP8 = {"fprop": "fp8", "dgrad": "fp8", "wgrad": "fp8"}
BF16 = {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
HIGH = {"fprop": "high", "dgrad": "high", "wgrad": "high"}


@pytest.mark.parametrize(
    ("emulated", "fprop", "fallen", "precision"),
    [
        ((), 0.036, (), FP8),
        ((), 0.002, (), FP8),
        # The plan, before and after the layer takes it up.
        ((), 0.036, ("dgrad",), {**FP8, "dgrad": "bf16"}),
        (("dgrad",), 0.036, ("dgrad",), {**FP8, "dgrad": "bf16"}),
        (("fprop", "dgrad"), 0.036, ("fprop", "dgrad"), {**BF16, "wgrad": "fp8"}),
        (("fprop", "dgrad", "wgrad"), 0.036, ("fprop", "dgrad", "wgrad"), BF16),
        # One of our layers, configured so.
        (("fprop", "dgrad", "wgrad"), 0.036, (), BF16),
        (("fprop",), 0.036, (), {**FP8, "fprop": "bf16"}),
        # A foreign layer: FP8, plain, and one that says nothing.
        (("dgrad", "wgrad"), 0.036, (), {"fprop": "fp8", "dgrad": None, "wgrad": None}),
        (("dgrad", "wgrad"), 0.002, (), HIGH),
        (("dgrad", "wgrad"), NAN, (), {"fprop": None, "dgrad": None, "wgrad": None}),
        # A wgrad that was restored since it was sampled.
        (("wgrad",), 0.036, (), {**FP8, "wgrad": None}),
    ],
)
def test_precision_by_what_is_emulated(emulated: Any, fprop: float, fallen: Any, precision: Any) -> None:
    seen = [
        (Slot("a", gemm=gemm, emulated=gemm in emulated), fprop if gemm == "fprop" else 0.03) for gemm in FP8
    ]
    assert precisions_of(seen, {("a", gemm) for gemm in fallen}) == {"a": precision}


def test_the_wgrad_that_is_not_due_is_as_the_rest_of_the_layer() -> None:
    ours = [(Slot("a", gemm=gemm, emulated=True), 0.03) for gemm in ("fprop", "dgrad")]
    foreign = [(Slot("b", gemm="fprop"), 0.002), (Slot("b", gemm="dgrad", emulated=True), 0.03)]
    assert precisions_of([*ours, *foreign], ()) == {"a": BF16, "b": HIGH}
    assert precisions_of(ours, {("a", "fprop"), ("a", "dgrad")})["a"]["wgrad"] == "fp8"


def test_operands_experts_and_what_ifs_say_nothing() -> None:
    slots = [
        Slot("a", operand="x", layout="row"),
        Slot("a", gemm="fprop", expert=3, emulated=True),
        Slot("a", gemm="fprop", variant="e5m2", emulated=True),
    ]
    assert precisions_of([(slot, 0.03) for slot in slots], ()) == {}
