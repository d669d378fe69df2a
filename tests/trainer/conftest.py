"""A tiny text and a tiny run for every trainer test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8_safeguard.trainer import TrainConfig, Trainer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_spool(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that a test leaves behind are nobody else's."""
    monkeypatch.setenv("FP8_SAFEGUARD_SPOOL_DIR", str(tmp_path_factory.mktemp("spool")))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24,000 bytes of made-up words: learnable, and long enough for a few epochs of nothing."""
    random = np.random.Generator(np.random.PCG64(7))
    words = [
        "".join(chr(97 + c) for c in random.integers(0, 26, size=random.integers(2, 9))) for _ in range(60)
    ]
    text = " ".join(words[i] for i in random.zipf(1.5, size=9000) % 60)[:24_000]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(text, encoding="ascii")
    return path


@pytest.fixture
def make_config(text_file: Path) -> Callable[..., TrainConfig]:
    def make(**changes: Any) -> TrainConfig:
        return TrainConfig.tiny(**{"corpus": str(text_file), **changes})

    return make


@pytest.fixture
def make_trainer(make_config: Callable[..., TrainConfig]) -> Callable[..., Trainer]:
    def make(**changes: Any) -> Trainer:
        return Trainer(make_config(**changes))

    return make


@pytest.fixture
def same_state() -> Callable[[Trainer, Trainer], bool]:
    """Whether two trainers agree in every bit of parameters, buffers, moments and counters."""

    def flat(trainer: Trainer) -> list[torch.Tensor]:
        moments = trainer.optimizer.state_dict()["state"]
        return [
            *trainer.model.state_dict().values(),
            *(value for entry in moments.values() for value in entry.values()),
        ]

    def same(a: Trainer, b: Trainer) -> bool:
        tensors_a, tensors_b = flat(a), flat(b)
        counters = (a.step, a.updates, a.skipped_steps) == (b.step, b.updates, b.skipped_steps)
        equal = len(tensors_a) == len(tensors_b) and all(map(torch.equal, tensors_a, tensors_b))
        return counters and equal

    return same
