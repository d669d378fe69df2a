"""Stored slot lists: written once, referred to by digest."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import Connection, func, select

from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.tables import run_slot_lists, slot_lists


@dataclass(frozen=True)
class SlotList:
    """A slot list as one run uses it."""

    slots: tuple[Slot, ...]
    indices: tuple[int, ...]
    """Place of each slot in the model's order."""


@lru_cache(maxsize=1024)
def _decode(body: str) -> tuple[Slot, ...]:
    return tuple(Slot.from_wire(item) for item in json.loads(body))


def load(conn: Connection, list_id: int) -> tuple[Slot, ...]:
    """The slots of a stored list."""
    return _decode(conn.execute(select(slot_lists.c.body).where(slot_lists.c.id == list_id)).scalar_one())


def find(conn: Connection, digest: str) -> tuple[Slot, ...] | None:
    """The slots that a client's slots_id stands for, or None where no list was accepted under it."""
    body = conn.execute(select(slot_lists.c.body).where(slot_lists.c.digest == digest)).scalar_one_or_none()
    return None if body is None else _decode(body)


def store(conn: Connection, slots: tuple[Slot, ...], digest: str | None = None) -> int:
    """The id of the list, stored now if it is new. Call inside a write transaction.

    `digest` spares computing it where it is known.
    """
    digest = digest if digest is not None else slots_id(slots)
    found = conn.execute(select(slot_lists.c.id).where(slot_lists.c.digest == digest)).scalar_one_or_none()
    if found is not None:
        return int(found)
    body = strict_dumps([slot.to_wire() for slot in slots])
    added = conn.execute(slot_lists.insert().values(digest=digest, body=body).returning(slot_lists.c.id))
    return int(added.scalar_one())


def remember(conn: Connection, run_id: int, list_id: int, indices: Sequence[int]) -> None:
    """Note that the run uses the list, and where its slots stand in the model's order."""
    mine = run_slot_lists.c.run_id == run_id
    known = select(run_slot_lists.c.position).where(mine, run_slot_lists.c.slot_list_id == list_id)
    if conn.execute(known).scalar_one_or_none() is not None:
        return
    used = conn.execute(select(func.count()).select_from(run_slot_lists).where(mine)).scalar_one()
    row = {
        "run_id": run_id,
        "position": used,
        "slot_list_id": list_id,
        "indices": strict_dumps(list(indices)),
    }
    conn.execute(run_slot_lists.insert().values(row))


def of_run(conn: Connection, run_id: int) -> dict[int, SlotList]:
    """Every slot list of a run by id, in order of first use."""
    query = (
        select(slot_lists.c.id, slot_lists.c.body, run_slot_lists.c.indices)
        .join(run_slot_lists, run_slot_lists.c.slot_list_id == slot_lists.c.id)
        .where(run_slot_lists.c.run_id == run_id)
        .order_by(run_slot_lists.c.position)
    )
    return {
        row.id: SlotList(_decode(row.body), tuple(json.loads(row.indices))) for row in conn.execute(query)
    }


def index_of(lists: dict[int, SlotList]) -> dict[str, int]:
    """Place in the model's order of every slot, by its key; the first that the run sent."""
    found: dict[str, int] = {}
    for held in lists.values():
        for index, slot in zip(held.indices, held.slots, strict=True):
            found.setdefault(slot.key, index)
    return found


def in_order(lists: dict[int, SlotList]) -> list[Slot]:
    """Every slot of the run by its index; of equal ones the first seen. A slot of several lists comes once."""
    placed = [pair for held in lists.values() for pair in zip(held.indices, held.slots, strict=True)]
    placed.sort(key=lambda pair: pair[0])
    seen: dict[str, Slot] = {}
    for _, slot in placed:
        seen.setdefault(slot.key, slot)
    return list(seen.values())


def layers_of(lists: dict[int, SlotList]) -> list[str]:
    """Layer names by slot index."""
    return list(dict.fromkeys(slot.layer for slot in in_order(lists)))
