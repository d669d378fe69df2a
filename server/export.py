"""Everything stored of a run, streamed as JSON lines or one bundle."""

import json
from collections.abc import Iterator
from typing import Any, Literal

from sqlalchemy import Row, select

from fp8_safeguard.monitor.columns import write_column
from fp8_safeguard.monitor.metrics import ALL_COLUMNS
from fp8_safeguard.server import slotlists
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.auditview import alert_item, decision_item, plan_of
from fp8_safeguard.server.clientreports import sent_with
from fp8_safeguard.server.packing import Packed
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.runview import attempts_of, detail_of
from fp8_safeguard.server.store import Store, freshness_of
from fp8_safeguard.server.tables import alerts, attempts, decisions, samples

_PAGE_ROWS = 64
_PLURALS = {
    "run": "run",
    "plan": "plan",
    "attempt": "attempts",
    "decision": "decisions",
    "alert": "alerts",
    "sample": "samples",
}


def export_run(store: Store, run: str, form: Literal["jsonl", "json"]) -> Iterator[str]:
    """Lines `{"type": ..., ...}`, or one object with lists; samples are wire documents, to be posted again.

    Pages of samples are read each with a connection of its own, so a slow reader pins none.
    """
    if form == "jsonl":
        for kind, item in _records(store, run):
            yield strict_dumps({"type": kind, **item}) + "\n"
        return
    lists: dict[str, list[str]] = {}
    opened = False
    yield "{"
    for kind, item in _records(store, run):
        name = _PLURALS[kind]
        if name != "samples":
            lists.setdefault(name, []).append(strict_dumps(item))
            continue
        yield ("," if opened else '"samples":[') + strict_dumps(item)
        opened = True
    yield "]," if opened else '"samples":[],'
    named = {"attempts": "[]", "decisions": "[]", "alerts": "[]"}
    for name, texts in lists.items():
        named[name] = texts[0] if name in ("run", "plan") else f"[{','.join(texts)}]"
    yield ",".join(f'"{name}":{text}' for name, text in named.items()) + "}"


def _records(store: Store, run: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with store.read() as conn:
        row = find_run(conn, run)
        now = freshness_of(conn)[0]
        head = [("run", detail_of(conn, row)), ("plan", plan_of(row))]
        head += [("attempt", item) for item in attempts_of(conn, run)["items"]]
        query = select(decisions).where(decisions.c.run_id == row.id).order_by(decisions.c.number)
        head += [("decision", decision_item(found)) for found in conn.execute(query)]
        mine = select(alerts).where(alerts.c.run_id == row.id).order_by(alerts.c.id)
        head += [("alert", alert_item(found, run, now)) for found in conn.execute(mine)]
    yield from head
    last = 0
    while page := _sample_page(store, row.id, last):
        for number, document in page:
            last = number
            yield "sample", document


def _sample_page(store: Store, run_id: int, after: int) -> list[tuple[int, dict[str, Any]]]:
    query = (
        select(samples, attempts.c.name, attempts.c.parent, attempts.c.from_step, attempts.c.groups)
        .join(attempts, attempts.c.id == samples.c.attempt_id)
        .where(attempts.c.run_id == run_id, samples.c.id > after)
        .order_by(samples.c.id)
        .limit(_PAGE_ROWS)
    )
    with store.read() as conn:
        lists = slotlists.of_run(conn, run_id)
        rows = conn.execute(query).all()
        said = sent_with(conn, {row.attempt_id for row in rows})
        return [(row.id, {**document_of(row, lists[row.slot_list_id]), **_said(row, said)}) for row in rows]


def _said(row: Row[Any], said: dict[tuple[int, str, int], dict[str, Any]]) -> dict[str, Any]:
    """What the newest report of a group was: it goes with its sample, once."""
    return said.get((row.attempt_id, row.group, row.step), {}) if row.part == 0 else {}


def document_of(row: Row[Any], held: slotlists.SlotList) -> dict[str, Any]:
    """The wire document of one stored row."""
    table = Packed([row.columns], [row.histograms], len(held.slots)).table()
    pairs = zip(held.indices, held.slots, strict=True)
    return {
        **json.loads(row.header),
        "attempt": {"id": row.name, "parent": row.parent, "from_step": row.from_step},
        "group": row.group,
        "groups": row.groups,
        "step": row.step,
        "slots": [{"index": index, **slot.to_wire()} for index, slot in pairs],
        "columns": {name: write_column(table, name, binary=False) for name in ALL_COLUMNS},
        "run": json.loads(row.run_values),
        "scalars": json.loads(row.scalars),
    }
