"""The durable log: each slot is written once, or refused."""

import json
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.numbers import encode_number
from fp8_safeguard.monitor.wire import Sample
from fp8_safeguard.server import slotlists
from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.packing import Packed, differing, pack
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.tables import nonfinite_totals, samples

CONFLICT = "sample-conflict"


def store_sample(
    conn: Connection, run_id: int, attempt_id: int, sample: Sample, now: float
) -> tuple[int, int]:
    """Write the slots that the key (attempt, group, step) does not have yet; (inserted, duplicates).

    Raises Problem 409 where a stored slot differs from the one sent.
    """
    parts = _stored_parts(conn, attempt_id, sample)
    duplicates = _check_same(conn, parts, sample) if parts else frozenset()
    fresh = [place for place in range(len(sample.slots)) if place not in duplicates]
    if fresh or not parts:
        _insert(conn, run_id, attempt_id, sample, fresh, part=len(parts), now=now)
        _count_nonfinite(conn, run_id, sample, fresh)
    elif parts:
        _complete_values(conn, parts, sample)
    return len(fresh), len(duplicates)


def _stored_parts(conn: Connection, attempt_id: int, sample: Sample) -> list[Row[Any]]:
    query = select(samples).where(
        samples.c.attempt_id == attempt_id, samples.c.step == sample.step, samples.c.group == sample.group
    )
    return list(conn.execute(query.order_by(samples.c.part)).all())


def _check_same(conn: Connection, parts: list[Row[Any]], sample: Sample) -> frozenset[int]:
    """Positions of the slots that are stored already, all of them equal to what is stored."""
    sent_at = {slot.key: place for place, slot in enumerate(sample.slots)}
    everything = list(range(len(sample.slots)))
    columns, histograms = pack(sample, everything)
    sent = Packed([columns], [histograms], len(everything))
    duplicates: set[int] = set()
    faults: list[int] = []
    for part in parts:
        slots = slotlists.load(conn, part.slot_list_id)
        shared = [(place, sent_at[slot.key]) for place, slot in enumerate(slots) if slot.key in sent_at]
        if not shared:
            continue
        stored = Packed([part.columns], [part.histograms], len(slots))
        unequal = differing(stored, [old for old, _ in shared], sent, [new for _, new in shared])
        faults.extend(shared[place][1] for place in unequal)
        duplicates.update(new for _, new in shared)
    if faults:
        raise _conflict(sample, sorted(faults))
    return frozenset(duplicates)


def _conflict(sample: Sample, faults: list[int]) -> Problem:
    errors = [
        {
            "pointer": f"/slots/{place}",
            "message": f"{sample.slots[place].label} is stored with other statistics",
        }
        for place in faults
    ]
    first = sample.slots[faults[0]].label
    return Problem(
        409,
        CONFLICT,
        f"step {sample.step} of attempt {sample.attempt.id!r}, group {sample.group!r} is stored with other values of "
        f"{len(faults)} slot{'' if len(faults) == 1 else 's'}, {first} first; nothing of this sample was stored. A resumed run needs a new attempt id.",
        errors=errors,
    )


def _insert(
    conn: Connection, run_id: int, attempt_id: int, sample: Sample, fresh: list[int], *, part: int, now: float
) -> None:
    whole = len(fresh) == len(sample.slots)
    slots = sample.slots if whole else tuple(sample.slots[place] for place in fresh)
    order = sample.indices or range(len(sample.slots))
    indices = [order[place] for place in fresh]
    list_id = slotlists.use(conn, run_id, slots, indices, sample.slots_id if whole else None)
    columns, histograms = pack(sample, fresh)
    conn.execute(
        samples.insert().values(
            attempt_id=attempt_id,
            step=sample.step,
            group=sample.group,
            part=part,
            slot_list_id=list_id,
            received_at=now,
            header=strict_dumps(_header(sample)),
            run_values=strict_dumps({name: encode_number(value) for name, value in sample.run.items()}),
            scalars=strict_dumps(_records(sample.scalars)),
            columns=columns,
            histograms=histograms,
        )
    )


def _header(sample: Sample) -> dict[str, Any]:
    return {
        "schema": sample.schema,
        "batch_id": sample.batch_id,
        "mode": sample.mode,
        "plan_version": sample.plan_version,
        "effective_step": sample.effective_step,
        "overhead_ratio": sample.overhead_ratio,
        "dropped": sample.dropped,
        "ranks": _records(sample.ranks),
    }


def _records(records: Any) -> list[dict[str, Any]]:
    return [
        {name: encode_number(value) if name == "value" else value for name, value in record.items()}
        for record in records
    ]


def _complete_values(conn: Connection, parts: list[Row[Any]], sample: Sample) -> None:
    """Keep run values and scalars that a repeat brings for the first time; stored ones stay."""
    held = [json.loads(part.run_values) for part in parts]
    known = {name for values in held for name in values}
    values = {name: encode_number(value) for name, value in sample.run.items() if name not in known}
    listed = [record for part in parts for record in json.loads(part.scalars)]
    named = {(record["layer"], record["name"]) for record in listed}
    scalars = [
        record for record in _records(sample.scalars) if (record["layer"], record["name"]) not in named
    ]
    if not values and not scalars:
        return
    first = parts[0]
    conn.execute(
        samples.update()
        .where(samples.c.id == first.id)
        .values(
            run_values=strict_dumps({**held[0], **values}),
            scalars=strict_dumps([*json.loads(first.scalars), *scalars]),
        )
    )


def _count_nonfinite(conn: Connection, run_id: int, sample: Sample, fresh: list[int]) -> None:
    """Keep the totals behind the nonfinite counter: each tensor once, whatever its layouts and experts."""
    for (layer, operand), count in _nonfinite_of(sample, fresh).items():
        key_is = (
            nonfinite_totals.c.run_id == run_id,
            nonfinite_totals.c.layer == layer,
            nonfinite_totals.c.operand == operand,
        )
        changed = conn.execute(
            nonfinite_totals.update().where(*key_is).values(total=nonfinite_totals.c.total + count)
        )
        if not changed.rowcount:
            row = {"run_id": run_id, "layer": layer, "operand": operand, "total": count}
            conn.execute(nonfinite_totals.insert().values(row))


def _nonfinite_of(sample: Sample, fresh: list[int]) -> dict[tuple[str, str], int]:
    """NaN and Inf elements of each operand, where there are any. An aggregate already holds its experts."""
    counts = sample.columns["nan"] + sample.columns["inf"]
    own: dict[tuple[str, str, str | None], int] = {}
    experts: dict[tuple[str, str, str | None], int] = {}
    for place in fresh if counts.any() else ():
        slot = sample.slots[place]
        if slot.operand is not None and slot.variant is None:
            key = (slot.layer, slot.operand, slot.layout)
            held = own if slot.expert is None else experts
            held[key] = held.get(key, 0) + int(counts[place])
    found: dict[tuple[str, str], int] = {}
    for (layer, operand, _), count in {**experts, **own}.items():
        # The layouts of an operand hold the same elements.
        found[layer, operand] = max(found.get((layer, operand), 0), count)
    return {key: count for key, count in found.items() if count}
