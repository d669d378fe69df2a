"""The function mode: on in measured forwards only, off whatever happens, and what it cannot recognise has a name."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import AlreadyAttachedError, Guard
from fp8_safeguard.hooks.functional import PATIENCE

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]
Watch = Callable[..., Guard]

WIDTH = 8


def modes() -> int:
    return torch._C._len_torch_function_stack()


class Raw(nn.Module):
    """A product with a parameter of its own; keeps how many modes were on, and fails or is interrupted on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.modes: list[int] = []
        self.fail: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(modes())
        y = F.linear(x, self.w)
        if self.fail is not None:
            raise self.fail
        return torch.tanh(y)


class Nested(nn.Module):
    """A raw parameter, and children that have one: the scopes lie in one another."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.raw, self.linear = Raw(), nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return self.raw(self.linear(self.raw(x)))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w
        h = (
            self.block(h)
            if self.reentrant is None
            else checkpoint(self.block, h, use_reentrant=self.reentrant)
        )
        return h @ self.w


def drive(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        for _ in range(2):
            model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_nested_scopes_count_each_use_once_and_put_one_mode_on(both: Both, read: Read) -> None:
    guard = both(Nested, drive, recompute=5)
    got = read(guard)
    for layer, calls in (("w", 2), ("raw.w", 2), ("linear", 1)):
        assert got[f"{layer} x row"].count == 2 * calls * 4 * WIDTH
        assert got[f"{layer} dy row"].count == 2 * calls * 4 * WIDTH
        assert got[f"{layer} w tile"].count == WIDTH * WIDTH
    model = guard._session.model()
    assert model is not None
    assert set(model.raw.modes) == {1}
    assert modes() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_each_use_once(both: Both, read: Read, reentrant: bool) -> None:
    plain = read(both(Nested, drive, recompute=5)).stats
    assert read(both(lambda: Nested(reentrant), drive, recompute=5)).stats == plain
    assert modes() == 0


def test_the_mode_is_on_in_sampled_steps_with_gradients_only(watch: Watch) -> None:
    model = Nested()
    watch(model, every=3)
    for _ in range(4):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        drive(model, 1)
    seen = [model.raw.modes[at : at + 6] for at in range(0, 24, 6)]
    assert seen == [[0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6, [0, 0, 1, 1, 1, 1]]


def test_paused_or_detached_no_mode_goes_on_and_no_hook_stays(watch: Watch) -> None:
    model = Nested()
    guard = watch(model)
    with guard.paused():
        drive(model, 1)
    assert set(model.raw.modes) == {0}
    guard.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    drive(model, 1)
    assert set(model.raw.modes) == {0}


def test_hooks_put_on_later_go_too(watch: Watch) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.ModuleDict({"head": nn.Linear(WIDTH, WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.child["head"].weight)

    model = Parent()
    guard = watch(model)
    drive(model, 3)
    assert len(model.child["head"]._forward_pre_hooks) == 1
    assert not model.child._forward_hooks  # it has no forward that could multiply
    guard.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_weight_that_nobody_uses_is_not_looked_for_without_end(watch: Watch) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.linear, self.modes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), list[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.modes.append(modes())
            return self.linear(x)

    model = Idle()
    guard = watch(model)
    drive(model, 12)
    looked = [max(model.modes[at : at + 2]) for at in range(0, 24, 2)]
    # On in the first sample, which looks for products beside the calls of linear modules, and in those of the search.
    assert looked == [1] + [1] * PATIENCE + [0] * (11 - PATIENCE)
    (row,) = [row for row in guard.coverage() if row["name"] == "idle"]
    assert "never called" in row["reason"]


def test_a_second_guard_is_refused_where_no_layer_is_linear(watch: Watch) -> None:
    model = Raw()
    guard = watch(model)
    with pytest.raises(AlreadyAttachedError):
        watch(model)
    guard.detach()
    watch(model)


def test_an_exception_in_the_forward_turns_the_mode_off(watch: Watch, read: Read) -> None:
    model = Nested()
    guard = watch(model)
    model.raw.fail = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        model(torch.randn(4, WIDTH))
    assert modes() == 0
    model.raw.fail = None
    drive(model, 2)
    assert read(guard)["raw.w x row"].count == 2 * 2 * 4 * WIDTH


def test_an_interrupted_forward_leaves_nothing_for_long(watch: Watch, read: Read) -> None:
    """Ctrl-C in a notebook: torch calls no forward hook, so the mode stays until the next measured step."""
    model = Nested()
    guard = watch(model)
    model.raw.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, WIDTH))
    model.raw.fail = None
    drive(model, 2)
    assert modes() == 0
    assert read(guard)["raw.w x row"].count == 2 * 2 * 4 * WIDTH


def test_modes_of_the_trainers_own_stay_and_see_what_they_saw(watch: Watch, read: Read) -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.called.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    called = []
    for observed in (False, True):
        torch.manual_seed(0)
        model = Nested()
        guard = watch(model) if observed else None
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with Names() as names, torch.device("cpu"):
            loss = model(torch.randn(4, WIDTH)).square().sum()
        called.append(list(names.called))
        loss.backward()
        optimizer.step()
    assert called[0] == called[1]
    assert guard is not None
    assert read(guard)["raw.w x row"].count == 2 * 4 * WIDTH


def test_copies_of_the_model_report_nothing_and_can_be_saved(watch: Watch, read: Read) -> None:
    model = Nested()
    guard = watch(model)
    drive(model, 1)
    before = read(guard).stats
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        torch.nn.init.zeros_(other.w)
        assert not other(torch.ones(2, WIDTH)).any()
    copy.copy(model)(torch.ones(2, WIDTH)).sum().backward()
    assert len(model.raw.modes) == 4 + 2  # its children are the model's own, and were observed
    assert read(guard).stats == before
    assert modes() == 0


def test_b16_nothing_is_kept_alive(watch: Watch) -> None:
    model = Nested()
    guard = watch(model, recompute=0)
    outputs: list[weakref.ref[Tensor]] = []
    model.raw.register_forward_hook(lambda module, args, y: outputs.append(weakref.ref(y)))
    drive(model, 3)
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    gc.collect()
    assert len(outputs) == 14
    assert all(output() is None for output in outputs)
    guard.detach()


def test_b09_adapters_kept_as_parameters_of_a_linear_subclass_are_seen_beside_the_frozen_weight(
    both: Both, read: Read
) -> None:
    """B09: a frozen weight and two trainable matrices of low rank; the frozen one has statistics and no gradient."""

    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias) + x @ self.a.t() @ self.b.t()

    got = read(both(lambda: nn.Sequential(Adapted()), lambda model: drive(model, 1), recompute=3))
    assert got.parts("0") == {"x row", "w tile", "fprop"}
    assert got.parts("0.a") == {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "wgrad"}
    assert got.parts("0.b") == {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"}
    assert got["0 x row"].count == got["0.a x row"].count == 2 * 4 * WIDTH


def test_a_frozen_raw_weight_has_no_weight_gradient(both: Both, read: Read) -> None:
    def build() -> Nested:
        model = Nested()
        model.raw.requires_grad_(False)
        return model

    got = read(both(build, lambda model: drive(model, 1), recompute=3))
    assert got.parts("raw.w") == {"x row", "w tile", "dy row", "fprop", "dgrad"}


def test_autocast_and_changes_in_place_behind_a_product(both: Both, read: Read) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.linear(x.unsqueeze(0), self.w, self.b)
                y.relu_()
                z = torch.mm(y[0], self.w)
                z.mul_(2)
                return z.float()

    got = read(both(Model, lambda model: drive(model, 1), recompute=1))
    assert got["w x row"].count == got["w dy row"].count == 2 * 2 * 4 * WIDTH


PASSES: dict[str, tuple[Callable[[Raw, Tensor], object], int, int]] = {
    "two micro-batches": (lambda m, x: [m(x).sum().backward() for _ in range(2)], 2, 2),
    "autograd.grad": (lambda m, x: torch.autograd.grad(m(x).sum(), [m.w, x]), 1, 1),
    "backward twice": (lambda m, x: [y := m(x).sum(), y.backward(retain_graph=True), y.backward()], 1, 1),
    "no backward": (lambda m, x: [m(x), m(x).sum().backward()], 2, 1),
    "no gradients": (lambda m, x: [torch.no_grad()(m)(x), torch.inference_mode()(m)(x), m(x).sum().backward()], 1, 1),
    "penalty": (
        lambda m, x: (
            torch.autograd.grad((y := m(x).sum()), x, create_graph=True)[0].square().sum() + y
        ).backward(), 1, 1,
    ),
    "evaluation": (lambda m, x: [m.eval()(x).sum().backward()], 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_each_kind_of_pass_counts_its_uses(both: Both, read: Read, name: str) -> None:
    body, forwards, backwards = PASSES[name]

    def once(model: Raw) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        body(model, torch.randn(4, WIDTH, requires_grad=True))
        optimizer.step()

    got = read(both(Raw, once, recompute=1))
    assert got["w x row"].count == got["w x col"].count == forwards * 4 * WIDTH
    assert got["w dy row"].count == got["w dy col"].count == backwards * 4 * WIDTH
    assert got["w w tile"].count == WIDTH * WIDTH
