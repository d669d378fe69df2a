"""Silences every guard in a forked child: its parent reports."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something with threads, locks or files that a forked child must leave alone."""

    def before_fork(self) -> None:
        """Come to rest, in bounded time."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """Fall silent: no thread of the parent's is here, and its locks are as they were."""


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()
_resting: list[Forked] = []
_registered: list[bool] = []


def watch(subject: Forked) -> None:
    """Tell it about every fork of this process, for as long as it lives."""
    if not _registered:
        # With the first guard, not with the import.
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        _registered.append(True)
    _watched.add(subject)


def _before() -> None:
    _resting[:] = list(_watched)
    for subject in _resting:
        subject.before_fork()


def _after_in_parent() -> None:
    for subject in _resting:
        subject.after_fork_in_parent()
    _resting.clear()


def _after_in_child() -> None:
    for subject in _resting:
        subject.after_fork_in_child()
    _resting.clear()
