"""What people change: mode, decisions, pins and the kill switch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.dashboards.causes import remedy_of
from fp8_safeguard.monitor import policy
from fp8_safeguard.monitor.document import escape
from fp8_safeguard.monitor.formats import ScaleError, check_multiplier
from fp8_safeguard.monitor.plan import ACTIONS, Decision, PlanError, Target, is_finite_number, step_after
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.thresholds import PRESETS
from fp8_safeguard.monitor.wire import MODES
from fp8_safeguard.server import audit, slotlists
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.audit import Act
from fp8_safeguard.server.auditview import decision_item, with_history
from fp8_safeguard.server.deciding import config_of
from fp8_safeguard.server.events import Event
from fp8_safeguard.server.policystore import load_state, save_state
from fp8_safeguard.server.problems import Problem, invalid, not_found
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import attempts, decisions, pins, run_slot_lists, runs, samples, slot_lists

Answer = tuple[dict[str, Any], list[Event]]
PERSON = "person"
_LONGEST_QUOTE = 200
_NAMES = {"scale_rounding": ("fp32", "pow2"), "format": ("e4m3", "e5m2")}
"""Actions whose value is one of these."""
_ON_OPERANDS = ("scale_multiplier", "scale_rounding", "format", "amax_history", "margin")
"""Actions on what a scale belongs to: an operand, or all of a layer."""


def change_run(
    conn: Connection, run: str, changes: Mapping[str, Any], now: float, actor: str = PERSON
) -> list[Event]:
    """Change mode, thresholds or end of a run. Raises Problem 404 or 422."""
    row = find_run(conn, run)
    changes = {name: value for name, value in changes.items() if name != "by"}
    allowed: dict[str, tuple[Any, ...]] = {
        "mode": MODES,
        "thresholds": tuple(PRESETS),
        "ended": (True, False),
    }
    wrong = [name for name in changes if name not in allowed]
    errors = [(f"/{escape(name[:_LONGEST_QUOTE])}", f"{quoted(name)} cannot be changed") for name in wrong]
    for name, known in allowed.items():
        # By type, too: 1 is equal to true.
        if name in changes and not any(
            type(changes[name]) is type(value) and changes[name] == value for value in known
        ):
            named = ", ".join(str(value).lower() if isinstance(value, bool) else value for value in known)
            errors.append((f"/{name}", f"{quoted(changes[name])} is not one of {named}"))
    if errors or not changes:
        detail = (
            "; ".join(message for _, message in errors)
            or f"nothing to change; give one of {', '.join(allowed)}"
        )
        raise invalid(detail, errors)
    values: dict[str, Any] = {}
    if "mode" in changes:
        values["mode"] = changes["mode"]
    if "thresholds" in changes:
        values["preset"] = changes["thresholds"]
    if "ended" in changes:
        values["ended_at"] = now if changes["ended"] else None
    conn.execute(runs.update().where(runs.c.id == row.id).values(values))
    before = {"mode": row.mode, "thresholds": row.preset, "ended": row.ended_at is not None}
    facts = {name: {"from": before[name], "to": value} for name, value in changes.items()}
    audit.note(conn, row.id, (Act(actor=actor, what=name, facts=fact) for name, fact in facts.items()))
    return [Event(run=run, kind="state", data=dict(changes))]


def delete_run(conn: Connection, run: str) -> None:
    """Remove a run with all that was stored for it, and slot lists that no run uses any more."""
    row = find_run(conn, run)
    mine = select(attempts.c.id).where(attempts.c.run_id == row.id)
    conn.execute(samples.delete().where(samples.c.attempt_id.in_(mine)))
    conn.execute(runs.delete().where(runs.c.id == row.id))
    used = select(run_slot_lists.c.slot_list_id)
    conn.execute(slot_lists.delete().where(slot_lists.c.id.not_in(used)))


def approve(conn: Connection, decision: str, actor: str, *, together: bool = False) -> Answer:
    """Put a proposed decision into the plan; `together`: with the others of its remedy. Raises Problem 404 or 409.

    The answer's `waiting` names those of its remedy that are proposed still.
    """
    row, run = _find_decision(conn, decision)
    _expect_state(row, ("proposed",), "approved")
    _refuse_observing(run, row)
    item, events = _apply(conn, run, row, policy.approve, state="approved", actor=actor)
    waiting = partners(conn, row)
    for other in waiting if together else ():
        found, changed = _find_decision(conn, other)
        events += _apply(conn, changed, found, policy.approve, state="approved", actor=actor)[1]
    return {**item, "waiting": [] if together else waiting}, events


def partners(conn: Connection, row: Row[Any]) -> list[str]:
    """The other decisions of a decision's remedy that wait for a person: half a remedy helps little."""
    remedy = remedy_of(json.loads(row.body))
    if remedy is None:
        return []
    waiting = (decisions.c.run_id == row.run_id, decisions.c.state == "proposed", decisions.c.id != row.id)
    asking = select(decisions.c.id, decisions.c.body).where(*waiting, decisions.c.action != "advice")
    query = asking.order_by(decisions.c.number)
    return [found.id for found in conn.execute(query) if remedy_of(json.loads(found.body)) == remedy]


