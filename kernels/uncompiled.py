"""Functions that torch.compile leaves out of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8_safeguard.kernels.dispatch import logger
from fp8_safeguard.kernels.lazy import compiled_module

linear: Callable[..., Any]
"""fp8_linear as a graph calls it: in eager Python, between two graphs. Like the others it is here once prepare() ran."""
grouped_linear: Callable[..., Any]
"""fp8_grouped_linear."""
enter: Callable[..., Any]
"""DelayedScaling.enter."""


def prepare() -> bool:
    """Make them. For code that is traced alone: to do it at import would import the compiler."""
    if "linear" not in globals():
        logger.info(
            "torch.compile: layers with a scale for a whole operand, or with tampering, run in eager Python between graphs"
        )
        products, memory = compiled_module("linear"), compiled_module("delayed")
        disable: Any = torch.compiler.disable
        made = {
            "linear": products.fp8_linear,
            "grouped_linear": products.fp8_grouped_linear,
            "enter": memory.enter,
        }
        globals().update({name: disable(function) for name, function in made.items()})
    return True


# As in dispatch.py: a trace runs it and takes its answer, and then finds the functions where they are.
prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]
