"""Compiles every shipped kernel, in a process of its own."""

import os

import pytest

ENABLED = os.environ.get("FP8_SAFEGUARD_COMPILE") == "1"


def pytest_configure() -> None:
    if ENABLED and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 turns kernels into Python, which cannot be compiled: unset it"
        )
