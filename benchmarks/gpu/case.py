"""One thing to check or to time on a GPU, and what it runs on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from gpu.floors import Work
from torch import Tensor

Row = dict[str, Any]
"""A row of the benchmarks' common JSON, and what else is worth keeping."""


@dataclass(frozen=True)
class Bench:
    """Where the cases run."""

    device: str
    """`cuda`; `cpu` under Triton's interpreter; `meta`, where tensors have no memory, for the dry run."""
    small: bool
    """Sizes that an interpreter can bear; its numbers mean nothing."""
    quick: bool = False
    """Fewer repeats."""

    @cached_property
    def generator(self) -> torch.Generator:
        """Of the device, with a fixed seed."""
        return torch.Generator(self.device).manual_seed(20240607)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random normal numbers."""
        if self.device == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Random float32 from 0 to 1."""
        if self.device == "meta":
            return torch.empty(shape, device="meta")
        return torch.rand(shape, generator=self.generator, device=self.device)

    def size(self, number: int, small: int) -> int:
        """A size on a GPU, and one for the interpreter."""
        return small if self.small else number

    def seed(self) -> torch.Generator:
        """A generator of the CPU: the reference's input is made there."""
        return torch.Generator().manual_seed(7)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A check or a timing, alone in what it may break."""

    name: str
    kind: str
    """`check`, `timing` or `tune`."""
    run: Callable[[Bench], Sequence[Row]]
    seconds: float
    """Estimate on an H200, compiling included."""
    work: Work | None = None
    """Of the timed call."""
    needs: tuple[str, ...] = ()
    """Modules of fp8_safeguard.kernels; while one does not exist the case is not run."""
    interpreted: bool = False
    """Whether the interpreter's run takes it too."""

    def missing(self) -> str:
        """The first module it needs that cannot be imported, with the reason; empty if there is none."""
        for name in self.needs:
            try:
                kernels(name)
            except ImportError as error:
                return f"kernels/{name.replace('.', '/')}.py: {error}"
        return ""


def kernels(name: str) -> ModuleType:
    """A module of fp8_safeguard.kernels, imported when a case wants it."""
    return importlib.import_module(f"fp8_safeguard.kernels.{name}")


def checked(case: str, value: float, unit: str, goal: float, **more: Any) -> Row:
    """A check's row: passed if the value is at most the goal."""
    row = {"case": case, "value": value, "unit": unit, "ratio": None, "low": None, "high": None, "goal": goal}
    return row | {"kind": "check", "passed": value <= goal} | more


def mismatches(case: str, number: int, **more: Any) -> Row:
    """A check that nothing differs."""
    return checked(case, number, "mismatches", 0, **more)
