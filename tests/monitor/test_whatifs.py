"""What-ifs are read as hooks measure them, and the cheapest remedy that helps is found by brute force."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.plan import Decision, Plan, Target
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, GEMMS, Slot
from fp8_safeguard.monitor.thresholds import FLOOR
from fp8_safeguard.monitor.treatment import (
    COSTS,
    HEALTHY_ERROR,
    Case,
    Remedy,
    catalogue,
    choices,
    common,
    reaches,
)
from fp8_safeguard.monitor.view import look
from fp8_safeguard.monitor.whatifs import LOOK_SAMPLES, VARIANTS, Look, Measured, WhatIfs, variant_of

LAYER = "blocks.3.qkv"


def a_case(*failing: str, error: float = 0.5, **fields: Any) -> Case:
    given = {"breaches": (), "first_step": 0, "because": "", "rule": "gemm-error"}
    judged = dict.fromkeys(failing, error)
    return Case(layer=LAYER, failing=frozenset(failing), judged=judged, **{**given, **fields})


def a_look(errors: Any, age: int = 0) -> Look:
    return Look(
        7,
        {
            (gemm, name): Measured(error, "e5m2" if "e5m2" in name else None)
            for gemm, variants in errors.items()
            for name, error in variants.items()
        },
        age,
    )


def entry(layer: str, operand: str, action: str, value: Any) -> Decision:
    return Decision(
        id="r-1", run="r", step=0, layer=layer, target=Target(operand=operand, layout="tile" if operand == "w" else "row"),
        action=action, value=value, rule="r", reason="", mode="enforce", state="sent", not_before_step=1,
    )  # fmt: skip


def free(remedy: Remedy) -> bool:
    return True


def test_every_plannable_variant_is_a_remedy_but_bf16() -> None:
    named = {
        (remedy.action, remedy.value, remedy.operands[0] if remedy.operands else None)
        for remedy in catalogue()
        if len(remedy.operands) < 2
    }
    wanted = {
        (variant.action, variant.value, variant.operand)
        for name, variant in VARIANTS.items()
        if variant.plannable and name != "bf16"
    }
    assert named == wanted
    assert [remedy.cost for remedy in catalogue()] == sorted(remedy.cost for remedy in catalogue())
    assert {remedy.action for remedy in catalogue()} <= set(COSTS)


@pytest.mark.parametrize(
    ("gemm", "operands", "name"),
    [
        ("fprop", ("x", "w"), "e5m2"),
        ("dgrad", ("x", "w"), "w_e5m2"),
        ("wgrad", ("x", "w"), "x_e5m2"),
        ("wgrad", ("w",), "fp8"),
        ("dgrad", ("x", "w", "dy"), "e5m2"),
    ],
)
def test_a_remedy_is_measured_by_the_variant_of_what_each_gemm_reads(
    gemm: str, operands: Any, name: str
) -> None:
    assert variant_of(gemm, tuple((operand, ("format", "e5m2")) for operand in operands)) == name


def test_what_no_variant_measures_has_none() -> None:
    assert variant_of("fprop", (("x", ("format", "e5m2")), ("w", ("scale_rounding", "pow2")))) is None
    assert variant_of("dgrad", (("w", ("scale_multiplier", 16.0)),)) is None


def outliers(fprop: float = 0.74) -> dict[str, dict[str, float]]:
    """Function-preserving outliers at 2^19, as they were measured."""
    return {
        "fprop": {"fp8": fprop, "e5m2": 0.057, "x_e5m2": 0.17, "w_e5m2": 0.7, "pow2": 0.9, "x_multiplier_2^-4": 0.8},
        "dgrad": {"fp8": 0.17, "e5m2": 0.06, "w_e5m2": 0.057, "dy_e5m2": 0.18, "pow2": 0.2},
        "wgrad": {"fp8": 0.5, "e5m2": 0.06, "x_e5m2": 0.056, "dy_e5m2": 0.5, "pow2": 0.6, "x_multiplier_2^-4": 0.7},
    }  # fmt: skip


def test_outliers_are_cured_by_x_and_w_in_e5m2_together() -> None:
    found = choices(a_case("fprop", "dgrad", error=0.74, vanishing=False), a_look(outliers()), Plan(), free)
    assert found == []  # dgrad's 17 % are not the 74 % that failed
    case = Case(
        layer=LAYER, breaches=(), failing=frozenset({"fprop", "dgrad"}), judged={"fprop": 0.74, "dgrad": 0.17},
        first_step=0, because="", rule="gemm-error",
    )  # fmt: skip
    best = choices(case, a_look(outliers()), Plan(), free)[0]
    assert best.remedy == Remedy("format", "e5m2", ("x", "w"))
    assert best.remedy.words == "x and w go to E5M2"
    assert {gemm: seen.error for gemm, seen in best.errors.items()} == {
        "fprop": 0.057,
        "dgrad": 0.057,
        "wgrad": 0.056,
    }


def test_a_saturating_scale_is_cured_by_head_room_before_a_format() -> None:
    look_at = a_look(
        {
            "fprop": {
                "fp8": 0.82,
                "x_multiplier_2^4": 0.026,
                "x_multiplier_2^-4": 0.9,
                "x_e5m2": 0.05,
                "e5m2": 0.07,
            },
            "wgrad": {
                "fp8": 0.81,
                "x_multiplier_2^4": 0.027,
                "x_multiplier_2^-4": 0.9,
                "x_e5m2": 0.05,
                "e5m2": 0.07,
            },
        }
    )
    case = a_case("fprop", "wgrad", error=0.82, lost=frozenset({"x"}))
    assert [choice.remedy.name for choice in choices(case, look_at, Plan(), free)][:2] == [
        "scale_multiplier=16.0: x",
        "format=e5m2: x",
    ]


def test_where_the_operands_do_not_show_the_fault_no_scale_or_format_is_trusted() -> None:
    """A stale inverse scale: the emulated plain precision is healthy, and every alternative with it."""
    fine = {gemm: {"fp8": 0.026, "x_e5m2": 0.04, "pow2": 0.027} for gemm in ("fprop", "wgrad")}
    assert choices(a_case("fprop", error=7.0), a_look(fine), Plan(), free) == []
    assert choices(a_case("fprop", error=math.inf), a_look(fine), Plan(), free) == []


def test_a_healthy_error_of_another_kind_of_remedy_is_no_cure_of_vanishing() -> None:
    """Weights and activations vanish while the results are healthy yet: power-of-two scales are too, and make it worse."""
    fine = {
        gemm: {"fp8": 0.027, "pow2": 0.028, "e5m2": 0.056, "w_e5m2": 0.045, "x_e5m2": 0.045} for gemm in GEMMS
    }
    case = a_case("fprop", "dgrad", vanishing=True)
    case = Case(**{**vars(case), "judged": {}})
    found = choices(case, a_look(fine), Plan(), free)
    assert [choice.remedy.name for choice in found] == ["format=e5m2: x, w", "format=e5m2: layer"]


def test_each_gemm_that_reads_the_changed_operand_has_to_stay_healthy() -> None:
    look_at = a_look(
        {
            "fprop": {"fp8": 0.5, "x_e5m2": 0.05},
            "wgrad": {"fp8": 0.03, "x_e5m2": 0.2},
        }
    )
    assert choices(a_case("fprop"), look_at, Plan(), free) == []


def test_a_leaf_that_does_not_fail_may_stay_as_noisy_as_it_is() -> None:
    look_at = a_look({"fprop": {"fp8": 0.5, "x_e5m2": 0.05}, "wgrad": {"fp8": 0.3, "x_e5m2": 0.29}})
    assert [choice.remedy.name for choice in choices(a_case("fprop"), look_at, Plan(), free)] == [
        "format=e5m2: x"
    ]
    assert choices(a_case("fprop", "wgrad"), look_at, Plan(), free) == []


def multipliers(**errors: float) -> dict[str, dict[str, float]]:
    """Multipliers of dy for a held scale of 1, by the power of two."""
    named = {f"dy_multiplier_2^-{power[1:]}": error for power, error in errors.items()}
    return {"dgrad": {"fp8": 1.0, **named}, "wgrad": {"fp8": 1.0, **named}}


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        # The smallest error of all is that of a scale whose largest values only just fit.
        ({"m20": 0.0216, "m16": 0.0222, "m12": 0.044}, 2.0**-16),
        ({"m20": 0.0216, "m16": 0.0222, "m12": 0.024}, 2.0**-12),
        ({"m20": 0.0216, "m16": 0.3, "m12": 0.9}, 2.0**-20),
        ({"m20": 0.4, "m16": 0.030, "m12": 0.9}, 2.0**-16),
    ],
)
def test_of_the_healthy_multipliers_the_one_with_room_on_both_sides_is_taken(
    errors: Any, best: float
) -> None:
    found = choices(a_case("dgrad", "wgrad", error=1.0), a_look(multipliers(**errors)), Plan(), free)
    assert (found[0].remedy.action, found[0].remedy.value) == ("scale_multiplier", best)


def a_breach(**where: Any) -> Breach:
    rule = next(rule for rule in FLOOR.rules if rule.rule == "sqnr")
    return Breach(rule=rule, slot=Slot(LAYER, **where), value=10.8, severity="act", limit=20.0, instant=False)


def test_what_is_not_at_fault_is_left_alone_and_what_gains_nothing_is_no_remedy() -> None:
    """dy col is ill, and a larger scale of x leaves every error as it is."""
    errors = {
        "fprop": {"fp8": 0.0186, "x_multiplier_2^4": 0.0186},
        "wgrad": {"fp8": 0.0355, "x_multiplier_2^4": 0.0354, "dy_multiplier_2^4": 0.0354, "pow2": 0.0353},
        "dgrad": {"fp8": 0.02, "dy_multiplier_2^4": 0.02, "pow2": 0.02},
    }
    breaches = (a_breach(operand="dy", layout="col"),)
    given = {"breaches": breaches, "failing": frozenset({"wgrad"}), "judged": {}}
    case = Case(**{**vars(a_case("wgrad")), **given})
    assert choices(case, a_look(errors), Plan(), free) == []
    # Where the gemm is ill, a scale of dy that heals it is one, and an equally good scale of x none.
    errors["wgrad"] |= {"fp8": 0.3, "x_multiplier_2^4": 0.03, "dy_multiplier_2^4": 0.03, "pow2": 0.29}
    found = choices(case, a_look(errors), Plan(), free)
    assert [choice.remedy.name for choice in found] == ["scale_multiplier=16.0: dy"]


@pytest.mark.parametrize(("after", "helps"), [(0.049, False), (0.044, False), (0.033, True)])
def test_a_remedy_halves_the_error_or_brings_it_to_the_formats_noise(after: float, helps: bool) -> None:
    errors = {"fprop": {"fp8": 0.055, "w_multiplier_2^4": 0.1, "pow2": after}, "wgrad": {"fp8": 0.03}}
    errors["wgrad"]["pow2"] = errors.setdefault("dgrad", {"fp8": 0.03})["pow2"] = 0.03
    assert bool(choices(a_case("fprop", error=0.055), a_look(errors), Plan(), free)) == helps


def test_what_only_other_gemms_read_is_not_changed() -> None:
    """Only dgrad fails, which reads no x: the format of all three operands goes too far."""
    errors = {
        "fprop": {"fp8": 0.0228, "e5m2": 0.0459, "w_e5m2": 0.04},
        "dgrad": {"fp8": 0.337, "e5m2": 0.0856, "w_e5m2": 0.3},
        "wgrad": {"fp8": 0.295, "e5m2": 0.09, "dy_e5m2": 0.09},
    }
    found = choices(a_case("dgrad", error=0.316), a_look(errors), Plan(), free)
    assert [choice.remedy.name for choice in found] == ["format=e5m2: dy, w"]


def test_what_the_plan_has_already_is_no_change() -> None:
    plan = Plan().with_decision(entry(LAYER, "x", "format", "e5m2"))
    look_at = a_look(
        {
            "fprop": {"fp8": 0.6, "w_e5m2": 0.06, "e5m2": 0.06},
            "dgrad": {"fp8": 0.5, "w_e5m2": 0.05, "e5m2": 0.06},
            "wgrad": {"fp8": 0.05},
        }
    )
    best = choices(a_case("fprop", "dgrad"), look_at, plan, free)[0]
    assert best.remedy == Remedy("format", "e5m2", ("w",))


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_is_what_trying_every_remedy_finds(seed: int) -> None:
    """Random looks: an independent search by operand, over what each GEMM reads."""
    rng = np.random.default_rng(seed)
    errors = {
        gemm: {
            name: float(rng.choice([0.02, 0.03, 0.06, 0.4]))
            for name, variant in VARIANTS.items()
            if variant.plannable and name != "bf16" and (variant.operand is None or variant.operand in dict(GEMM_OPERANDS[gemm]))
        }
        | {"fp8": 0.6}
        for gemm in GEMMS
    }  # fmt: skip
    found = {
        choice.remedy.name for choice in choices(a_case(*GEMMS, error=0.6), a_look(errors), Plan(), free)
    }
    expected = set()
    for remedy in catalogue():
        good = True
        for gemm, read in GEMM_OPERANDS.items():
            changed = [operand for operand, _ in read if operand in remedy.changed]
            matching = [
                name
                for name, variant in VARIANTS.items()
                if (variant.action, variant.value) == (remedy.action, remedy.value)
                and (variant.operand is None if len(changed) == 2 else changed == [variant.operand])
            ]
            if not matching:
                good = False
                break
            limit = HEALTHY_ERROR[gemm] * (2 if "e5m2" in matching[0] else 1)
            good = good and errors[gemm][matching[0]] <= limit
        if good:
            expected.add(remedy.name)
    assert found == expected


def test_the_common_remedy_is_the_cheapest_of_all() -> None:
    one = {"fprop": {"fp8": 0.5, "x_multiplier_2^4": 0.03, "x_multiplier_2^-4": 0.5, "x_e5m2": 0.05},
           "wgrad": {"fp8": 0.03, "x_multiplier_2^4": 0.03, "x_e5m2": 0.05}}  # fmt: skip
    other = {
        "fprop": {"fp8": 0.5, "x_multiplier_2^4": 0.2, "x_e5m2": 0.05},
        "wgrad": {"fp8": 0.03, "x_e5m2": 0.05},
    }
    lists = [choices(a_case("fprop"), a_look(errors), Plan(), free) for errors in (one, other)]
    assert lists[0][0].remedy.action == "scale_multiplier"
    shared = common(lists)
    assert shared is not None
    assert shared.remedy.name == "format=e5m2: x"
    assert common([lists[0], []]) is None


def test_a_remedy_reaches_a_case_whose_failing_gemms_all_read_what_it_changes() -> None:
    dy = Remedy("scale_multiplier", 16.0, ("dy",))
    assert reaches(a_case("dgrad", "wgrad"), dy)
    assert not reaches(a_case("fprop", "dgrad"), dy)
    assert not reaches(a_case("dgrad", lost=frozenset({"x"})), dy)


def view_of(seen: Any) -> Any:
    return look(PolicyState(), seen, PolicyConfig())


def test_a_sample_without_alternatives_is_no_look(observation: Any, slots: Any, looked: Any) -> None:
    """A shadow run measures plain FP8 beside every layer."""
    shadow = looked(observation(0, slots), LAYER, {"fprop": {"fp8": 0.03}})
    assert WhatIfs.of(view_of(shadow)).looks == {}


def test_the_worst_expert_speaks_and_one_with_a_handful_of_tokens_does_not(
    observation: Any, slots: Any, with_stats: Any
) -> None:
    layer = "blocks.0.expert_up"
    seen = observation(3, slots)
    for expert, error, count in ((None, 0.05, 16384), (2, 0.4, 16384), (5, 0.9, 256)):
        seen = with_stats(seen, Slot(layer, gemm="fprop", variant="pow2", expert=expert), error, count=count)
    found = WhatIfs.of(view_of(seen)).looks[layer]
    assert found.errors["fprop", "pow2"].error == pytest.approx(0.4)


def test_looks_are_kept_for_some_samples_and_survive_json() -> None:
    one = WhatIfs({"a": a_look({"fprop": {"fp8": math.inf, "x_e5m2": 0.05}})}, (0,))
    kept = one
    for step in range(1, LOOK_SAMPLES):
        kept = kept.added(WhatIfs({}, (step,)))
        assert kept.looks["a"].age == step
        assert WhatIfs.from_dict(json.loads(json.dumps(kept.to_dict(), allow_nan=False))) == kept
    assert kept.added(WhatIfs({}, (99,))).looks == {}
    assert kept.samples_since(LOOK_SAMPLES - 3) == 3
    newer = kept.added(WhatIfs({"a": a_look({"fprop": {"pow2": 0.1}})}, (99,)))
    assert newer.looks["a"].age == 0
    assert newer.without(["a", "b"]).looks == {}


def test_the_names_of_remedies_are_all_different() -> None:
    names = [remedy.name for remedy in catalogue()]
    assert all(one != other for one, other in itertools.combinations(names, 2))
