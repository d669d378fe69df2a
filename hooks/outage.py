"""When to try the server again; says once that it is away."""

from __future__ import annotations

import random
import time
from pathlib import Path

from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.transport import Answer

FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 30.0
QUIET_SECONDS = 10.0
"""An outage shorter than this is told the first time only: a server that comes and goes must not fill the log."""

_MESSAGES = {
    "unreachable": "no answer from %s (%s)",
    "busy": "%s does not take samples now (%s)",
    "foreign": "what answers at %s is not the fp8-safeguard service but a proxy or another server (%s)",
    "held": "%s refuses to take samples (%s)",
    "failing": "%s answers samples with an error (%s)",
}


class Outage:
    """What one client has told about its server."""

    def __init__(self, address: str, run: str, once: OnceLog) -> None:
        self._address, self._run, self._once = address, run, once
        self._since: float | None = None
        self._back: float | None = None
        self._delivered = 0
        self._told: set[str] = set()

    @property
    def away(self) -> bool:
        """Whether the server takes no samples, as far as is known."""
        return self._since is not None and self._back is None

    def failed(self, answer: Answer, place: str) -> None:
        """The server did not take samples, which wait at that place."""
        if self._since is None:
            self._since, self._delivered = time.monotonic(), 0
        self._back = None
        message = _MESSAGES[answer.kind] + ": samples of run %s wait %s; training goes on"
        kind = f"outage: {answer.kind}"
        if self._once.counts.get(kind, 0) == 0:
            self._told.add(kind)
        self._once.warning(kind, message, self._address, answer.reason, self._run, place)

    def delivered(self, number: int, waiting: int) -> None:
        """The server took that many samples, and so many wait still."""
        if self._since is None or not number:
            return
        self._back = self._back or time.monotonic()
        self._delivered += number
        if waiting:
            return
        lasted, self._since = self._back - self._since, None
        if self._told:
            logger.warning(
                "%s is back: run %s resumed after %.0f s, %d samples delivered",
                self._address, self._run, lasted, self._delivered,
            )  # fmt: skip
        for kind in self._told if lasted >= QUIET_SECONDS else ():
            self._once.forget(kind)
        self._told = set()

    def left_unsent(self, kept: int, lost: int, when: str, folder: Path | None) -> None:
        """What has not arrived at the end: where it is kept, or that it is lost."""
        if kept:
            logger.warning(
                "%d samples of run %s did not reach %s %s: they are kept in %s, and the next start of this run sends them",
                kept, self._run, self._address, when, folder,
            )  # fmt: skip
        if lost:
            logger.warning(
                "%d samples of run %s did not reach %s %s and are lost", lost, self._run, self._address, when
            )


class Pause:
    """Time until the next try: longer after each failure, by a random part, so that many trainers do not come back at once."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0
        # Not the global generator: it is the trainer's.
        self._random = random.Random()

    @property
    def left(self) -> float:
        """Seconds until the next try; not above 0 where it is due."""
        return self._until - time.monotonic()

    def end(self) -> None:
        """Try at once, and begin with short pauses."""
        self._failures, self._until = 0, 0.0

    def longer(self, answer: Answer | None) -> None:
        """Pause after that answer; None where something of our own has failed."""
        longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures, 16))
        if answer is None or answer.kind == "held":
            longest = LONGEST_BACKOFF_SECONDS  # a person has to act
        asked = 0.0 if answer is None else answer.wait_seconds or 0.0
        self._failures += 1
        seconds = max(longest * self._random.uniform(0.5, 1.0), asked)
        self._until = time.monotonic() + min(seconds, LONGEST_BACKOFF_SECONDS)
