"""Copies of an attached model work, report nothing, and leave the original observed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Both = Callable[..., Guard]


class Net(nn.Module):
    """A layer of each kind, one of them with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours, self.experts = nn.Linear(8, 8), Fp8Linear(8, 8), Fp8GroupedLinear(2, 8, 8)
        self.again = self.plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([0, 1, len(x)], dtype=torch.int32)
        return self.experts(self.ours(self.plain(self.again(x))), rows)


def test_an_averaged_model_follows_and_is_not_observed(both: Both, read: Read) -> None:
    averages = []

    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            average(torch.ones(5, 8)).sum().backward()
            average.zero_grad()
        averages.append(average.state_dict())

    guard = both(Net, drive)
    got = read(guard)
    assert [got[f"{layer} {part}"].rows for layer in ("ours", "experts") for part in ("x row", "dy row")] == [
        4
    ] * 4
    assert got["plain x row"].rows == got["plain dy row"].rows == 8
    assert all(torch.equal(a, averages[1][name]) for name, a in averages[0].items())


@pytest.mark.parametrize("through", ["deepcopy", "deepcopy twice", "save", "save a copy"])
def test_copies_of_copies_compute_with_their_own_weights(
    watch: Watch, read: Read, train: Train, through: str
) -> None:
    model = Net()
    guard = watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    other: nn.Module = model
    for _ in range(2 if through in ("deepcopy twice", "save a copy") else 1):
        other = copy.deepcopy(other)
    if through.startswith("save"):
        buffer = io.BytesIO()
        torch.save(model if through == "save" else other, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    bare = Net()
    bare.load_state_dict(model.state_dict())
    x = torch.randn(5, 8)
    for net in (other, bare):
        with torch.no_grad():
            net.plain.weight.mul_(3)
        net(x).square().sum().backward()
    assert torch.equal(other(x), bare(x))
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(other.parameters(), bare.parameters(), strict=True)
    )
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(guard)["ours x row"].rows == 4


def test_a_state_dict_holds_weights_and_nothing_of_ours(watch: Watch, train: Train) -> None:
    model = Net()
    names = list(model.state_dict())
    watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert list(state) == names
    fresh = Net()
    fresh.load_state_dict(state)
    x = torch.randn(4, 8)
    assert torch.equal(fresh(x), model(x))


def test_a_copy_can_be_observed_beside_its_original(watch: Watch, read: Read, train: Train) -> None:
    model = Net()
    guards = [watch(model, run="one")]
    other = copy.deepcopy(model)
    guards.append(watch(other, run="two"))
    train(other, torch.optim.SGD(other.parameters(), 0.1))
    assert read(guards[1])["ours x row"].rows == 4
    assert guards[0].last_sample() is None
    guards[0].detach()
    train(other, torch.optim.SGD(other.parameters(), 0.1))
    assert read(guards[1]).sample.step == 1


class TestHookOrder:
    """dy is what the GEMMs get, whoever else has hooks on the same tensor."""

    @pytest.mark.parametrize("shape", [(4, 8), (2, 2, 8)])
    def test_a_hook_of_the_trainer_that_changes_the_gradient_comes_first(
        self, both: Both, read: Read, shape: tuple[int, ...]
    ) -> None:
        def drive(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            y = model(torch.randn(*shape))
            y.register_hook(lambda dy: dy * 0.25)
            y.retain_grad()
            y.sum().backward()
            optimizer.step()

        got = read(both(lambda: nn.Sequential(nn.Linear(8, 8)), drive))
        # Of a view the hook sits on the base, where the changed gradient arrives.
        assert got["0 dy row"].amax == 0.25
        assert got["0 dy row"].rows == 4

    def test_full_backward_hooks_of_the_trainer_work_beside_ours(self, both: Both, read: Read) -> None:
        seen = []

        def drive(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model[0].register_full_backward_hook(lambda module, dx, dy: seen.append(float(dy[0].abs().max())))
            model[0].register_full_backward_pre_hook(lambda module, dy: (dy[0] * 0.5,))
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()
            optimizer.step()

        got = read(both(lambda: nn.Sequential(nn.Linear(8, 8)), drive))
        assert got["0 dy row"].rows == 4
        assert seen[0] == seen[1]
        assert got["0 dy row"].amax == 0.5
