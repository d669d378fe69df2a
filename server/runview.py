"""Runs as people see them: state, verdict, last values."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.dashboards.metrics import format_value, metric_view
from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.server.branch import Segment, live_branch, segment_rows
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import alerts, attempts, runs, samples

RUN_STATES = ("healthy", "watch", "unstable", "fallback", "stale", "ended")


@dataclass(frozen=True, kw_only=True)
class Health:
    """What the open alerts and the plan say about a run or a layer."""

    worst_alert: dict[str, Any] | None
    severities: frozenset[str]
    fallbacks: int

    @property
    def state(self) -> str:
        """`unstable` is trouble that nothing holds yet, `fallback` trouble that the plan holds."""
        if "act" in self.severities:
            return "unstable"
        if self.fallbacks:
            return "fallback"
        return "watch" if self.severities else "healthy"


def list_runs(
    conn: Connection, *, page_size: int = DEFAULT_PAGE, page_token: str | None = None
) -> dict[str, Any]:
    """Runs with their detail, the newest first."""
    after = decode_token(page_token, ("id",))
    query = select(runs).order_by(runs.c.id.desc()).limit(page_size + 1)
    if after is not None:
        query = query.where(runs.c.id < after["id"])
    rows = conn.execute(query).all()
    shown = rows[:page_size]
    more = len(rows) > page_size
    return {
        "items": [detail_of(conn, row) for row in shown],
        "next_page_token": encode_token({"id": shown[-1].id}) if more else None,
    }


def run_detail(conn: Connection, run: str) -> dict[str, Any]:
    """One run: state, verdict and last values. Raises Problem 404."""
    return detail_of(conn, find_run(conn, run))


def run_state(conn: Connection, row: Row[Any]) -> str:
    """One of RUN_STATES."""
    now, stale_seconds = freshness_of(conn)
    if row.ended_at is not None:
        return "ended"
    if now - row.last_report_at > stale_seconds:
        return "stale"
    return health_of(conn, row).state


def health_of(conn: Connection, row: Row[Any]) -> Health:
    """Open alerts and fallbacks of a run. An alert of a layer whose fallback is in the plan is held by it."""
    fallen = {entry["layer"] for entry in json.loads(row.plan) if entry["action"] == "bf16_fallback"}
    query = select(alerts.c.severity, alerts.c.layer, alerts.c.body).where(
        alerts.c.run_id == row.id, alerts.c.state == "open"
    )
    open_alerts = [alert for alert in conn.execute(query.order_by(alerts.c.id)) if alert.layer not in fallen]
    # "act" sorts before "watch"; among equals the oldest is the cause to look at first.
    ranked = sorted(open_alerts, key=lambda alert: alert.severity)
    return Health(
        worst_alert=json.loads(ranked[0].body) if ranked else None,
        severities=frozenset(alert.severity for alert in open_alerts),
        fallbacks=len(fallen),
    )


def attempts_of(conn: Connection, run: str) -> dict[str, Any]:
    """The tree of attempts, oldest first; `live` marks the branch that queries show."""
    row = find_run(conn, run)
    live = {segment.attempt_id: segment for segment in live_branch(conn, row.id)}
    spans = {
        span.attempt_id: span
        for span in conn.execute(
            select(
                samples.c.attempt_id,
                func.min(samples.c.step).label("first"),
                func.max(samples.c.step).label("last"),
            )
            .join(attempts, attempts.c.id == samples.c.attempt_id)
            .where(attempts.c.run_id == row.id)
            .group_by(samples.c.attempt_id)
        )
    }
    found = conn.execute(select(attempts).where(attempts.c.run_id == row.id).order_by(attempts.c.id))
    items = [
        {
            "id": attempt.name,
            "parent": attempt.parent,
            "from_step": attempt.from_step,
            "groups": attempt.groups,
            "first_step": spans[attempt.id].first if attempt.id in spans else None,
            "last_step": spans[attempt.id].last if attempt.id in spans else None,
            "live": attempt.id in live,
            "created": rfc3339(attempt.created_at),
        }
        for attempt in found
    ]
    return {"items": items, "next_page_token": None}


def rfc3339(seconds: float | None) -> str | None:
    """A time for people and programs, in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def detail_of(conn: Connection, row: Row[Any]) -> dict[str, Any]:
    branch = live_branch(conn, row.id)
    newest = conn.execute(select(attempts).where(attempts.c.id == branch[0].attempt_id)).one()
    last = _last_values(conn, branch, newest.groups)
    state = run_state(conn, row)
    return {
        "id": row.name,
        "state": state,
        "verdict": {"state": state, **_verdict(state, health_of(conn, row), row, freshness_of(conn)[0])},
        "mode": row.mode,
        "attempt": newest.name,
        "groups": newest.groups,
        **last,
        "created": rfc3339(row.created_at),
        "last_report": rfc3339(row.last_report_at),
        "fallback_budget_used_ratio": row.fallback_budget_used_ratio,
        "plan_version": row.plan_version,
        "thresholds": row.preset,
    }


