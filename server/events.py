"""Live events of a run, handed from ingest threads to streams."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

EventKind = Literal["sample", "decision", "alert", "plan", "state"]
KEPT_EVENTS = 1024
"""Events kept for a reader that reconnects with Last-Event-ID."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that the readers of a run are told, after it was committed."""

    run: str
    kind: EventKind
    data: dict[str, Any]
    number: int = 0


@dataclass(eq=False)
class Subscription:
    """One reader: a bounded queue in its own event loop."""

    run: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Event | None]
    lost: int = field(default=0)
    """Events that the reader was too slow for."""

    def offer(self, event: Event | None) -> None:
        """Put an event in the queue; the oldest one makes room. Runs in the reader's loop."""
        if self.queue.full():
            self.queue.get_nowait()
            self.lost += 1
        self.queue.put_nowait(event)


class Broadcast:
    """Events by run to any number of readers; it holds no database connection and no thread."""

    def __init__(self, queue_events: int) -> None:
        self._queue_events = queue_events
        self._lock = threading.Lock()
        self._readers: set[Subscription] = set()
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._numbers = itertools.count(1)
        self._closed = False

    def publish(self, events: Iterable[Event]) -> None:
        """Tell the readers; callable from any thread."""
        with self._lock:
            for event in events:
                numbered = Event(run=event.run, kind=event.kind, data=event.data, number=next(self._numbers))
                self._kept.append(numbered)
                for reader in self._readers:
                    if reader.run == event.run:
                        _hand_over(reader, numbered)

    def subscribe(self, run: str, after: int | None = None) -> Subscription:
        """A reader in the running loop; `after` asks for the kept events that followed that number."""
        loop = asyncio.get_running_loop()
        reader = Subscription(run, loop, asyncio.Queue(maxsize=self._queue_events))
        with self._lock:
            if after is not None:
                for event in self._kept:
                    if event.run == run and event.number > after:
                        reader.offer(event)
            if self._closed:
                reader.offer(None)
            self._readers.add(reader)
        return reader

    def unsubscribe(self, reader: Subscription) -> None:
        """Forget a reader that went away."""
        with self._lock:
            self._readers.discard(reader)

    def readers(self) -> int:
        """How many streams are open."""
        with self._lock:
            return len(self._readers)

    def close(self) -> None:
        """End every stream, so that the service can stop."""
        with self._lock:
            self._closed = True
            for reader in self._readers:
                _hand_over(reader, None)


def _hand_over(reader: Subscription, event: Event | None) -> None:
    # The loop may have closed between the reader's last turn and now; its stream is gone then.
    if not reader.loop.is_closed():
        reader.loop.call_soon_threadsafe(reader.offer, event)
