"""Finds the sample that the server fails on, so that others can pass."""

from __future__ import annotations

from collections.abc import Sequence

from fp8_safeguard.hooks.memory import Store
from fp8_safeguard.hooks.spool import Entry
from fp8_safeguard.hooks.transport import Answer

TRIES = 5
"""Errors on one sample before the one behind it is tried."""
_BETWEEN = 8
"""Errors from one such test to the next: a server that recovers gets its samples in order, nearly always."""


class Suspect:
    """The oldest sample, while the server answers it with an error.

    After five errors the sample behind it is sent: if the server fails on that too, the server is at fault, and both
    wait. If not, the first one has a last try; should that fail, the sample is at fault and is set aside.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._place: tuple[Store, Entry] | None = None
        self._errors = 0
        self._others_pass = False

    def judge(
        self, store: Store, entries: Sequence[Entry], answers: Sequence[Answer]
    ) -> tuple[Store, Entry, str] | None:
        """Take note of what each was answered; the sample that is at fault, with what the server said to it."""
        pairs = zip(entries, answers, strict=True)
        failing = next((pair for pair in pairs if pair[1].kind == "failing"), None)
        if failing is not None:
            return self._failed(store, *failing)
        if any(answer.waits for answer in answers):
            self._others_pass = False  # it is away: what it could do before says nothing
        elif self._is(store, entries[0]):
            self._clear()
        else:
            self._others_pass = self._place is not None
        return None

    def _failed(self, store: Store, entry: Entry, answer: Answer) -> tuple[Store, Entry, str] | None:
        if not self._is(store, entry) and self._errors < TRIES:
            self._place, self._errors = (store, entry), 0
        elif self._others_pass:
            self._clear()
            return store, entry, answer.reason
        self._errors += 1
        return None

    @property
    def alone(self) -> bool:
        """Whether there is a suspect: samples go one at a time."""
        return self._place is not None

    @property
    def passed_over(self) -> tuple[Store, int] | None:
        """Store and key of the suspect, if the one behind it is to go now."""
        due = self._errors >= TRIES and (self._errors - TRIES) % _BETWEEN == 0 and not self._others_pass
        return (self._place[0], self._place[1].key) if due and self._place is not None else None

    def _is(self, store: Store, entry: Entry) -> bool:
        return self._place is not None and self._place[0] is store and self._place[1].key == entry.key
