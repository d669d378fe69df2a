"""What hurts BF16 as much is told by its own evidence, a healthy run by none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.slots import Slot

COUNT = 1024 * 256
LINEARS = ("qkv", "o", "shared_up", "shared_down", "expert_up", "expert_down")
EVERY = [f"blocks.{block}.{linear}" for block in range(4) for linear in LINEARS]
GAINS = {("blocks.1.mlp_norm", "gain_amax"): 1.1, ("blocks.1.mlp_norm", "gain_median"): 1.0}
HIGH_GAINS = {("blocks.1.mlp_norm", "gain_amax"): 132.0, ("blocks.1.mlp_norm", "gain_median"): 1.0}
DOWN = {("blocks.1.shared_down", "x row"): {"underflow_ratio": 0.3, "amax": 180.0}}
GROWN = {(f"blocks.1.{linear}", "x row"): {"amax": 120.0} for linear in ("shared_up", "expert_up")}
"""What the norm feeds; nothing in its name tells."""
RAISED = {("blocks.1.shared_up", "fprop"): {"sum_sq": 3e6, "sum_sq_q": 3e6, "sum_sq_err": 3e6 * 0.035**2}}


def test_a_raw_norm_gain_is_not_fp8s_and_its_value_is_proposed(
    course: Any, followed: Any, causes: Any
) -> None:
    state, told, decisions = followed(
        course([GROWN | DOWN | RAISED] * 6, {"scalars": GAINS}, {"scalars": HIGH_GAINS})
    )
    assert told == [(9, "norm-gain", "blocks.1.shared_up")]
    (said,) = causes(state)
    # 132 over a median of 1.1 is 120: the nearest power of two is 128.
    assert (said["kind"], said["value"]) == ("not-fp8", pytest.approx(132 / 128))
    assert "blocks.1.mlp_norm" in said["summary"]
    assert "divide by 128" in said["advice"]
    (advice,) = decisions
    assert (advice.action, advice.rule, advice.evidence["cause"]["name"]) == (
        "advice",
        "norm-gain",
        "norm-gain",
    )


def test_a_gain_that_the_next_weight_makes_up_for_is_fp8s_and_has_an_exact_cure(
    course: Any, followed: Any, causes: Any
) -> None:
    _, told, decisions = followed(course([GROWN] * 6, {"scalars": GAINS}, {"scalars": HIGH_GAINS}))
    assert told == [(9, "outlier-channels", "blocks.1.shared_up")]
    assert decisions == []
    state, *_ = followed(course([GROWN] * 2, {"scalars": GAINS}, {"scalars": HIGH_GAINS}))
    (said,) = causes(state)
    assert said["kind"] == "fp8"
    assert "fold the gain into the weight" in said["advice"]


@pytest.mark.parametrize("module", ["blocks.1.n2", "blocks.1.post_attention_layernorm", "final_norm"])
def test_who_a_norm_feeds_is_told_by_the_inputs_that_have_grown(
    course: Any, followed: Any, module: str
) -> None:
    """Whatever it is called: an attention whose own results have grown meanwhile is none of its business."""
    gains, high = ({"scalars": {(module, "gain_amax"): value}} for value in (1.1, 132.0))
    other = {("blocks.1.o", "fprop"): {"sum_sq": 3e6, "sum_sq_q": 3e6, "sum_sq_err": 3e6 * 0.035**2}}
    assert followed(course([GROWN | other] * 6, gains, high))[1] == [
        (9, "outlier-channels", "blocks.1.shared_up")
    ]
    assert followed(course([GROWN | other | RAISED] * 6, gains, high))[1] == [
        (9, "norm-gain", "blocks.1.shared_up")
    ]
    # No input has grown: what it feeds is not among what is observed.
    assert followed(course([other] * 6, gains, high))[1] == []


def test_a_loss_that_jumps_with_a_gain_follows_from_it(course: Any, followed: Any) -> None:
    loud = {(layer, "dy row"): {"amax": 11.0} for layer in EVERY}
    healthy = {"scalars": GAINS, "run": {"loss": 1.9, "gradient_norm": 0.8}}
    seen = course([loud | GROWN | DOWN | RAISED] * 6, healthy, {"scalars": HIGH_GAINS, "run": {"loss": 8.7}})
    _, told, decisions = followed(seen)
    assert told == [(9, "norm-gain", "blocks.1.shared_up")]
    assert [made.rule for made in decisions] == ["norm-gain"]
    # Without the gain the same jump is the data's.
    seen = course([loud | GROWN | DOWN | RAISED] * 6, healthy, {"scalars": GAINS, "run": {"loss": 8.7}})
    assert [cause for _, cause, _ in followed(seen)[1]] == ["data-spike"]


def logits(value: float) -> dict[str, Any]:
    return {"scalars": {("blocks.1.attention", "qk_logit_max"): value}}


QKV = {
    ("blocks.1.qkv", "dy col"): {"underflow_ratio": 0.45},
    ("blocks.1.qkv", "dy row"): {"underflow_ratio": 0.14},
}


@pytest.mark.parametrize(
    ("healthy", "fields", "ill", "expected"),
    [
        (logits(11.3), logits(726.0), QKV, (9, "qk-growth", "blocks.1.attention")),
        (
            {"scalars": {("blocks.1.q_norm", "gain_amax"): 1.2}},
            {"scalars": {("blocks.1.q_norm", "gain_amax"): 9.6}},
            QKV,
            (9, "qk-growth", "blocks.1.qkv"),
        ),
        ({}, {}, QKV, (10, "qk-growth", "blocks.1.qkv")),
    ],
    ids=["logits", "gain", "gradients alone"],
)
def test_attention_that_hardens_is_named(
    course: Any, healthy: Any, fields: Any, ill: Any, expected: Any, followed: Any
) -> None:
    _, told, decisions = followed(course([ill] * 6, healthy, fields))
    assert told == [expected]
    assert [made.action for made in decisions] == ["advice"]


def test_logits_that_creep_up_are_named_at_the_level_of_qk_clip(
    make_slots: Any, observation: Any, followed: Any
) -> None:
    slots = make_slots(1, gemms=())
    values = 10.0 * 1.02 ** np.arange(160)
    seen = [observation(at, slots, **logits(value)) for at, value in enumerate(values.tolist())]
    _, told, _ = followed(seen)
    ((step, cause, _),) = told
    assert cause == "qk-growth"
    assert 100.0 <= values[step] <= 110.0


def test_tokens_of_uneven_weight_are_told_from_attention(course: Any, followed: Any) -> None:
    last = [layer for layer in EVERY if layer.startswith("blocks.3.")]
    ill = {(layer, "dy col"): {"underflow_ratio": 0.2} for layer in last}
    _, told, decisions = followed(course([ill] * 6))
    assert told == [(9, "token-imbalance", "blocks.3.expert_down")]
    assert [made.action for made in decisions] == ["advice"]
    # A result that is wrong is a fault of FP8, whatever vanishes besides.
    wrong = {(layer, "dgrad"): {"error": 0.3} for layer in last}
    _, told, _ = followed(course([ill | wrong] * 6))
    assert [cause for _, cause, _ in told] != ["token-imbalance"]


def test_what_is_told_stays_for_as_long_as_it_lasts_and_is_no_norm(
    course: Any, followed: Any, causes: Any
) -> None:
    last = [layer for layer in EVERY if layer.startswith("blocks.3.")]
    tokens = {(layer, "dy col"): {"underflow_ratio": 0.2} for layer in last}
    state, told, decisions = followed(
        course([tokens | GROWN] * 60, {"scalars": GAINS}, {"scalars": HIGH_GAINS})
    )
    assert [cause for _, cause, _ in told] == ["outlier-channels", "token-imbalance"]
    assert {said["name"] for said in causes(state)} == {"outlier-channels", "token-imbalance"}
    assert len(decisions) == 1


def test_tokens_of_uneven_weight_from_the_first_step_are_told_once(
    slots: Any, observation: Any, followed: Any, causes: Any
) -> None:
    last = [layer for layer in EVERY if layer.startswith("blocks.3.")]
    tokens = {(layer, "dy col"): {"underflow_ratio": 0.2} for layer in last}
    state, told, decisions = followed([observation(at, slots, tokens) for at in range(40)])
    assert told == [(3, "token-imbalance", "blocks.3.expert_down")]
    assert len(causes(state)) == len(decisions) == 1


@pytest.mark.parametrize("every_layer", [True, False])
def test_a_jump_of_the_loss_is_the_datas_where_all_layers_jump_with_it(
    course: Any, every_layer: bool, followed: Any
) -> None:
    loud = {(layer, "dy row"): {"amax": 11.0} for layer in EVERY} if every_layer else {}
    seen = course([loud] * 6, {"run": {"loss": 1.9, "gradient_norm": 0.8}}, {"run": {"loss": 8.7}})
    _, told, decisions = followed(seen)
    assert told == ([(9, "data-spike", None)] if every_layer else [(10, "loss-spike", None)])
    assert [(made.layer, made.action) for made in decisions] == [("(run)", "advice")]
    assert decisions[0].evidence["cause"]["name"] == told[0][1]
    # Where FP8 is wrong, that is why.
    saturated = {"saturated": round(0.8 * COUNT), "sqnr_db": 1.8, "sum_sq_q": 0.4 * COUNT}
    fault = {(layer, "x row"): saturated for layer in EVERY}
    seen = course([fault] * 6, {"run": {"loss": 1.9}}, {"run": {"loss": 8.7}})
    assert [cause for _, cause, _ in followed(seen)[1]] == ["scale-too-small"]


def test_a_change_of_domain_is_neither(course: Any, observation: Any, slots: Any, followed: Any) -> None:
    losses = [4.1, 4.4, 4.4, 4.0, 3.8, 4.1, 3.2, 2.5, 2.4, 2.4]
    norms = [3.0, 4.0, 4.5, 3.8, 2.3, 2.6, 1.6, 1.7, 1.2, 1.6]
    ill = {(layer, "dy row"): {"amax": 2.7} for layer in EVERY}
    ill |= {(f"blocks.{block}.qkv", "dy col"): {"underflow_ratio": 0.0225} for block in range(4)}
    before = [observation(at, slots, run={"loss": 1.95, "gradient_norm": 0.8}) for at in range(24)]
    after = [
        observation(24 + at, slots, ill, run={"loss": loss, "gradient_norm": norm})
        for at, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    _, told, decisions = followed([*before, *after])
    assert (told, decisions) == ([], [])


def router(share: float, block: int = 2) -> dict[str, Any]:
    name = f"blocks.{block}.router"
    return {"scalars": {(name, "load_min"): share, (name, "entropy"): 0.9}}


def test_an_expert_that_had_its_share_and_gets_nothing_is_starved(course: Any, followed: Any) -> None:
    _, told, decisions = followed(course([{}] * 12, router(0.12), router(0.0)))
    assert told == [(15, "starved-expert", "blocks.2.router")]
    assert [made.action for made in decisions] == ["advice"]
    # One that never had any, or gets a few tokens, is not.
    assert followed(course([{}] * 12, router(0.0), router(0.0)))[1] == []
    assert followed(course([{}] * 12, router(0.12), router(0.01)))[1] == []
    # Nor one that has come down by and by, as in healthy young runs.
    shares = [*(0.2 * 0.9 ** np.arange(24)).tolist(), *[0.0] * 12]
    falling = [replace(course([])[0], step=at, **router(share)) for at, share in enumerate(shares)]
    assert followed(falling)[1] == []
    # Nor one that comes down within a few, with a token now and then, as after a change of domain.
    for last in ([0.03, 0.1, 0.01, *[0.0] * 9, 0.02], [0.06, *[0.0] * 8, 0.08]):
        dwindling = [0.42] * 12 + [0.4, 0.3, 0.26, 0.16, *last, *[0.0] * 10]
        falling = [replace(course([])[0], step=at, **router(share)) for at, share in enumerate(dwindling)]
        assert followed(falling)[1] == []


def test_an_expert_that_dwindles_in_a_young_run_is_not_starved_however_long_it_gets_nothing(
    course: Any, followed: Any
) -> None:
    """Least loads of a healthy run from its first step on, warm-up of the learning rate included."""
    shares = [0.68, 0.63, 0.58, 0.47, 0.37, 0.43, 0.18, 0.09, 0.07, 0.07, 0, 0, 0, 0.01, 0, 0, 0, 0, 0, 0, 0, 0, 0.02,
              0.07, 0.05, 0.05, 0.07, 0.03, 0.12, *[0] * 9, 0.08, 0, 0, 0, 0, 0, 0.01, *[0] * 18, 0.01, *[0] * 30]  # fmt: skip
    seen = [replace(course([])[0], step=at, **router(float(share))) for at, share in enumerate(shares)]
    _, told, decisions = followed(seen)
    assert (told, decisions) == ([], [])


def shaken(after: int) -> list[dict[str, Any]]:
    """A loss that jumps for a dozen samples, while the router empties, and is its own norm again for so many more."""
    return [{**router(0.0), "run": {"loss": 8.7 if at < 12 else 1.9}} for at in range(12 + after)]


def test_what_starts_in_a_router_while_the_data_are_unusual_is_their_consequence(
    course: Any, observation: Any, slots: Any, followed: Any
) -> None:
    loud = {(layer, "dy row"): {"amax": 11.0} for layer in EVERY}
    before = course([], {**router(0.12), "run": {"loss": 1.9}})

    def told(after: int) -> Any:
        fields = shaken(after)
        ills = [loud if at < 12 else {} for at in range(len(fields))]
        seen = [
            observation(8 + at, slots, ill, **each)
            for at, (ill, each) in enumerate(zip(ills, fields, strict=True))
        ]
        return followed([*before, *seen])

    state, causes, decisions = told(20)
    assert causes == [(9, "data-spike", None)]
    assert [made.rule for made in decisions] == ["data-spike"]
    stored = json.loads(json.dumps(state.to_dict(), allow_nan=False))
    assert PolicyState.from_dict(stored).trends.shaken == state.trends.shaken > 0
    # An expert that is still without tokens long after it is a cause of its own.
    assert [cause for _, cause, _ in told(80)[1]] == ["data-spike", "starved-expert"]


def test_a_layer_whose_input_has_died_is_named_and_what_follows_is_folded_in(
    course: Any, followed: Any, causes: Any
) -> None:
    dead = {"zeros": COUNT, "sum_sq": 0.0, "sum_sq_q": 0.0, "sum_sq_err": 0.0, "sum_4th": 0.0, "amax": 0.0}
    ill = {(f"blocks.1.{linear}", "x row"): dead for linear in LINEARS[2:]}
    state, told, decisions = followed(course([ill] * 24, router(0.12, 1), router(0.0, 1)))
    assert told == [(9, "dead-layer", "blocks.1.shared_up")]
    # Its router has nothing to choose by; that is no cause of its own.
    assert [made.action for made in decisions] == ["advice"]
    assert causes(state)[0]["evidence"]["layers"] == [f"blocks.1.{linear}" for linear in LINEARS[2:]]
    # What was never alive is no news: the first step of a low-rank adapter.
    assert followed(course([{}], {"ill": ill})[:8])[1] == []


def test_a_gradient_norm_that_rises_for_long_is_named_one_that_spikes_or_is_no_number_is_not(
    make_slots: Any, observation: Any, followed: Any
) -> None:
    slots = make_slots(1, gemms=())
    rng = np.random.default_rng(3)
    noise = np.exp(0.25 * rng.standard_normal(200))

    def told(norms: Any) -> list[Any]:
        seen = [observation(at, slots, run={"gradient_norm": float(norm)}) for at, norm in enumerate(norms)]
        return followed(seen)[1]

    rising = np.where(np.arange(200) < 80, 1.0, 1.03 ** (np.arange(200) - 80.0)) * noise
    ((step, cause, _),) = told(rising)
    assert cause == "gradient-norm-growth"
    assert 80 < step < 150
    assert told(noise) == []
    spiky = noise.copy()
    spiky[[40, 80, 81, 120]] *= 30.0
    spiky[[60, 61, 62, 100]] = np.nan
    assert told(spiky) == []
    warm_up = np.where(np.arange(200) < 20, 3.0 * 0.92 ** np.arange(200.0), 0.6) * noise
    assert told(warm_up) == []


def rank(number: int, value: float, host: str = "a", layer: str = "blocks.1.expert_up") -> dict[str, Any]:
    return {
        "rank": number,
        "host": host,
        "layer": layer,
        "gemm": "fprop",
        "metric": "relative_error",
        "value": value,
    }


BAD = {("blocks.1.expert_up", "fprop"): {"error": 12.4}}


@pytest.mark.parametrize(
    ("ranks", "ill", "expected"),
    [
        ([rank(1, 17.6)], BAD, {"ranks": [1], "host": "a"}),
        ([rank(4, 24.0, "b"), rank(5, 25.0, "b")], BAD, {"ranks": [4, 5], "host": "b"}),
        ([rank(0, 12.4), rank(1, 12.5)], BAD, None),
        ([rank(0, 20.0, "a"), rank(9, 20.0, "b")], BAD, None),
        ([rank(4, 20.0, ""), rank(9, 20.0, "")], BAD, None),
        ([rank(0, 0.06)], {}, None),
    ],
    ids=["one rank", "one host", "all alike", "two hosts", "hosts unknown", "healthy"],
)
def test_one_rank_or_host_that_is_off_alone_is_hardware(
    course: Any, ranks: Any, ill: Any, expected: Any, followed: Any, causes: Any
) -> None:
    state, told, decisions = followed(course([ill] * 3, {}, {"ranks": tuple(ranks)}))
    if expected is None:
        assert all(cause == "stale-inverse-scale" for _, cause, _ in told)
        assert all(made.action != "advice" for made in decisions)
        return
    assert told == [(8, "one-rank", "blocks.1.expert_up")]
    (said,) = causes(state)
    assert said["kind"] == "hardware"
    assert {name: said["evidence"][name] for name in expected} == expected
    assert "advice" in [made.action for made in decisions]
    assert {made.evidence["cause"]["name"] for made in decisions} == {"one-rank"}


@pytest.mark.parametrize("seed", range(4))
def test_healthy_runs_have_no_cause(make_slots: Any, observation: Any, seed: int, followed: Any) -> None:
    rng = np.random.default_rng(seed)
    head = [*make_slots(2), Slot("head", operand="dy", layout="row"), Slot("head", operand="dy", layout="col"),
            Slot("head", gemm="dgrad")]  # fmt: skip
    # Half of the gradient of a language model's head vanishes, early and for good, and its dgrad is right.
    ill = {("head", "dy row"): {"underflow_ratio": 0.45}, ("head", "dy col"): {"underflow_ratio": 0.5}}
    seen = [
        observation(
            at,
            tuple(head),
            ill,
            rng=rng,
            run={
                "loss": 5.6 * (at + 1) ** -0.25 * rng.uniform(0.9, 1.1),
                "gradient_norm": rng.uniform(0.5, 1.5),
            },
            scalars={
                ("blocks.1.mlp_norm", "gain_amax"): 1.0 + 0.005 * at,
                ("blocks.1.attention", "qk_logit_max"): 8.0 + 0.1 * at,
                ("blocks.1.router", "load_min"): float(max(0.0, rng.normal(0.05, 0.05))),
            },
        )
        for at in range(40)
    ]
    state, told, decisions = followed(seen)
    assert (told, decisions) == ([], [])
    assert len(json.dumps(state.trends.to_dict())) < 8_000