def reject(conn: Connection, decision: str, actor: str) -> Answer:
    """Refuse a proposed decision; its spot rests before it may be proposed again. Raises Problem 404 or 409."""
    row, run = _find_decision(conn, decision)
    _expect_state(row, ("proposed",), "rejected")
    return _apply(conn, run, row, policy.reject, state="rejected", actor=actor)


def revert(conn: Connection, decision: str, actor: str) -> Answer:
    """Take a decision out of the plan again. Raises Problem 404 or 409."""
    row, run = _find_decision(conn, decision)
    _expect_state(row, ("approved", "sent", "applied"), "reverted")
    return _apply(conn, run, row, policy.revert, state="reverted", actor=actor)


def _apply(conn: Connection, run: Row[Any], row: Row[Any], change: Any, *, state: str, actor: str) -> Answer:
    """Let the policy's memory take up what a person decided, and note it."""
    attempt, before = _memory(conn, run)
    made = replace(Decision.from_wire(json.loads(row.body)), actor=actor, state=state)
    after = change(before, made, before.last_step or 0)
    save_state(conn, run, attempt.id, after, config_of(conn, run))
    changed = after.plan.version != before.plan.version
    values = {"state": state, "body": strict_dumps(made.to_wire())}
    if state == "approved" and changed:
        values["plan_version"] = after.plan.version
    updated = conn.execute(
        decisions.update().where(decisions.c.number == row.number).values(values).returning(*decisions.c)
    ).one()
    audit.note(conn, run.id, [Act(actor=actor, what=state, decision=row.id, step=before.last_step)])
    item = decision_item(updated)
    events = [Event(run=run.name, kind="decision", data=item), *_plan_events(run, before, after)]
    return with_history(conn, [item])[0], events


def _memory(conn: Connection, run: Row[Any]) -> tuple[Row[Any], PolicyState]:
    """The newest attempt and its policy's memory."""
    newest = select(func.max(attempts.c.id)).where(attempts.c.run_id == run.id).scalar_subquery()
    attempt = conn.execute(select(attempts).where(attempts.c.id == newest)).one()
    return attempt, load_state(run, attempt)


def _plan_events(run: Row[Any], before: PolicyState, after: PolicyState) -> list[Event]:
    if after.plan.version == before.plan.version:
        return []
    return [Event(run=run.name, kind="plan", data=after.plan.to_wire())]


def _find_decision(conn: Connection, decision: str) -> tuple[Row[Any], Row[Any]]:
    row = conn.execute(select(decisions).where(decisions.c.id == decision)).one_or_none()
    if row is None:
        raise not_found("decision-not-found", f"there is no decision {decision!r}")
    return row, conn.execute(select(runs).where(runs.c.id == row.run_id)).one()


def _expect_state(row: Row[Any], states: tuple[str, ...], wish: str) -> None:
    if row.state not in states:
        raise Problem(
            409,
            "decision-state",
            f"decision {row.id!r} is {row.state}; only {' or '.join(states)} ones can be {wish}",
            state=row.state,
        )


def _refuse_observing(run: Row[Any], decision: Row[Any] | None = None) -> None:
    """Raises Problem 409 for a run whose plan does not change; advice never changed one."""
    if run.mode != "observe":
        return
    if decision is not None and decision.action == "advice":
        raise Problem(
            409,
            "decision-state",
            f"decision {decision.id!r} is advice for people, which no plan takes up: there is nothing to approve. Do what it "
            "says, or reject it",
            state=decision.state,
        )
    raise Problem(
        409,
        "mode-conflict",
        f"run {run.name!r} is only observed, its plan does not change: set its mode to advise or enforce first (Mode on its "
        f"page, or PATCH /api/v1/runs/{run.name})",
        run=run.name,
    )


