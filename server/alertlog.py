"""Rows of alerts: raised, changed, held, resolved, raised again.

One definition of an alert's state serves the page, the command line, /metrics and the verdict; it is the stored one:

    open       in breach, or not yet seen clear for long enough, and nothing holds it
    held       the same, but the GEMMs that it is about run in BF16: as the layer is configured, or by a fallback of the plan
               that the client has said it applies. An alert whose fallback is decided with it is open until then
    resolved   clear for some samples, or a person said so, or its steps did not happen (a rewind)

A breach that comes back within the cool-down re-opens its alert (`occurrences` counts), later it raises another. What a
person has resolved stays so until the breach clears and comes again, grows from watch to act, or another slot joins.
Acknowledged and silenced are marks beside the state: the states of runs and layers do not depend on them. Counts of open
alerts (`open` of a run's `alerts`, the page's figure, alerts_active) leave out those that are silenced, and say how many.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from fp8_safeguard.monitor.alerts import COOL_DOWN_STEPS, Alert, is_held
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.policy import PolicyState
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import alerts, decisions

UNRESOLVED = ("open", "held")
STATES = (*UNRESOLVED, "resolved")

_NOT_RESOLVED: dict[str, Any] = {
    "state": "open",
    "resolved_at": None,
    "resolved_by": None,
    "resolved_step": None,
    "resolved_reason": None,
}


@dataclass(frozen=True)
class AlertCounts:
    """How many alerts of a run are in which state; those silenced are not among `open`."""

    open: int = 0
    held: int = 0
    silenced: int = 0

    def to_dict(self) -> dict[str, int]:
        """JSON object."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class AlertChanges:
    """Row ids of what one step did to alerts."""

    raised: tuple[int, ...] = ()
    """Opened, opened again, or worsened to act: what the sample raised."""
    changed: tuple[int, ...] = ()
    """Joined by another slot, or resolved."""


@dataclass(frozen=True)
class _Log:
    """The alerts of one run at one step of one attempt."""

    conn: Connection
    run_id: int
    attempt_id: int
    step: int
    now: float

    def newest(self, keys: Iterable[str]) -> dict[str, Row[Any]]:
        """The newest row of each key that has one."""
        wanted = (alerts.c.run_id == self.run_id, alerts.c.state.in_(STATES), alerts.c.key.in_(list(keys)))
        return {
            row.key: row for row in self.conn.execute(select(alerts).where(*wanted).order_by(alerts.c.id))
        }

    def update(self, changed: dict[str, Alert]) -> None:
        """Write what the latest sample says into rows that are not resolved."""
        # One prepared statement for all: a run in trouble has many open alerts, each new at every step.
        rows = [{"open_key": key, **_changing(alert, "new_")} for key, alert in changed.items()]
        if rows:
            values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("severity", "body")}
            # Not IN, which a prepared statement cannot have.
            unresolved_one = (alerts.c.state == "open") | (alerts.c.state == "held")
            which = (alerts.c.run_id == self.run_id, unresolved_one, alerts.c.key == bindparam("open_key"))
            statement = alerts.update().where(*which)
            self.conn.execute(statement.values(values), rows)

    def resolve(self, keys: list[str], reason: str) -> tuple[int, ...]:
        """Resolve what is over; what a person had resolved is over now, too, and may come again."""
        if not keys:
            return ()
        mine = (alerts.c.run_id == self.run_id, alerts.c.key.in_(keys))
        by_hand = (alerts.c.state == "resolved", alerts.c.resolved_by.is_not(None))
        over = alerts.update().where(*mine, *by_hand, alerts.c.resolved_step.is_(None))
        self.conn.execute(over.values(resolved_step=self.step))
        values = {"state": "resolved", "resolved_at": self.now, "resolved_step": self.step}
        close = alerts.update().where(*mine, alerts.c.state.in_(UNRESOLVED)).returning(alerts.c.id)
        return tuple(self.conn.execute(close.values(**values, resolved_reason=reason)).scalars())

    def open(self, opened: dict[str, Alert]) -> tuple[int, ...]:
        """Open the alerts: the row of one that was resolved not long ago again, for the others a new one."""
        before = self.newest(opened) if opened else {}
        again = {key: alert for key, alert in opened.items() if key in before and self._recent(before[key])}
        added = [self._row(key, alert, before.get(key)) for key, alert in opened.items() if key not in again]
        ids = [self.reopen(before[key], alert) for key, alert in again.items()]
        if added:
            insert = alerts.insert().returning(alerts.c.id, sort_by_parameter_order=True)
            ids += self.conn.execute(insert, added).scalars()
        return tuple(ids)

    def _recent(self, row: Row[Any]) -> bool:
        if row.state != "resolved":
            return True
        if row.resolved_step is None:
            return row.resolved_by is not None
        return bool(self.step - row.resolved_step <= COOL_DOWN_STEPS)

    def reopen(self, row: Row[Any], alert: Alert, *, occurrences: int = 1) -> int:
        """Make a row open again."""
        values = {**_NOT_RESOLVED, "occurrences": row.occurrences + occurrences, **_changing(alert)}
        self.conn.execute(alerts.update().where(alerts.c.id == row.id).values(values))
        return int(row.id)

    def _row(self, key: str, alert: Alert, before: Row[Any] | None) -> dict[str, Any]:
        silence = before if before is not None and is_silenced(before.silenced_until, self.now) else None
        return {
            "run_id": self.run_id,
            "attempt_id": self.attempt_id,
            "key": key,
            "rule": alert.rule,
            "layer": alert.layer,
            "state": "open",
            "created_at": self.now,
            "first_step": alert.first_step,
            "raised_step": alert.step,
            # Silence is about a rule of a layer, and outlasts one alert of it.
            "silenced_until": None if silence is None else silence.silenced_until,
            "silenced_by": None if silence is None else silence.silenced_by,
            **_changing(alert),
        }


