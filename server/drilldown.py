"""One layer in full: slots, limits, alerts, decisions, precision."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.formats import get_format
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.precision import BF16, FP8, precisions_of
from fp8_safeguard.monitor.slots import GEMMS, Slot
from fp8_safeguard.server.audit import plan_from
from fp8_safeguard.server.auditview import decision_item, shown_alerts
from fp8_safeguard.server.baselines import chosen
from fp8_safeguard.server.branch import live_branch, segment_rows, visible_rows
from fp8_safeguard.server.drilldown_limits import (
    Medians,
    breaches_of,
    limits_of,
    own_medians,
    worst_reading,
)
from fp8_safeguard.server.drilldown_slots import (
    SHOWN_METRICS,
    Known,
    load_known,
    newest_parts,
    worst_experts,
)
from fp8_safeguard.server.layerview import layer_standings, layer_state
from fp8_safeguard.server.problems import Problem, not_found
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.tables import alerts as alert_table
from fp8_safeguard.server.tables import decisions as decision_table
from fp8_safeguard.server.tables import samples

MOST_ALERTS = 100
MOST_DECISIONS = 500
MOST_NAMED = 5


def layer_document(conn: Connection, run: str, layer: str) -> dict[str, Any]:
    """Everything that is known of one layer. Raises Problem 404 for an unknown run or layer."""
    row = find_run(conn, run)
    known = load_known(conn, row.id)
    names = check_layer(known.names, row.name, layer)
    place = names.index(layer)
    span = step_span(conn, row)
    raised, decided = layer_alerts(conn, row, layer), layer_decisions(conn, row, layer)
    spans = in_force_spans(conn, row, decided)
    readings = _readings(conn, row, known, layer)
    fresh = [pair for pair in readings if pair[1]["step"] in known.steps]
    plan = plan_from(row)
    precision = _precision_now(plan, layer, readings)
    worst = worst_reading(row.preset, fresh, chosen(conn, row))
    standings, passed_on = layer_standings(conn, row, plan)
    return {
        "run": run,
        "mode": row.mode,
        "ended": row.ended_at is not None,
        "in_plan": sorted({entry.decision_id for entry in plan.entries if entry.layer == layer}),
        "layer": layer,
        "state": layer_state(
            sampled=bool(fresh),
            judged=worst is not None,
            fallen=any(place[0] == layer for place in fallbacks(plan)),
            standings=standings.get(layer, set()) | (passed_on if _holds_nonfinite(fresh) else set()),
        ),
        "precision": precision,
        "worst": worst,
        "first_step": span[0],
        "last_step": span[1],
        "preset": row.preset,
        "previous": names[place - 1] if place else None,
        "next": names[place + 1] if place + 1 < len(names) else None,
        "position": place + 1,
        "layers": len(names),
        "slots": [*_slots(conn, row, readings), *_experts(conn, row, known, layer)],
        "alerts": raised,
        "decisions": decided,
        "precision_history": precision_history(spans, span[0], precision),
        "adjustments": [span for span in spans if span["action"] != "bf16_fallback"],
    }


def _holds_nonfinite(readings: Iterable[tuple[Slot, Mapping[str, Any]]]) -> bool:
    counts = (decode_number(reading["metrics"].get(NON_FINITE.metric)) for _, reading in readings)
    return any(count is not None and count > 0 for count in counts)


def _readings(conn: Connection, row: Row[Any], known: Known, layer: str) -> list[tuple[Slot, dict[str, Any]]]:
    """Every slot of the layer in model order with its newest step and the metrics of that step."""
    parts = newest_parts(conn, row.id, known, layer)
    found = []
    for tensor, slot in known.slots(layer).items():
        step, part = parts.get(tensor, (None, None))
        metrics = dict.fromkeys(SHOWN_METRICS) if part is None else part.metrics()
        found.append(
            (slot, {"step": step, "metrics": metrics, "histogram": None if part is None else part.histogram})
        )
    return found


def _slots(
    conn: Connection, row: Row[Any], readings: Sequence[tuple[Slot, dict[str, Any]]]
) -> list[dict[str, Any]]:
    medians = own_medians(conn, row, [slot for slot, _ in readings])
    learned = chosen(conn, row)
    return [
        _slot(row.preset, slot, reading, medians.get(slot.key, {}), learned) for slot, reading in readings
    ]


def _experts(conn: Connection, row: Row[Any], known: Known, layer: str) -> list[dict[str, Any]]:
    found = []
    learned = chosen(conn, row)
    for slot, step, part in worst_experts(known, layer).values():
        reading = {"step": step, "metrics": part.metrics(), "histogram": part.histogram}
        found.append(_slot(row.preset, slot, reading, {}, learned))
    return found


def _slot(
    preset: str, slot: Slot, reading: Mapping[str, Any], medians: Medians, learned: Baseline | None
) -> dict[str, Any]:
    fmt = get_format(slot.fmt or "e4m3")
    metrics = reading["metrics"]
    limits = {name: limits_of(preset, slot, name, medians.get(name), learned) for name in metrics}
    return {
        **slot.to_wire(),
        "step": reading["step"],
        "metrics": metrics,
        "thresholds": {name: lines for name, lines in limits.items() if lines},
        "breaches": breaches_of(preset, slot, metrics, medians, learned),
        "tile_sqnr_hist": reading["histogram"],
        "format": fmt.name,
        "format_max": fmt.max if slot.operand else None,
    }


def _precision_now(
    plan: Plan, layer: str, readings: Iterable[tuple[Slot, Mapping[str, Any]]]
) -> dict[str, str | None]:
    """What each gemm is computed in, None where it cannot be known, as the list of layers has it."""
    fallen = fallbacks(plan)
    seen = [
        (slot, math.nan if error is None else error)
        for slot, reading in readings
        for error in [decode_number(reading["metrics"]["relative_error"])]
    ]
    found = precisions_of(seen, fallen)
    plain: dict[str, str | None] = {gemm: BF16 if (layer, gemm) in fallen else FP8 for gemm in GEMMS}
    return found.get(layer, plain)


def step_span(conn: Connection, row: Row[Any]) -> tuple[int | None, int | None]:
    """First and last sampled step of the live branch."""
    ends: list[int | None] = []
    for segment in live_branch(conn, row.id):
        query = select(func.min(samples.c.step), func.max(samples.c.step))
        ends.extend(conn.execute(query.where(*segment_rows(segment, None, None))).one())
    known = [end for end in ends if end is not None]
    return min(known, default=None), max(known, default=None)


def check_layer(names: Sequence[str], run: str, layer: str) -> Sequence[str]:
    """The run's layers. Raises Problem 404 that names close matches where `layer` is none of them."""
    if layer not in names:
        raise _unknown_layer(run, layer, names)
    return names


