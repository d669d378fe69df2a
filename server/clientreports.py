"""What clients say of their own watching: newest coverage and sampling."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.coverage import STATUSES, coverage_to_wire, merged
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server import slotlists
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.branch import live_branch
from fp8_safeguard.server.choices import check_choice
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import client_reports

COVERAGE, SAMPLING = "coverage", "sampling"


def keep(conn: Connection, attempt_id: int, sample: Sample) -> None:
    """Keep what a sample says of itself, unless a later step of its group has said it already."""
    if sample.coverage is not None:
        _keep(conn, attempt_id, sample, COVERAGE, coverage_to_wire(sample.coverage))
    if sample.sampling is not None:
        _keep(conn, attempt_id, sample, SAMPLING, dict(sample.sampling))


def _keep(conn: Connection, attempt_id: int, sample: Sample, kind: str, said: Any) -> None:
    key = {"attempt_id": attempt_id, "group": sample.group, "kind": kind}
    mine = [client_reports.c[name] == value for name, value in key.items()]
    known = conn.execute(select(client_reports.c.step).where(*mine)).scalar_one_or_none()
    value = {"step": sample.step, "body": strict_dumps(said)}
    if known is None:
        conn.execute(client_reports.insert().values({**key, **value}))
    elif known <= sample.step:
        conn.execute(client_reports.update().where(*mine).values(value))


def coverage(
    conn: Connection,
    run: str,
    *,
    status: str | None = None,
    q: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """Every weight matrix in the model's order, whether it is observed, and if not why.

    Groups are merged: what one of them observes is observed, and its reason is shown. `measured` says whether a sample of the
    run has held the matrix: what is observed may still wait for its turn. `counts` are over all matrices, whatever the
    filters leave; `step` is that of the newest report, null where no client has sent one. Raises Problem 404.
    """
    row = find_run(conn, run)
    check_choice("status", status, STATUSES)
    reports = _reports(conn, row.id, COVERAGE)
    rows = _merged_rows(tuple(report.body for report in reports))
    at = (decode_token(page_token, ("offset",)) or {"offset": 0})["offset"]
    text = (q or "").lower()
    places = [
        place
        for place, item in enumerate(rows)
        if place >= at and status in (None, item["status"]) and text in item["name"].lower()
    ]
    shown = places[:page_size]
    measured = frozenset(slotlists.layers_of(slotlists.of_run(conn, row.id)))
    more = len(places) > page_size
    return {
        "items": [{**rows[place], "measured": rows[place]["name"] in measured} for place in shown],
        "next_page_token": encode_token({"offset": shown[-1] + 1}) if more else None,
        "counts": {each: sum(item["status"] == each for item in rows) for each in STATUSES},
        "step": max((report.step for report in reports), default=None),
    }


def sampling_of(conn: Connection, run_id: int) -> dict[str, Any] | None:
    """The newest sampling report with its step; of several groups' the one that costs most. None without one."""
    reports = _reports(conn, run_id, SAMPLING)
    if not reports:
        return None
    newest = max(report.step for report in reports)
    said: list[dict[str, Any]] = [json.loads(report.body) for report in reports if report.step == newest]
    dearest = max(said, key=lambda each: float(each.get("overhead_ratio", 0.0)))
    return {**dearest, "step": newest}


def sent_with(conn: Connection, attempt_ids: Collection[int]) -> dict[tuple[int, str, int], dict[str, Any]]:
    """By (attempt, group, step) the kept reports, as fields of the sample that brought them."""
    query = select(client_reports).where(client_reports.c.attempt_id.in_(attempt_ids))
    found: dict[tuple[int, str, int], dict[str, Any]] = {}
    for report in conn.execute(query):
        place = (report.attempt_id, report.group, report.step)
        found.setdefault(place, {})[report.kind] = json.loads(report.body)
    return found


def _reports(conn: Connection, run_id: int, kind: str) -> Sequence[Row[Any]]:
    """Newest report of each group, of the newest attempt of the live branch that has any."""
    for segment in live_branch(conn, run_id):
        query = select(client_reports).where(
            client_reports.c.attempt_id == segment.attempt_id, client_reports.c.kind == kind
        )
        found = conn.execute(query.order_by(client_reports.c.group)).all()
        if found:
            return found
    return ()


# A page asks every second, and the rows change a few times in a run; those of a large model are megabytes.
@lru_cache(maxsize=8)
def _merged_rows(bodies: tuple[str, ...]) -> tuple[Mapping[str, Any], ...]:
    return tuple(merged(json.loads(body) for body in bodies))
