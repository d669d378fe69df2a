"""Runs as people see them: state, verdict, last values."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.dashboards.incidents import fold
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.numbers import decode_number, encode_number, worse
from fp8_safeguard.monitor.runwatch import LOSS
from fp8_safeguard.server.alertlog import count_alerts, is_silenced, unresolved
from fp8_safeguard.server.answers import rfc3339
from fp8_safeguard.server.audit import plan_from
from fp8_safeguard.server.branch import Segment, live_branch, segment_rows
from fp8_safeguard.server.causes import standing_causes
from fp8_safeguard.server.clientreports import sampling_of
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.slotlists import layers_of, of_run, order_of
from fp8_safeguard.server.standing import HELD, WAITING, Standing, load_standings
from fp8_safeguard.server.store import freshness_of
from fp8_safeguard.server.tables import attempts, decisions, runs, samples
from fp8_safeguard.server.verdict import Situation, is_broken, verdict_of

RUN_STATES = ("healthy", "watch", "unstable", "fallback", "stale", "ended")


@dataclass(frozen=True, kw_only=True)
class Health:
    """What the open alerts and the plan say about a run."""

    worst_alerts: tuple[dict[str, Any], ...]
    """Those to look at first, the oldest before the others that weigh as much; of what the plan covers, none."""
    unresolved: tuple[dict[str, Any], ...]
    """All, those that the plan covers among them, each with its state."""
    severities: frozenset[str]
    """Of alerts that are in breach as things are, the silenced ones among them: silence heals nothing."""
    waiting: tuple[dict[str, Any], ...]
    """Those that nothing has shown since a remedy took effect, and that wait to be measured again: no evidence of trouble."""
    fallbacks: int
    """Layers with a GEMM in BF16 by the plan."""
    what_if: dict[str, Any] | None
    """The alert of a layer that runs in high precision, on what it would show in FP8: one to act on first, then the oldest."""
    loss_alert: dict[str, Any] | None
    """The open alert on a loss that is no number."""

    @property
    def state(self) -> str:
        """`unstable` is trouble that nothing holds yet, `fallback` trouble that the plan holds."""
        if "act" in self.severities:
            return "unstable"
        if self.fallbacks:
            return "fallback"
        return "watch" if self.severities or self.waiting or self.what_if else "healthy"


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
    return _state(conn, row, health_of(conn, row))


def _state(conn: Connection, row: Row[Any], health: Health) -> str:
    """A run that said it has ended is not stale, however long ago that was."""
    now, stale_seconds = freshness_of(conn)
    if row.ended_at is not None:
        return "ended"
    return "stale" if now - row.last_report_at > stale_seconds else health.state


def health_of(conn: Connection, row: Row[Any]) -> Health:
    """Open alerts and fallbacks of a run."""
    now = freshness_of(conn)[0]
    found = unresolved(conn, row.id)
    plan = plan_from(row)
    standings = load_standings(conn, row, plan, (alert.layer for alert in found))
    stored = {alert.id: json.loads(alert.body) for alert in found}
    told = {alert.id: standings.of(stored[alert.id], alert.state) for alert in found}
    bodies = {
        alert.id: _as_it_stands({**stored[alert.id], "id": alert.id, "state": alert.state}, told[alert.id])
        for alert in found
    }
    open_alerts = [alert for alert in found if told[alert.id].says not in (HELD, WAITING)]
    # "act" sorts before "watch"; among equals a layer, and of those the oldest, is the cause to look at first.
    weights = [
        (is_silenced(alert.silenced_until, now), told[alert.id].says, alert.layer is None)
        for alert in open_alerts
    ]
    first = min(weights, default=None)
    worst = [alert for alert, weight in zip(open_alerts, weights, strict=True) if weight == first]
    held = [bodies[alert.id] for alert in found if told[alert.id].says == HELD]
    return Health(
        worst_alerts=tuple(bodies[alert.id] for alert in worst),
        unresolved=tuple(bodies.values()),
        severities=frozenset(told[alert.id].says for alert in open_alerts),
        waiting=tuple(bodies[alert.id] for alert in found if told[alert.id].says == WAITING),
        fallbacks=len({layer for layer, _ in fallbacks(plan)}),
        # "act" sorts before "watch"; of equals the oldest stays.
        what_if=min((body for body in held if body.get("what_if")), key=itemgetter("severity"), default=None),
        loss_alert=next((bodies[alert.id] for alert in open_alerts if alert.rule == LOSS.rule), None),
    )


def _as_it_stands(alert: dict[str, Any], standing: Standing) -> dict[str, Any]:
    """An alert that speaks by the worst of its slots that says what it stands for now."""
    named = ("slot", "metric", "value", "threshold", "origin", "severity", "last_step")
    worst = {name: standing.speaks[name] for name in named} if standing.speaks is not None else {}
    return {**alert, **worst, "waits_since": standing.waits_since}


def _explained(conn: Connection, row: Row[Any], health: Health, causes: Sequence[Any]) -> dict[int, int]:
    """The place of the cause that each unresolved alert follows from, by the alert's id."""
    if not causes:
        return {}
    groups = fold(causes, health.unresolved, layers_of(of_run(conn, row.id)))
    return {alert["id"]: place for place, group in enumerate(groups) for alert in group}