def pins_of(conn: Connection, run: str) -> dict[str, Any]:
    """What people have fixed in a run."""
    row = find_run(conn, run)
    query = select(pins.c.body).where(pins.c.run_id == row.id).order_by(pins.c.layer, pins.c.target)
    return {"items": [json.loads(body) for body in conn.execute(query).scalars()], "next_page_token": None}


def put_pin(conn: Connection, run: str, pin: Mapping[str, Any], actor: str, now: float) -> Answer:
    """Fix a layer: the policy leaves it alone, and an action given with the pin enters the plan.

    Raises Problem 404 for an unknown layer, 409 for an action in a run that is only observed, 422.
    """
    row = find_run(conn, run)
    layer, target = _pin_place(conn, row, pin)
    action, value = pin.get("action"), pin.get("value")
    _check_action(action, value, target)
    events = _release(conn, row, layer, target, actor)
    body = {"layer": layer, "target": target.to_wire(), "action": action, "value": value, "actor": actor}
    decision_id = None
    if action is not None:
        _refuse_observing(row)
        decided, more = _decide_by_hand(conn, find_run(conn, run), layer, target, body, now)
        decision_id = decided["id"]
        events += more
    body["decision_id"] = decision_id
    key = {"run_id": row.id, "layer": layer, "target": target.key}
    conn.execute(pins.insert().values(**key, body=strict_dumps(body)))
    audit.note(conn, row.id, [Act(actor=actor, what="pin", decision=decision_id, facts=body)])
    return body, events


def _check_action(action: Any, value: Any, target: Target) -> None:
    if action is not None and action not in ACTIONS:
        raise invalid(
            f"action {action!r} is not one of {', '.join(ACTIONS)}", [("/action", "unknown action")]
        )
    wrong = _wrong_target(action, target)
    if wrong is not None:
        raise invalid(wrong, [("/target", wrong)])
    wrong = _wrong_value(action, value)
    if wrong is not None:
        raise invalid(wrong, [("/value", wrong)])


def _wrong_target(action: str | None, target: Target) -> str | None:
    """What is wrong with an action at that place, if anything."""
    if action == "bf16_fallback" and target.operand is not None:
        return f"bf16_fallback switches a gemm or a layer, not an operand ({target.key})"
    if action in _ON_OPERANDS and target.gemm is not None:
        return f"{action} changes an operand or a layer, not a gemm ({target.key})"
    return None


def _wrong_value(action: str | None, value: Any) -> str | None:
    """What is wrong with an action's argument, if anything."""
    if action is None or action == "bf16_fallback":
        return (
            None if value is None else f"{action or 'a pin without an action'} takes no value, not {value!r}"
        )
    if action in _NAMES:
        allowed = _NAMES[action]
        return None if value in allowed else f"{action} is one of {', '.join(allowed)}, not {value!r}"
    if not is_finite_number(value):
        return f"{action} needs a finite number, not {value!r}"
    if action == "scale_multiplier":
        try:
            check_multiplier(value)
        except ScaleError as error:
            return str(error)
    if action == "amax_history" and not (value >= 1 and value == int(value)):
        return f"amax_history is a number of steps, a whole number from 1, not {value!r}"
    if action == "gradient_smoothing" and not 0 <= value < 1:
        return f"gradient_smoothing is a beta from 0 to below 1, not {value!r}"
    return None


def delete_pin(conn: Connection, run: str, pin: Mapping[str, Any], actor: str) -> list[Event]:
    """Release a pin, and take its action out of the plan. Raises Problem 404."""
    row = find_run(conn, run)
    layer, target = _pin_place(conn, row, pin)
    if not _pinned(conn, row, layer, target):
        raise not_found("pin-not-found", f"run {run!r} has no pin on {layer!r} {target.key}")
    return _release(conn, row, layer, target, actor)


