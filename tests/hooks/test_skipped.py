"""Iterations whose gradients a trainer throws away, without a word to anybody."""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.hooks.clock import FIRST_PATIENCE, PATIENCE
from fp8_safeguard.hooks.notices import DISCARDED

Watch = Callable[..., Guard]
Both = Callable[..., Guard]


class SkipsByHand:
    """`if isfinite(norm): optimizer.step()`, and nothing of ours in the loop but log()."""

    def __init__(self, layers: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.guard: Guard | None = None
        self.stepped = 0

    def micro_batch(self, *, bad: bool = False) -> torch.Tensor:
        x = torch.randn(4, 16)
        loss = (self.model(x) - x).square().mean() * (math.nan if bad else 1.0)
        loss.backward()
        return loss

    def iteration(self, *, bad: bool = False, micro_batches: int = 1, logs: bool = True) -> None:
        for at in range(micro_batches):
            loss = self.micro_batch(bad=bad and at == micro_batches - 1)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.guard is not None and logs:
            self.guard.log(loss=loss, gradient_norm=norm)
        if torch.isfinite(norm):
            self.optimizer.step()
            self.stepped += 1
        self.optimizer.zero_grad()


@pytest.fixture
def trainer(watch: Watch, endpoint: Any) -> Callable[..., Any]:
    """A trainer under a guard with a server, and what arrived there."""

    def start(**options: Any) -> Any:
        made = SkipsByHand()
        made.guard = guard = watch(made.model, server=endpoint.url, run="skips", **options)

        def samples() -> list[Any]:
            assert guard.flush(10)
            return endpoint.samples

        return types.SimpleNamespace(loop=made, samples=samples, guard=guard)

    return start


def _discarded(sample: Any) -> int:
    return sum(int(each["value"]) for each in sample["scalars"] if each["name"] == DISCARDED)


def _nonfinite(sample: Any) -> int:
    columns = sample["columns"]
    return sum(int(np.frombuffer(columns[name]["data"], np.int64).sum()) for name in ("nan", "inf"))


def _rows(sample: Any) -> int:
    """Tokens that the first layer was given: 4 a micro-batch."""
    return int(np.frombuffer(sample["columns"]["rows"]["data"], np.int64)[0])


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "guard.step(step)" in record.getMessage()]


