"""Steps are optimizer steps, whatever the training loop looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from fp8_safeguard.hooks import Guard, OptionError

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


@pytest.fixture
def steps(endpoint: Any, watch: Watch) -> Any:
    """Attach with a server and tell which steps arrived."""

    def start(model: nn.Module, **options: Any) -> Any:
        guard = watch(model, server=endpoint.url, run="clock", **options)

        def arrived() -> Any:
            assert guard.flush(10)
            return [sample["step"] for sample in endpoint.samples]

        return guard, arrived

    return start


def backward(model: nn.Module) -> None:
    model(torch.randn(4, 8)).square().mean().backward()


@pytest.mark.parametrize(
    ("batches", "accumulation", "step_on_rest", "wanted"),
    [(4, 2, False, [0, 1]), (7, 3, True, [0, 1, 2]), (7, 3, False, [0, 1])],
)
def test_b08_a_step_is_one_optimizer_step(
    steps: Any, batches: int, accumulation: int, step_on_rest: bool, wanted: Any
) -> None:
    model = nn.Linear(8, 8)
    _, arrived = steps(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in range(1, batches + 1):
        backward(model)
        if batch % accumulation == 0 or (step_on_rest and batch == batches):
            optimizer.step()
    assert arrived() == wanted


def test_every_counts_the_sampled_steps_from_zero(steps: Any, train: Train) -> None:
    model = nn.Linear(8, 8)
    guard, arrived = steps(model, every=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    due = []
    for _ in range(8):
        due.append(guard.sampling)
        train(model, optimizer)
    assert arrived() == [0, 3, 6]
    assert due == [True, False, False] * 2 + [True, False]


def test_the_trainers_number_wins_from_the_first_call_on(steps: Any, train: Train) -> None:
    model = nn.Linear(8, 8)
    guard, arrived = steps(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(5000, 5005):
        train(model, optimizer)
        guard.step(n)
    assert arrived() == [5000, 5002, 5004]


def test_a_first_step_off_schedule_is_not_a_sample(steps: Any, train: Train) -> None:
    model = nn.Linear(8, 8)
    guard, arrived = steps(model, every=2)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    guard.step(7)
    assert arrived() == []


def test_without_a_torch_optimizer_step_ends_the_step(steps: Any) -> None:
    model = nn.Linear(8, 8)
    guard, arrived = steps(model)
    for _ in range(3):
        backward(model)
        guard.step()
    assert arrived() == [0, 1, 2]


@pytest.mark.parametrize("bad", [-1, True, 1.0, "3"])
def test_a_step_number_that_is_none_is_refused(watch: Watch, bad: Any) -> None:
    with pytest.raises(OptionError, match="whole number"):
        watch(nn.Linear(8, 8)).step(bad)


def test_optimizers_of_other_parameters_and_a_second_one_of_ours_do_not_count(steps: Any) -> None:
    model, other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
    _, arrived = steps(model)
    mine = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    strange = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(2):
        backward(model)
        strange.step()
        backward(model)
        for optimizer in mine:
            optimizer.step()
    assert arrived() == [0, 1]


def test_with_every_observed_weight_frozen_any_parameter_of_the_model_counts(steps: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model[0].requires_grad_(False)
    _, arrived = steps(model)
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    for _ in range(2):
        backward(model)
        optimizer.step()
    assert arrived() == [0, 1]


def test_a_named_optimizer_is_the_only_one_that_counts(steps: Any) -> None:
    model = nn.Linear(8, 8)
    wanted, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    _, arrived = steps(model, optimizer=wanted)
    for _ in range(2):
        backward(model)
        other.step()
        backward(model)
        wanted.step()
    assert arrived() == [0, 1]


def test_a_closure_that_runs_the_forward_inside_step_belongs_to_that_step(steps: Any, endpoint: Any) -> None:
    model = nn.Linear(8, 8)
    _, arrived = steps(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls = []

    def closure() -> Any:
        optimizer.zero_grad()
        calls.append(1)
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    first = len(calls)
    optimizer.step(closure)
    assert arrived() == [0, 1]
    rows = [int.from_bytes(s["columns"]["rows"]["data"][:8], "little") for s in endpoint.samples]
    assert rows == [4 * first, 4 * (len(calls) - first)]


@pytest.mark.parametrize("counts", [False, True])
def test_an_optimizer_inside_backward_ends_the_step_when_the_backward_is_over(
    steps: Any, read: Read, counts: bool
) -> None:
    """One optimizer for each parameter: their steps in one backward are one step."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    guard, arrived = steps(model)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for n in range(3):
        backward(model)
        if counts:
            guard.step(n)
        if n == 1:
            assert [read(guard)[f"{i} dy row"].rows for i in (0, 1)] == [4, 4]
    assert arrived() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_optimizer_step_ends_the_step_too(steps: Any, read: Read, whole: bool) -> None:
    """Compiled by itself, or inside a function of the trainer's that clips as well."""
    torch._dynamo.reset()
    model, plain = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    guard, arrived = steps(model)
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def clipped(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()

        step = torch.compile(clipped if whole else optimizer.step, backend="eager")
        torch.manual_seed(1)
        for _ in range(3):
            backward(net)
            step()
            optimizer.zero_grad()
    torch._dynamo.reset()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert arrived() == [0, 1, 2]
    assert [read(guard)[f"{i} {part}"].rows for i in (0, 2) for part in ("x row", "dy row")] == [4] * 4
    assert guard._session.once.counts == {}


class TestLossScale:
    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=1000)

    @pytest.mark.parametrize("manual", [False, True])
    def test_b07_gradients_are_reported_unscaled_with_the_scale_beside_them(
        self, watch: Watch, read: Read, manual: bool
    ) -> None:
        model = nn.Linear(4, 4)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        scaler = self.scaler()
        dy = torch.full((2, 4), 0.5)
        scaler.scale((model(torch.ones(2, 4)) * dy).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if manual:
            guard.step(0)
        got = read(guard)
        assert got[" dy row"].amax == 0.5
        assert got[" dy row"].sum_sq == 8 * 0.5**2
        assert got[" dy row"].sum_4th == 8 * 0.5**4
        assert got[" wgrad"].amax == 1.0
        assert got[" x row"].amax == 1.0
        assert got.sample.run["loss_scale"] == 65536.0

    def test_b07_a_scale_that_the_trainer_logs_is_used(self, watch: Watch, read: Read) -> None:
        model = nn.Linear(4, 4)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        (model(torch.ones(2, 4)) * 0.5 * 1024).sum().backward()
        guard.log(loss_scale=torch.tensor(1024.0))
        optimizer.step()
        assert read(guard)[" dy col"].amax == 0.5

    def test_an_iteration_that_the_scaler_skips_is_part_of_the_next_step(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(4, 4)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        scaler = self.scaler()
        for dy in (torch.inf, 0.5):
            scaler.scale((model(torch.ones(2, 4)) * dy).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        got = read(guard)
        assert got.sample.step == 0
        assert got[" dy row"].inf == 8
        assert got[" dy row"].amax == 0.5

    def test_a_skipped_iteration_that_the_trainer_counts_is_a_step_of_its_own(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Linear(4, 4)
        guard = watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        scaler = self.scaler()
        readings = []
        for n, dy in enumerate((0.5, torch.inf, 0.5)):
            y = model(torch.ones(2, 4))
            y[0, 0] * 0  # a graph as any other
            weight = torch.full((2, 4), 0.5)
            weight[0, 0] = dy
            scaler.scale((y * weight).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            guard.step(n)
            readings.append(read(guard))
        assert [r.sample.run["loss_scale"] for r in readings] == [65536.0, 65536.0, 32768.0]
        assert [r[" dy row"].amax for r in readings] == [0.5, 0.5, 0.5]
        assert [r[" dy row"].inf for r in readings] == [0, 1, 0]


class TestLog:
    def test_values_belong_to_the_step_in_progress_or_the_one_that_has_just_ended(
        self, watch: Watch, read: Read, train: Train
    ) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, every=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for step in range(4):
            backward(model)
            guard.log(loss=float(step), learning_rate=0.1, tokens=32)
            optimizer.step()
            guard.log(gradient_norm=torch.tensor(10.0 + step))
            guard.log_scalar("", "entropy", 0.5)
            if step % 2 == 0:
                seen.append(read(guard).sample)
        assert [dict(s.run) for s in seen] == [
            {"loss": 0.0, "learning_rate": 0.1, "tokens": 32.0, "gradient_norm": 10.0},
            {"loss": 2.0, "learning_rate": 0.1, "tokens": 32.0, "gradient_norm": 12.0},
        ]
        assert seen[1].scalars == ({"layer": "", "name": "entropy", "value": 0.5},)

    def test_a_tensor_that_changes_afterwards_is_reported_as_it_was(self, watch: Watch, read: Read) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model)
        backward(model)
        loss = torch.tensor(2.5)
        guard.log(loss=loss)
        loss.add_(100)
        guard.step(0)
        assert read(guard).sample.run["loss"] == 2.5


def test_a_budget_leaves_samples_out_and_says_so_once(
    steps: Any, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    _, arrived = steps(model, overhead_budget=1e-9)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    assert arrived() == [0]
    assert sum("overhead_budget" in r.message for r in caplog.records) == 1