def _pin_place(conn: Connection, run: Row[Any], pin: Mapping[str, Any]) -> tuple[str, Target]:
    layer = pin.get("layer")
    if not isinstance(layer, str):
        raise invalid("a pin names its layer", [("/layer", "required")])
    try:
        target = Target.from_wire(pin.get("target") or {"layer": True})
    except (PlanError, TypeError) as error:
        raise invalid(str(error), [("/target", str(error))]) from error
    if layer not in slotlists.layers_of(slotlists.of_run(conn, run.id)):
        raise not_found("layer-not-found", f"run {run.name!r} has no layer {layer!r}")
    return layer, target


def _where_pin(run: Row[Any], layer: str, target: Target) -> tuple[Any, ...]:
    return (pins.c.run_id == run.id, pins.c.layer == layer, pins.c.target == target.key)


def _pinned(conn: Connection, run: Row[Any], layer: str, target: Target) -> dict[str, Any] | None:
    body = conn.execute(select(pins.c.body).where(*_where_pin(run, layer, target))).scalar_one_or_none()
    return None if body is None else json.loads(body)


def _release(conn: Connection, run: Row[Any], layer: str, target: Target, actor: str) -> list[Event]:
    pinned = _pinned(conn, run, layer, target)
    conn.execute(pins.delete().where(*_where_pin(run, layer, target)))
    if pinned is None:
        return []
    audit.note(conn, run.id, [Act(actor=actor, what="release", decision=pinned["decision_id"], facts=pinned)])
    if pinned["decision_id"] is None:
        return []
    row, current = _find_decision(conn, pinned["decision_id"])
    if row.state not in ("approved", "sent", "applied"):
        return []
    return _apply(conn, current, row, policy.revert, state="reverted", actor=actor)[1]


def _decide_by_hand(
    conn: Connection, run: Row[Any], layer: str, target: Target, body: Mapping[str, Any], now: float
) -> Answer:
    attempt, before = _memory(conn, run)
    step = before.last_step or 0
    decision = Decision(
        id=f"{run.name}-{before.decisions_made + 1}",
        run=run.name,
        step=step,
        layer=layer,
        target=target,
        action=body["action"],
        value=body["value"],
        rule="pin",
        reason=f"{body['actor']} pinned it",
        mode=run.mode,
        state="approved",
        actor=body["actor"],
        not_before_step=step_after(step),
    )
    after = policy.approve(replace(before, decisions_made=before.decisions_made + 1), decision, step)
    save_state(conn, run, attempt.id, after, config_of(conn, run))
    (item,) = audit.record_decisions(conn, run, [decision], after.plan.version, now)
    return item, [Event(run=run.name, kind="decision", data=item), *_plan_events(run, before, after)]


def kill_switch(conn: Connection, run: str, actor: str = PERSON) -> list[Event]:
    """Empty the plan, drop proposals and pins, and only observe from here on."""
    row = find_run(conn, run)
    attempt, before = _memory(conn, row)
    after = policy.kill(before, before.last_step or 0)
    dropped = pins_of(conn, run)["items"]
    plan = before.plan.to_wire()
    facts = {"mode": {"from": row.mode, "to": "observe"}, "plan": plan, "pins": dropped}
    audit.note(conn, row.id, [Act(actor=actor, what="kill-switch", step=before.last_step, facts=facts)])
    save_state(conn, row, attempt.id, after, config_of(conn, row))
    conn.execute(runs.update().where(runs.c.id == row.id).values(mode="observe"))
    conn.execute(pins.delete().where(pins.c.run_id == row.id))
    mine = decisions.c.run_id == row.id
    in_force = decisions.c.state.in_(("approved", "sent", "applied"))
    gone = [*_set_state(conn, "reverted", mine, in_force, decisions.c.id.in_(_entry_ids(before)))]
    gone += _set_state(conn, "expired", mine, decisions.c.state == "proposed")
    ended = (Act(actor=actor, what=one.state, decision=one.id, step=before.last_step) for one in gone)
    audit.note(conn, row.id, ended)
    events = [Event(run=run, kind="decision", data=decision_item(found)) for found in gone]
    state = Event(run=run, kind="state", data={"mode": "observe", "kill_switch": True})
    return [*events, *_plan_events(row, before, after), state]


def _entry_ids(state: PolicyState) -> list[str]:
    return [entry.decision_id for entry in state.plan.entries]


def _set_state(conn: Connection, state: str, *which: Any) -> list[Row[Any]]:
    return list(
        conn.execute(decisions.update().where(*which).values(state=state).returning(*decisions.c)).all()
    )
