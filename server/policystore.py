"""The policy's state of each attempt: stored whole, decoded once."""

import json
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row

from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, budget_used_ratio
from fp8_safeguard.server.alertlog import settle
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.audit import plan_columns, plan_from
from fp8_safeguard.server.tables import attempts, runs

_KEPT_STATES = 16


class _Decoded:
    """States by their stored text: equal text is an equal state, so an entry can never be out of date."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[str, PolicyState] = OrderedDict()

    def get(self, text: str) -> PolicyState:
        with self._lock:
            known = self._states.get(text)
        return known if known is not None else self.put(text, PolicyState.from_dict(json.loads(text)))

    def put(self, text: str, state: PolicyState) -> PolicyState:
        with self._lock:
            self._states[text] = state
            self._states.move_to_end(text)
            while len(self._states) > _KEPT_STATES:
                self._states.popitem(last=False)
        return state


_DECODED = _Decoded()


def load_state(run: Row[Any], attempt: Row[Any]) -> PolicyState:
    """The state after the attempt's last decided step, with the run's plan as it is now."""
    return replace(_DECODED.get(attempt.policy_state), plan=plan_from(run))


def save_state(
    conn: Connection, run: Row[Any], attempt_id: int, state: PolicyState, config: PolicyConfig
) -> tuple[int, ...]:
    """Store the state, and the plan, budget and held alerts that follow from it; ids of alerts held or let go now."""
    text = strict_dumps(state.to_dict())
    _DECODED.put(text, state)
    conn.execute(
        attempts.update()
        .where(attempts.c.id == attempt_id)
        .values(policy_state=text, last_decided_step=state.last_step)
    )
    budget = {"fallback_budget_used_ratio": budget_used_ratio(state, config)}
    conn.execute(runs.update().where(runs.c.id == run.id).values({**plan_columns(state.plan), **budget}))
    return settle(conn, run.id, state)
