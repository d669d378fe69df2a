"""Stored slot lists: written once, referred to by digest."""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Row, Select, and_, func, select

from fp8_safeguard.monitor.slots import Slot, slots_id
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.store import lock_slot_lists
from fp8_safeguard.server.tables import run_slot_lists, slot_lists

# A run whose recomputed GEMMs rotate, or whose worst experts change, has a list for almost every sample, and most of their
# slots are the same: what follows from all lists together is kept, and only what a run has added since is read.
MOST_RUNS = 64
MOST_SLOTS = 4_000_000
"""Slots of decoded lists that are kept: about 64 MB."""


@dataclass(frozen=True)
class SlotList:
    """A slot list as one run uses it."""

    slots: tuple[Slot, ...]
    indices: tuple[int, ...]
    """Place of each slot in the model's order."""


class Place(NamedTuple):
    """Where one slot of a run stands."""

    slot: Slot
    """As sent with the lowest index, of equal ones the first."""
    lowest: int
    """The lowest index that it was sent with."""
    rank: int
    """How many slots of the run's lists came before that one."""
    first: int
    """The index that it was first sent with."""


@dataclass(frozen=True, eq=False)
class SlotOrder:
    """What all slot lists of a run say together; never changed, so that readers may share it."""

    ids: tuple[int, ...] = ()
    """The lists in order of first use."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """By slot key, in the order in which the slots were first seen."""
    count: int = 0
    """Slots of all lists."""

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot of the run by its index; of equal ones the first seen. A slot of several lists comes once."""
        ordered = sorted(self.places.values(), key=lambda place: (place.lowest, place.rank))
        return tuple(place.slot for place in ordered)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Layer names by slot index."""
        return tuple(dict.fromkeys(slot.layer for slot in self.slots))

    def with_lists(self, added: Sequence[tuple[int, SlotList]]) -> "SlotOrder":
        """This order with more lists, by id."""
        places, count = dict(self.places), self.count
        for _, held in added:
            for rank, (index, slot) in enumerate(zip(held.indices, held.slots, strict=True), start=count):
                known = places.get(slot.key)
                if known is None:
                    places[slot.key] = Place(slot, index, rank, index)
                elif index < known.lowest:
                    places[slot.key] = Place(slot, index, rank, known.first)
            count += len(held.slots)
        return SlotOrder((*self.ids, *(list_id for list_id, _ in added)), places, count)


class RunLists(Mapping[int, SlotList]):
    """The slot lists of one run by id, read when they are asked for."""

    def __init__(self, conn: Connection, run_id: int, order: SlotOrder) -> None:
        self.order = order
        self._conn = conn
        self._run_id = run_id

    def __getitem__(self, list_id: int) -> SlotList:
        memory = _memory_of(self._conn)
        held = memory.list_of(self._run_id, list_id)
        if held is None:
            found = self._conn.execute(_listed(self._run_id).where(slot_lists.c.id == list_id)).one_or_none()
            if found is None:
                raise KeyError(list_id)
            held = _as_list(found)
            if list_id in self.order.ids[: _committed(self._conn, self._run_id, len(self.order.ids))]:
                memory.keep_list(self._run_id, list_id, held)
        return held

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.ids)

    def __len__(self) -> int:
        return len(self.order.ids)


class _Memory:
    """What is kept of one database's slot lists: only what was committed, so that no rollback can make it wrong."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: OrderedDict[int, SlotOrder] = OrderedDict()
        self._lists: OrderedDict[tuple[int, int], SlotList] = OrderedDict()
        self._slots = 0

    def order_of(self, run_id: int) -> SlotOrder:
        with self._lock:
            if run_id in self._orders:
                self._orders.move_to_end(run_id)
            return self._orders.get(run_id, SlotOrder())

    def keep_order(self, run_id: int, order: SlotOrder) -> None:
        with self._lock:
            if len(order.ids) > len(self._orders.get(run_id, SlotOrder()).ids):
                self._orders[run_id] = order
                self._orders.move_to_end(run_id)
            while len(self._orders) > MOST_RUNS:
                self._orders.popitem(last=False)

    def list_of(self, run_id: int, list_id: int) -> SlotList | None:
        with self._lock:
            if (run_id, list_id) in self._lists:
                self._lists.move_to_end((run_id, list_id))
            return self._lists.get((run_id, list_id))

    def keep_list(self, run_id: int, list_id: int, held: SlotList) -> None:
        with self._lock:
            if (run_id, list_id) not in self._lists:
                self._lists[run_id, list_id] = held
                self._slots += len(held.slots)
            while self._slots > MOST_SLOTS and len(self._lists) > 1:
                self._slots -= len(self._lists.popitem(last=False)[1].slots)


