"""Sends the last samples at exit and on SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Any, Protocol

EXIT_SECONDS = 5.0
"""Longest that the end of the process waits for its servers; what is left stays in the spool, or is counted and logged."""
_LEAST_SECONDS = 0.5
"""What each further guard of the process still gets when the first ones have used that up."""


class Leaver(Protocol):
    """Who has something to send at the end."""

    def flush(self, timeout: float) -> bool:
        """Send what there is."""

    def finish(self, timeout: float, *, clean: bool) -> None:
        """Send what there is and stop; a clean end is told to the server."""


_end_by: list[float] = []
"""Until when the guards of this process wait together, from the first one's turn on."""


def _seconds_left() -> float:
    if not _end_by:
        _end_by.append(time.monotonic() + EXIT_SECONDS)
    return min(EXIT_SECONDS, max(_LEAST_SECONDS, _end_by[0] - time.monotonic()))


class Farewell:
    """Ends the leaver at exit. An earlier SIGTERM handler, and the exit code, stay what they were.

    Where a handler of the trainer's own follows, SIGTERM only flushes: training may go on to write a checkpoint. A
    second SIGTERM, while the first one's samples are being sent, does not wait again.
    """

    def __init__(self, leaver: Leaver) -> None:
        # Weak: a registration at exit must not keep a guard that everybody else has forgotten.
        self._leaver = weakref.ref(leaver)
        self._process = os.getpid()
        self._previous: Any = None
        self._sending = False
        self.signalled = False
        """Whether SIGTERM has come: the run was stopped and did not end."""
        atexit.register(self._at_exit)
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous = previous
                signal.signal(signal.SIGTERM, self._on_signal)

    def cancel(self) -> None:
        """Take both off again."""
        atexit.unregister(self._at_exit)
        main = threading.current_thread() is threading.main_thread()
        if self._previous is not None and main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _mine(self) -> Leaver | None:
        """The leaver, in the process that it belongs to."""
        return self._leaver() if os.getpid() == self._process else None

    def _at_exit(self) -> None:
        leaver = self._mine()
        if leaver is not None:
            # The interpreter notes an exception that nobody caught before it calls what is registered at exit. Of
            # sys.exit() it notes nothing, whatever the code: that counts as a clean end.
            failed = getattr(sys, "last_type", None) is not None
            leaver.finish(_seconds_left(), clean=not failed and not self.signalled)

    @property
    def _ends_here(self) -> bool:
        """Whether no handler of the trainer's follows, only those of other guards."""
        behind = getattr(self._previous, "__self__", None)
        return behind._ends_here if isinstance(behind, Farewell) else not callable(self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._sending = self._sending, True
        self.signalled = True
        previous, leaver, first = self._previous, self._mine(), not _end_by
        try:
            if leaver is not None and not again:
                if self._ends_here:
                    leaver.finish(_seconds_left(), clean=False)
                else:
                    leaver.flush(_seconds_left())
            if callable(previous):
                previous(number, frame)
                return
        finally:
            self._sending = again
            if first:
                _end_by.clear()
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
        os.kill(os.getpid(), number)
