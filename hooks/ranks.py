"""Makes the ranks of a group report as one, in rounds off the training thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8_safeguard.hooks import forking
from fp8_safeguard.hooks.collectives import Collectives
from fp8_safeguard.hooks.flags import Flags
from fp8_safeguard.hooks.merging import Layout
from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.rounds import LEAVE, STEP, STOP, Heads, Proposal, Rounds, Turn
from fp8_safeguard.hooks.sample import SampleBuilder, StepRecord
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.monitor.plan import Plan

if TYPE_CHECKING:
    from fp8_safeguard.hooks.client import Client
    from fp8_safeguard.hooks.controls import Controls
    from fp8_safeguard.hooks.emergency import Emergency

_LEAVE_SHARE = 0.6
"""Of the time that the end has, what the other ranks may take of it."""
_REST_SECONDS = 1.0
_REPAIR_STEPS = 4


class _Stopped(Exception):
    """The thread of the rounds is not to go on."""


class Ranks:
    """Stands where a lone process has its client, on each rank of a group.

    At every step boundary known to this rank one round follows, in a thread of its own: all ranks do the same operations
    in it, in the same order, whatever each of them has to say; of a step that a rank did not see, or lost the sample of,
    it says nothing. The training thread only puts down what it has, and before it goes on into a step asks that the round
    of two steps before has been heard: a plan was perhaps announced there. If that takes longer than `rank_timeout` the
    ranks go on alone: each reports for itself, and keeps the plan that it has.
    """

    def __init__(
        self,
        options: Options,
        layout: Layout,
        builder: SampleBuilder,
        controls: Controls,
        client: Client,
        own_flags: Flags,
        once: OnceLog,
        *,
        rank: int,
        size: int,
        store: Any,
        connect: Callable[[Options], Client],
    ) -> None:
        self.rank, self.size = rank, size
        self.newest: StepRecord | None = None
        """The last merged sample."""
        self._options, self._builder, self._once = options, builder, once
        self._controls, self._client = controls, client
        self._store, self._connect = store, connect
        self._change = threading.Condition()
        self._rounds = Rounds(layout, Collectives(rank, size, self._nap), builder, own_flags)
        self._turns: deque[Turn] = deque()
        self._open: Turn | None = None
        self._epoch = 0
        self._put = self._heard = self._done = 0
        """Steps of this rank that were put down, whose round was heard, and whose round is over."""
        self._proposal: Proposal | None = None
        self._repaired_at = -_REPAIR_STEPS
        self._voted = False
        self._over = self._finished = self._abandoned = False
        self._all_clean = True
        self._reason: str | None = None
        self._process = os.getpid()
        forking.watch(self)
        controls.ranks = self
        self._thread = threading.Thread(target=self._work, name="fp8-safeguard-ranks", daemon=True)
        self._thread.start()

    @property
    def collectives(self) -> int:
        """Operations among the ranks so far."""
        return self._rounds.collectives.count

    @property
    def together(self) -> bool:
        """Whether this rank still reports with the others."""
        return not self._over

    @property
    def waiting(self) -> int:
        """Samples that have not reached their destination."""
        return sum(turn.record is not None for turn in tuple(self._turns)) + self._client.waiting

    @property
    def delivered(self) -> int:
        """Samples that the server has taken from this rank."""
        return self._client.delivered

    @property
    def emergency(self) -> Emergency | None:
        """What decides while the server is away; on rank 0."""
        return self._client.emergency

    @property
    def place(self) -> str:
        """Where samples wait, in words."""
        return self._client.place

    def count_dropped(self, reason: str | None, number: int = 1) -> None:
        """Samples of this rank are lost: the others go on without its part."""
        self._client.count_dropped(reason, number)

    def await_rounds(self) -> None:
        """Before a step begins: hear the rounds of the steps before the last one. In practice it is no wait."""
        if os.getpid() != self._process:
            return
        seconds = self._options.rank_timeout
        with self._change:
            # A rank that has agreed to a plan waits once more: the others may be about to take it up.
            heard = self._wait_heard(seconds) or (self._voted and self._wait_heard(seconds))
            if not heard:
                self._end(f"no word from all of them within rank_timeout={seconds:g} s")

    def catch_up(self, seconds: float) -> bool:
        """Wait until what was put down has been heard, if it comes soon; nothing is given up if it does not."""
        if os.getpid() != self._process:
            return False
        with self._change:
            return self._wait_heard(seconds)

    def _wait_heard(self, seconds: float) -> bool:
        return self._change.wait_for(lambda: self._over or self._heard >= self._put, seconds)

    def open(self, number: int, plan_version: int, effective_step: int | None) -> None:
        """Step `number` has ended; its number may still be corrected, and its sample is still to come."""
        effective = -1 if effective_step is None else effective_step
        self._open = Turn(STEP, self._epoch, number, plan_version, effective)

    def step_is_final(self) -> None:
        """The last step's number stands, and it has no sample."""
        self._put_down(None)

    def submit(self, record: StepRecord) -> None:
        """The last step's number stands, and this is its sample. Returns at once."""
        self._put_down(record)

    def _put_down(self, record: StepRecord | None) -> None:
        if os.getpid() != self._process:
            return
        turn, self._open = self._open, None
        with self._change:
            if not self._finished:
                if turn is not None:
                    turn.record = record
                    self._turns.append(turn)
                    self._put += 1
                    self._change.notify_all()
                return
        if record is not None:
            self._client.submit(record)

    def propose(self, plan: Plan) -> bool:
        """A plan that all ranks are to take up, with the next round; False where they do not hear each other any more.

        On rank 0 only, from the sender's thread.
        """
        with self._change:
            if not self._over and (self._proposal is None or plan.version > self._proposal.plan.version):
                self._proposal = Proposal(plan)
            return not self._over

    @property
    def proposed(self) -> Plan | None:
        """The plan that waits for a round."""
        return None if self._proposal is None else self._proposal.plan

    def rewind(self) -> None:
        """The step numbers begin anew, on every rank: what was announced before holds no more."""
        with self._change:
            self._epoch += 1

    def flush(self, timeout: float) -> bool:
        """Wait until everything put down has been merged and sent, and its reply is handled."""
        if os.getpid() != self._process:
            return False
        deadline = time.monotonic() + timeout
        with self._change:
            done = self._change.wait_for(lambda: self._finished or self._done >= self._put, timeout)
        return self._client.flush(max(0.0, deadline - time.monotonic())) and done

    def close(self, timeout: float, *, clean: bool = False) -> int:
        """Leave with the others, and end as a client does. Ranks that stay longer go on alone."""
        if os.getpid() != self._process:
            return 0
        deadline = time.monotonic() + timeout
        with self._change:
            if not self._over:
                self._turns.append(Turn(LEAVE if clean else STOP))
                self._change.notify_all()
                self._change.wait_for(lambda: self._over, _LEAVE_SHARE * timeout)
            self._end(None)
            self._change.wait_for(lambda: self._finished, _REST_SECONDS)
        clean = clean and self._all_clean and self.rank == 0
        return self._client.close(max(0.0, deadline - time.monotonic()), clean=clean)

    def abandon(self) -> None:
        """Stop without waiting for anybody."""
        if os.getpid() != self._process:
            return
        with self._change:
            self._abandoned = True
            self._end(None)
        self._client.abandon()

    def before_fork(self) -> None:
        """Nothing here is a child's to use: every call looks at the process first."""

    def after_fork_in_parent(self) -> None:
        """Go on."""

    def after_fork_in_child(self) -> None:
        """The connections and the thread are the parent's."""

    def _end(self, reason: str | None) -> None:
        """No more rounds. Inside the lock; twice is once."""
        if not self._over:
            self._over, self._reason = True, reason
        self._change.notify_all()

    def _nap(self, seconds: float) -> None:
        with self._change:
            if not self._over:
                self._change.wait(seconds)
            if self._over:
                raise _Stopped

    def _work(self) -> None:
        reason = None
        try:
            self._options = self._rounds.meet(self._store, self._options)
            while (turn := self._next()) is not None and self._round(turn):
                pass
        except _Stopped:
            pass
        except Exception as error:
            reason = str(error)
        finally:
            self._go_alone(reason)

    def _next(self) -> Turn | None:
        """What this rank brings to the next round; None where it is not to come any more."""
        with self._change:
            self._change.wait_for(lambda: self._turns or self._over)
            if self._over:
                return None
            turn = self._turns[0]
        try:
            self._rounds.prepare(turn)
        except Exception as error:  # a sample that cannot be read is as good as lost
            self._once.failure("reading a sample", error)
            self.count_dropped(type(error).__name__)
            turn.record = turn.local = None
        return turn

    def _round(self, turn: Turn) -> bool:
        """One round; False where it was the last one."""
        with self._change:
            proposal = self._proposal if self.rank == 0 and turn.kind == STEP else None
        announcement = b"" if proposal is None else proposal.to_bytes()
        heads = self._rounds.heads(turn, announcement)
        if not heads.steps:
            self._all_clean = all(kind == LEAVE for kind in heads.kind)
            return False
        mine = turn if heads.has(self.rank) else None
        if heads.announced[0]:
            self._take_plan(self._rounds.plan(heads, announcement, self._vote), heads, proposal)
        self._look_for_difference(heads)
        merge = self._rounds.masks(mine, heads) if any(heads.sampled) else None
        self._count(mine, heard=True)
        if merge is not None:
            self._keep(self._rounds.merged(mine, heads, merge))
        self._count(mine, heard=False)
        return True

    def _vote(self) -> None:
        with self._change:
            if self._over:
                raise _Stopped
            self._voted = True

    def _take_plan(self, said: dict[str, Any], heads: Heads, proposal: Proposal | None) -> None:
        with self._change:
            self._voted = False
            if not heads.one_epoch:
                return  # some have gone back meanwhile: rank 0 says it again once all of them have
            if proposal is not None and self._proposal is proposal:
                self._proposal = None
            if self._epoch == heads.key[0]:
                self._controls.agree(said["plan"], heads.first_step, repairs=bool(said["repairs"]))

    def _look_for_difference(self, heads: Heads) -> None:
        """Ranks that were resumed from different states run under different plans: rank 0's holds for all."""
        step = heads.key[1]
        if self.rank == 0 and heads.differ and abs(step - self._repaired_at) >= _REPAIR_STEPS:
            self._repaired_at = step
            newest = self._controls.newest
            with self._change:
                self._proposal = self._proposal or Proposal(newest, repairs=True)

    def _count(self, turn: Turn | None, *, heard: bool) -> None:
        """The round of a step of this rank was heard, or is over."""
        if turn is None:
            return
        with self._change:
            if heard:
                self._heard += 1
            else:
                self._turns.popleft()
                self._done += 1
            self._change.notify_all()

    def _keep(self, record: StepRecord | None) -> None:
        if record is not None:
            self.newest = record
            if self.rank == 0:
                self._client.submit(record)

    def _go_alone(self, reason: str | None) -> None:
        """The thread's last work: what was not merged is this rank's own, and what follows."""
        with self._change:
            self._end(reason)
            leaving = self._abandoned or any(turn.kind != STEP for turn in self._turns)
            left = any(turn.record is not None for turn in self._turns)
        self._rounds.collectives.close()
        try:
            if self._reason is not None and not leaving:
                self._say_alone()
            if self.rank and not self._abandoned and (left or not leaving):
                self._report_alone()
            while (turn := self._next_left()) is not None:
                if turn.record is not None and not self._abandoned:
                    self._client.submit(turn.record)
        except Exception as error:
            self._once.failure("reporting alone", error)
        finally:
            with self._change:
                self._finished = True
                self._change.notify_all()

    def _next_left(self) -> Turn | None:
        """What nobody has merged; None once what comes goes straight to the client."""
        with self._change:
            self._finished = not self._turns
            return self._turns.popleft() if self._turns else None

    def _say_alone(self) -> None:
        logger.warning(
            "the %d ranks of run %s do not report together any more (%s): rank %d reports its own statistics, and keeps "
            "plan %d until the run is started again",
            self.size, self._options.run, self._reason, self.rank, self._controls.plan.version,
        )  # fmt: skip

    def _report_alone(self) -> None:
        """A client for a rank that had none, under a group of its own."""
        self._options = replace(self._options, group=f"{self._options.group}.rank{self.rank}")
        self._builder.options = self._options
        self._client = self._connect(self._options)
