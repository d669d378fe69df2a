"""Compiles every shipped kernel, in a process of its own."""

import os

import pytest

REASON = "not run: it compiles for minutes; set FP8_SAFEGUARD_COMPILE=1, leave TRITON_INTERPRET unset and run the folder alone"

ENABLED = os.environ.get("FP8_SAFEGUARD_COMPILE") == "1"

collect_ignore_glob = [] if ENABLED else ["test_*.py"]


def pytest_configure() -> None:
    if ENABLED and os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 turns kernels into Python, which cannot be compiled: unset it"
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why the folder was left out."""
    if not ENABLED:
        terminalreporter.write_line(f"tests/compile {REASON}")
