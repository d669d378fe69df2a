"""What was decided of a run in a range of steps, and why."""

from typing import Any

from sqlalchemy import Connection, select

from fp8_safeguard.dashboards.causes import cause_of
from fp8_safeguard.monitor.inforce import in_force, since
from fp8_safeguard.server.auditview import decision_item, with_history
from fp8_safeguard.server.tables import decisions

_CAUSE = ("name", "kind", "layer")


def all_decisions(conn: Connection, run_id: int) -> list[dict[str, Any]]:
    """Every decision of a run with its history, the oldest first."""
    query = select(decisions).where(decisions.c.run_id == run_id).order_by(decisions.c.number)
    return with_history(conn, [decision_item(row) for row in conn.execute(query)])


def decided(
    conn: Connection, run_id: int, from_step: int | None, to_step: int | None
) -> list[dict[str, Any]]:
    """The decisions in force at some step of a range, and the advice given in it, the oldest first.

    Each with `since_step`, its first step, and the `cause` that it names (name, kind and layer), if any. A range without steps
    has none.
    """
    if from_step is None or to_step is None:
        return []
    found = all_decisions(conn, run_id)
    advice = [item for item in found if item["action"] == "advice" and from_step <= item["step"] <= to_step]
    listed = [(since(item), item) for item in in_force(found, from_step, to_step)]
    listed += [(item["step"], item) for item in advice]
    return [
        {
            **{name: item[name] for name in ("id", "layer", "action")},
            "since_step": step,
            "cause": None
            if (cause := cause_of(item)) is None
            else {name: cause.get(name) for name in _CAUSE},
        }
        for step, item in sorted(listed, key=lambda pair: pair[0])
    ]
