"""Runs one request at a time in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from fp8_safeguard.hooks.transport import Answers, Transport

Job = Callable[[Transport], Answers]


class Courier:
    """Whatever a network does to its thread, the one that keeps samples on disk never waits for it.

    A request that takes for ever is given up by giving up the courier: its thread ends when the request does.
    """

    def __init__(self, connect: Callable[[], Transport], wake: Callable[[], None]) -> None:
        self._connect = connect
        self._wake = wake
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._answers: Answers | Exception | None = None

    def start(self, job: Job) -> None:
        """Begin a request; only with none under way. Raises RuntimeError where no thread is to be had."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="fp8-safeguard-courier", daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(job)

    @property
    def done(self) -> bool:
        """Whether the request has been answered."""
        return self._answers is not None

    def take(self) -> Answers:
        """The answers, once. Raises what the request raised."""
        answers, self._answers = self._answers, None
        if isinstance(answers, Exception):
            raise answers
        assert answers is not None
        return answers

    def close(self) -> None:
        """No more requests; one under way is not waited for."""
        self._jobs.put(None)

    def _work(self) -> None:
        transport: Transport | None = None
        while (job := self._jobs.get()) is not None:
            try:
                transport = transport or self._connect()
                self._answers = job(transport)
            except Exception as error:
                self._answers = error
            self._wake()
        if transport is not None:
            transport.close()