def _told(health: Health, explained: Mapping[int, int]) -> dict[str, Any] | None:
    """The alert that the verdict tells: of those that weigh as much, one with a cause, and of those the oldest.

    The oldest of a fault is where it began. Of what is only to be watched healthy layers have some, too, and from the first
    step on: there the one farthest beyond its limit comes first.
    """

    def rank(alert: dict[str, Any]) -> tuple[float, float]:
        return explained.get(alert["id"], math.inf), -_beyond(alert) if alert["severity"] == "watch" else 0.0

    # The first of equals is kept, and that is the oldest.
    return min(health.worst_alerts, key=rank, default=None)


def _beyond(alert: Mapping[str, Any]) -> float:
    """How many times its limit an alert's value is, either way, as a logarithm."""
    value, limit = alert["value"], alert["threshold"]
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return math.inf
    return abs(math.log(value / limit)) if value > 0 and limit > 0 else math.inf


def _advice(conn: Connection, row: Row[Any], alert: dict[str, Any] | None) -> str | None:
    """What the policy advises about an alert of a layer for which it has decided nothing else."""
    if alert is None or alert["severity"] != "act" or alert["layer"] is None:
        return None
    mine = (decisions.c.run_id == row.id, decisions.c.layer == alert["layer"])
    query = select(decisions.c.action, decisions.c.body).where(*mine, decisions.c.step >= alert["first_step"])
    made = conn.execute(query.order_by(decisions.c.number)).all()
    said = [json.loads(decision.body) for decision in made if decision.action == "advice"]
    said = [body for body in said if body["rule"] == alert["rule"]]
    if not said or len(said) < len(made):
        return None
    # The last part of a reason is what follows from it.
    return str(said[-1]["reason"]).rpartition("; ")[2]


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
            "conflicts": attempt.conflicts,
            "last_conflict_step": attempt.last_conflict_step,
            "ended_groups": json.loads(attempt.ended_groups),
            "created": rfc3339(attempt.created_at),
        }
        for attempt in found
    ]
    return {"items": items, "next_page_token": None}


