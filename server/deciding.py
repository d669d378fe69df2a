"""Run the policy over arrived steps, in order, inside the ingest transaction."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Row, func, or_, select

from fp8_safeguard.monitor.columns import merge_tables
from fp8_safeguard.monitor.numbers import decode_number, worse
from fp8_safeguard.monitor.observation import StepObservation, scalars_of
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server import alertlog, audit, baselines, local, slotlists
from fp8_safeguard.server.auditview import alert_items
from fp8_safeguard.server.branch import visible_rows
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.packing import Packed
from fp8_safeguard.server.policystore import load_state, save_state
from fp8_safeguard.server.store import policy_of
from fp8_safeguard.server.tables import attempts, decisions, samples

NEWER_STEPS = 4
"""A step that lacks a group is decided on once this many newer steps exist."""
_REPLAYED_STEPS = 256
_MOST_STEPS_AT_ONCE = 1024


@dataclass
class Raised:
    """What one sample led to, for its reply and for the live stream."""

    plan_version: int
    plan: dict[str, Any] | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def after_sample(conn: Connection, run: Row[Any], attempt: Row[Any], sample: Sample, now: float) -> Raised:
    """Note what the client applied, decide on every step that is ready, and make up the reply.

    `attempt` is its row, and `newest`: whether it is the run's newest. Only that one is decided on.
    """
    raised = Raised(run.plan_version)
    if not sample.local_decisions:
        # Until they are taken over, the client's versions are its own.
        raised.events += audit.mark_applied(conn, run, sample)
    if attempt.newest:
        plan = _decide_ready(conn, run, attempt, sample, raised, now)
    else:
        plan = audit.plan_from(run)
        raised.events += local.note(conn, run, sample, config_of(conn, run), now)
    raised.plan_version = plan.version
    if sample.plan_version < plan.version:
        raised.plan = plan.to_wire()
        raised.events += audit.mark_sent(conn, run, plan.version)
        raised.decisions = audit.refreshed(conn, raised.decisions)
    return raised


def _decide_ready(
    conn: Connection, run: Row[Any], attempt: Row[Any], sample: Sample, raised: Raised, now: float
) -> Plan:
    """Take over what the client decided alone, and decide on every step that is ready; the plan afterwards."""
    fresh = attempt.policy_state is None
    state = first_state(conn, run, attempt) if fresh else load_state(run, attempt)
    ready = _ready_steps(conn, attempt, state.last_step)
    if not ready and not fresh and not sample.local_decisions:
        return state.plan
    changes = [alertlog.begin_attempt(conn, run, attempt, state, now)] if fresh else []
    raised.events += audit.begin_attempt(conn, run, state) if fresh else []
    config = config_of(conn, run)
    begun = state
    taken = local.take_over(conn, run, state, sample, config, now)
    state, raised.decisions = taken.state, taken.decisions
    raised.events += taken.events
    for step in ready:
        before = state
        state, made = decide(state, observation_of(conn, run, attempt.id, step), config)
        changes.append(alertlog.record_alerts(conn, run, attempt.id, before, state, now))
        raised.decisions += audit.record_decisions(conn, run, made, state.plan.version, now)
        raised.events += audit.expire_proposals(conn, run, before, state)
        raised.events += audit.record_grades(conn, run, state.grades, state.last_step)
    moved = save_state(conn, run, attempt.id, state, config)
    raised.alerts = alert_items(conn, run, (number for change in changes for number in change.raised))
    others = (number for change in changes for number in change.changed)
    shown = [*raised.alerts, *alert_items(conn, run, (*others, *moved))]
    raised.events += _events(conn, run, raised, shown, begun, state)
    return state.plan


def _events(
    conn: Connection,
    run: Row[Any],
    raised: Raised,
    alerts: list[dict[str, Any]],
    before: PolicyState,
    after: PolicyState,
) -> list[Event]:
    events = [Event(run=run.name, kind="decision", data=item) for item in raised.decisions]
    told = {item["id"]: item for item in alerts}
    events += [Event(run=run.name, kind="alert", data=item) for item in told.values()]
    if after.plan.version != before.plan.version:
        events.append(Event(run=run.name, kind="plan", data=after.plan.to_wire()))
    if events:
        severities = sorted({alert.severity for alert in after.alerts.values()})
        counts = alertlog.count_alerts(conn, run.id)
        state = {"last_step": after.last_step, "open_alerts": counts.open, "severities": severities}
        events.append(Event(run=run.name, kind="state", data=state))
    return events


def config_of(conn: Connection, run: Row[Any]) -> PolicyConfig:
    """The policy's configuration for a run: what all have in common, and what is its own."""
    return replace(
        policy_of(conn),
        run=run.name,
        preset=run.preset,
        mode=run.mode,
        pins=audit.pinned_layers(conn, run.id),
        baseline=baselines.chosen(conn, run),
    )


def _ready_steps(conn: Connection, attempt: Row[Any], last: int | None) -> list[int]:
    """Undecided steps, in order, up to the first that still waits for a group."""
    groups = func.count(func.distinct(samples.c.group)).label("groups")
    query = select(samples.c.step, groups).where(samples.c.attempt_id == attempt.id)
    if last is not None:
        query = query.where(samples.c.step > last)
    arrived = conn.execute(
        query.group_by(samples.c.step).order_by(samples.c.step).limit(_MOST_STEPS_AT_ONCE)
    ).all()
    ready = []
    for place, row in enumerate(arrived):
        newer = len(arrived) - 1 - place
        if row.groups < attempt.groups and newer < NEWER_STEPS:
            break
        ready.append(row.step)
    return ready