def _unknown_layer(run: str, layer: str, names: Sequence[str]) -> Problem:
    folded = {name.casefold(): name for name in reversed(names)}
    close = difflib.get_close_matches(layer.casefold(), folded, n=MOST_NAMED, cutoff=0.5)
    inside = [name for name in names if layer and layer.casefold() in name.casefold()]
    near = list(dict.fromkeys([*(folded[name] for name in close), *inside]))[:MOST_NAMED]
    hint = (
        f"; did you mean {', '.join(map(repr, near))}?"
        if near
        else f"; GET /api/v1/runs/{run}/layers lists them"
    )
    return not_found("layer-not-found", f"run {run!r} has no layer {layer!r}{hint}")


def layer_alerts(conn: Connection, row: Row[Any], layer: str) -> list[dict[str, Any]]:
    """The layer's alerts, the newest first."""
    query = select(alert_table).where(alert_table.c.run_id == row.id, alert_table.c.layer == layer)
    found = conn.execute(query.order_by(alert_table.c.id.desc()).limit(MOST_ALERTS)).all()
    return shown_alerts(conn, row, found)


def layer_decisions(conn: Connection, row: Row[Any], layer: str) -> list[dict[str, Any]]:
    """The layer's decisions, the newest first."""
    query = select(decision_table).where(decision_table.c.run_id == row.id, decision_table.c.layer == layer)
    found = conn.execute(query.order_by(decision_table.c.number.desc()).limit(MOST_DECISIONS))
    return [{**decision_item(made), "plan_version": made.plan_version} for made in found]