def detail_of(conn: Connection, row: Row[Any]) -> dict[str, Any]:
    """The contract's run, with its verdict."""
    branch = live_branch(conn, row.id)
    newest = conn.execute(select(attempts).where(attempts.c.id == branch[0].attempt_id)).one()
    last = _last_values(conn, branch, newest.groups)
    health = health_of(conn, row)
    state = _state(conn, row, health)
    # A run that ended with a loss that is no number did not end well, however few its alerts.
    lost = state == "ended" and is_broken(last["loss"])
    condition = "unstable" if lost else health.state
    causes = standing_causes(conn, row, newest)
    explained = _explained(conn, row, health, causes)
    worst_alert = _told(health, explained)
    verdict = verdict_of(
        Situation(
            state=state,
            health=condition,
            mode=row.mode,
            worst_alert=worst_alert,
            waiting=health.waiting,
            what_if=health.what_if,
            plan=json.loads(row.plan),
            silent_seconds=freshness_of(conn)[0] - row.last_report_at,
            last_step=last["last_step"],
            first_step=last["first_step"],
            conflicts=newest.conflicts,
            last_conflict_step=newest.last_conflict_step,
            ended_groups=len(json.loads(newest.ended_groups)),
            groups=newest.groups,
            loss=last["loss"],
            loss_alert=health.loss_alert,
            advice=_advice(conn, row, worst_alert),
            causes=causes,
            explained=explained,
            measured=bool(order_of(conn, row.id).layers),
        )
    )
    return {
        "id": row.name,
        "state": state,
        "health": condition,
        "verdict": {"state": state, **verdict},
        "mode": row.mode,
        "attempt": newest.name,
        "groups": newest.groups,
        **last,
        "created": rfc3339(row.created_at),
        "last_report": rfc3339(row.last_report_at),
        "ended": rfc3339(row.ended_at),
        "fallback_budget_used_ratio": row.fallback_budget_used_ratio,
        "nonfinite_steps": row.nonfinite_steps,
        "plan_version": row.plan_version,
        "thresholds": row.preset,
        "alerts": count_alerts(conn, row.id).to_dict(),
        "conflicts": newest.conflicts,
        "last_conflict_step": newest.last_conflict_step,
        "sampling": sampling_of(conn, row.id),
        "causes": causes,
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
        select(samples.c.step, samples.c.group, samples.c.header, samples.c.run_values)
        .where(samples.c.attempt_id == branch[0].attempt_id)
        .order_by(samples.c.step.desc(), samples.c.group, samples.c.part)
        .limit(max(_LOOK_BACK, 2 * groups))
    )
    found = conn.execute(newest).all()
    rows = [(row.group, json.loads(row.header)) for row in found]
    values = [(row.step, json.loads(row.run_values)) for row in found]
    # Each client counts its own since it started: the newest count of every group.
    dropped = {group: header["dropped"] for group, header in reversed(rows)}
    return {
        "first_step": min(firsts, default=None),
        "last_step": max(lasts, default=None),
        "loss": _of_all_groups(values, "loss"),
        "gradient_norm": _of_all_groups(values, "gradient_norm"),
        "learning_rate": _of_all_groups(values, "learning_rate"),
        "overhead_ratio": _newest([header for _, header in rows], "overhead_ratio"),
        "dropped": sum(dropped.values()),
        "ranks": _worst_ranks(rows),
    }


def _worst_ranks(rows: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The worst ranks that the newest sample of each group named, as they were sent."""
    newest: dict[str, list[dict[str, Any]]] = {}
    for group, header in rows:
        newest.setdefault(group, header.get("ranks") or [])
    return [record for group in sorted(newest) for record in newest[group]]


# A run value may come with one group's samples only; this many rows are searched for it.
_LOOK_BACK = 64


def _newest(values: list[dict[str, Any]], name: str) -> Any:
    return next((held[name] for held in values if held.get(name) is not None), None)


def _of_all_groups(values: list[tuple[int, dict[str, Any]]], name: str) -> Any:
    """What the newest step that has it says: where groups disagree the worse number, as everywhere."""
    told = [(step, number) for step, held in values if (number := decode_number(held.get(name))) is not None]
    newest = max((step for step, _ in told), default=None)
    return encode_number(reduce(worse, [number for step, number in told if step == newest])) if told else None
