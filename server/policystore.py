"""The policy's state of each attempt: stored whole, decoded once."""

import json
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, budget_used_ratio
from fp8_safeguard.server.alertlog import settle
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.audit import plan_columns, plan_from
from fp8_safeguard.server.recent import Recent
from fp8_safeguard.server.tables import attempts, runs

_KEPT_STATES = 16


_DECODED: Recent[str, PolicyState] = Recent(_KEPT_STATES)
"""States by their stored text: equal text is an equal state."""


def load_state(run: Row[Any], attempt: Row[Any]) -> PolicyState:
    """The state after the attempt's last decided step, with the run's plan as it is now."""
    text = attempt.policy_state
    state = _DECODED.get(text) or _DECODED.put(text, PolicyState.from_dict(json.loads(text)))
    return replace(state, plan=plan_from(run))


def save_state(
    conn: Connection, run: Row[Any], attempt_id: int, state: PolicyState, config: PolicyConfig
) -> tuple[int, ...]:
    """Store the state, and the plan, budget, counts and held alerts that follow from it; ids of alerts held or let go now.

    `run` is its row as this transaction sees it.
    """
    text = strict_dumps(state.to_dict())
    _DECODED.put(text, state)
    conn.execute(
        attempts.update()
        .where(attempts.c.id == attempt_id)
        .values(policy_state=text, last_decided_step=state.last_step)
    )
    told = {
        "fallback_budget_used_ratio": budget_used_ratio(state, config),
        "nonfinite_steps": state.trends.nonfinite_steps,
    }
    follows = {**plan_columns(state.plan), **told}
    if any(getattr(run, name) != value for name, value in follows.items()):
        conn.execute(runs.update().where(runs.c.id == run.id).values(follows))
    return settle(conn, run.id, state)
