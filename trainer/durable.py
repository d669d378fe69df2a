"""Files that survive a crash of the process or the machine."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

STALE_SECONDS = 3600.0
"""Age at which a half-written file belongs to nobody any more; a slow writer is younger."""
_TEMPORARY = ".tmp"


def replace_durably(target: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Let `write` fill a file so that a crash leaves the old one or the new one, never a part; returns the path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name is unique: two processes may write the same file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)
    return target


def create_durably(target: Path, content: bytes) -> None:
    """Make a file that must not exist yet; of two processes that try at once, one gets FileExistsError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make names in the folder, such as a rename just made, durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Delete what processes that were killed in the middle of a write have left behind."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue  # its writer has just finished
