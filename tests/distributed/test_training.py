"""Two ranks of the trainer decide alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.trainer import TrainConfig, Trainer

Launch = Callable[..., Any]


@pytest.fixture
def text(tmp_path: Path) -> None:
    """What the ranks learn."""
    (tmp_path / "text.txt").write_text(" ".join(f"word{n * n % 97}" for n in range(6000)))


def test_delayed_scales_follow_the_amax_of_all_ranks(launch: Launch, text: None, tmp_path: Path) -> None:
    first, second = launch("replica", "delayed", 2).results()
    assert first == second
    changes: dict[str, Any] = {"sequences_per_step": 4, "micro_batches": 2, "scaling": "delayed"}
    alone = Trainer(TrainConfig.tiny(corpus=str(tmp_path / "text.txt"), amax_history=3, **changes))
    assert first["trained"] == [[r.step, r.loss, r.gradient_norm, r.skipped] for r in alone.run(6)]
    assert first["histories"] == {
        name: layer.scaling.state().tolist() for name, layer in alone.model.linears().items()
    }


def test_a_loss_that_is_lost_on_one_rank_is_lost_on_all(launch: Launch, text: None) -> None:
    first, second = launch("replica", "lost", 2).results()
    assert first == second
    assert first["skipped"] == [[4, True], [5, True]]
    assert first["attempt"] == "1"
    assert [row[0] for row in first["after"]] == [4, 5]
    assert not any(skipped for *_, skipped in first["after"])


def test_a_signal_to_one_rank_stops_all_after_the_same_step(launch: Launch, text: None) -> None:
    first, second = launch("replica", "stopped", 2).results()
    assert first == second
    assert first["code"] == 143
    assert first["step"] in (3, 4)
    assert Path(first["path"]).exists()


def test_sequences_that_do_not_divide_are_refused_on_every_rank(launch: Launch, text: None) -> None:
    for rank in launch("replica", "refused", 2).results():
        assert "not a multiple of 2" in rank["said"]
