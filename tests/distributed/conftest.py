"""Runs scenarios on several ranks: processes of their own, which must end whatever happens to one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Ranks:
    """The processes of one scenario."""

    def __init__(self, script: str, scenario: str, size: int, folder: Path, **environment: str) -> None:
        self.folder, self.size, self._scenario = folder, size, scenario
        # The scripts import each other, and the folder of a script is on no path here.
        beside = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        fixed = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder), "PYTHONPATH": beside}
        command = [sys.executable, str(HERE / f"{script}.py")]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(folder), scenario],
                env={**os.environ, **fixed, **environment},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def results(self, dead: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """What the ranks saw; those that are to die have seen nothing."""
        try:
            errors = [process.communicate(timeout=240)[1] for process in self.processes]
        finally:
            self.kill()
        alive = [rank for rank in range(self.size) if rank not in dead]
        assert [self.processes[rank].returncode for rank in alive] == [0] * len(alive), "\n".join(errors)
        return [json.loads((self.folder / f"{self._scenario}.{rank}.json").read_text()) for rank in alive]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            if process.stderr is not None and not process.stderr.closed:
                process.communicate()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Starts a scenario of worker.py or trouble.py on that many ranks."""
    started: list[Ranks] = []

    def start(script: str, scenario: str, size: int, **environment: str) -> Ranks:
        started.append(Ranks(script, scenario, size, tmp_path, **environment))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()
