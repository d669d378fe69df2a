"""Two ranks train as one process that splits its steps in two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_safeguard.trainer import ConfigError, TrainConfig, Trainer
from fp8_safeguard.trainer.distributed import Replicas

WORKER = Path(__file__).parents[1] / "distributed" / "replica.py"
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each rank saw; more scenarios are in tests/distributed."""
    folder = tmp_path_factory.mktemp("replicas")
    shutil.copy(text_file, folder / "text.txt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder), "bit_by_bit"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return folder, [json.loads((folder / f"bit_by_bit.{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_are_two_micro_batches_bit_by_bit(replicas: Any, make_trainer: Make) -> None:
    folder, (first, second) = replicas
    alone = make_trainer(sequences_per_step=4, micro_batches=2)
    expected = [[r.step, r.loss, r.gradient_norm, r.skipped] for r in alone.run(6)]
    assert first == second
    assert first["trained"] == expected
    assert first["resumed"] == expected[4:]
    for rank in range(2):
        state = torch.load(folder / f"resumed.{rank}.pt")
        assert all(torch.equal(value, state[name]) for name, value in alone.model.state_dict().items())


def test_one_rank_writes_and_names_for_all(replicas: Any) -> None:
    folder, (first, second) = replicas
    assert first["saved"]
    assert first["attempts"] == second["attempts"] == ["0", "1"]
    notes = sorted(path.name for path in (folder / "exact" / ".attempts").iterdir())
    assert notes == ["tiny.0.json", "tiny.1.json"]


def test_without_other_ranks_nothing_is_exchanged(make_config: Callable[..., TrainConfig]) -> None:
    alone = Replicas.join()
    assert (alone.rank, alone.size, alone.largest(3), alone.first(lambda: 7)) == (0, 1, 3, 7)
    values = torch.ones(2, dtype=torch.float64)
    assert alone.sum(values) is values
    alone.check(make_config(sequences_per_step=6, micro_batches=3))


def test_ranks_that_do_not_come_are_named_as_the_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2.*RANK"):
        Replicas.join()
