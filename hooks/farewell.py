"""Sends the last samples at exit and on SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any, Protocol

EXIT_SECONDS = 5.0
"""Longest that the end of the process waits for the server; what is left stays in the spool, or is counted and logged."""


class Leaver(Protocol):
    """Who has something to send at the end."""

    def flush(self, timeout: float) -> bool:
        """Send what there is."""

    def finish(self, timeout: float, *, clean: bool) -> None:
        """Send what there is and stop; a clean end is told to the server."""


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
            # The interpreter notes an exception that nobody caught before it calls what is registered at exit.
            failed = getattr(sys, "last_type", None) is not None
            leaver.finish(EXIT_SECONDS, clean=not failed and not self.signalled)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._sending = self._sending, True
        self.signalled = True
        previous, leaver = self._previous, self._mine()
        try:
            if leaver is not None and not again:
                if callable(previous):
                    leaver.flush(EXIT_SECONDS)
                else:
                    leaver.finish(EXIT_SECONDS, clean=False)
        finally:
            self._sending = again
        if callable(previous):
            previous(number, frame)
            return
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
        os.kill(os.getpid(), number)
