"""Exact checkpoints: written whole or not at all, with their health."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8_safeguard.trainer.errors import CheckpointError

VERSION = 1
"""Layout of the file; another version is refused."""
_NAME = re.compile(r"step-(\d+)(\.unhealthy)?\.pt")
_KEYS = frozenset(
    {"config", "model", "optimizer", "guard", "rng", "step", "updates", "skipped_steps", "corpus", "healthy"}
)


def write(path: str | Path, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint so that a crash leaves the old file or the new one, never a part; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name is unique: two processes may write the same checkpoint.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(target.parent)
    return target


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | Path) -> dict[str, Any]:
    """The state of a checkpoint; only tensors and plain values are unpickled. CheckpointError says what is wrong."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {str(path)!r}") from error
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        seen = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} has version {seen}; this trainer reads version {VERSION}")
    missing = sorted(_KEYS - state.keys())
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}: it was not written by this trainer")
    return state


def periodic_path(folder: str | Path, step: int, *, healthy: bool) -> Path:
    """Name of the periodic checkpoint after `step` completed steps; its health is in the name."""
    return Path(folder) / f"step-{step:08d}{'' if healthy else '.unhealthy'}.pt"


def listed(folder: str | Path) -> list[tuple[int, bool, Path]]:
    """(step, healthy, path) of the periodic checkpoints in a folder, oldest first."""
    found = [
        (match, path) for path in Path(folder).glob("step-*.pt") if (match := _NAME.fullmatch(path.name))
    ]
    return sorted((int(match[1]), match[2] is None, path) for match, path in found)


def latest(folder: str | Path) -> Path:
    """The newest healthy periodic checkpoint, the one to resume from. CheckpointError if there is none."""
    healthy = [path for _, good, path in listed(folder) if good]
    if not healthy:
        raise CheckpointError(f"{str(folder)!r} holds no healthy checkpoint (step-*.pt)")
    return healthy[-1]


def rotate(folder: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` periodic checkpoints; the newest healthy one is never deleted."""
    entries = listed(folder)
    healthy = [path for _, good, path in entries if good]
    protected = set(healthy[-1:])
    for _, _, path in entries[:-keep]:
        if path not in protected:
            path.unlink(missing_ok=True)
