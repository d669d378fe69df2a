"""Background thread that keeps and sends samples; training never waits for it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8_safeguard.hooks import forking
from fp8_safeguard.hooks.backlog import Backlog, full_body, together
from fp8_safeguard.hooks.courier import Courier
from fp8_safeguard.hooks.emergency import Emergency
from fp8_safeguard.hooks.memory import Store
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.hooks.outage import Outage, Pause
from fp8_safeguard.hooks.sample import SampleBuilder, StepRecord, log_sample
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.hooks.spool import DISK_ERRORS, Entry
from fp8_safeguard.hooks.suspect import Suspect
from fp8_safeguard.hooks.transport import Answer, Answers, Transport
from fp8_safeguard.monitor.wire import MAX_BATCH

INBOX_SAMPLES = 256
"""Steps that wait to be built and stored; beyond it the oldest are dropped and counted."""
BATCH_BYTES = 4 * 2**20
"""Most that one request carries, unless a single sample is larger: replies to fresh samples come soon."""
REQUEST_SECONDS = 60.0
"""Longest that one request may take, however slowly its answer trickles in."""
ACCEPTED_LISTS = 1024  # slot lists that are named by their digest; beyond it all are sent whole once more
DISK_SECONDS = 2.0
"""Longest that the end waits, beyond its time-out, for the last samples to be on disk."""
_FORK_SECONDS = 1.0


class Client:
    """Takes finished steps from the training thread, keeps them on disk and brings them to the server.

    One thread builds the samples and owns the files; a second one waits for the network. A sample keeps its batch
    id through every retry and restart, so one that arrived twice is a duplicate and no more.
    """

    def __init__(
        self,
        options: Options,
        builder: SampleBuilder,
        on_reply: Callable[[Mapping[str, Any]], None],
        once: OnceLog,
        emergency: Emergency | None = None,
    ) -> None:
        self._options = options
        self.emergency = emergency
        self._builder = builder
        self._on_reply = on_reply
        self._once = once
        self._inbox: deque[StepRecord] = deque()
        self._backlog = Backlog(options, once, self.count_dropped)
        self._outage = Outage(options.address, options.run, once)
        self._courier = self._new_courier()
        self._change = threading.Condition()
        # Held while files are written and requests prepared: a fork waits for it, so that the child finds them at rest.
        self._working = threading.Lock()
        self._rests = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._pending = 0
        self._busy = False
        self._closing = self._abandoned = False
        self._finished = False
        self._end_by: float | None = None
        self._kept = self._lost = 0
        self._pause = Pause()
        self._batch = MAX_BATCH
        self._suspect = Suspect()
        self._under_way: tuple[Store, list[Entry], list[bool], float] | None = None
        self._accepted: set[str] = set()
        self.delivered = 0
        """Samples of this attempt that the server has taken."""
        forking.watch(self)
        if options.server is not None and self._backlog.has_files():
            with contextlib.suppress(RuntimeError):  # no thread to be had now: the first sample tries again
                self._start()

    @property
    def waiting(self) -> int:
        """Samples that have not reached their destination."""
        return len(self._inbox) + self._pending

    @property
    def place(self) -> str:
        """Where samples wait, in words."""
        return self._backlog.place

    def step_is_final(self) -> None:
        """The last step has no sample: of that only other ranks would want to know."""

    def submit(self, record: StepRecord) -> None:
        """Take a finished step; returns at once."""
        if os.getpid() != self._process:
            return  # a forked child: its parent reports
        with self._change:
            if self._closing:
                return
            if len(self._inbox) >= INBOX_SAMPLES:
                self._inbox.popleft()
                self.count_dropped("the thread that stores them is behind")
            # Where no thread can be started now, the next sample tries again.
            self._start()
            self._inbox.append(record)
            self._change.notify_all()

    def count_dropped(self, reason: str | None, number: int = 1) -> None:
        """Samples are lost: the next one says how many, the log says why once (None: it has been said)."""
        self._builder.dropped += number
        if reason is None:
            return
        self._once.warning(
            f"dropped: {reason}", "samples of run %s are dropped (%s); their number travels with the next",
            self._options.run, reason,
        )  # fmt: skip

    def flush(self, timeout: float) -> bool:
        """Wait until everything submitted has arrived and its replies are handled; False after `timeout` seconds."""
        if os.getpid() != self._process:
            return False
        with self._change:
            if not self._closing:
                self._pause.end()  # somebody waits: try now rather than after the pause
                self._change.notify_all()
            return self._change.wait_for(lambda: not self.waiting and not self._busy, timeout)

    def close(self, timeout: float, *, clean: bool = False) -> int:
        """Send what is left for at most `timeout` seconds, then stop; the number of samples that did not arrive.

        A clean end is told to the server, once everything has arrived.
        """
        if os.getpid() != self._process:
            return 0
        deadline = time.monotonic() + timeout
        arrived = self.flush(timeout)
        with self._change:
            if not self._closing:
                self._closing = True
                self._end_by = deadline if clean and arrived else None
                self._change.notify_all()
            if self._thread is None:
                return 0
            left = max(0.0, deadline - time.monotonic()) + DISK_SECONDS
            if not self._change.wait_for(lambda: self._finished, left):
                self._lost += len(self._inbox)
            kept, lost = self._kept, self._lost
            self._kept = self._lost = 0
        self._say_unsent(kept, lost, f"within {round(timeout, 1):g} s")
        return kept + lost

    def abandon(self) -> None:
        """Stop without waiting: nobody is left who could want the replies. What the disk has, it keeps."""
        if os.getpid() != self._process:
            return
        with self._change:
            self._abandoned = not self._closing
            self._closing = True
            self._change.notify_all()

    def before_fork(self) -> None:
        """Let the threads come to rest, in bounded time."""
        self._rests = os.getpid() == self._process and self._working.acquire(timeout=_FORK_SECONDS)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._rests:
            self._rests = False
            self._working.release()

    def after_fork_in_child(self) -> None:
        """The files are the parent's. The locks, which a thread that is not here may hold for ever, are not used here:
        every call looks at the process first."""
        self._inbox.clear()
        self._backlog.forget_in_child()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="fp8-safeguard-client", daemon=True)
            thread.start()
            self._busy = True
            self._thread = thread

    def _work(self) -> None:
        try:
            self._open()
            while self._wait():
                with self._working:
                    self._round()
        except Exception as error:
            self._once.failure("the sender", error)
        finally:
            self._finish()

    def _open(self) -> None:
        try:
            with self._working:
                self._backlog.open()
        except Exception as error:
            self._once.failure("opening the spool", error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread has to end."""
        with self._change:
            self._pending = self._backlog.count if self._options.server is not None else 0
            self._busy = False
            self._change.notify_all()
            while True:
                if self._inbox:
                    self._busy = True
                    return True
                if self._closing:
                    return False
                seconds = self._idle_seconds()
                if seconds is not None and seconds <= 0:
                    self._busy = True
                    return True
                self._change.wait(seconds)

    def _idle_seconds(self) -> float | None:
        """Seconds until there is something to do with the server; None where only a sample can bring it."""
        if self._under_way is not None:
            return 0.0 if self._courier.done else self._under_way[3] - time.monotonic()
        return self._pause.left if self._pending else None

    def _round(self) -> None:
        """Store what has come, look at what was answered, send what waits."""
        try:
            self._take_in()
            if self._under_way is not None:
                self._look_at_answers()
            if self._under_way is None and not self._closing and self._pause.left <= 0:
                self._send()
        except Exception as error:
            self._once.failure("sending", error)
            self._back_off(None)

    def _take_in(self) -> None:
        """Build, log and keep what came from the training thread, whatever the server does."""
        while self._inbox:
            record = self._inbox.popleft()
            try:
                sample = self._builder.build(record)
                if self.emergency is not None:
                    sample = record.sample = self.emergency.look(sample, away=self._outage.away)
                log_sample(self._options.run, sample)
                if self._options.server is not None or self._options.spool_dir is not None:
                    self._backlog.put(sample)
            except Exception as error:
                self._once.failure("building a sample", error)
                self.count_dropped(type(error).__name__)

    def _send(self) -> None:
        """Hand the oldest samples to the courier."""
        if self._options.server is None or not self._backlog.count:
            return
        store, entries = self._next()
        if store is None:
            self._back_off(None)  # the disk does not give them back now
            return
        entries = together(entries, self._accepted)
        by_id = [entry.slots_id in self._accepted for entry in entries]
        try:
            bodies = [entry.body for entry in entries] if by_id[0] else [full_body(store, entries[0])]
        except DISK_ERRORS:
            raise
        except Exception as error:
            # What cannot be read now never will be; the others must not wait for it.
            self._backlog.refuse(store, entries[0], f"unreadable: {type(error).__name__} {error}")
            return
        self._courier.start(lambda transport: transport.post(bodies))
        store.send(entries)
        self._under_way = (store, entries, by_id, time.monotonic() + REQUEST_SECONDS)

    def _next(self) -> tuple[Store | None, list[Entry]]:
        """The oldest samples; the one behind them where the server fails on the oldest."""
        passed_over = self._suspect.passed_over
        if passed_over is not None:
            store, entries = self._backlog.take(1, BATCH_BYTES, passed_over)
            if store is not None:
                return store, entries
        return self._backlog.take(1 if self._suspect.alone else self._batch, BATCH_BYTES)

    def _look_at_answers(self) -> None:
        assert self._under_way is not None
        store, entries, by_id, deadline = self._under_way
        if not self._courier.done:
            if time.monotonic() >= deadline:
                self._under_way = None
                store.put_back()
                self._courier.close()
                self._courier = self._new_courier()
                problem = {"title": f"no whole answer within {REQUEST_SECONDS:g} s"}
                self._back_off(Answer("unreachable", problem))
            return
        self._under_way = None
        store.put_back()
        try:
            answers = self._courier.take()
        except Exception as error:
            problem = {"title": f"{type(error).__name__}: {error}"}
            self._back_off(Answer("unreachable", problem))
            return
        kind = answers.each[0].kind
        if len(entries) > 1 and answers.whole and kind in ("refused", "too-large", "failing"):
            self._batch = max(1, len(entries) // 2)  # one of them, or their sum, is at fault: find out which
            return
        self._batch = MAX_BATCH if len(entries) == 1 else self._batch
        self._settle(store, entries, by_id, answers)

    def _settle(
        self, store: Store, entries: Sequence[Entry], by_id: Sequence[bool], answers: Answers
    ) -> None:
        """Act on the answer for each sample."""
        arrived: list[Entry] = []
        refused: list[tuple[Entry, Answer]] = []
        own = self._backlog.is_own(store)
        for entry, named, answer in zip(entries, by_id, answers.each, strict=True):
            if answer.kind == "accepted":
                full = len(self._accepted) >= ACCEPTED_LISTS
                self._accepted = {entry.slots_id, *(() if full else self._accepted)}
                arrived.append(entry)
                if own:
                    self._reply(answer.body)
            elif answer.kind == "slots-unknown" and named:
                self._accepted.discard(entry.slots_id)
            elif not answer.waits:
                refused.append((entry, answer))
        self._backlog.remove(store, arrived)
        for entry, answer in refused:
            self._backlog.refuse(store, entry, answer.reason)
        at_fault = self._suspect.judge(store, entries, answers.each)
        if at_fault is not None:
            self._backlog.refuse(*at_fault)
        self.delivered += len(arrived) if own else 0
        unheard = next((answer for answer in answers.each if answer.waits), None)
        if unheard is None:
            self._pause.end()
            self._outage.delivered(len(arrived), self._backlog.count)
        else:
            self._back_off(unheard)

    def _reply(self, body: Mapping[str, Any]) -> None:
        try:
            self._on_reply(body)
        except Exception as error:
            self._once.failure("a reply of the server", error)

    def _back_off(self, answer: Answer | None) -> None:
        if answer is not None:
            self._outage.failed(answer, self._backlog.place)
        self._pause.longer(answer)

    def _finish(self) -> None:
        """The thread's last work: the rest goes to disk, the end is told, the files are let go."""
        try:
            with self._working:
                self._take_in()
                self._tell_end()
                in_memory = self._backlog.in_memory
                on_disk = self._backlog.count - in_memory
                self._backlog.close()
                self._courier.close()
            if self._abandoned:
                self._say_unsent(on_disk, in_memory, "before the guard was dropped")
            else:
                self._kept, self._lost = on_disk, in_memory
        finally:
            with self._change:
                self._pending, self._busy, self._finished = 0, False, True
                self._change.notify_all()

    def _tell_end(self) -> None:
        if self._end_by is None or not self.delivered or self._backlog.count:
            return
        attempt, group = self._options.attempt, self._options.group
        self._courier.start(lambda transport: transport.end(attempt, group))
        with self._change:
            self._change.wait_for(lambda: self._courier.done, max(0.0, self._end_by - time.monotonic()))

    def _say_unsent(self, kept: int, lost: int, when: str) -> None:
        if self._options.server is not None:  # without one, on disk is where samples go
            self._outage.left_unsent(kept, lost, when, self._backlog.folder)

    def _new_courier(self) -> Courier:
        options = self._options
        return Courier(lambda: Transport(options.server or "", options.run, options.token), self._wake)

    def _wake(self) -> None:
        with self._change:
            self._change.notify_all()
