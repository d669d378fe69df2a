"""The causes that stand: which decisions name them, and since when."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.dashboards.causes import cause_of
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.monitor.state import place
from fp8_safeguard.server.policystore import load_state
from fp8_safeguard.server.tables import decisions

MOST_DECISIONS = 500
"""Newest decisions searched: a run in trouble makes a few dozen."""
_LIVE = ("proposed", "approved", "sent", "applied")
_KINDS = ("hardware", "fp8", "not-fp8")
"""What to look at first: a broken machine makes all other evidence doubtful."""


def standing_causes(conn: Connection, run: Row[Any], attempt: Row[Any]) -> list[dict[str, Any]]:
    """The causes of what is decided and still holds, each once: the hardware's first, then by first step.

    A cause stands while the plan or a proposal holds a decision on it, or, for advice, while the policy goes on seeing the
    reason. Each is the decision's `evidence["cause"]` with `decisions`, the ids that name it, `first_step`, where what it
    explains began, and `found_step` and `step`, where it was named first and last.
    """
    live = (decisions.c.run_id == run.id, decisions.c.state.in_(_LIVE))
    query = select(decisions).where(*live, decisions.c.body.contains('"cause"'))
    rows = conn.execute(query.order_by(decisions.c.number.desc()).limit(MOST_DECISIONS)).all()
    if not rows or attempt.policy_state is None:
        return []
    state = load_state(run, attempt)
    bodies = [body for row in reversed(rows) if _stands(body := json.loads(row.body), state)]
    return sorted(_merged(bodies), key=_order)


def _stands(body: Mapping[str, Any], state: PolicyState) -> bool:
    if cause_of(body) is None:
        return False
    if body["action"] == "advice":
        return place(body["layer"], Target.from_wire(body["target"]), body["rule"]) in state.advised
    held = {entry.decision_id for entry in state.plan.entries}
    return body["id"] in held or body["id"] in {made.decision_id for made in state.proposals.values()}


def _merged(bodies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for body in bodies:
        cause = cause_of(body) or {}
        first = min(int(body["evidence"].get("first_step", body["step"])), int(body["step"]))
        key = (cause["name"], cause.get("layer"))
        held = found.setdefault(key, {"first_step": first, "found_step": body["step"], "decisions": []})
        # The newest decision has the newest numbers.
        held.update({**cause, "first_step": min(held["first_step"], first), "step": body["step"]})
        held["decisions"].append(body["id"])
    return list(found.values())


def _order(cause: Mapping[str, Any]) -> tuple[Any, ...]:
    kind = cause.get("kind")
    return (_KINDS.index(kind) if kind in _KINDS else len(_KINDS), cause["first_step"], str(cause["name"]))
