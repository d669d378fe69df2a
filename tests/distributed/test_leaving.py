"""A process that ends leaves nothing of torch's behind that could still abort it: its exit code is the trainer's."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]


@pytest.fixture
def meeting() -> dict[str, str]:
    """Where the ranks meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def test_the_trainer_takes_the_threads_of_its_group_with_it(
    launch: Launch, tmp_path: Path, meeting: dict[str, str]
) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"word{n * n % 97}" for n in range(6000)))
    results = launch("leaving", "trained", 2, **meeting).results()
    assert all(result["threads"] for result in results)  # there were some
    assert [json.loads((tmp_path / f"threads.{rank}.json").read_text()) for rank in (0, 1)] == [[], []]


@pytest.mark.parametrize("scenario", ["in_flight", "connecting"])
def test_a_rank_dies_in_what_was_left_to_the_library_while_the_interpreter_ends(
    launch: Launch, meeting: dict[str, str], scenario: str
) -> None:
    (first,) = launch("leaving", scenario, 2, **meeting).results(dead=(1,))
    assert first["threads"]  # those of the operation are left to the process
