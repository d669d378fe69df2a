"""Replays stored steps under a policy, and tells how that differs.

Without changes to the policy the decisions come out as they were stored. With changes, what was measured after the first
decision that differs was measured under the other plan: what is said of later steps is a guess, and marked `certain: false`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fp8_safeguard.monitor.alerts import COOL_DOWN_STEPS
from fp8_safeguard.monitor.inforce import was_held
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.plan import Decision, Target
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide

Status = Literal["same", "earlier", "later", "only_here", "only_stored"]
STATUSES: tuple[Status, ...] = ("same", "earlier", "later", "only_here", "only_stored")


@dataclass
class Raised:
    """An alert as it was raised; a breach that comes back within the cool-down re-opens it."""

    rule: str
    layer: str | None
    severity: str
    """The worst that it reached."""
    step: int
    first_step: int
    """First step of the breach, before hysteresis."""
    times: int = 1


@dataclass
class Replay:
    """The policy's memory while it runs over stored steps, and what it did."""

    config: PolicyConfig
    state: PolicyState = field(default_factory=PolicyState)
    decisions: list[Decision] = field(default_factory=list)
    alerts: list[Raised] = field(default_factory=list)
    steps: int = 0
    _newest: dict[str, Raised] = field(default_factory=dict)
    _resolved: dict[str, int] = field(default_factory=dict)

    def add(self, seen: StepObservation) -> tuple[Decision, ...]:
        """Decide on one more step; steps come in order."""
        before = self.state
        self.state, made = decide(before, seen, self.config)
        self.steps += 1
        self.decisions.extend(made)
        self._follow(before, seen.step)
        return made

    def _follow(self, before: PolicyState, step: int) -> None:
        for key in before.alerts:
            if key not in self.state.alerts:
                self._resolved[key] = step
        for key, alert in self.state.alerts.items():
            held = self._newest.get(key)
            if key not in before.alerts:
                gone = self._resolved.get(key)
                if held is not None and gone is not None and step - gone <= COOL_DOWN_STEPS:
                    held.times += 1
                else:
                    held = Raised(alert.rule, alert.layer, alert.severity, alert.step, alert.first_step)
                    self._newest[key] = held
                    self.alerts.append(held)
            if held is not None and alert.severity == "act":
                held.severity = "act"


def replay(observations: Iterable[StepObservation], config: PolicyConfig) -> Replay:
    """The whole of a run under a policy, in memory that does not grow with its steps but for what was decided."""
    running = Replay(config)
    for seen in observations:
        running.add(seen)
    return running


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One decision or alert of either side, with its partner where it has one."""

    status: Status
    step: int | None
    """In the replay."""
    stored_step: int | None
    certain: bool
    """Whether everything up to it was measured under the plan that the replay had."""
    what: Mapping[str, Any]
    """layer, target, action, value and rule of a decision; rule, layer and severity of an alert."""
    stored_id: str | int | None = None

    @property
    def shift_steps(self) -> int | None:
        """How much later the replay has it; negative: earlier."""
        if self.step is None or self.stored_step is None:
            return None
        return self.step - self.stored_step

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        steps = {"step": self.step, "stored_step": self.stored_step, "shift_steps": self.shift_steps}
        return {
            "status": self.status,
            **steps,
            "certain": self.certain,
            **self.what,
            "stored_id": self.stored_id,
        }


def compare_decisions(
    stored: Sequence[Mapping[str, Any]], made: Sequence[Decision]
) -> tuple[list[Difference], int | None]:
    """Stored decisions of the policy (as the API shows them) beside the replay's, and the last step that is certain.

    That is the first step at which one plan was changed and the other not; None where the plans never differ.
    """
    here = [_decision_facts(decision.to_wire()) for decision in made]
    there = [_decision_facts(item) for item in stored]

    def key(facts: Mapping[str, Any]) -> tuple[Any, ...]:
        return (facts["layer"], Target.from_wire(facts["target"]).key, facts["action"], facts["value"])

    pairs = match(here, there, key)
    parted = [step for a, b in pairs if (step := _parts_at(here, there, a, b)) is not None]
    known = min(parted, default=None)
    return [_difference(here, there, a, b, known) for a, b in pairs], known


def compare_alerts(
    stored: Sequence[Mapping[str, Any]], made: Sequence[Raised], known: int | None
) -> list[Difference]:
    """Stored alerts (as the API shows them) beside the replay's. known: the last step that is certain."""
    here = [
        {"rule": each.rule, "layer": each.layer, "severity": each.severity, "step": each.step}
        for each in made
    ]
    names = ("rule", "layer", "severity", "step", "id")
    there = [{name: item.get(name) for name in names} for item in stored]
    pairs = match(here, there, lambda facts: (facts["rule"], facts["layer"]))
    return [_difference(here, there, a, b, known) for a, b in pairs]


