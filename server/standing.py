"""What unresolved alerts say of the present, after the remedies in force."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.alerts import Signal, is_held
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.plan import Plan, Target
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot
from fp8_safeguard.server.tables import attempts, decisions

HELD, WAITING = "held", "waiting"
_TREATING = ("scale_multiplier", "scale_rounding", "format", "amax_history", "margin")
"""Actions after which a slot is measured as something else; what runs in BF16 is held instead."""
_RESTORED = "probation"
"""The rule of a restore after healthy samples: what was seen before the fallback is no word on what came after it."""


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A decision that the trainer has said it applies, and since when."""

    decision: str
    layer: str
    target: Target
    step: int
    """The first step that ran with it."""

    def reaches(self, slot: Slot) -> bool:
        """Whether the slot is measured as something else since then."""
        if slot.layer != self.layer:
            return False
        if self.target.gemm is not None:
            return slot.gemm == self.target.gemm
        if self.target.operand is None:
            return True
        # A layer has one format and scale an operand, whatever the layout.
        read = [operand for operand, _ in GEMM_OPERANDS[slot.gemm]] if slot.gemm else [slot.operand]
        return self.target.operand in read


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What one unresolved alert says of its layer and run."""

    says: str
    """act or watch: in breach as things are. held: what the plan covers. waiting: nothing in breach since a remedy."""
    since: Treatment | None = None
    """For waiting the remedy: no sample since then has shown the breach, nor enough of them that it is gone."""
    speaks: Mapping[str, Any] | None = None
    """The worst of its slots that says so; none for held."""

    @property
    def waits_since(self) -> dict[str, Any] | None:
        """As the API shows it."""
        return None if self.since is None else {"decision": self.since.decision, "step": self.since.step}


@dataclass(frozen=True)
class Standings:
    """The plan of a run, and what of it the trainer has applied."""

    plan: Plan
    treatments: tuple[Treatment, ...] = ()

    def of(self, alert: Mapping[str, Any], state: str) -> Standing:
        """What an unresolved alert says: held once the plan covers it, waiting where only what was seen before speaks.

        alert: its body, or as the API shows it. The states of layers and runs speak of what was decided, alerts of what is
        in force: for the two steps between them a layer in fallback has an open alert. A wgrad is measured in turn only: its
        alert may outlast the fault by many samples, and says nothing of the present meanwhile.
        """
        listed = alert.get("slots") or (alert,)
        pairs = [(Signal.from_dict({**item, "key": "", "excess": 1.0}), item) for item in listed]
        after = {
            at: self._after(alert["rule"], signal) for at, (signal, _) in enumerate(pairs) if not signal.over
        }
        standing = [pairs[at] for at, treatment in after.items() if treatment is None]
        # The worst comes first.
        waiting = [(pairs[at][1], treatment) for at, treatment in after.items() if treatment is not None]
        held = state == HELD or is_held([signal for signal, _ in standing], alert["rule"], self.plan)
        if held and (state == HELD or not waiting):
            return Standing(says=HELD)
        if waiting and (held or not standing):
            return Standing(says=WAITING, speaks=waiting[0][0], since=waiting[0][1])
        worst = min(standing or pairs, key=lambda pair: pair[0].severity != "act")
        return Standing(says=worst[0].severity, speaks=worst[1])

    def _after(self, rule: str, signal: Signal) -> Treatment | None:
        """The newest treatment of a signal's slot, where it came after the latest sample in breach."""
        slot = signal.slot
        if slot is None or rule == NON_FINITE.rule:
            return None
        found = [one for one in self.treatments if one.step > signal.last_step and one.reaches(slot)]
        return max(found, key=lambda one: one.step, default=None)


def load_standings(conn: Connection, run: Row[Any], plan: Plan, layers: Iterable[str | None]) -> Standings:
    """Read what is applied in the layers named: those with unresolved alerts. `plan` is the run's."""
    named = sorted({layer for layer in layers if layer is not None})
    newest = select(attempts.c.last_decided_step).where(attempts.c.run_id == run.id)
    upto = conn.execute(newest.order_by(attempts.c.id.desc()).limit(1)).scalar() if named else None
    if upto is None:
        return Standings(plan)
    # Only steps that have been judged can have shown anything.
    applied = (decisions.c.state == "applied", decisions.c.effective_step <= upto)
    actions = decisions.c.action.in_((*_TREATING, "restore"))
    mine = (decisions.c.run_id == run.id, decisions.c.layer.in_(named), actions, *applied)
    rows = conn.execute(select(decisions).where(*mine).order_by(decisions.c.number)).all()
    return Standings(plan, tuple(_treatments(rows, plan)))


def _treatments(rows: Sequence[Row[Any]], plan: Plan) -> Iterable[Treatment]:
    in_plan = {entry.decision_id for entry in plan.entries}
    for row in rows:
        body = json.loads(row.body)
        if row.id in in_plan or (row.action == "restore" and body["rule"] == _RESTORED):
            target = Target.from_wire(body["target"])
            yield Treatment(decision=row.id, layer=row.layer, target=target, step=row.effective_step)
