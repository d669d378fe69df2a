"""Imports compiled kernels on first use."""

import importlib
from functools import cache
from types import ModuleType


@cache
def compiled_module(name: str) -> ModuleType:
    """A module of this package that needs numba or Triton: importing the package must not import them."""
    return importlib.import_module(f"fp8_safeguard.kernels.{name}")