def test_a_skipped_iteration_is_told_with_the_next_step_and_a_finite_loss_does_not_hide_it(
    trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    for iteration in range(7):
        made.loop.iteration(bad=iteration == 3)
        made.samples()
    sent = made.samples()
    assert [sample["step"] for sample in sent] == list(range(6))
    assert [_discarded(sample) for sample in sent] == [0, 0, 0, 1, 0, 0]
    assert [_nonfinite(sample) > 0 for sample in sent] == [False, False, False, True, False, False]
    told = sent[3]["run"]
    assert (str(told["loss"]), str(told["gradient_norm"])) == ("NaN", "NaN")
    assert {(each["layer"], each["value"]) for each in sent[3]["scalars"] if each["name"] == "wgrad_norm"} == {
        ("0", "NaN"), ("1", "NaN"), ("2", "NaN"),
    }  # fmt: skip
    assert all(math.isfinite(sample["run"]["loss"]) for sample in sent if sample is not sent[3])
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("every", [1, 5])
def test_a_run_that_skips_for_ever_goes_on_reporting(
    trainer: Any, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No optimizer step comes any more: after some patience each iteration counts as a step."""
    made = trainer(every=every)
    for _ in range(6 + every // 2):
        made.loop.iteration()
    before = len(made.samples())
    for _ in range(PATIENCE + 2 * every + 2):
        made.loop.iteration(bad=True)
    later = made.samples()[before:]
    assert len(later) >= 2
    assert all(_nonfinite(sample) for sample in later)
    assert all(sample["run"]["loss"] == "NaN" for sample in later)
    assert len(_warnings(caplog)) == 1


def test_the_loops_steps_end_with_the_optimizer_again_once_it_has_recovered(trainer: Any) -> None:
    made = trainer()
    for _ in range(3):
        made.loop.iteration()
    for _ in range(PATIENCE + 3):
        made.loop.iteration(bad=True, micro_batches=4)
    ended = made.samples()
    assert [_discarded(sample) for sample in ended[3:]] == [PATIENCE + 1, 1, 1]
    assert [_rows(sample) for sample in ended[4:]] == [16, 16]
    for _ in range(2):
        made.loop.iteration(micro_batches=4)
    recovered = made.samples()[len(ended) :]
    assert [_discarded(sample) for sample in recovered] == [0, 0]
    assert [_rows(sample) for sample in recovered] == [16, 16]
    assert [sample["step"] for sample in recovered] == [len(ended), len(ended) + 1]
    assert not any(_nonfinite(sample) for sample in recovered)


def test_a_run_that_never_takes_a_step_is_reported_too(trainer: Any) -> None:
    made = trainer()
    for _ in range(FIRST_PATIENCE + 4):
        made.loop.iteration(bad=True)
    sent = made.samples()
    assert [sample["step"] for sample in sent[:3]] == [0, 1, 2]
    assert all(_nonfinite(sample) for sample in sent)


def test_backwards_of_two_threads_that_meet_at_a_weight_discard_nothing(trainer: Any) -> None:
    made = trainer(every=1)
    meet = threading.Barrier(2)

    def wait(_: torch.Tensor) -> None:
        meet.wait(10)

    handle = made.loop.model[0].weight.register_hook(wait)
    for _ in range(2):
        threads = [threading.Thread(target=made.loop.micro_batch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        made.loop.optimizer.step()
        made.loop.optimizer.zero_grad()
    handle.remove()
    assert [(_rows(sample), _discarded(sample)) for sample in made.samples()] == [(8, 0), (8, 0)]


@pytest.mark.parametrize("every", [1, 3])
def test_accumulation_is_no_skipping_however_many_micro_batches_and_whatever_they_hold(
    trainer: Any, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice as many from step to step, and in one of them a NaN that the trainer steps with or not."""
    made = trainer(every=every)
    for micro_batches in (1, 4, 64, 160, 2):
        made.loop.iteration(micro_batches=micro_batches)
    made.loop.iteration(micro_batches=32, bad=True)
    made.loop.iteration(micro_batches=32)
    sent = made.samples()
    assert [sample["step"] for sample in sent] == list(range(0, 6, every))
    assert [_discarded(sample) for sample in sent] == [0] * (len(sent) - 1) + [int(every == 1)]


def test_a_nan_in_the_second_micro_batch_alone_is_told_though_the_third_is_fine(trainer: Any) -> None:
    made = trainer()
    made.loop.iteration()
    for bad in (False, True, False):
        made.guard.log(loss=made.loop.micro_batch(bad=bad))
    made.loop.optimizer.step()
    sample = made.samples()[-1]
    assert sample["run"]["loss"] == "NaN"
    assert _nonfinite(sample)
    assert not _discarded(sample)


def test_a_loop_that_clears_its_gradients_in_each_step_keeps_its_steps(
    trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As sharpness-aware minimisation does, or adversarial training; with nothing bad in it nothing is said."""
    made = trainer()
    for _ in range(12):
        for _ in range(FIRST_PATIENCE // 8):
            made.loop.micro_batch()
            made.loop.optimizer.zero_grad()
        made.loop.iteration()
    sent = made.samples()
    assert [sample["step"] for sample in sent] == list(range(12))
    assert {_discarded(sample) for sample in sent} == {FIRST_PATIENCE // 8}
    assert not _warnings(caplog)


def test_a_closure_of_many_evaluations_is_one_step(watch: Watch, endpoint: Any) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model, server=endpoint.url, run="closure", recompute=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def closure() -> torch.Tensor:
        for _ in range(FIRST_PATIENCE + 20):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert guard.flush(10)
    assert [sample["step"] for sample in endpoint.samples] == [0, 1]


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_what_a_loss_scaler_skips_is_counted_and_needs_no_warning(
    trainer: Any, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer of BF16 may log a scale of 1: that is none."""
    made = trainer()
    for iteration in range(5):
        made.guard.log(loss_scale=scale)
        made.loop.iteration(bad=iteration == 2)
        made.guard.log(loss_scale=scale)
        sent = made.samples()
    assert [_discarded(sample) for sample in sent] == [0, 0, 1, 0]
    assert len(_warnings(caplog)) == (scale == 1.0)


def test_a_run_that_was_stuck_is_not_waited_for_much_longer_the_next_time(trainer: Any) -> None:
    made = trainer()
    for _ in range(2):
        made.loop.iteration()
        for _ in range(PATIENCE + 40):
            made.loop.iteration(bad=True)
        made.loop.iteration()
    sent = made.samples()
    waits = [_discarded(sample) for sample in sent if _discarded(sample) > 1]
    assert waits == [PATIENCE + 1, 2 * PATIENCE + 1]


def test_optimizers_inside_the_backward_discard_nothing(watch: Watch, endpoint: Any) -> None:
    """They clear each gradient as soon as they have used it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def use(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    guard = watch(model, server=endpoint.url, run="inside", recompute=0)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(use)
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
    assert guard.flush(10)
    assert [(sample["step"], _discarded(sample)) for sample in endpoint.samples] == [(n, 0) for n in range(5)]


def test_iterations_of_several_micro_batches_stay_whole_where_steps_are_not_sampled(trainer: Any) -> None:
    made = trainer(every=4)
    made.loop.iteration()
    for _ in range(PATIENCE + 8):
        made.loop.iteration(bad=True, micro_batches=3)
    later = made.samples()[1:]
    assert [sample["step"] for sample in later] == [4, 8]
    assert [_rows(sample) for sample in later] == [12, 12]


def test_of_a_named_optimizer_only_its_own_weights_speak(watch: Watch, endpoint: Any) -> None:
    """The other one's gradients are used by somebody else."""
    model = nn.ModuleDict({"d": nn.Linear(8, 8), "g": nn.Linear(8, 8)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in "dg"}
    guard = watch(model, server=endpoint.url, run="named", optimizer=optimizers["g"])
    for _ in range(2):
        for _ in range(5):
            model["d"](torch.randn(4, 8)).square().mean().backward()
            optimizers["d"].step()
            model.zero_grad()
        model["d"](model["g"](torch.randn(4, 8))).square().mean().backward()
        optimizers["g"].step()
        model.zero_grad()
    assert guard.flush(10)
    assert [_discarded(sample) for sample in endpoint.samples] == [0, 0]


def test_gradients_that_are_discarded_while_the_guard_is_paused_end_no_step(trainer: Any) -> None:
    made = trainer()
    made.loop.iteration()
    with made.guard.paused():
        for _ in range(PATIENCE * 3):
            made.loop.iteration(bad=True, logs=False)
    made.loop.iteration(micro_batches=3)
    assert [sample["step"] for sample in made.samples()] == [0, 1]


def test_who_says_where_steps_end_is_not_second_guessed(trainer: Any) -> None:
    made = trainer()
    for step in range(PATIENCE + 12):
        made.loop.iteration(bad=step > 2)
        made.guard.step(step)
    sent = made.samples()
    assert [sample["step"] for sample in sent] == list(range(PATIENCE + 12))
    assert not any(_discarded(sample) for sample in sent)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_keeps_every_bit_and_nothing_of_ours_stays(both: Both, set_to_none: bool) -> None:
    weights: list[nn.Parameter] = []

    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        weights.append(next(model.parameters()))
        for step in range(14):
            x = torch.randn(4, 16)
            loss = (model(x) - x).square().mean() * (math.nan if step in (2, 5, 6) else 1.0)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    guard = both(lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), drive)
    assert weights[1]._backward_hooks
    guard.detach()
    assert not weights[1]._backward_hooks
    assert not getattr(weights[1], "_post_accumulate_grad_hooks", None)


def test_a_weight_put_in_the_place_of_the_watched_one_is_watched_from_the_next_step_on(trainer: Any) -> None:
    made = trainer()
    made.loop.iteration()
    old = made.loop.model[0].weight
    made.loop.model[0].weight = nn.Parameter(old.detach().clone())
    made.loop.optimizer = torch.optim.SGD(made.loop.model.parameters(), lr=0.1)
    made.loop.iteration()
    made.loop.iteration(bad=True)
    made.loop.iteration()
    assert [_discarded(sample) for sample in made.samples()] == [0, 0, 1]
    assert not old._backward_hooks


def test_a_watched_weight_that_is_frozen_gives_its_office_to_another(trainer: Any) -> None:
    made = trainer()
    made.loop.iteration()
    made.loop.model[0].requires_grad_(False)
    made.loop.iteration()
    made.loop.iteration(bad=True)
    made.loop.iteration()
    assert [_discarded(sample) for sample in made.samples()] == [0, 0, 1]


def test_a_trainer_that_moves_gradients_out_of_grad_is_not_accused(trainer: Any) -> None:
    """Buffers of its own for the sum, as Megatron has: what is cleared after each micro-batch is not lost."""
    made = trainer()
    parameters = list(made.loop.model.parameters())
    for _ in range(4):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(PATIENCE * 3):
            made.loop.micro_batch()
            for total, parameter in zip(sums, parameters, strict=True):
                assert parameter.grad is not None
                total += parameter.grad
                parameter.grad = None
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total
        made.loop.optimizer.step()
        made.loop.optimizer.zero_grad()
    assert [sample["step"] for sample in made.samples()] == list(range(4))


def test_a_fault_of_ours_in_the_backward_is_one_line_and_no_exception(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    made.loop.iteration()

    def fail() -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(made.guard._session.discards, "_discard", fail)
    for _ in range(3):
        made.loop.iteration(bad=True)
    made.loop.iteration()
    assert made.loop.stepped == 2
    assert [sample["step"] for sample in made.samples()] == [0, 1]
    assert sum("monitoring failed in the backward" in r.getMessage() for r in caplog.records) == 1
