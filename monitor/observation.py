"""What all groups of a run measured at one step, merged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8_safeguard.monitor.columns import StatsTable, merge_tables
from fp8_safeguard.monitor.numbers import decode_number, worse
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.wire import Sample


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """What all groups of a run measured at one step, merged."""

    step: int
    slots: tuple[Slot, ...]
    stats: StatsTable
    """One row a slot."""
    run: Mapping[str, float | None] = field(default_factory=dict)
    plan_version: int = 0
    """The plan that the step ran with."""
    indices: tuple[int, ...] = ()
    """The slots' order in the model, to tell the earliest layer; empty: layer names decide."""
    scalars: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """What the trainer or the hooks noted besides, by (layer, name): a router's entropy, the gain of a norm."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """The worst ranks of each group, as on the wire."""


def observe(samples: Sequence[Sample]) -> StepObservation:
    """The observation in the samples of one step, one from each group that has arrived."""
    ordered = sorted(samples, key=lambda sample: sample.group)
    slots, stats = merge_tables([(sample.slots, sample.table) for sample in ordered])
    index: dict[str, int] = {}
    run: dict[str, float | None] = {}
    for sample in ordered:
        for position, slot in zip(sample.indices or range(len(sample.slots)), sample.slots, strict=True):
            index.setdefault(slot.key, position)
        for name, value in sample.run.items():
            if value is not None:
                # No group's trouble is hidden.
                held = run.get(name)
                run[name] = value if held is None else worse(held, value)
    return StepObservation(
        step=ordered[0].step,
        slots=slots,
        stats=stats,
        run=run,
        plan_version=min(sample.plan_version for sample in ordered),
        indices=tuple(index[slot.key] for slot in slots),
        scalars=scalars_of(record for sample in ordered for record in sample.scalars),
        ranks=tuple(record for sample in ordered for record in sample.ranks),
    )


def scalars_of(records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Scalars by (layer, name); of several groups' values the worse: no trouble is hidden."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        key, number = (record["layer"], record["name"]), decode_number(record["value"])
        if number is not None:
            found[key] = worse(found.get(key, number), number)
    return found
