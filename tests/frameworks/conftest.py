"""Fixtures for other people's models: one thread, a guard that is detached, and an independent count of products."""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.wire import columns_for, parse_sample

ENABLED = os.environ.get("FP8_SAFEGUARD_SLOW") == "1"
FRAMEWORKS = ("transformers", "peft", "torchao", "accelerate")


def pytest_configure() -> None:
    missing = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]
    if ENABLED and missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}; make test-slow installs them")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No option from outside, and nothing is written to the user's own folder or fetched."""
    for name in ("SERVER", "TOKEN", "RUN", "SPOOL_DIR"):
        monkeypatch.delenv(f"FP8_SAFEGUARD_{name}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Products(TorchDispatchMode):
    """Elements of x and y of each product of the forward with a parameter, by the parameter's name."""

    OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {
            p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.dim() > 1
        }
        self.uses, self.x, self.y = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._opname in self.OPERATORS:
            operands = [a for a in args if isinstance(a, Tensor) and a.dim() > 1]
            if all(type(a) in (Tensor, nn.Parameter) for a in operands):
                self.multiplied(operands, out)
        return out

    def multiplied(self, operands: list[Tensor], out: Tensor) -> None:
        # Forwards only: a backward's products run inside a graph task.
        if torch._C._current_graph_task_id() != -1:
            return
        left, right = operands[-2:]
        for w, x in ((left, right), (right, left)):
            name = self.names.get(w.untyped_storage().data_ptr())
            if name is not None:
                self.uses[name] += 1
                self.x[name] += x.numel()
                self.y[name] += out.numel()


class Reading:
    """The last sample, as the server would read it; whole layers, not their worst experts."""

    def __init__(self, guard: Guard) -> None:
        document = guard.last_sample()
        assert document is not None
        sample = parse_sample(document)
        self.coverage = {row["name"]: row for row in guard.coverage()}
        self.stats: dict[tuple[str, str], TensorStats] = {
            (slot.layer, slot.gemm or f"{slot.operand} {slot.layout}"): columns_for(sample, index)
            for index, slot in enumerate(sample.slots)
            if slot.expert is None and slot.variant is None
        }

    def count(self, layer: str, part: str) -> int:
        return self.stats[layer, part].count if (layer, part) in self.stats else 0


Train = Callable[[nn.Module], object]


class Trial:
    """The same training without and with a guard; parameters, gradients and random state were bit-equal."""

    def __init__(self, guard: Guard, products: Products, model: nn.Module) -> None:
        self.guard, self.products, self.model = guard, products, model
        self.reading = Reading(guard)

    def row(self, parameter: str) -> dict[str, Any]:
        """Its row of coverage: a linear layer's is named by its module, and a tied weight's points there."""
        rows = self.reading.coverage
        row = rows[parameter] if parameter in rows else rows[parameter.removesuffix(".weight")]
        tied = re.fullmatch("the weight of (.*): observed there", row["reason"])
        return row if tied is None else rows[tied[1]]

    def assert_every_use_is_seen_or_named(self, *, out_of_sight: tuple[str, ...] = ()) -> None:
        """As many elements of x and dy as an independent count says; no matrix without a row."""
        for name, parameter in self.model.named_parameters():
            if parameter.dim() < 2:
                continue
            row = self.row(name)
            assert row["reason"] or row["status"] == "observed"
            if name not in self.products.uses or name.endswith(out_of_sight):
                assert row["status"] == "not observed", name
                continue
            assert row["status"] in ("observed", "adapted"), row
            assert self.reading.count(row["name"], "x row") == self.products.x[name], name
            assert self.reading.count(row["name"], "w tile") == parameter.numel(), name
            dy = self.reading.count(row["name"], "dy row")
            assert dy in (0, self.products.y[name]), name
            assert dy > 0 or not parameter.requires_grad, name


@pytest.fixture
def trial() -> Iterator[Callable[..., Trial]]:
    guards: list[Guard] = []

    def run(build: Callable[[], nn.Module], train: Train, **options: Any) -> Trial:
        ends: list[list[Tensor | None]] = []
        counted: list[Products] = []
        for observed in (False, True):
            torch.manual_seed(0)
            model = build()
            if observed:
                guards.append(attach(model, **{"every": 1, **options}))
                train(model)
            else:
                counted.append(Products(model))
                with counted[-1]:
                    train(model)
            gradients = [p.grad for p in model.parameters()]
            ends.append([*model.state_dict().values(), *gradients, torch.get_rng_state()])
        for plain, monitored in zip(*ends, strict=True):
            assert (plain is None) == (monitored is None)
            assert plain is None or torch.equal(plain, monitored)
        return Trial(guards[-1], counted[-1], model)

    yield run
    for guard in guards:
        guard.detach(timeout=0.2)
