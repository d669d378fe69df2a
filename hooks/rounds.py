"""What the ranks say to each other in one round, in a fixed order."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8_safeguard.hooks.collectives import Collectives
from fp8_safeguard.hooks.controls import STEPS_AHEAD
from fp8_safeguard.hooks.flags import AgreedFlags, Flags
from fp8_safeguard.hooks.merging import (
    Layout,
    Local,
    Merge,
    flagged_bytes,
    local_of,
    worst_of,
    worst_of_all,
)
from fp8_safeguard.hooks.sample import Notes, SampleBuilder, StepRecord
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.monitor.plan import Plan

STEP, LEAVE, STOP = 0, 1, 2
"""What a rank comes to a round with: a step, its clean end, or an end that was none."""
NEVER = 2**62
_HOST_BYTES = 64
_DIGEST_BYTES = 32


@dataclass(slots=True, eq=False)
class Turn:
    """What this rank brings to a round."""

    kind: int
    epoch: int = 0
    """How often the step numbers have begun anew."""
    number: int = NEVER
    plan_version: int = 0
    """In force once the step had ended, since `effective_step` (-1: none yet)."""
    effective_step: int = -1
    record: StepRecord | None = None
    local: Local | None = None
    """The record's statistics, once they were read."""
    flagged: tuple[dict[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that rank 0 wants all ranks to take up."""

    plan: Plan
    repairs: bool = False
    """Whether it holds whatever the ranks have now: they had come to differ."""

    def to_bytes(self) -> bytes:
        """As it travels."""
        return json.dumps({"plan": self.plan.to_wire(), "repairs": self.repairs}).encode()


@dataclass(frozen=True, slots=True)
class Heads:
    """What all ranks bring to the round: [W] each."""

    kind: list[int]
    epoch: list[int]
    number: list[int]
    sampled: list[int]
    plan_version: list[int]
    effective_step: list[int]
    announced: list[int]
    variants: list[int]
    dropped: list[int]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(epoch, number) of those that bring a step."""
        listed = zip(self.kind, self.epoch, self.number, strict=True)
        return [(epoch, number) for kind, epoch, number in listed if kind == STEP]

    @property
    def key(self) -> tuple[int, int]:
        """The step that the round is about: the first that any rank has still to report."""
        return min(self.steps)

    def has(self, rank: int) -> bool:
        """Whether that rank reports the step."""
        return self.kind[rank] == STEP and (self.epoch[rank], self.number[rank]) == self.key

    @property
    def first_step(self) -> int:
        """First step in which what this round says holds: of the rank that is furthest, the next but one."""
        epoch, _ = self.key
        return max(number for e, number in self.steps if e == epoch) + STEPS_AHEAD

    @property
    def one_epoch(self) -> bool:
        """Whether nobody's step numbers have begun anew while the others' have not."""
        return len({epoch for epoch, _ in self.steps}) == 1

    @property
    def differ(self) -> bool:
        """Whether ranks at the same step run under different plans, or have for a different time."""
        abreast = all(map(self.has, range(len(self.kind))))
        return abreast and len(set(zip(self.plan_version, self.effective_step, strict=True))) > 1


class Rounds:
    """The operations of a round. All ranks do the same ones: each follows from what all have heard before it."""

    def __init__(
        self, layout: Layout, collectives: Collectives, builder: SampleBuilder, own_flags: Flags
    ) -> None:
        self.collectives = collectives
        self._layout, self._builder, self._own_flags = layout, builder, own_flags
        self._hosts: list[str] = []
        self._rank = collectives.rank

    def meet(self, store: Any, options: Options) -> Options:
        """Connect; the options under the run and attempt of rank 0. Raises ValueError where ranks measure differently."""
        self.collectives.meet(store)
        name = json.dumps({"run": options.run, "attempt": options.attempt}).encode()
        digest = self._layout.digest(
            options.every, options.recompute, options.mode, options.thresholds, options.shadow
        )
        host = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES)
        hello = np.frombuffer(digest + host + len(name).to_bytes(4, "big"), np.uint8)
        heard = [bytes(each) for each in self._gather(hello)]
        hosts = (each[_DIGEST_BYTES : _DIGEST_BYTES + _HOST_BYTES] for each in heard)
        self._hosts = [each.decode(errors="replace").strip() for each in hosts]
        run = json.loads(self.collectives.broadcast(name, int.from_bytes(heard[0][-4:], "big")))
        if any(each[:_DIGEST_BYTES] != digest for each in heard):
            raise ValueError(
                "they do not observe the same layers with the same options: give each rank a group= of its own, and say "
                "groups="
            )
        self._builder.attempt = replace(self._builder.attempt, id=run["attempt"])
        self._builder.options = replace(self._builder.options, **run)
        return replace(options, **run)

    def prepare(self, turn: Turn) -> None:
        """Read what the step has measured, and look for breaches of this rank's own. Waits for the device."""
        record, builder = turn.record, self._builder
        if record is not None and turn.local is None:
            turn.local = local_of(self._layout, record, builder.loss_scale(record))
            self._own_flags.look(builder.part(record))

    def heads(self, turn: Turn, announcement: bytes) -> Heads:
        """Everybody says what it brings."""
        local = turn.local
        mine = [
            turn.kind, turn.epoch, turn.number, local is not None, turn.plan_version, turn.effective_step,
            len(announcement), 0 if local is None else len(local.variant_names), self._builder.dropped,
        ]  # fmt: skip
        heard = Heads(*self._gather(np.array(mine, np.int64)).T.tolist())
        # A sample of a later step stays for its own round.
        heard.sampled[:] = [each * bool(heard.steps and heard.has(r)) for r, each in enumerate(heard.sampled)]
        return heard

    def plan(self, heads: Heads, announcement: bytes, vote: Callable[[], None]) -> dict[str, Any]:
        """The proposal of rank 0, once all have heard it; `vote` raises where this rank is not to agree any more.

        So all ranks take a plan up, or none: one that has given up waiting does not come to the second operation.
        """
        text = self.collectives.broadcast(announcement, heads.announced[0])
        vote()
        self.collectives.sum(torch.ones(1, dtype=torch.int64))
        said: dict[str, Any] = json.loads(text)
        return said

    def masks(self, turn: Turn | None, heads: Heads) -> Merge:
        """Who has what, and which layers any rank has flagged: all of them look closely at the same ones."""
        layout, local = self._layout, None if turn is None else turn.local
        masks_S = np.zeros(len(layout.places), np.uint8) if local is None else local.masks_S
        server_too = (self._builder.flags.urgency,) if self._rank == 0 else ()
        flagged_L = flagged_bytes(layout, (self._own_flags.urgency, *server_too))
        heard = self._gather(np.concatenate([masks_S, flagged_L]))
        masks_WS, urgency_L = heard[:, : len(masks_S)], heard[:, len(masks_S) :].max(axis=0)
        order = np.argsort(-urgency_L.astype(np.int64), kind="stable")
        flags = self._builder.flags
        assert isinstance(flags, AgreedFlags)
        flags.agree([layout.layers[at] for at in order if urgency_L[at]], heads.first_step)
        lengths = [length * sampled for length, sampled in zip(heads.variants, heads.sampled, strict=True)]
        if not any(lengths):
            return Merge(layout, masks_WS)
        return Merge(layout, masks_WS, self._texts(b"" if local is None else local.variant_names, lengths))

    def merged(self, turn: Turn | None, heads: Heads, merge: Merge) -> StepRecord | None:
        """The sum of all ranks' statistics, with what this rank says besides; None where this is not its step."""
        local = None if turn is None else turn.local
        sums, maxima = (_tensor(part) for part in merge.packed(self._rank, local))
        self.collectives.sum(sums)
        self.collectives.maximum(maxima)
        values, variants = merge.unpacked(sums.numpy(), maxima.numpy())
        worst = self._gather(worst_of(self._layout, merge, self._rank, local, values))
        own = None if turn is None else turn.record
        if own is None and self._rank:
            return None
        record = merge.record(own or _without_own(heads), values, variants)
        record.ranks = worst_of_all(self._layout, worst, self._hosts)
        record.dropped_elsewhere = sum(heads.dropped) - heads.dropped[self._rank]
        return record

    def _gather(self, mine: Any) -> Any:
        return self.collectives.gather(_tensor(mine)).numpy()

    def _texts(self, text: bytes, lengths: list[int]) -> list[bytes]:
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        heard = self._gather(padded)
        return [bytes(each[:length]) for each, length in zip(heard, lengths, strict=True)]


def _without_own(heads: Heads) -> StepRecord:
    """What rank 0 can say of a step whose sample it has lost itself: the others' statistics follow."""
    effective = heads.effective_step[0]
    return StepRecord(
        step=heads.key[1],
        snapshot=None,  # type: ignore[arg-type]
        filled=frozenset(),
        marks={},
        notes=Notes(),
        plan_version=heads.plan_version[0],
        effective_step=None if effective < 0 else effective,
        overhead_ratio=0.0,
    )


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values))
