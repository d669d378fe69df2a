"""One log line for each kind of trouble, however often it happens."""

from __future__ import annotations

import logging

logger = logging.getLogger("fp8_safeguard")

KINDS = 1000
"""Kinds of trouble that are told apart: a name that changes with every step must not grow for ever."""
_FURTHER = "further kinds"


class OnceLog:
    """Logs the first trouble of each kind and counts the others, so that a fault in a hook is one line."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """How often each kind happened."""

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        """Log the message the first time that this kind is seen."""
        if kind not in self.counts and len(self.counts) >= KINDS:
            kind, message, arguments = _FURTHER, "further kinds of trouble are counted and not told", ()
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        if count == 0:
            logger.warning(message, *arguments)

    def forget(self, kind: str) -> None:
        """The trouble is over: should it come back, it is told again."""
        self.counts.pop(kind, None)

    def failure(self, where: str, error: BaseException, at: str = "") -> None:
        """Log an exception of our own code that was kept away from the training loop; `at` names the first layer."""
        kind = f"{where}: {type(error).__name__}"
        place = f"{where} of layer {at}" if at else where
        self.warning(
            kind, "monitoring failed in %s (%s: %s); training goes on, later ones are only counted",
            place, type(error).__name__, error,
        )  # fmt: skip
