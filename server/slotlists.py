"""Stored slot lists: written once, referred to by digest."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import Connection, and_, func, select

from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.store import lock_slot_lists
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


def use(
    conn: Connection,
    run_id: int,
    slots: tuple[Slot, ...],
    indices: Sequence[int],
    digest: str | None = None,
) -> int:
    """The id of the list, stored now if it is new, and noted as one of the run's. Call inside a write transaction.

    `indices` are its slots' places in the model's order; `digest` spares computing it where it is known.
    """
    digest = digest if digest is not None else slots_id(slots)
    mine = and_(run_slot_lists.c.slot_list_id == slot_lists.c.id, run_slot_lists.c.run_id == run_id)
    query = select(slot_lists.c.id, run_slot_lists.c.position).outerjoin_from(
        slot_lists, run_slot_lists, mine
    )
    found = conn.execute(query.where(slot_lists.c.digest == digest)).one_or_none()
    list_id = int(found.id) if found is not None else _add(conn, slots, digest)
    if found is None or found.position is None:
        _remember(conn, run_id, list_id, indices)
    return list_id


def _add(conn: Connection, slots: tuple[Slot, ...], digest: str) -> int:
    lock_slot_lists(conn)
    # Another run may have added it while this one waited for the lock.
    same = select(slot_lists.c.id).where(slot_lists.c.digest == digest)
    found = conn.execute(same).scalar_one_or_none()
    if found is not None:
        return int(found)
    body = strict_dumps([slot.to_wire() for slot in slots])
    added = conn.execute(slot_lists.insert().values(digest=digest, body=body).returning(slot_lists.c.id))
    return int(added.scalar_one())


def _remember(conn: Connection, run_id: int, list_id: int, indices: Sequence[int]) -> None:
    mine = run_slot_lists.c.run_id == run_id
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
