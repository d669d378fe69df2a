"""Background thread that sends samples; training never waits for it."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.sample import SampleBuilder, StepRecord, log_sample
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.spool import append
from fp8_safeguard.hooks.transport import Answer, Transport
from fp8_safeguard.monitor.wire import Sample, sample_to_wire

QUEUE_SAMPLES = 256
"""Samples that wait for the server in memory; beyond it the oldest are dropped and counted."""
BATCH_SAMPLES = 32
"""Samples sent in one request when several wait."""
FIRST_BACKOFF_SECONDS = 0.25
LONGEST_BACKOFF_SECONDS = 30.0


@dataclass(slots=True)
class _Queued:
    """A built sample that waits for the server."""

    sample: Sample
    resent: bool = False
    """Whether the server has asked for its slot list once already."""


class Client:
    """Takes finished steps from the training thread and brings them to the server, or to a file without one.

    The queue is in memory and bounded: what a long outage or a crash leaves in it is lost, counted and logged.
    A sample keeps its batch id through every retry, so one that arrived twice is a duplicate and no more.
    """

    def __init__(
        self,
        options: Options,
        builder: SampleBuilder,
        on_reply: Callable[[Mapping[str, Any]], None],
        once: OnceLog,
    ) -> None:
        self._options = options
        self._builder = builder
        self._on_reply = on_reply
        self._once = once
        self._inbox: deque[StepRecord] = deque()
        self._outbox: deque[_Queued] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._busy = False
        self._closing = False
        self._abandoned = False
        self._failures = 0
        self._retry_at = 0.0
        self._batch = BATCH_SAMPLES
        self._accepted: set[str] = set()
        # Jitter must not draw from the global generator: it is the trainer's.
        self._random = random.Random()

    @property
    def waiting(self) -> int:
        """Samples that have not reached their destination."""
        return len(self._inbox) + len(self._outbox)

    def submit(self, record: StepRecord) -> None:
        """Take a finished step; returns at once."""
        if os.getpid() != self._process:
            return  # a forked child: its parent reports
        with self._change:
            if self._closing:
                return
            if len(self._inbox) >= QUEUE_SAMPLES:
                self._inbox.popleft()
                self.count_dropped("the sender is behind")
            if self._thread is None:
                # Kept once it runs: where no thread can be started now, the next sample tries again.
                thread = threading.Thread(target=self._work, name="fp8-safeguard-client", daemon=True)
                thread.start()
                self._thread = thread
            self._inbox.append(record)
            self._change.notify_all()

    def count_dropped(self, reason: str, number: int = 1) -> None:
        """Samples are lost: the next one says how many, the log says why once."""
        self._builder.dropped += number
        self._once.warning(
            f"dropped: {reason}", "samples are dropped (%s); their number travels with the next", reason
        )

    def flush(self, timeout: float) -> bool:
        """Wait until everything submitted has arrived and its replies are handled; False after `timeout` seconds."""
        if os.getpid() != self._process:
            return False
        with self._change:
            self._failures, self._retry_at = 0, 0.0  # somebody waits: try now rather than after the pause
            self._change.notify_all()
            return self._change.wait_for(lambda: not self.waiting and not self._busy, timeout)

    def close(self, timeout: float) -> int:
        """Send what is left for at most `timeout` seconds, then stop; the number of samples that were lost."""
        arrived = self.flush(timeout)
        with self._change:
            self._closing = self._abandoned = True
            lost = 0 if arrived else self.waiting
            self._inbox.clear()
            self._outbox.clear()
            self._change.notify_all()
        if lost:
            logger.warning("%d samples were not sent within %g s and are lost", lost, timeout)
        return lost

    def abandon(self) -> None:
        """Stop without waiting: nobody is left who could want the samples."""
        with self._change:
            self._closing = self._abandoned = True
            self._change.notify_all()

    def _work(self) -> None:
        transport: Transport | None = None
        try:
            while self._wait():
                try:
                    self._take_in()
                    if self._outbox and time.monotonic() >= self._retry_at:
                        transport = transport or self._connect()
                        self._send(transport)
                except Exception as error:
                    # Whatever it was would fail for ever: give up the oldest sample.
                    self._once.failure("sending", error)
                    self._outbox and self._outbox.popleft()
                    self.count_dropped(type(error).__name__)
        finally:
            if transport is not None:
                transport.close()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread has to end."""
        with self._change:
            self._busy = False
            self._change.notify_all()
            while not self._abandoned:
                pause = self._retry_at - time.monotonic() if self._outbox else None
                if self._inbox or (pause is not None and pause <= 0):
                    self._busy = True
                    return True
                self._change.wait(pause)
            return False

    def _take_in(self) -> None:
        """Build, log and queue what came from the training thread, whatever the server does."""
        while self._inbox:
            record = self._inbox.popleft()
            try:
                sample = self._builder.build(record)
                log_sample(self._options.run, sample)
                if self._options.server is not None:
                    self._queue(sample)
                elif self._options.spool_dir is not None:
                    append(self._options, sample)
            except Exception as error:
                self._once.failure("building a sample", error)
                self.count_dropped(type(error).__name__)

    def _queue(self, sample: Sample) -> None:
        if len(self._outbox) >= QUEUE_SAMPLES:
            self._outbox.popleft()
            self.count_dropped("the server does not answer")
        self._outbox.append(_Queued(sample))

    def _connect(self) -> Transport:
        assert self._options.server is not None
        return Transport(self._options.server, self._options.run, self._options.token)

    def _send(self, transport: Transport) -> None:
        batch = [self._outbox[i] for i in range(min(self._batch, len(self._outbox)))]
        known = [queued.sample.slots_id in self._accepted for queued in batch]
        wires = [sample_to_wire(q.sample, binary=True, by_id=k) for q, k in zip(batch, known, strict=True)]
        answers = transport.post(wires)
        if len(batch) > 1 and all(answer.kind in ("refused", "too-large") for answer in answers):
            self._batch = max(1, len(batch) // 2)  # one of them, or their sum, is at fault: find out which
            return
        self._batch = BATCH_SAMPLES if len(batch) == 1 else self._batch
        finished = [self._settle(queued, answer) for queued, answer in zip(batch, answers, strict=True)]
        unheard = [answer for answer in answers if answer.kind == "retry"]
        if unheard:
            self._back_off(unheard[0])
        gone = {id(queued) for queued, done in zip(batch, finished, strict=True) if done}
        self._outbox = deque(queued for queued in self._outbox if id(queued) not in gone)

    def _settle(self, queued: _Queued, answer: Answer) -> bool:
        """Act on the answer for one sample; whether the sample is done with."""
        if answer.kind == "accepted":
            self._accepted.add(queued.sample.slots_id)
            self._failures, self._retry_at = 0, 0.0
            self._reply(answer.body)
            return True
        if answer.kind == "slots-unknown" and not queued.resent:
            self._accepted.discard(queued.sample.slots_id)
            queued.resent = True
            return False
        if answer.kind == "retry":
            return False
        self.count_dropped("the server refuses them")
        self._once.warning(
            f"refused: {answer.body.get('status')} {answer.body.get('type')}",
            "the server refuses a sample: %s",
            answer.reason,
        )
        return True

    def _reply(self, body: Mapping[str, Any]) -> None:
        try:
            self._on_reply(body)
        except Exception as error:
            self._once.failure("a reply of the server", error)

    def _back_off(self, answer: Answer) -> None:
        """Wait longer after each failure, by a random part, so that many trainers do not come back at once."""
        self._once.warning(
            "unreachable", "the server does not take samples (%s); they wait in memory", answer.reason
        )
        longest = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        pause = max(longest * self._random.uniform(0.5, 1.0), answer.wait_seconds or 0.0)
        self._retry_at = time.monotonic() + min(pause, LONGEST_BACKOFF_SECONDS)