def _last_values(conn: Connection, branch: tuple[Segment, ...], groups: int) -> dict[str, Any]:
    """First and last step of the live branch, and what the newest samples said of the run."""
    spans = []
    for segment in branch:
        spans.append(
            conn.execute(
                select(func.min(samples.c.step), func.max(samples.c.step)).where(
                    *segment_rows(segment, None, None)
                )
            ).one()
        )
    firsts = [first for first, _ in spans if first is not None]
    lasts = [last for _, last in spans if last is not None]
    newest = (
        select(samples.c.group, samples.c.header, samples.c.run_values)
        .where(samples.c.attempt_id == branch[0].attempt_id)
        .order_by(samples.c.step.desc(), samples.c.group, samples.c.part)
        .limit(max(_LOOK_BACK, 2 * groups))
    )
    rows = [(row.group, json.loads(row.header), json.loads(row.run_values)) for row in conn.execute(newest)]
    values = [held for _, _, held in rows]
    # Each client counts its own since it started: the newest count of every group.
    dropped = {group: header["dropped"] for group, header, _ in reversed(rows)}
    return {
        "first_step": min(firsts, default=None),
        "last_step": max(lasts, default=None),
        "loss": _newest(values, "loss"),
        "gradient_norm": _newest(values, "gradient_norm"),
        "learning_rate": _newest(values, "learning_rate"),
        "overhead_ratio": _newest([header for _, header, _ in rows], "overhead_ratio"),
        "dropped": sum(dropped.values()),
    }


# A run value may come with one group's samples only; this many rows are searched for it.
_LOOK_BACK = 64


def _newest(values: list[dict[str, Any]], name: str) -> Any:
    return next((held[name] for held in values if held.get(name) is not None), None)


def _verdict(state: str, health: Health, row: Row[Any], now: float) -> dict[str, str]:
    if state == "ended":
        return {"why": "the trainer said that the run has ended", "next": "compare it, or export it"}
    if state == "stale":
        minutes = (now - row.last_report_at) / 60
        return {
            "why": f"no sample for {minutes:.1f} min: the trainer stopped, or the network is down",
            "next": "look at the trainer's log, then at the address its client reports to",
        }
    alert = health.worst_alert
    if state in ("unstable", "watch") and alert is not None:
        return {"why": _why(alert), "next": _next_step(state, row.mode)}
    if state == "fallback":
        return {
            "why": f"the plan holds a fault: {_deviations(row.plan)}; the map goes on showing what FP8 would do",
            "next": "find the cause in the decisions; a gemm returns to FP8 once its numbers are healthy again",
        }
    return {"why": "every judged slot is within its thresholds", "next": "nothing to do"}


def _deviations(plan: str) -> str:
    """What the plan changes, the first two layers by name."""
    entries = json.loads(plan)
    names = sorted({entry["layer"] for entry in entries})
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    fallback = any(entry["action"] == "bf16_fallback" for entry in entries)
    return f"{', '.join(names[:2])}{more} {'in BF16' if fallback else 'with other scales'}"


def _why(alert: dict[str, Any]) -> str:
    slot = alert.get("slot") or {}
    where = slot.get("gemm") or " ".join(part for part in (slot.get("operand"), slot.get("layout")) if part)
    view = metric_view(str(alert.get("metric")))
    value, limit = (decode_number(alert.get(name)) for name in ("value", "threshold"))
    return (
        f"{alert.get('layer')} {where}: {view.label} {format_value(value, view)} "
        f"(limit {format_value(limit, view)}) since step {alert.get('first_step')}"
    )


def _next_step(state: str, mode: str) -> str:
    if state == "watch":
        return "watch it: nothing is decided on this alone"
    if mode == "enforce":
        return "the policy acts by itself; look at the decisions"
    if mode == "advise":
        return "approve or reject the proposed decision"
    return "the run is only observed; change its mode to advise or enforce to let a remedy take effect"