def _parts_at(
    here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]], a: int | None, b: int | None
) -> int | None:
    """The step at which a pair makes the two plans differ, if it does."""
    sides = [side[at] for side, at in ((here, a), (there, b)) if at is not None]
    steps = [int(facts["step"]) for facts in sides]
    together = len(steps) == 2 and steps[0] == steps[1]
    return None if together or not any(facts["in_force"] for facts in sides) else min(steps)


def _decision_facts(item: Mapping[str, Any]) -> dict[str, Any]:
    names = ("step", "layer", "target", "action", "value", "rule", "id", "reason")
    changes = item["action"] != "advice" and was_held(item)
    return {**{name: item.get(name) for name in names}, "in_force": changes}


def _difference(
    here: Sequence[Mapping[str, Any]],
    there: Sequence[Mapping[str, Any]],
    a: int | None,
    b: int | None,
    known: int | None,
) -> Difference:
    facts = dict(here[a] if a is not None else there[b if b is not None else 0])
    step = None if a is None else here[a]["step"]
    stored_step = None if b is None else there[b]["step"]
    facts.pop("in_force", None)
    for name in ("id", "step"):
        facts.pop(name, None)
    return Difference(
        status=_status(step, stored_step),
        step=step,
        stored_step=stored_step,
        certain=known is None or (step if step is not None else stored_step or 0) <= known,
        what=facts,
        stored_id=None if b is None else there[b].get("id"),
    )


def _status(step: int | None, stored_step: int | None) -> Status:
    if stored_step is None:
        return "only_here"
    if step is None:
        return "only_stored"
    if step == stored_step:
        return "same"
    return "earlier" if step < stored_step else "later"


def match(
    here: Sequence[Mapping[str, Any]],
    there: Sequence[Mapping[str, Any]],
    key: Callable[[Mapping[str, Any]], tuple[Any, ...]],
) -> list[tuple[int | None, int | None]]:
    """Places of equal keys in pairs, by `step`: first those of the same step, then the others in their order."""
    waiting: dict[tuple[Any, ...], list[int]] = {}
    for b, facts in enumerate(there):
        waiting.setdefault(key(facts), []).append(b)
    pairs: list[tuple[int | None, int | None]] = []
    alone: list[int] = []
    for a, facts in enumerate(here):
        held = waiting.get(key(facts), [])
        same = next((b for b in held if there[b]["step"] == here[a]["step"]), None)
        if same is None:
            alone.append(a)
        else:
            held.remove(same)
            pairs.append((a, same))
    for a in alone:
        held = waiting.get(key(here[a]), [])
        pairs.append((a, held.pop(0) if held else None))
    pairs += [(None, b) for held in waiting.values() for b in held]

    def place(pair: tuple[int | None, int | None]) -> tuple[Any, ...]:
        a, b = pair
        step = here[a]["step"] if a is not None else there[b or 0]["step"]
        return (step, a is None, -1 if a is None else a, -1 if b is None else b)

    return sorted(pairs, key=place)


def counts(differences: Iterable[Difference]) -> dict[str, int]:
    """How many of each status."""
    found = Counter(each.status for each in differences)
    return {status: found[status] for status in STATUSES}


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """What a policy raised over some steps, for the choice of a baseline."""

    alerts: int
    decisions: int
    by_rule: Mapping[str, int]
    """Alerts and decisions by rule."""
    by_layer: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        return {**vars(self), "by_rule": dict(self.by_rule), "by_layer": dict(self.by_layer)}


def alarms(running: Replay, keep: Callable[[int], bool]) -> Alarms:
    """What a replay raised at the steps that `keep` takes."""
    alerts = [alert for alert in running.alerts if keep(alert.step)]
    decisions = [decision for decision in running.decisions if keep(decision.step)]
    rules = Counter([alert.rule for alert in alerts] + [decision.rule for decision in decisions])
    layers = Counter(
        [alert.layer or "(run)" for alert in alerts] + [decision.layer for decision in decisions]
    )
    return Alarms(
        alerts=len(alerts),
        decisions=len(decisions),
        by_rule=dict(rules.most_common()),
        by_layer=dict(layers.most_common()),
    )
