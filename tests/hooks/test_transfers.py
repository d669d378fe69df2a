"""The training thread never waits for the device: what it would read back is counted."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_safeguard import hooks, kernels
from fp8_safeguard.hooks import Guard, aside
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear

Watch = Callable[..., Guard]

HOOKS, KERNELS = (str(Path(str(package.__file__)).parent) for package in (hooks, kernels))
METHODS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "equal", "is_nonzero", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "allclose", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount",
}  # fmt: skip


class Transfers(TorchDispatchMode):
    """Reads of tensors by code of the hooks on this thread, as if every tensor were on a device.

    A kernel may read: on a device another one runs in its place.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.thread = threading.get_ident()
        for name in METHODS:
            monkeypatch.setattr(torch.Tensor, name, self.counted(name, getattr(torch.Tensor, name)))
        monkeypatch.setattr(torch.Tensor, "to", self.counted_to(torch.Tensor.to))
        # Whatever is done only because it is free on a CPU is not done.
        monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False))
        # In the place of what keeps the modes around us out.
        monkeypatch.setattr(
            aside, "_without_modes", lambda: self if self.outside else contextlib.nullcontext()
        )

    @property
    def outside(self) -> bool:
        return threading.get_ident() == self.thread and torch._C._len_torch_dispatch_stack() == 0

    def counted(self, name: str, original: Any) -> Any:
        def read(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            self.note(name)
            return original(tensor, *arguments, **keywords)

        return read

    def counted_to(self, original: Any) -> Any:
        def to(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
            # To go to where another tensor is names that tensor's device.
            if any(isinstance(value, str) and value == "cpu" for value in (*arguments, *keywords.values())):
                self.note("to")
            return original(tensor, *arguments, **keywords)

        return to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        masks = (
            a for a in (args[1] if name in ("index", "index_put", "index_put_") else ()) if a is not None
        )
        if name in SYNCHRONISING or any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            path = frame.f_code.co_filename
            if path.startswith(KERNELS) or threading.get_ident() != self.thread:
                return
            # A function mode passes on what the model calls.
            if path.startswith(HOOKS) and frame.f_code.co_name != "__torch_function__":
                self.found.append(f"{name} in {frame.f_code.co_name}")
                return

    def taken(self) -> list[str]:
        taken, self.found = self.found, []
        return taken


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    with monkeypatch.context() as patch:
        yield Transfers(patch)


class Model(nn.Module):
    """Foreign layers and ours, dense and with experts, frozen and not."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64)
        self.own, self.experts = Fp8Linear(64, 64), Fp8GroupedLinear(3, 64, 64)
        self.attention = nn.MultiheadAttention(64, 2)
        self.frozen.requires_grad_(False)
        self.offsets = torch.tensor([0, 30, 30, 90], dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.own(self.foreign(x).relu_()))
        return self.attention(x, x, x)[0] + self.experts(x, self.offsets)


@pytest.mark.parametrize("options", [{}, {"shadow": True}, {"overhead_budget": 0.5}])
def test_b24_a_sampled_step_reads_back_once_and_the_others_never(
    options: dict[str, Any], watch: Watch, transfers: Transfers
) -> None:
    model = Model()
    guard = watch(model, every=3, recompute=5, **options)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    read = []
    for _ in range(9):
        loss = model(torch.randn(90, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.log(loss=loss)
        read.append(transfers.taken())
    assert guard.last_sample() is not None
    assert not [kind for kind in guard._session.once.counts if kind != "overhead budget"]
    # With a budget the clock decides which of them are sampled after the first.
    wanted = [["to in snapshot"], [], []] * 3
    assert all(got in ([], most) for got, most in zip(read, wanted, strict=True))
    assert read == wanted or "overhead_budget" in options
    assert read[0]


def test_a_closer_look_at_flagged_layers_reads_nothing_either(watch: Watch, transfers: Transfers) -> None:
    model = Model()
    guard = watch(model)
    named = {"alerts": [{"layer": name, "severity": "act"} for name in ("foreign", "own", "experts")]}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        guard._session.builder.flags.hear(named)
        model(torch.randn(90, 64)).square().mean().backward()
        optimizer.step()
        assert transfers.taken() == ["to in snapshot"]
    sample = guard.last_sample()
    assert sample is not None
    assert any(slot.get("variant") for slot in sample["slots"])


def test_b24_a_loss_scale_is_followed_on_its_device(watch: Watch, transfers: Transfers) -> None:
    model = Model()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for _ in range(3):
        scaler.scale(model(torch.randn(90, 64)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert transfers.taken() == ["to in snapshot"]


def test_the_count_would_see_a_read(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    from fp8_safeguard.hooks import operands

    model = nn.Linear(64, 64)
    guard = watch(model)
    source = "def measure(session, layer, x_TK, *rest, **options):\n    x_TK.sum().item(), x_TK[x_TK > 0]\n"
    names: dict[str, Any] = {}
    exec(compile(source, operands.__file__, "exec"), names)
    monkeypatch.setattr(operands, "measure", names["measure"])
    model(torch.randn(9, 64))
    assert transfers.taken() == ["item in measure", "_local_scalar_dense in measure", "index in measure"]
    assert guard._session.frame is not None