def record_alerts(
    conn: Connection, run: Row[Any], attempt_id: int, before: PolicyState, after: PolicyState, now: float
) -> AlertChanges:
    """Store what opened, changed and closed between the states before and after one step."""
    log = _Log(conn, run.id, attempt_id, after.last_step or 0, now)
    old, new = before.alerts, after.alerts
    kept = {key: new[key] for key in new if key in old and new[key] != old[key]}
    worse = [key for key in kept if (old[key].severity, new[key].severity) == ("watch", "act")]
    joined = [key for key in kept if key not in worse and _live(new[key]) - _live(old[key])]
    log.update(kept)
    closed = log.resolve([key for key in old if key not in new], "clear again")
    opened = log.open({key: alert for key, alert in new.items() if key not in old})
    rows = log.newest([*worse, *joined]) if worse or joined else {}
    # A person resolved what was there, not what has come since.
    again = [log.reopen(row, new[key]) for key, row in rows.items() if row.state == "resolved"]
    worsened = [rows[key].id for key in worse if key in rows and rows[key].id not in again]
    others = [rows[key].id for key in joined if key in rows and rows[key].id not in again]
    return AlertChanges(raised=(*opened, *again, *worsened), changed=(*others, *closed))


def begin_attempt(
    conn: Connection, run: Row[Any], attempt: Row[Any], state: PolicyState, now: float
) -> AlertChanges:
    """Leave exactly the alerts open that the attempt starts with."""
    log = _Log(conn, run.id, attempt.id, attempt.from_step, now)
    rows = log.newest(_unresolved_keys(conn, run.id) | state.alerts.keys())
    gone = [key for key, row in rows.items() if row.state in UNRESOLVED and key not in state.alerts]
    closed = log.resolve(gone, _why_gone(attempt))
    log.update(dict(state.alerts))
    missing = {key: alert for key, alert in state.alerts.items() if key not in rows}
    for key, row in rows.items():
        # It was resolved in steps that did not happen. What a person resolved stays so.
        if key in state.alerts and row.state == "resolved" and row.resolved_by is None:
            log.reopen(row, state.alerts[key], occurrences=0)
    log.open(missing)
    return AlertChanges(changed=closed)


def _why_gone(attempt: Row[Any]) -> str:
    if attempt.parent is None:
        return f"attempt {attempt.name!r} starts over"
    return f"steps from {attempt.from_step} on did not happen: attempt {attempt.name!r} went back"


def settle(conn: Connection, run_id: int, state: PolicyState) -> tuple[int, ...]:
    """Mark as held what the plan covers as far as it is applied, and only that; ids of the rows that this changed."""
    moved: list[int] = []
    held: dict[bool, list[str]] = {True: [], False: []}
    applied = _applied(conn, state.plan) if state.alerts else state.plan
    for key, alert in state.alerts.items():
        held[is_held(alert.signals, alert.rule, applied)].append(key)
    for covered, (now, before) in ((True, ("held", "open")), (False, ("open", "held"))):
        if held[covered]:
            mine = (alerts.c.run_id == run_id, alerts.c.state == before, alerts.c.key.in_(held[covered]))
            change = alerts.update().where(*mine).values(state=now).returning(alerts.c.id)
            moved += conn.execute(change).scalars()
    return tuple(moved)


def _applied(conn: Connection, plan: Plan) -> Plan:
    """The plan without the entries that no client has said it applies."""
    named = [entry.decision_id for entry in plan.entries]
    taken_up = (decisions.c.id.in_(named), decisions.c.state == "applied")
    applied = set(conn.execute(select(decisions.c.id).where(*taken_up)).scalars()) if named else set()
    return replace(plan, entries=tuple(entry for entry in plan.entries if entry.decision_id in applied))


def unresolved(conn: Connection, run_id: int) -> list[Row[Any]]:
    """Open and held alerts of a run, the oldest first."""
    query = select(alerts).where(alerts.c.run_id == run_id, alerts.c.state.in_(UNRESOLVED))
    return list(conn.execute(query.order_by(alerts.c.id)).all())


def count_alerts(conn: Connection, run_id: int) -> AlertCounts:
    """The counts that everybody shows."""
    now = freshness_of(conn)[0]
    query = select(alerts.c.state, alerts.c.silenced_until)
    found = {"open": 0, "held": 0, "silenced": 0}
    for row in conn.execute(query.where(alerts.c.run_id == run_id, alerts.c.state.in_(UNRESOLVED))):
        found["silenced" if row.state == "open" and is_silenced(row.silenced_until, now) else row.state] += 1
    return AlertCounts(**found)


def is_silenced(until: float | None, now: float) -> bool:
    """Whether nobody wants to hear of an alert that is silenced until then."""
    return until is not None and until > now


def _unresolved_keys(conn: Connection, run_id: int) -> set[str]:
    mine = (alerts.c.run_id == run_id, alerts.c.state.in_(UNRESOLVED))
    return set(conn.execute(select(alerts.c.key).where(*mine)).scalars())


def _live(alert: Alert) -> set[str]:
    return {signal.key for signal in alert.live}


def _changing(alert: Alert, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}severity": alert.severity, f"{prefix}body": strict_dumps(alert.to_wire())}
