"""Tells the spool file of a living owner from a dead one's."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class OwnedError(OSError):
    """The file belongs to a process, or another guard, that is still at work."""


class OwnerLock:
    """An exclusive lock on a file beside the spool; the kernel gives it up when its process dies, however it dies.

    flock belongs to the open file, so two guards of one process exclude each other too; a forked child would keep
    it, and has to close its copy.
    """

    def __init__(self, path: Path) -> None:
        """Raises OwnedError where the owner lives, OSError where no lock can be had."""
        self.path = path
        self._fd = _locked(path)

    def release(self) -> None:
        """Give the lock up; closing a forked child's copy leaves the parent's in force."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Delete the file and give the lock up. In this order: nobody may take it in between and then lose it."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.release()


def _locked(path: Path) -> int:
    """Descriptor of the locked file."""
    for _ in range(8):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed the empty folder
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise OwnedError(f"{path} is locked: its owner is at work") from error
        except OSError:
            os.close(fd)
            raise
        if _is_still_there(path, fd):
            return fd
        os.close(fd)  # its last owner has removed it since it was opened: a lock on nothing
    raise OwnedError(f"{path} comes and goes: somebody else is at work there")


def _is_still_there(path: Path, fd: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
