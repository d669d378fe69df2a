"""One kernel call as a value, to run or to compile."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A Triton kernel with its grid and arguments. Tensors may be of torch's `meta` device, for compiling only."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """Every argument by name, compile-time ones included."""
    warps: int = 4
    stages: int = 3
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Start the kernel on its tensors' device, unless its grid is empty."""
        if 0 in self.grid:
            return
        with _current(self.arguments):
            self.kernel[self.grid](
                **self.arguments, num_warps=self.warps, num_stages=self.stages, **self.options
            )


def _current(arguments: dict[str, Any]) -> AbstractContextManager[Any]:
    """The arguments' CUDA device as the current one: Triton starts kernels there, wherever their tensors are."""
    devices = {value.device for value in arguments.values() if isinstance(value, Tensor) and value.is_cuda}
    return torch.cuda.device(devices.pop()) if devices else nullcontext()


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def as_bytes(codes: Tensor) -> Tensor:
    """FP8 codes as uint8 with the same strides."""
    return codes.view(torch.uint8)
