"""While the server is away, values that are not finite are answered here, and what was decided is handed over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear, QuantizedTensor
from fp8_safeguard.monitor.plan import Decision

Watch = Callable[..., Guard]
Accept = Callable[..., dict[str, Any]]
AWAY = (503, {"type": "busy", "title": "not now", "status": 503})
AT_ONCE = 1e-3
"""Seconds between two tries."""


def poison(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
    """A product that is not finite in FP8, of healthy operands."""
    scale = codes.scale.clone()
    if (gemm, operand) == ("fprop", "x"):
        scale[0] = float("nan")
    return QuantizedTensor(codes.data, scale, codes.layout, codes.fmt)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8_safeguard.hooks.outage.FIRST_BACKOFF_SECONDS", AT_ONCE)
    monkeypatch.setattr("fp8_safeguard.hooks.outage.LONGEST_BACKOFF_SECONDS", AT_ONCE)


class Run:
    """Four layers, so that one GEMM in BF16 is within the budget; the second one's product is poisoned."""

    def __init__(self, guard: Guard, model: nn.Sequential, endpoint: Any) -> None:
        self.guard, self.model, self.endpoint = guard, model, endpoint
        self.seen: list[str] = []

    def step(self, *, ill: bool) -> None:
        """One step, until its sample is stored, the server was asked, and its answer or its absence is known."""
        layer = self.model[1]
        assert isinstance(layer, Fp8Linear)
        layer.tamper = poison if ill else None
        self.seen.append(layer.precision.fprop)
        x_TK = torch.randn(64, 32, generator=torch.Generator().manual_seed(len(self.seen)))
        self.model(x_TK).nan_to_num(0.0).square().mean().backward()
        self.model.zero_grad()
        asked = len(self.endpoint.requests)
        client: Any = self.guard._session.client
        self.guard.step(len(self.seen) - 1)
        until(lambda: len(self.endpoint.requests) > asked and not client._inbox)
        until(lambda: client._outage.away or client._under_way is None)


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def start(endpoint: Any, watch: Watch) -> Callable[..., Run]:
    def begin(**options: Any) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(*(Fp8Linear(32, 32) for _ in range(4)))
        endpoint.answer = lambda body: AWAY
        options = {"mode": "enforce", "run": "away", "spool_dir": "", **options}
        return Run(watch(model, server=endpoint.url, **options), model, endpoint)

    return begin


def test_two_samples_in_a_row_are_answered_as_the_policy_answers_and_said_once(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.step(ill=False)  # after this one the server is known to be away
    for _ in range(6):
        run.step(ill=True)
    assert run.seen == ["fp8", "fp8", "fp8", "fp8", "bf16", "bf16", "bf16"]
    assert run.guard.plan.version == 1
    assert [entry.place for entry in run.guard.plan.entries] == [("1", "fprop", "bf16_fallback")]
    told = [r.message for r in caplog.records if "decided here" in r.message]
    assert len(told) == 1
    assert "'1' fprop" in told[0]


def test_one_sample_alone_or_with_a_finite_one_between_changes_nothing(start: Callable[..., Run]) -> None:
    run = start()
    for ill in (False, True, False, True, False, True, False):
        run.step(ill=ill)
    assert set(run.seen) == {"fp8"}
    assert run.guard.plan.version == 0


@pytest.mark.parametrize("options", [{"mode": "observe"}, {"mode": "advise"}, {"groups": 2}])
def test_only_an_enforcing_run_of_one_group_decides_alone(
    start: Callable[..., Run], options: dict[str, Any]
) -> None:
    run = start(**options)
    for step in range(6):
        run.step(ill=step > 0)
    assert set(run.seen) == {"fp8"}


def test_a_server_that_is_there_decides_by_itself(start: Callable[..., Run], accept: Accept) -> None:
    run = start()
    run.endpoint.answer = lambda body: (200, accept(body))
    for step in range(6):
        run.step(ill=step > 0)
    assert set(run.seen) == {"fp8"}
    assert all("local_decisions" not in sample for sample in run.endpoint.samples)


def taking_over(accept: Accept, replies: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """A server that takes decisions over and answers with a plan of its own above both."""

    def answer(body: dict[str, Any]) -> Any:
        samples = body.get("samples", [body])
        results = []
        for sample in samples:
            brought = [Decision.from_wire(each) for each in sample.get("local_decisions", ())]
            plan = {"version": 7, "entries": [each.entry().to_wire() for each in brought]}
            # Before it has heard of them it has a plan without them.
            stale = {"version": 6, "entries": []}
            reply = accept(sample, plan=plan if brought else stale, plan_version=7)
            if brought:
                reply["local_decisions"] = [each.id for each in brought]
            results.append(reply)
        replies.append(results)
        return 200, ({"results": results} if "samples" in body else results[0])

    return answer


def test_a_decision_travels_until_the_servers_own_plan_is_in_force(
    start: Callable[..., Run], accept: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.step(ill=False)
    for _ in range(5):
        run.step(ill=True)
    replies: list[Any] = []
    controls, taken = run.guard._session.controls, list[int]()
    receive = controls.receive
    monkeypatch.setattr(
        controls, "receive", lambda wire: taken.append(wire["version"]) if receive(wire) else None
    )
    run.endpoint.requests.clear()
    run.endpoint.answer = taking_over(accept, replies)
    for _ in range(6):
        run.step(ill=True)
        assert run.guard.flush(30)
    # The replies to the first, older samples brought a plan without the decision: it was not taken up.
    assert taken == [7]
    assert run.seen == ["fp8"] * 4 + ["bf16"] * 8
    assert run.guard.plan.version == 7
    carried = {s["step"]: [d["id"] for d in s.get("local_decisions", ())] for s in run.endpoint.samples}
    ids = {name for names in carried.values() for name in names}
    assert len(ids) == 1
    first, last = (pick(step for step, names in carried.items() if names) for pick in (min, max))
    versions = {s["step"]: s["plan_version"] for s in run.endpoint.samples}
    assert first == 2
    assert [step for step, names in carried.items() if names] == list(range(first, last + 1))
    assert (versions[last], versions[last + 1]) == (1, 7)
    decided = [d for s in run.endpoint.samples for d in s.get("local_decisions", ())]
    assert {d["actor"] for d in decided} == {"client"}
    assert (decided[0]["effective_step"], decided[-1]["effective_step"]) == (None, 4)
    assert run.guard.state_dict()["local_decisions"] == []


def test_a_decision_survives_in_the_state_and_a_lost_reply(start: Callable[..., Run], accept: Accept) -> None:
    run = start()
    run.step(ill=False)
    for _ in range(4):
        run.step(ill=True)
    state = run.guard.state_dict()
    assert [each["accepted"] for each in state["local_decisions"]] == [False]
    run.guard.load_state_dict(state)
    replies: list[Any] = []
    good, lost = taking_over(accept, replies), [0]

    def answer(body: dict[str, Any]) -> Any:
        answered = good(body)
        lost[0] += 1
        return AWAY if lost[0] < 3 else answered  # the server has them, and nobody hears of it

    run.endpoint.requests.clear()
    run.endpoint.answer = answer
    for _ in range(5):
        run.step(ill=True)
    assert run.guard.flush(30)
    run.step(ill=True)
    assert run.guard.plan.version == 7
    assert run.seen == ["fp8"] * 4 + ["bf16"] * 7