def observation_of(conn: Connection, run: Row[Any], attempt_id: int, step: int) -> StepObservation:
    """All groups' samples of one step, merged."""
    query = select(samples).where(samples.c.attempt_id == attempt_id, samples.c.step == step)
    rows = conn.execute(query.order_by(samples.c.group, samples.c.part)).all()
    parts = []
    values: dict[str, float] = {}
    versions, notes, ranks = [], [], []
    for row in rows:
        slots = slotlists.load(conn, row.slot_list_id)
        if slots:
            parts.append((slots, Packed([row.columns], [row.histograms], len(slots)).table()))
        for name, value in json.loads(row.run_values).items():
            number = decode_number(value)
            if number is not None:
                # No group's trouble is hidden.
                values[name] = worse(values.get(name, number), number)
        header = json.loads(row.header)
        versions.append(header["plan_version"])
        notes += json.loads(row.scalars)
        ranks += header.get("ranks", ())
    slots, table = merge_tables(parts)
    held = slotlists.of_run(conn, run.id)
    order = slotlists.index_of(held)
    return StepObservation(
        step=step,
        slots=slots,
        stats=table,
        run=values,
        plan_version=min(versions),
        indices=tuple(order[slot.key] for slot in slots),
        scalars=scalars_of(notes),
        ranks=tuple(ranks),
    )


def first_state(conn: Connection, run: Row[Any], attempt: Row[Any]) -> PolicyState:
    """What an attempt's policy starts with: its parent's memory of the steps that both share, and the run's plan.

    A child that goes back over steps after which a client took up a decision is given the decision for the very step at which
    its parent applied it: the entry's `not_before_step` is raised from evidence step + 1 to the effective step that was
    reported, so that a resume repeats its parent bit by bit. What no client reported stays as it is.
    """
    parent = _parent(conn, attempt)
    made = conn.execute(select(func.count()).where(decisions.c.run_id == run.id)).scalar_one()
    if parent is None or parent.policy_state is None:
        return replace(PolicyState(), plan=audit.plan_from(run), decisions_made=made)
    plan = _as_applied(conn, audit.plan_from(run), attempt.from_step)
    before = _before(conn, attempt, parent)
    goes_on = parent.last_decided_step is None or parent.last_decided_step < attempt.from_step
    if goes_on and before.id == parent.id:
        return replace(load_state(run, parent), plan=plan)
    ended = (decisions.c.action == "restore", decisions.c.step >= attempt.from_step)
    undone = conn.execute(select(decisions.c.id).where(decisions.c.run_id == run.id, *ended)).scalars().all()
    shared = load_state(run, parent) if goes_on else _replayed(conn, run, attempt)
    state = shared.after_rewind(load_state(run, before), undone)
    return replace(state, plan=plan, decisions_made=made)


def _as_applied(conn: Connection, plan: Plan, from_step: int) -> Plan:
    """The plan whose entries wait for the steps, from that one on, at which they took effect before."""
    named = [entry.decision_id for entry in plan.entries]
    repeated = (decisions.c.id.in_(named), decisions.c.effective_step >= from_step)
    found = conn.execute(select(decisions.c.id, decisions.c.effective_step).where(*repeated)) if named else ()
    taken_up = {row.id: row.effective_step for row in found}
    entries = (
        replace(entry, not_before_step=max(entry.not_before_step, taken_up.get(entry.decision_id, 0)))
        for entry in plan.entries
    )
    return replace(plan, entries=tuple(entries))


def _parent(conn: Connection, attempt: Row[Any]) -> Row[Any] | None:
    query = select(attempts).where(
        attempts.c.run_id == attempt.run_id, attempts.c.name == attempt.parent, attempts.c.id < attempt.id
    )
    return conn.execute(query).one_or_none()


def _before(conn: Connection, attempt: Row[Any], parent: Row[Any]) -> Row[Any]:
    """The attempt that the run's plan comes from: the parent, or a later child of the tree, as a first try to resume.

    Its memory is the one that knows the plan's entries, the proposals that wait, and every number that was given.
    """
    older = (attempts.c.run_id == attempt.run_id, attempts.c.id < attempt.id, attempts.c.id >= parent.id)
    known = (
        attempts.c.policy_state.is_not(None),
        or_(attempts.c.id == parent.id, attempts.c.parent.is_not(None)),
    )
    query = select(attempts).where(*older, *known).order_by(attempts.c.id.desc()).limit(1)
    return conn.execute(query).one()


def _replayed(conn: Connection, run: Row[Any], attempt: Row[Any]) -> PolicyState:
    """Memory rebuilt from the steps before a rewind: the parent's own has seen steps that did not happen."""
    shared = attempt.from_step - 1
    state = PolicyState()
    config = replace(config_of(conn, run), mode="observe")
    rows = visible_rows(conn, run.id, [samples.c.attempt_id], to_step=shared)
    owner = {row.step: row.attempt_id for row in rows}
    for step in sorted(owner)[-_REPLAYED_STEPS:]:
        state, _ = decide(state, observation_of(conn, run, owner[step], step), config)
    return replace(state, last_step=shared if shared >= 0 else None)