def in_force_spans(
    conn: Connection, row: Row[Any], decided: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """When each decision was in force, by first step: what it did, from which step to which (null: still)."""
    begun = sorted(
        (made for made in decided if made["effective_step"] is not None and made["action"] != "advice"),
        key=lambda made: (made["effective_step"], made["plan_version"] or 0),
    )
    removed = _removals(conn, row, [made for made in begun if made["state"] == "reverted"])
    spans = []
    for place, made in enumerate(begun):
        if made["action"] == "restore":
            continue
        ends = [later for later in begun[place + 1 :] if _ends(later, made)]
        until = [(later["effective_step"], later["id"]) for later in ends]
        if made["id"] in removed:
            until.append((removed[made["id"]], made["id"]))
        end, by = min(until, default=(None, None))
        spans.append(
            {
                "target": made["target"],
                "action": made["action"],
                "value": made["value"],
                "from_step": made["effective_step"],
                "to_step": None if end is None else max(end - 1, made["effective_step"]),
                "decision_id": made["id"],
                "ended_by": by,
                "reason": made["reason"],
                "actor": made["actor"],
            }
        )
    return spans


def _ends(later: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    """A restore of its target, or another value of the same action at the same target, ends a decision."""
    return later["target"] == made["target"] and later["action"] in ("restore", made["action"])


def _removals(conn: Connection, row: Row[Any], reverted: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The step from which each reverted decision was out of force, as the trainer's samples tell by plan version.

    A person's change of the plan makes a version that no decision brought: the first such one after the decision, and
    failing that the newest version, is the one without it. None of them reported yet: it still is in force there.
    """
    if not reverted:
        return {}
    brought = set(
        conn.execute(select(decision_table.c.plan_version).where(decision_table.c.run_id == row.id)).scalars()
    )
    since: dict[int, int] = {}
    first = min(made["effective_step"] for made in reverted)
    for sample in visible_rows(conn, row.id, [samples.c.header], from_step=first):
        header = json.loads(sample.header)
        version, step = header.get("plan_version"), header.get("effective_step")
        if version is not None and step is not None:
            since.setdefault(version, step)
    found = {}
    for made in reverted:
        later = sorted(version for version in since if version > (made["plan_version"] or 0))
        by_hand = [version for version in later if version not in brought]
        if by_hand or later:
            found[made["id"]] = since[by_hand[0] if by_hand else later[-1]]
    return found


def precision_history(
    spans: Iterable[Mapping[str, Any]], first_step: int | None, now: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """What each gemm was computed in: periods without a gap, both ends included; `to_step` null is still so.

    `now` tells the configured precision of a gemm that no fallback holds; one that is held was FP8 before.
    """
    if first_step is None:
        return []
    history = []
    for gemm in GEMMS:
        mine = [span for span in spans if span["action"] == "bf16_fallback" and _covers(span["target"], gemm)]
        held = any(span["to_step"] is None for span in mine)
        configured = FP8 if held else now.get(gemm) or "unknown"
        history += [{"gemm": gemm, **period} for period in _periods(mine, first_step, configured)]
    return history


def _periods(
    spans: Sequence[Mapping[str, Any]], first_step: int, configured: str
) -> Iterable[dict[str, Any]]:
    at: int | None = first_step
    ended_by = None
    for span in spans:
        if at is None:
            return
        start = max(span["from_step"], at)
        if span["to_step"] is not None and span["to_step"] < at:
            continue
        if start > at:
            yield _period(at, start - 1, configured, ended_by)
        yield _period(start, span["to_step"], BF16, span["decision_id"])
        ended_by = span["ended_by"]
        at = None if span["to_step"] is None else span["to_step"] + 1
    if at is not None:
        yield _period(at, None, configured, ended_by)


def _period(start: int, end: int | None, precision: str, decision: str | None) -> dict[str, Any]:
    return {"from_step": start, "to_step": end, "precision": precision, "decision_id": decision}


def _covers(target: Mapping[str, Any], gemm: str) -> bool:
    return bool(target.get("layer")) or target.get("gemm") == gemm
