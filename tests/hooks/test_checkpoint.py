"""Activation checkpointing: every GEMM counts once, whichever way the forward is repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear, LinearPrecision

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Both = Callable[..., Guard]


class Checkpointed(nn.Module):
    """Two layers inside a checkpoint, one of them used twice, and one outside."""

    def __init__(self, kind: type[nn.Module], reentrant: bool | None) -> None:
        super().__init__()
        self.outside, self.first, self.second = kind(64, 64), kind(64, 64), kind(64, 64)
        self.reentrant = reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.second(torch.relu(self.first(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outside(x)
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_equal_those_without_checkpoint(
    watch: Watch, read: Read, kind: Any, reentrant: bool
) -> None:
    readings = []
    for mode in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(kind, mode)
        guard = watch(model, recompute=3, run=f"mode-{mode}")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):  # two micro-batches
            model(torch.randn(9, 64)).square().sum().backward()
        optimizer.step()
        readings.append(read(guard).stats)
    plain, checkpointed = readings
    assert plain["second x row"].count == 2 * 2 * 9 * 64
    assert plain == checkpointed


class Nested(nn.Module):
    """One layer before, inside and behind a checkpoint in a checkpoint, and shared by both and by none."""

    def __init__(self, kind: type[nn.Module], outer: bool | None, inner: bool | None) -> None:
        super().__init__()
        self.shared, self.first, self.last = kind(16, 16), kind(16, 16), kind(16, 16)
        self.modes = outer, inner

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(torch.tanh(self.first(x))))

    def outer(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(x))
        return torch.tanh(self.last(self._call(self.inner, x, self.modes[1])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(self.outer, torch.tanh(self.shared(x)), self.modes[0])

    @staticmethod
    def _call(body: Callable[..., torch.Tensor], x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
        return body(x) if reentrant is None else checkpoint(body, x, use_reentrant=reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_in_a_checkpoint_counts_each_use_of_a_shared_layer_once(
    both: Both, read: Read, kind: Any, outer: bool, inner: bool
) -> None:
    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(5, 16)).square().sum().backward()
        optimizer.step()

    plain = read(both(lambda: Nested(kind, None, None), drive, recompute=3))
    nested = read(both(lambda: Nested(kind, outer, inner), drive, recompute=3))
    assert [nested[f"shared {part}"].rows for part in ("x row", "dy row")] == [15, 15]
    assert plain.stats.keys() == nested.stats.keys()
    for label, stats in plain.stats.items():
        assert nested[label].count == stats.count
        # The order of the uses in a backward, and with it the order of the sums, may differ.
        assert nested[label].amax == stats.amax or label.split()[-1] in ("fprop", "dgrad", "wgrad")
    assert not nested.sample.scalars


def test_selective_checkpointing_keeps_the_models_results_and_none_of_ours(both: Both, read: Read) -> None:
    """Its dispatch mode stores what the operators of the forward return, in their order."""

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def drive(model: nn.Sequential) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        for _ in range(2):
            y = checkpoint(model, torch.randn(5, 16), use_reentrant=False, context_fn=contexts)
            y.square().sum().backward()
            optimizer.step()

    guard = both(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)), drive, recompute=2)
    got = read(guard)
    assert [got[f"{i} {part}"].rows for i in (0, 2) for part in ("x row", "dy row")] == [5, 5, 5, 5]


def test_a_checkpoint_of_another_make_repeats_under_an_autograd_function(both: Both, read: Read) -> None:
    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, body: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            ctx.body, ctx.parameters = body, parameters
            ctx.save_for_backward(x)
            with torch.no_grad():
                return body(x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.body(x)
            return None, *torch.autograd.grad(y, (x, *ctx.parameters), dy)

    def drive(model: nn.Sequential) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.tanh(model[0](torch.randn(5, 16)))
        Theirs.apply(model, x, *model.parameters()).square().sum().backward()
        optimizer.step()

    guard = both(lambda: nn.Sequential(nn.Linear(16, 16)), drive)
    assert [read(guard)[f"0 {part}"].rows for part in ("x row", "dy row")] == [10, 10]


class Mixed(nn.Module):
    """Products by function and by modules, as a block has them."""

    def __init__(self) -> None:
        super().__init__()
        self.raw, self.linear = nn.Parameter(torch.randn(16, 16) / 4), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(torch.tanh(nn.functional.linear(x, self.raw)))
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_modules_inside_torchs_checkpoint_wrapper_keep_their_names_and_statistics(
    both: Both, read: Read, kind: CheckpointImpl
) -> None:
    """A run with checkpointing is compared with one without by the layers' names, which state_dict() keeps too."""

    def build(wrapped: bool) -> nn.Sequential:
        block = Mixed()
        return nn.Sequential(nn.Linear(16, 16), checkpoint_wrapper(block, kind) if wrapped else block)

    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(5, 3, 16)).square().sum().backward()
            optimizer.step()

    plain, wrapped = (both(lambda w=w: build(w), drive, recompute=9) for w in (False, True))
    assert read(plain).stats == read(wrapped).stats
    assert read(plain)["1.attention.out_proj dy row"].count == 15 * 16
    assert plain.coverage() == wrapped.coverage()
    assert {row["name"] for row in wrapped.coverage()} == {
        name.removesuffix(".weight") for name, value in build(True).state_dict().items() if value.dim() > 1
    }


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_stay_bit_equal(watch: Watch, kind: Any, reentrant: bool) -> None:
    gradients = []
    for observed in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(kind, reentrant)
        if observed:
            watch(model, recompute=3)
        model(torch.randn(9, 64)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_b05_dy_of_each_step_is_that_steps_own_and_the_precision_the_same_as_without_checkpoint(
    watch: Watch, read: Read, kind: Any, reentrant: bool | None
) -> None:
    """Scales here are of the current tensor, so what a step reports of dy is all the state that there is."""
    model = kind(8, 8, bias=False)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for amax in (4.0, 2.0):
        x, dy = torch.ones(3, 8, requires_grad=True), torch.full((3, 8), amax / 2)
        dy[1, 1] = -amax
        y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        y.backward(dy)
        optimizer.step()
        got = read(guard)
        assert [got[f" dy {layout}"].amax for layout in ("row", "col")] == [amax, amax]
        assert got[" dy row"].count == 24
        # Each power of two has a code of its own: amax / 448 is the scale, and no longer 1.
        assert got[" dy row"].underflow == got[" dy row"].saturated == 0
        assert got[" dy row"].sum_sq_err < 0.05**2 * got[" dy row"].sum_sq
    assert getattr(model, "precision", LinearPrecision()) == LinearPrecision()
