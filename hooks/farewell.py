"""Sends the last samples at exit and on SIGTERM."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_SECONDS = 5.0
"""Longest that the end of the process waits for the server; what is left is counted and logged."""


class Farewell:
    """Calls `finish(timeout)` at exit. An earlier SIGTERM handler, and the exit code, stay what they were.

    Where a handler of the trainer's own follows, SIGTERM only flushes: training may go on to write a checkpoint.
    """

    def __init__(self, flush: Callable[[float], object], finish: Callable[[float], object]) -> None:
        # Weak: a registration at exit must not keep a guard that everybody else has forgotten.
        self._flush, self._finish = weakref.WeakMethod(flush), weakref.WeakMethod(finish)
        self._process = os.getpid()
        self._previous: Any = None
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

    def _at_exit(self) -> None:
        self._send(self._finish)

    def _send(self, method: weakref.WeakMethod[Callable[[float], object]]) -> None:
        send = method()
        if send is not None and os.getpid() == self._process:
            send(EXIT_SECONDS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous
        if callable(previous):
            self._send(self._flush)
            previous(number, frame)
            return
        self._send(self._finish)
        signal.signal(number, signal.SIG_DFL if previous is None else previous)
        os.kill(os.getpid(), number)
