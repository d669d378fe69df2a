"""Tests that take a minute or more each: `make test-all` runs them."""

import os
from collections.abc import Iterator

import pytest
import torch

REASON = "not run: its tests take a minute each; set FP8_SAFEGUARD_SLOW=1"

ENABLED = os.environ.get("FP8_SAFEGUARD_SLOW") == "1"

collect_ignore_glob = [] if ENABLED else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why the folder was left out."""
    if not ENABLED:
        terminalreporter.write_line(f"tests/slow {REASON}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
