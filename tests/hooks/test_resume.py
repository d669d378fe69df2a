"""What a checkpoint carries of the monitor, and what a resumed run makes of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


def test_state_survives_a_restart(watch: Watch, read: Read, train: Train) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    guard = watch(model, run="r", attempt="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 4)
    buffer = io.BytesIO()
    torch.save(guard.state_dict(), buffer)
    guard.detach()
    buffer.seek(0)
    resumed = watch(model, run="r", attempt="1")
    resumed.load_state_dict(torch.load(buffer))
    train(model, optimizer)
    got = read(resumed)
    assert got.sample.step == 4
    assert (got.sample.attempt.parent, got.sample.attempt.from_step) == ("0", 4)
    assert "wgrad" in got.parts("1")


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((None, None), 5),  # as the state says
        ((5, 6), 5),
        ((7, 8), 7),  # the trainer's checkpoint is newer than the state that it carries
        ((3, 4), 3),  # the trainer goes back further than the state
    ],
)
def test_from_step_is_the_first_step_of_the_attempt_itself_sampled_or_not(
    watch: Watch, endpoint: Any, train: Train, numbers: tuple[Any, ...], wanted: int
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = watch(model, run="r", attempt="0")
    train(model, optimizer, 5)
    state = guard.state_dict()
    guard.detach()
    resumed = watch(model, run="r", attempt="1", every=2, server=endpoint.url)
    resumed.load_state_dict(state)
    for n in numbers:
        train(model, optimizer)
        resumed.step(n)
    assert resumed.flush(10)
    assert [s["attempt"] for s in endpoint.samples] == [{"id": "1", "parent": "0", "from_step": wanted}]


def test_a_step_that_the_trainer_names_before_its_first_forward_is_the_parents(
    watch: Watch, read: Read, train: Train
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resumed = watch(model, run="r", attempt="1")
    resumed.load_state_dict({"step": 5, "plan": {"version": 0, "entries": []}, "attempt": "0"})
    resumed.step(8)
    train(model, optimizer)
    resumed.step(9)
    assert (read(resumed).sample.step, read(resumed).sample.attempt.from_step) == (9, 9)


def test_an_attempt_that_goes_on_keeps_its_parent(watch: Watch, read: Read, train: Train) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state: dict[str, Any] = {"step": 5, "plan": {"version": 0, "entries": []}, "attempt": "0"}
    for step in (5, 6):
        guard = watch(model, run="r", attempt="1")
        guard.load_state_dict(state)
        train(model, optimizer)
        got = read(guard).sample
        assert (got.step, got.attempt.parent, got.attempt.from_step) == (step, "0", 5)
        state = guard.state_dict()
        guard.detach()


def test_a_state_of_something_else_is_refused(watch: Watch) -> None:
    with pytest.raises(OptionError, match="state_dict"):
        watch(nn.Linear(2, 2)).load_state_dict({"param_groups": []})


class TestPlanOfACheckpoint:
    """A resumed run is bit for bit the one that went on."""

    PLAN: ClassVar[dict[str, Any]] = {
        "version": 4,
        "entries": [
            {
                "layer": "0", "target": {"layer": True}, "action": "bf16_fallback", "value": None,
                "decision_id": "d", "not_before_step": 1, "expires_step": None,
            },
            {
                "layer": "1", "target": {"gemm": "fprop"}, "action": "bf16_fallback", "value": None,
                "decision_id": "e", "not_before_step": 8, "expires_step": 10,
            },
        ],
    }  # fmt: skip

    def run(self, guard: Guard, model: nn.Module, optimizer: Any, steps: range, save_at: int = -1) -> Any:
        """Steps whose plan arrives while step 5 is the last completed one; what was saved before `save_at`."""
        saved = None
        for step in steps:
            if step == save_at:
                buffer = io.BytesIO()
                torch.save([guard.state_dict(), model.state_dict(), optimizer.state_dict()], buffer)
                saved = buffer
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.step(step)
            if step == 5:
                guard._session.controls.receive(self.PLAN)
        return saved

    def build(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(Fp8Linear(64, 64), Fp8Linear(64, 64))
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    @pytest.mark.parametrize("save_at", [4, 6, 7, 9])
    def test_a_plan_that_waits_takes_effect_with_the_step_that_it_would_have(
        self, watch: Watch, read: Read, save_at: int
    ) -> None:
        model, optimizer = self.build()
        guard = watch(model, mode="enforce", run="r")
        saved = self.run(guard, model, optimizer, range(12), save_at)
        assert guard._session.controls.effective_step == 7
        resumed_model, resumed_optimizer = self.build()
        saved.seek(0)
        guard_state, weights, moments = torch.load(saved)
        waits = guard_state["waiting_plan"] is not None
        assert waits == (save_at == 6)
        resumed_model.load_state_dict(weights)
        resumed_optimizer.load_state_dict(moments)
        resumed = watch(resumed_model, mode="enforce", run="r", attempt="1")
        resumed.load_state_dict(guard_state)
        self.run(resumed, resumed_model, resumed_optimizer, range(save_at, 12))
        for ours, wanted in zip(resumed_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, wanted)
        first, second = read(guard).sample, read(resumed).sample
        assert first.effective_step == second.effective_step == 7
        assert first.plan_version == second.plan_version == 4
        assert all((first.columns[n] == second.columns[n])[~first.nulls[n]].all() for n in first.columns)

    def test_an_observing_guard_takes_up_neither(self, watch: Watch) -> None:
        model, optimizer = self.build()
        guard = watch(model, mode="enforce")
        saved = self.run(guard, model, optimizer, range(7), 6)
        other, _ = self.build()
        saved.seek(0)
        observing = watch(other, mode="observe")
        observing.load_state_dict(torch.load(saved)[0])
        observing.step(6)
        observing.step(7)
        assert observing.plan.version == 0

    def test_a_state_from_before_there_was_a_waiting_plan_still_loads(self, watch: Watch) -> None:
        model, _ = self.build()
        guard = watch(model, mode="enforce")
        state = guard.state_dict()
        del state["waiting_plan"]
        guard.load_state_dict({**state, "step": 20, "plan": self.PLAN})
        assert guard.plan.version == 4


def test_b100_b103_what_a_guard_saves_is_no_larger_with_time_and_a_copy(watch: Watch, train: Train) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    guard, optimizer = watch(model, run="r", spool_dir=""), torch.optim.SGD(model.parameters(), 0.1)

    def saved() -> bytes:
        buffer = io.BytesIO()
        torch.save(guard.state_dict(), buffer)
        return buffer.getvalue()

    train(model, optimizer, 10)
    early, handed = len(saved()), guard.state_dict()
    text = repr(handed)
    train(model, optimizer, 30)
    assert len(saved()) == pytest.approx(early, rel=0.05)
    # Later steps do not change what was handed out, and its holder does not change the guard.
    assert repr(handed) == text
    before = saved()
    for mine in (guard.state_dict(), guard.last_sample(), *guard.coverage()):
        assert mine is not None
        for value in mine.values():
            if isinstance(value, (dict, list)):
                value.clear()
            elif isinstance(value, torch.Tensor):
                value.zero_()
        mine.clear()
    assert saved() == before
    sample = guard.last_sample()
    assert sample is not None
    assert sample["slots"]
    assert [row["name"] for row in guard.coverage()] == ["0", "1", "2"]
