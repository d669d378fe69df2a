"""Bounds what waiting requests hold: memory, threads and time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.to_thread import run_sync

from fp8_safeguard.server.problems import Problem, busy

# Ingest threads beyond the few that keep one writer busy would only take the readers' threads away.
_THREADS = 4
# As many of the largest bodies may wait at once.
_LARGEST_BODIES = 4


class Gate:
    """What the ingest requests of one event loop may hold together."""

    def __init__(self, *, max_body_bytes: int, wait_seconds: float) -> None:
        self._most_bytes = _LARGEST_BODIES * max_body_bytes
        self._wait_seconds = wait_seconds
        self._held_bytes = 0
        self._threads = anyio.CapacityLimiter(_THREADS)

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """Gives `take(bytes)`, which raises Problem 429 where too much is held; all is given back at the end."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self._held_bytes + size > self._most_bytes:
                raise Problem(
                    429,
                    "too-many-requests",
                    f"requests of {self._held_bytes} bytes are being read already, at most {self._most_bytes} are "
                    "held at a time; send this one again later",
                    headers={"Retry-After": "1"},
                )
            self._held_bytes += size
            mine += size

        try:
            yield take
        finally:
            self._held_bytes -= mine

    async def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call in one of the ingest threads. Raises Problem 503 where none is free in time."""
        try:
            with anyio.fail_after(self._wait_seconds):
                await self._threads.acquire()
        except TimeoutError as error:
            raise busy() from error
        try:
            # The thread's own limiter is the framework's; this one was acquired above.
            return await run_sync(call, *arguments)
        finally:
            self._threads.release()