_memories: WeakKeyDictionary[Engine, _Memory] = WeakKeyDictionary()
_added: WeakKeyDictionary[Connection, dict[int, int]] = WeakKeyDictionary()
"""By connection and run the position of the first list that its transaction added."""


def _memory_of(conn: Connection) -> _Memory:
    return _memories.setdefault(conn.engine, _Memory())


def _committed(conn: Connection, run_id: int, known: int) -> int:
    """How many of the known lists were there before this transaction: a run has one writer at a time."""
    return min(known, _added.get(conn, {}).get(run_id, known))


@lru_cache(maxsize=2**16)
def _slot(*values: Any) -> Slot:
    """One object for equal slots of all lists: a list then costs little more than its references."""
    return Slot(*values)


def _decode(body: str) -> tuple[Slot, ...]:
    return tuple(_slot(*(item.get(name, default) for name, default in _FIELDS)) for item in json.loads(body))


_FIELDS = tuple((each.name, False if each.name == "emulated" else None) for each in fields(Slot))


@lru_cache(maxsize=1024)
def _decode_body(body: str) -> tuple[Slot, ...]:
    return _decode(body)


def _as_list(row: Row[Any]) -> SlotList:
    return SlotList(_decode(row.body), tuple(json.loads(row.indices)))


def load(conn: Connection, list_id: int) -> tuple[Slot, ...]:
    """The slots of a stored list."""
    return _decode_body(
        conn.execute(select(slot_lists.c.body).where(slot_lists.c.id == list_id)).scalar_one()
    )


def find(conn: Connection, digest: str) -> tuple[Slot, ...] | None:
    """The slots that a client's slots_id stands for, or None where no list was accepted under it."""
    body = conn.execute(select(slot_lists.c.body).where(slot_lists.c.digest == digest)).scalar_one_or_none()
    return None if body is None else _decode_body(body)


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
    _added.setdefault(conn, {}).setdefault(run_id, used)


def of_run(conn: Connection, run_id: int) -> RunLists:
    """Every slot list of a run by id, in order of first use."""
    return RunLists(conn, run_id, order_of(conn, run_id))


def order_of(conn: Connection, run_id: int) -> SlotOrder:
    """The run's slots in model order."""
    memory = _memory_of(conn)
    known = memory.order_of(run_id)
    mine = run_slot_lists.c.run_id == run_id
    last = conn.execute(select(func.max(run_slot_lists.c.position)).where(mine)).scalar_one()
    total = 0 if last is None else last + 1
    if total < len(known.ids):
        # A snapshot from before another one that has been read meanwhile.
        known = SlotOrder()
    if total == len(known.ids):
        return known
    fresh = conn.execute(_listed(run_id).where(run_slot_lists.c.position >= len(known.ids))).all()
    added = [(int(row.id), _as_list(row)) for row in fresh]
    committed = _committed(conn, run_id, total) - len(known.ids)
    whole = known.with_lists(added[:committed])
    memory.keep_order(run_id, whole)
    for list_id, held in added[:committed]:
        memory.keep_list(run_id, list_id, held)
    return whole.with_lists(added[committed:]) if added[committed:] else whole


def _listed(run_id: int) -> Select[Any]:
    return (
        select(slot_lists.c.id, slot_lists.c.body, run_slot_lists.c.indices)
        .join(run_slot_lists, run_slot_lists.c.slot_list_id == slot_lists.c.id)
        .where(run_slot_lists.c.run_id == run_id)
        .order_by(run_slot_lists.c.position)
    )


def index_of(lists: RunLists) -> dict[str, int]:
    """Place in the model's order of every slot, by its key; the first that the run sent."""
    return {key: place.first for key, place in lists.order.places.items()}


def in_order(lists: RunLists) -> Sequence[Slot]:
    """Every slot of the run by its index; of equal ones the first seen. A slot of several lists comes once."""
    return lists.order.slots


def layers_of(lists: RunLists) -> Sequence[str]:
    """Layer names by slot index."""
    return lists.order.layers
