"""Exact checkpoints: written whole or not at all, with their health."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fp8_safeguard.trainer import attempts
from fp8_safeguard.trainer.durable import replace_durably, sweep
from fp8_safeguard.trainer.errors import CheckpointError

logger = logging.getLogger("fp8_safeguard")

VERSION = 2
"""Layout of the file; another version is refused."""
_NAME = re.compile(r"step-(\d+)(?:\.attempt-(\d+))?(\.unhealthy)?\.pt")
_KEYS = frozenset(
    {
        "config",
        "attempt",
        "model",
        "optimizer",
        "guard",
        "rng",
        "step",
        "position",
        "updates",
        "skipped_steps",
        "skipped_in_a_row",
        "loss_level",
        "corpus",
        "healthy",
        "ailments",
    }
)


@dataclass(frozen=True, kw_only=True, order=True)
class Entry:
    """One periodic checkpoint, by what its name says; later attempts come after earlier ones, whatever the step."""

    attempt: int
    """Number of the attempt that wrote it."""
    step: int
    """Completed steps."""
    healthy: bool
    """Whether it is fit to continue from."""
    path: Path
    """Where it is."""


def write(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint so that a crash leaves the old file or the new one, never a part; returns the path."""
    return replace_durably(Path(path), lambda file: torch.save({"version": VERSION, **state}, file))


def read(path: str | Path) -> dict[str, Any]:
    """The state of a checkpoint; only tensors and plain values are unpickled. CheckpointError says what is wrong."""
    try:
        _verify(Path(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}{_instead(Path(path))}") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {_first_line(error)}{_instead(Path(path))}"
        ) from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        seen = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} has version {seen}; this trainer reads version {VERSION}")
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}: it was not written by this trainer")
    return state


def _verify(path: Path) -> None:
    """Compare every part of the file with its CRC-32: torch reads a flipped bit as a weight."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"checksum of {damaged} does not match")


def readable(path: Path) -> bool:
    """Whether the file is there, whole, and undamaged."""
    try:
        _verify(path)
    except Exception:  # a damaged header can raise anything
        return False
    return True


def periodic_path(folder: str | Path, step: int, *, healthy: bool, attempt: int = 0) -> Path:
    """Name of the periodic checkpoint after `step` completed steps: its attempt and health are in the name."""
    of_attempt = f".attempt-{attempt}" if attempt else ""
    return Path(folder) / f"step-{step:08d}{of_attempt}{'' if healthy else '.unhealthy'}.pt"


def listed(folder: str | Path) -> list[Entry]:
    """The periodic checkpoints in a folder, by attempt and step."""
    named = ((path, _NAME.fullmatch(path.name)) for path in Path(folder).glob("step-*.pt"))
    return sorted(
        Entry(attempt=int(name[2] or 0), step=int(name[1]), healthy=name[3] is None, path=path)
        for path, name in named
        if name is not None
    )


def latest(folder: str | Path, *, attempt: int | None = None) -> Path:
    """The checkpoint to resume from: the newest healthy and readable one of the run as it stands.

    That is the newest attempt and what it shares with its ancestors; a later step that a rewind has abandoned does
    not count. `attempt` asks for another attempt's. A damaged file is passed over, and the log says so.
    CheckpointError if there is none.
    """
    for entry in dict.fromkeys(_candidates(Path(folder), attempt)):
        if readable(entry.path):
            return entry.path
        logger.warning("%s is damaged: looking for an older checkpoint", entry.path)
    marked = sum(not entry.healthy for entry in listed(folder))
    also = f", only {marked} that are marked unhealthy" if marked else ""
    raise CheckpointError(f"{str(folder)!r} holds no healthy checkpoint (step-*.pt){also}")


def _candidates(folder: Path, attempt: int | None) -> Iterator[Entry]:
    """Healthy checkpoints on the branch of `attempt`; without it, of the newest attempt that has any."""
    healthy = [entry for entry in listed(folder) if entry.healthy]
    known = attempts.recorded(folder, attempts.owner(folder) or "")
    if attempt is not None:
        return iter(_on_branch(known, attempt, healthy))
    numbers = sorted({*known, *(entry.attempt for entry in healthy)}, reverse=True)
    return (entry for number in numbers for entry in _on_branch(known, number, healthy))


def _on_branch(
    known: Mapping[int, attempts.Attempt], number: int, entries: Iterable[Entry]
) -> Iterator[Entry]:
    """Those of an attempt and of its ancestors up to where they are shared, newest first."""
    listed_entries = sorted(entries, reverse=True)
    for ancestor, upto in attempts.branch(known, number) or [(number, None)]:
        for entry in listed_entries:
            if entry.attempt == ancestor and (upto is None or entry.step <= upto):
                yield entry


def rotate(folder: str | Path, keep: int, *, attempt: int = 0) -> None:
    """Delete what an attempt and its ancestors no longer need: all but the newest `keep` healthy checkpoints.

    Unhealthy ones are counted by themselves, whoever wrote them, so that they never push out a healthy one. The newest
    healthy one that can be read always stays, and so do healthy ones that a rewind has abandoned and those of
    unrelated attempts.
    """
    folder = Path(folder)
    entries = listed(folder)
    known = attempts.recorded(folder, attempts.owner(folder) or "")
    healthy = list(_on_branch(known, attempt, [entry for entry in entries if entry.healthy]))
    unhealthy = [entry for entry in reversed(entries) if not entry.healthy]
    newest = next((entry for entry in healthy if readable(entry.path)), None)
    for entry in (*healthy[keep:], *unhealthy[keep:]):
        if entry != newest:
            entry.path.unlink(missing_ok=True)
    sweep(folder)


def _instead(path: Path) -> str:
    """What to resume from where this file cannot be."""
    name = _NAME.fullmatch(path.name)
    before = [
        entry
        for entry in reversed(listed(path.parent))
        if entry.healthy and entry.path != path and (name is None or entry.step < int(name[1]))
    ]
    found = next((entry.path for entry in before if readable(entry.path)), None)
    return "" if found is None else f"; the next older healthy checkpoint is {found}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
