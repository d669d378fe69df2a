"""A plan takes effect at a step boundary, on our layers, and goes away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear, LinearPrecision, OperandFormat
from fp8_safeguard.monitor.plan import Plan

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Accept = Callable[..., dict[str, Any]]


def entry(layer: str, action: str = "bf16_fallback", value: float | str | None = None, **fields: Any) -> Any:
    target = fields.pop("target", {"gemm": "fprop"})
    fixed = {"decision_id": "d1", "not_before_step": 1, "expires_step": None}
    return {"layer": layer, "target": target, "action": action, "value": value, **fixed, **fields}


def plan(version: int, *entries: Any) -> Any:
    return {"version": version, "entries": list(entries)}


@pytest.fixture
def controlled(endpoint: Any, watch: Watch, accept: Accept) -> Any:
    """A model whose server answers each step with the plan that the test has put down for it."""

    def start(model: nn.Module, plans: dict[int, Any], **options: Any) -> Any:
        options = {"mode": "enforce", **options}
        guard = watch(model, server=endpoint.url, run="controls", **options)
        endpoint.answer = lambda body: (200, accept(body, plan=plans.get(body["step"])))
        return guard

    return start


def run_steps(guard: Guard, model: nn.Module, number: int) -> Any:
    """Precision of the first layer's three GEMMs as each step's forward saw it; replies arrive between steps."""
    seen = []
    layer = next(m for m in model.modules() if isinstance(m, Fp8Linear))
    for _ in range(number):
        n = guard.state_dict()["step"]
        seen.append(layer.precision)
        model(torch.randn(4, 8)).sum().backward()
        guard.step(n)
        assert guard.flush(10)
    return seen


def test_a_reply_takes_effect_two_steps_after_its_sample_and_is_reported(
    controlled: Any, endpoint: Any
) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {1: plan(1, entry(""))})
    seen = run_steps(guard, model, 5)
    assert [p.fprop for p in seen] == ["fp8", "fp8", "fp8", "bf16", "bf16"]
    assert all(p.dgrad == p.wgrad == "fp8" for p in seen)
    reported = [(s["step"], s["plan_version"], s["effective_step"]) for s in endpoint.samples]
    assert reported == [(0, 0, None), (1, 0, None), (2, 0, None), (3, 1, 3), (4, 1, 3)]
    assert guard.plan == Plan.from_wire(plan(1, entry("")))


def test_the_real_gemm_changes_with_the_plan(controlled: Any, read: Read) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: plan(1, entry(""))})
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    errors, emulated = [], []
    for _ in range(3):
        run_steps(guard, model, 1)
        exact = x.double() @ model.weight.detach().double().T
        errors.append(float((model(x).detach().double() - exact).norm() / exact.norm()))
        emulated.append({slot.label.strip() for slot in read(guard).sample.slots if slot.emulated})
    # After step 1 the next forward, ours included, runs with the plan.
    assert errors[0] > 0.01 > 0.005 > errors[1]
    # What FP8 would do is still measured in fallback, and said to be emulated.
    assert emulated == [set(), set(), {"fprop"}]
    assert read(guard)[" x row"].relative_error > 0.01
    assert read(guard)[" fprop"].relative_error > 0.01


def test_a_newer_plan_without_the_entry_restores_and_an_older_one_is_ignored(controlled: Any) -> None:
    model = Fp8Linear(8, 8)
    both = plan(5, entry(""), entry("", target={"gemm": "dgrad"}))
    guard = controlled(model, {0: both, 2: plan(6, entry("")), 3: plan(4), 5: plan(7)})
    seen = run_steps(guard, model, 8)
    assert [p.dgrad for p in seen] == ["fp8"] * 2 + ["bf16"] * 2 + ["fp8"] * 4
    assert [p.fprop for p in seen] == ["fp8"] * 2 + ["bf16"] * 5 + ["fp8"]


def test_observe_applies_nothing_whatever_it_receives(controlled: Any) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: plan(9, entry(""))}, mode="observe")
    seen = run_steps(guard, model, 4)
    assert {p.fprop for p in seen} == {"fp8"}
    assert guard.plan == Plan()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (entry("", target={"layer": True}), LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")),
        (
            entry("", "scale_multiplier", 0.25, target={"operand": "dy", "layout": "row"}),
            LinearPrecision(dy=OperandFormat(multiplier=0.25)),
        ),
        (
            entry("", "scale_rounding", "pow2", target={"operand": "x", "layout": "row"}),
            LinearPrecision(x=OperandFormat(scale="pow2")),
        ),
        (
            entry("", "format", "e5m2", target={"operand": "x", "layout": "col"}),
            LinearPrecision(x=OperandFormat(fmt="e5m2")),
        ),
    ],
)
def test_each_action_changes_what_it_names(controlled: Any, change: Any, wanted: Any) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: plan(1, change)})
    assert run_steps(guard, model, 3)[-1] == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (entry("nowhere"), "layer nowhere is unknown here"),
        (entry("1"), "layer 1 is only observed"),
        (entry("0", "amax_history", 4.0), "amax_history is not supported"),
        (entry("0", "scale_multiplier", 0.3, target={"operand": "x", "layout": "row"}), "multiplier"),
    ],
)
def test_what_cannot_be_applied_is_said_once_and_the_rest_is_applied(
    controlled: Any, caplog: pytest.LogCaptureFixture, change: Any, said: str
) -> None:
    model = nn.Sequential(Fp8Linear(8, 8), nn.Linear(8, 8))
    good = entry("0", target={"gemm": "wgrad"})
    guard = controlled(model, {0: plan(1, change, good), 2: plan(2, change, good)})
    assert run_steps(guard, model, 6)[-1] == LinearPrecision(wgrad="bf16")
    assert sum(said in r.message for r in caplog.records) == 1


def test_an_entry_waits_for_its_step_and_expires(controlled: Any) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: plan(1, entry("", not_before_step=4, expires_step=6))})
    assert [p.fprop for p in run_steps(guard, model, 8)] == ["fp8"] * 4 + ["bf16"] * 2 + ["fp8"] * 2


def test_detach_gives_back_the_configured_precision(controlled: Any) -> None:
    configured = LinearPrecision(wgrad="bf16", x=OperandFormat(scale="pow2"))
    model = Fp8Linear(8, 8, precision=configured)
    guard = controlled(model, {0: plan(1, entry(""))})
    assert run_steps(guard, model, 3)[-1].fprop == "bf16"
    guard.detach()
    assert model.precision == configured


def test_a_checkpoint_carries_the_plan(controlled: Any, watch: Watch) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: plan(3, entry(""))})
    run_steps(guard, model, 4)
    state = guard.state_dict()
    guard.detach()
    resumed = watch(model, mode="enforce")
    resumed.load_state_dict(state)
    assert resumed.plan.version == 3
    assert model.precision.fprop == "bf16"
    observing = watch(Fp8Linear(8, 8), mode="observe")
    observing.load_state_dict(state)
    assert observing.plan == Plan()


def test_a_reply_that_is_no_plan_is_logged_and_changes_nothing(
    controlled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {0: {"version": 1}, 1: plan(2, {"layer": ""})})
    assert {p.fprop for p in run_steps(guard, model, 4)} == {"fp8"}
    assert sum("a reply of the server" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize(
    "bad",
    [
        entry("0", "scale_multiplier", None, target={"operand": "x", "layout": "row"}),
        entry("0", "scale_multiplier", "abc", target={"operand": "x", "layout": "row"}),
        entry("0", not_before_step=None),
        entry("0", not_before_step="5"),
        entry("0", expires_step="x"),
        entry(["0"]),
        "nonsense",
    ],
)
def test_an_entry_that_is_none_neither_stops_training_nor_takes_the_others_with_it(
    controlled: Any, caplog: pytest.LogCaptureFixture, bad: Any
) -> None:
    model = nn.Sequential(Fp8Linear(8, 8), Fp8Linear(8, 8))
    good = entry("1", target={"gemm": "wgrad"})
    guard = controlled(model, {0: plan(1, bad, good), 1: plan(2, bad, good)})
    assert run_steps(guard, model, 4)[-1] == LinearPrecision()
    assert model[1].precision == LinearPrecision(wgrad="bf16")
    assert sum("is not applied" in r.message for r in caplog.records) == 1


def test_an_entry_that_fails_while_it_is_applied_does_not_stop_training(
    controlled: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8_safeguard.hooks import controls

    def failing(precision: LinearPrecision, change: Any) -> LinearPrecision:
        if change.layer == "0":
            raise TypeError("a value of a kind that nobody thought of")
        return with_entry(precision, change)

    with_entry = controls._with_entry
    monkeypatch.setattr(controls, "_with_entry", failing)
    model = nn.Sequential(Fp8Linear(8, 8), Fp8Linear(8, 8))
    guard = controlled(model, {0: plan(1, entry("0"), entry("1")), 2: plan(2, entry("0"), entry("1"))})
    run_steps(guard, model, 5)
    assert [m.precision.fprop for m in model] == ["fp8", "bf16"]
    assert sum("nobody thought of" in r.message for r in caplog.records) == 1


def test_a_fault_between_two_steps_does_not_reach_the_trainer(
    controlled: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(step: int) -> None:
        raise TypeError("a broken boundary")

    model = Fp8Linear(8, 8)
    guard = controlled(model, {})
    monkeypatch.setattr(guard._session.controls, "at_boundary", failing)
    run_steps(guard, model, 2)
    assert guard.last_sample()["step"] == 1
    assert sum("a broken boundary" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_detach_leaves_a_precision_that_the_user_has_set_since(controlled: Any, mode: str) -> None:
    mine = LinearPrecision(wgrad="bf16", x=OperandFormat(fmt="e5m2"))
    model = nn.Sequential(Fp8Linear(8, 8), Fp8Linear(8, 8), Fp8Linear(8, 8))
    guard = controlled(model, {0: plan(1, entry("1"), entry("2"))}, mode=mode)
    run_steps(guard, model, 3)
    model[0].precision = model[1].precision = mine
    guard.detach()
    assert [m.precision for m in model] == [mine, mine, LinearPrecision()]


def test_a_plan_is_applied_on_top_of_what_the_user_has_set_since(controlled: Any) -> None:
    model = Fp8Linear(8, 8)
    guard = controlled(model, {1: plan(1, entry("")), 3: plan(2)})
    model.precision = LinearPrecision(wgrad="bf16")
    seen = run_steps(guard, model, 6)
    assert [p.fprop for p in seen] == ["fp8"] * 3 + ["bf16"] * 2 + ["fp8"]
    assert {p.wgrad for p in seen} == {"bf16"}
