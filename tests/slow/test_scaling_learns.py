"""One scale for a whole operand trains as well as scales of blocks do."""

from pathlib import Path

import pytest

from fp8_safeguard.trainer import TrainConfig, Trainer


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A few words, of which some come after each other often."""
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"word{n * n % 97}" for n in range(6000)))
    return str(path)


def late_loss(scaling: str, text: str) -> float:
    """Mean of the last 5 of 30 steps of the tiny model."""
    config = TrainConfig.tiny(corpus=text, scaling=scaling, learning_rate=5e-3)
    with Trainer(config) as trainer:
        return sum(report.loss for report in trainer.run(30)[-5:]) / 5


def test_all_scalings_learn_the_same(text: str) -> None:
    """The same loss within what its steps differ by."""
    block = late_loss("block", text)
    for scaling in ("tensor", "delayed"):
        assert late_loss(scaling, text) == pytest.approx(block, rel=0.02), scaling
