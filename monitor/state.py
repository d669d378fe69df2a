"""What the policy remembers between steps, and its JSON form."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fp8_safeguard.monitor.alerts import Alert, Evidence, join_alerts
from fp8_safeguard.monitor.budget import Costs
from fp8_safeguard.monitor.history import History
from fp8_safeguard.monitor.lastlayers import UnderflowTrend
from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.outcomes import Outcomes
from fp8_safeguard.monitor.plan import Plan, Target
from fp8_safeguard.monitor.trends import Trends
from fp8_safeguard.monitor.whatifs import WhatIfs


@dataclass(frozen=True)
class Change:
    """The latest change at one spot (a target of a layer), which keeps it at rest for the dwell."""

    step: int
    decision_id: str
    action: str
    restorable: bool = False
    """Whether the operands showed the fault, so that their health says when it is over."""
    restores: int = 0
    """How often the spot was restored before: each time the next restore waits twice as long."""
    by_result: bool = False
    """Whether only the GEMM's result showed the fault. Once the GEMM runs in BF16, the FP8 result that is emulated beside it
    says when that is over; where none is, a person restores it."""
    version: int = 0
    """The first plan that holds it: older samples were measured without it."""
    remedy: str | None = None
    """Name of the measured remedy that it is a part of."""
    unshown: float = 0.0
    """The GEMM's real error, capped, that no emulated result has shown yet; 0 once one has. What never showed a fault does not
    say either when it is over."""


@dataclass(frozen=True)
class Proposal:
    """A decision that waits for a person. It is not made twice, and counts against the budget; once the evidence has not
    asked for it for the dwell, it expires."""

    step: int
    last_step: int
    """The latest step whose evidence asked for it."""
    decision_id: str
    layer: str
    gemm: str | None
    action: str


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """Immutable; `decide` returns a new one. PolicyState() starts a run."""

    last_step: int | None = None
    """The last step decided on; older ones are never decided on."""
    clean_step: int | None = None
    """The latest step decided on in which no tensor, loss or gradient norm was NaN or Inf."""
    plan: Plan = field(default_factory=Plan)
    alerts: Mapping[str, Alert] = field(default_factory=dict)
    """Open alerts by key."""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    history: History = field(default_factory=History)
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By spot."""
    proposals: Mapping[str, Proposal] = field(default_factory=dict)
    """By place: spot and action."""
    probation: Mapping[str, int] = field(default_factory=dict)
    """Consecutive healthy samples of what a spot in fallback reads, or healthy looks without its remedy, by spot."""
    advised: Mapping[str, int] = field(default_factory=dict)
    """The last step at which a reason for advice held, by spot: advice is given once."""
    costs: Costs = field(default_factory=Costs)
    loss_scale: float | None = None
    losses: tuple[float, ...] = ()
    """The recent losses that were no jump, the oldest first."""
    decisions_made: int = 0
    trends: Trends = field(default_factory=Trends)
    looks: WhatIfs = field(default_factory=WhatIfs)
    """The latest close look at each layer, under the precision that it has."""
    outcomes: Outcomes = field(default_factory=Outcomes)
    underflow: UnderflowTrend = field(default_factory=UnderflowTrend)
    grades: Mapping[str, str] = field(default_factory=dict)
    """Outcomes of decisions that the latest step told, or why there is none, by decision id."""

    def after_rewind(self, parent: "PolicyState", undone: Collection[str]) -> "PolicyState":
        """This memory of the steps before a rewind, with what goes on in the run's plan, as the parent knew it.

        The plan outlives an attempt, and so does what belongs to its entries: that they are the policy's own, that spots rest
        after them or after a person's word, which proposals wait. What has no grade yet is graded by the child's samples.
        undone: ids of the policy's own restores in the steps that did not happen; a spot does not rest after those.
        """
        changes = {key: change for key, change in parent.changes.items() if change.decision_id not in undone}
        waiting = {key: made for key, made in parent.outcomes.pending.items() if key not in undone}
        unseen: dict[str, Any] = {"samples": 0, "seen": 0, "failing": 0, "latest": None}
        pending = {key: replace(made, **unseen, status="unknown", losses=()) for key, made in waiting.items()}
        shared = -1 if self.last_step is None else self.last_step
        failed = {key: step for key, step in parent.outcomes.failed.items() if step <= shared}
        outcomes = replace(self.outcomes, pending=pending, failed=failed)
        return replace(self, changes=changes, proposals=dict(parent.proposals), outcomes=outcomes)

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal state."""
        return {
            "last_step": self.last_step,
            "clean_step": self.clean_step,
            "plan": self.plan.to_wire(),
            "alerts": {key: alert.to_dict() for key, alert in self.alerts.items()},
            "evidence": {key: evidence.to_list() for key, evidence in self.evidence.items()},
            "history": self.history.to_dict(),
            "changes": {key: dict(vars(change)) for key, change in self.changes.items()},
            "proposals": {key: dict(vars(made)) for key, made in self.proposals.items()},
            "probation": dict(self.probation),
            "advised": dict(self.advised),
            "costs": dict(self.costs.layers),
            "loss_scale": encode_number(self.loss_scale),
            "losses": list(self.losses),
            "decisions_made": self.decisions_made,
            "trends": self.trends.to_dict(),
            "looks": self.looks.to_dict(),
            "outcomes": self.outcomes.to_dict(),
            "underflow": self.underflow.to_list(),
            "grades": dict(self.grades),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        return cls(
            last_step=stored["last_step"],
            clean_step=stored.get("clean_step"),
            plan=Plan.from_wire(stored["plan"]),
            alerts=join_alerts(Alert.from_dict(alert) for alert in stored["alerts"].values()),
            evidence={key: Evidence(*numbers) for key, numbers in stored["evidence"].items()},
            history=History.from_dict(stored["history"]),
            changes={key: Change(**change) for key, change in stored["changes"].items()},
            proposals={key: Proposal(**proposal) for key, proposal in stored["proposals"].items()},
            probation=dict(stored["probation"]),
            advised=dict(stored["advised"]),
            costs=Costs(dict(stored["costs"])),
            loss_scale=decode_number(stored["loss_scale"]),
            losses=tuple(stored.get("losses", ())),
            decisions_made=stored["decisions_made"],
            trends=Trends.from_dict(stored.get("trends", {})),
            looks=WhatIfs.from_dict(stored.get("looks", {})),
            outcomes=Outcomes.from_dict(stored.get("outcomes", {})),
            underflow=UnderflowTrend.from_list(stored.get("underflow", ())),
            grades=dict(stored.get("grades", {})),
        )


def spot(layer: str, target: Target) -> str:
    """Key of one target of one layer. A layer may hold any character, but a target's key no bar: the last one parts them."""
    return f"{layer}|{target.key}"


def place(layer: str, target: Target, action: str) -> str:
    """Key of one action at one spot."""
    return f"{layer}|{target.key}|{action}"
