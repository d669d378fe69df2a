"""Runs the kernels in Triton's interpreter, in a process of its own."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

ENABLED = os.environ.get("TRITON_INTERPRET") == "1"

if ENABLED:
    from .interpreter_fix import install

    install()


@pytest.fixture(autouse=True)
def float_arithmetic() -> Iterator[None]:
    """Overflow, Inf and NaN are what a GPU computes, not mistakes: numpy's warnings about them are off."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240607)


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> Iterator[None]:
    """One thread, so that suites running side by side do not wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
