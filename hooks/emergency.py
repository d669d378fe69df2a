"""Decides alone, on non-finite values only, while the server is away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8_safeguard.hooks.controls import Controls
from fp8_safeguard.hooks.once import OnceLog, logger
from fp8_safeguard.hooks.settings import Options
from fp8_safeguard.monitor.localdecisions import LOCAL_VERSION
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.wire import Sample

if TYPE_CHECKING:
    from fp8_safeguard.monitor.policy import PolicyState

ACTOR = "client"


@dataclass(frozen=True, slots=True)
class Local:
    """A decision of our own that the server has still to take over."""

    decision: Decision
    version: int
    """The plan of ours that took it up."""
    accepted: bool = False
    """Whether the server has it."""


class Emergency:
    """Rank 0's own policy: the server's, for what cannot wait for it.

    A server that is away decides nothing, and a run whose values are not finite is lost before it comes back. So two
    samples in a row with such values, both taken while the server is away, are put before the policy here; of what it
    decides only its answer to non-finite values is used. It makes a plan of a version above the server's. Samples carry
    the decision until the server has put it into a plan of its own, above ours, and that plan is in force; before that no
    other plan of the server's is taken up, for it would be one without the decision. Used from the sender's thread.
    """

    def __init__(self, options: Options, controls: Controls, once: OnceLog) -> None:
        self._options, self._controls, self._once = options, controls, once
        self._state: PolicyState | None = None
        """What the samples in a row have shown; None while values are finite, or the server is there."""
        self._open: tuple[Local, ...] = ()

    def look(self, sample: Sample, *, away: bool) -> Sample:
        """The sample, with the decisions that it has to carry; `away`: the server takes none now. Never raises."""
        try:
            if away and self._may_decide and _is_nonfinite(sample):
                self._decide(sample)
            else:
                self._state = None
            self._open = tuple(self._still_open(sample))
        except Exception as error:
            self._once.failure("deciding without the server", error)
        carried = tuple(local.decision for local in self._open)
        return replace(sample, local_decisions=carried) if carried else sample

    def hear(self, reply: Mapping[str, Any]) -> bool:
        """A reply of the server: what it has taken over. Whether the plan in it holds all that was decided here."""
        told = reply.get("local_decisions")
        taken = set(told) if isinstance(told, list) and all(isinstance(each, str) for each in told) else set()
        self._open = tuple(
            replace(local, accepted=local.accepted or local.decision.id in taken) for local in self._open
        )
        return all(local.accepted for local in self._open)

    def state(self) -> list[dict[str, Any]]:
        """What the server has still to take over, for a checkpoint."""
        return [
            {"decision": local.decision.to_wire(), "version": local.version, "accepted": local.accepted}
            for local in self._open
        ]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take it up again."""
        self._open = tuple(
            Local(Decision.from_wire(each["decision"]), int(each["version"]), bool(each["accepted"]))
            for each in state
        )

    @property
    def _may_decide(self) -> bool:
        """Of several groups none sees the whole step."""
        return self._options.mode == "enforce" and self._options.groups == 1

    def _decide(self, sample: Sample) -> None:
        from fp8_safeguard.monitor import policy

        options = self._options
        before = self._state or policy.PolicyState(plan=self._controls.newest)
        config = policy.PolicyConfig(run=options.run, preset=options.thresholds, mode="enforce")
        after, made = policy.decide(before, policy.observe([sample]), config)
        # Whatever else it would change, the server is to decide that.
        state = replace(after, plan=before.plan, changes=before.changes, decisions_made=before.decisions_made)
        chosen = self._chosen(made, sample)
        for decision in chosen:
            state = policy.approve(state, decision, sample.step)
        self._state = state
        if chosen and self._controls.receive(state.plan.to_wire()):
            version = state.plan.version
            noted = [replace(each, evidence={**each.evidence, LOCAL_VERSION: version}) for each in chosen]
            self._open = (*self._open, *(Local(each, version) for each in noted))
            self._say(noted)

    def _chosen(self, made: Sequence[Decision], sample: Sample) -> list[Decision]:
        """What is done about non-finite values, under ids that no server gives."""
        attempt = re.sub(r"[^A-Za-z0-9._-]", "_", sample.attempt.id)
        wanted = [
            decision
            for decision in made
            if decision.rule == "non-finite"
            and decision.action == "bf16_fallback"
            and decision.layer in self._controls.switchable
        ]
        return [
            replace(
                decision,
                id=f"{self._options.run}-local-{attempt}-{sample.step}-{number}",
                actor=ACTOR,
                state="sent",
            )
            for number, decision in enumerate(wanted, start=1)
        ]

    def _still_open(self, sample: Sample) -> Iterable[Local]:
        last = max((local.version for local in self._open), default=0)
        for local in self._open:
            if local.accepted and sample.plan_version > local.version:
                continue  # the server's own plan is in force
            ran = local.version <= sample.plan_version <= last
            if ran and local.decision.effective_step is None and sample.effective_step is not None:
                applied = replace(local.decision, effective_step=sample.effective_step, state="applied")
                yield replace(local, decision=applied)
            else:
                yield local

    def _say(self, chosen: Sequence[Decision]) -> None:
        for decision in chosen:
            logger.warning(
                "%s is away, and values of run %s are not finite: %s (decided here, decision %s; the server takes it over "
                "when it is back)",
                self._options.address, self._options.run, decision.reason, decision.id,
            )  # fmt: skip


def _is_nonfinite(sample: Sample) -> bool:
    counts = sample.columns["nan"] + sample.columns["inf"]
    return any(
        count and slot.variant is None for count, slot in zip(counts.tolist(), sample.slots, strict=True)
    )
