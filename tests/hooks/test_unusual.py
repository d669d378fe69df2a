"""Weights, numbers, devices and threads of an unusual kind: measured right, or said not to be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard, operands, together

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[Tensor]]
Watch = Callable[..., Guard]

WIDTH = 128


def one_step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    model(x).square().sum().backward()
    optimizer.step()


class BothWays(nn.Module):
    """Multiplies with a square weight and with its transpose, which lies in the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.w_NK = nn.Parameter(torch.randn(WIDTH, WIDTH).exp())

    def forward(self, x_TK: Tensor) -> Tensor:
        return (x_TK @ self.w_NK.T).sigmoid() @ self.w_NK


def test_a_square_weight_and_its_transpose_are_judged_each_by_its_own_codes(both: Both, read: Read) -> None:
    guard = both(BothWays, lambda model: one_step(model, torch.randn(64, WIDTH, requires_grad=True)))
    got = read(guard)["w_NK dgrad"]
    assert got.count == 2 * 64 * WIDTH
    # Of the other orientation's codes nothing would be right.
    assert 0.005 < got.relative_error < 0.05


class Mixed(nn.Module):
    """Complex and integer weights beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.complex = nn.Linear(8, 8, dtype=torch.complex64)
        self.raw = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.table = nn.Parameter(torch.ones(8, 8, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(x)
        z = self.complex(y.to(torch.complex64)) @ self.raw
        return z.abs() + (y.detach().int() @ self.table).float()


def test_complex_and_integer_weights_are_named_and_cost_the_others_nothing(both: Both, read: Read) -> None:
    alive: list[nn.Module] = []
    guard = both(Mixed, lambda model: (alive.append(model), one_step(model, torch.randn(4, 8))))
    assert not [kind for kind in guard._session.once.counts if "Error" in kind]
    assert {slot.layer for slot in read(guard).sample.slots} == {"plain"}
    rows = {row["name"]: row for row in guard.coverage()}
    for name, kept_as in (("complex", "complex64"), ("raw", "complex64"), ("table", "int32")):
        assert rows[name]["status"] == "not observed"
        assert kept_as in rows[name]["reason"]


@pytest.mark.filterwarnings("ignore:.*meta.*:UserWarning")
def test_a_model_that_leaves_the_meta_device_after_its_first_forward_is_measured(
    watch: Watch, read: Read, train: Train
) -> None:
    model = nn.Linear(8, 8, device="meta")
    guard = watch(model)
    model(torch.randn(4, 8, device="meta"))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    train(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    assert read(guard)[" x row"].count == 4 * 8
    assert not [kind for kind in guard._session.once.counts if "Error" in kind]


class Products(nn.Module):
    """A module call, and two products by function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w_KN = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) @ self.w_KN).sigmoid() @ self.w_KN


def test_threads_that_run_one_model_at_once_lose_no_use(watch: Watch, read: Read) -> None:
    """All of them open the step: none may go on before the frame is there."""
    model, threads = Products(), 4
    guard = watch(model)
    session = guard._session
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    outputs: list[Tensor] = []
    acquired = session._buffers().acquire
    opening, others = threading.Event(), threading.Event()

    def slowly() -> Any:
        opening.set()
        others.wait(0.2)
        return acquired()

    session._buffers().acquire = slowly  # type: ignore[method-assign]
    workers = [
        threading.Thread(target=lambda: outputs.append(model(torch.randn(4, 8)))) for _ in range(threads)
    ]
    workers[0].start()
    assert opening.wait(10)
    for worker in workers[1:]:
        worker.start()
    for worker in workers:
        worker.join()
    others.set()
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    optimizer.step()
    got = read(guard)
    for operand in ("x row", "x col", "dy row", "dy col"):
        assert got[f"linear {operand}"].count == threads * 4 * 8
        assert got[f"w_KN {operand}"].count == threads * 2 * 4 * 8


class Loaded(nn.Module):
    """A frozen weight that was loaded in inference mode, in front of one that learns."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.linear(x)


def test_a_weight_made_in_inference_mode_is_measured(both: Both, read: Read) -> None:
    guard = both(Loaded, lambda model: one_step(model, torch.randn(64, WIDTH)))
    assert read(guard)["frozen w tile"].count == WIDTH * WIDTH
    assert not guard._session.once.counts


class Scaled(nn.Linear):
    """Its first keyword is a number."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_before_the_input_is_passed_over(watch: Watch, read: Read, compiled: bool) -> None:
    layer = Scaled(8, 8)
    guard = watch(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    call(scale=2.0, x=torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert read(guard)[" x row"].count == read(guard)[" dy row"].count == 4 * 8
    assert not guard._session.once.counts


def test_a_step_does_not_end_within_a_measurement_of_another_thread(
    watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    guard = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    measuring, ended = threading.Event(), threading.Event()
    real = operands.layout_stats

    def slow(*arguments: Any, **keywords: Any) -> Any:
        measuring.set()
        ended.wait(0.2)
        return real(*arguments, **keywords)

    monkeypatch.setattr(operands, "layout_stats", slow)
    monkeypatch.setattr(together.native_use, "fits", lambda *operands: False)
    worker = threading.Thread(target=model, args=(torch.randn(4, 8),))
    worker.start()
    assert measuring.wait(10)
    optimizer.step()
    ended.set()
    worker.join()
    assert read(guard)[" x row"].count == 4 * 8
    assert not guard._session.once.counts


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_weight_without_elements_is_named(both: Both, read: Read) -> None:
    alive: list[nn.Module] = []

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 8), nn.Linear(8, 8))

    guard = both(build, lambda model: (alive.append(model), one_step(model, torch.randn(4, 8))))
    assert not [kind for kind in guard._session.once.counts if "Error" in kind]
    assert read(guard)["2 x row"].count == 4 * 8
    assert guard.coverage()[0]["reason"] == "not read: a weight of shape [0, 8]"


def test_a_bag_of_embeddings_is_a_look_up(watch: Watch) -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 8), nn.Linear(8, 8))
    guard = watch(model)
    model(torch.randint(9, (4, 3))).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert guard.last_sample() is not None
    reasons = {row["name"]: row["reason"] for row in guard.coverage()}
    assert reasons["0.weight"] == "embedding: a look-up, no GEMM"
