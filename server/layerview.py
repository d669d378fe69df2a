"""The layers of a run with their state, worst reading and precision."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.budget import fallbacks
from fp8_safeguard.monitor.nonfinite import RULE as NON_FINITE
from fp8_safeguard.monitor.plan import Plan
from fp8_safeguard.monitor.precision import BF16, FP8, precisions_of
from fp8_safeguard.monitor.slots import GEMMS
from fp8_safeguard.server.alertlog import UNRESOLVED, unresolved
from fp8_safeguard.server.answers import encode_float
from fp8_safeguard.server.audit import plan_from
from fp8_safeguard.server.branch import last_steps
from fp8_safeguard.server.choices import check_choice
from fp8_safeguard.server.latest import Latest, Reading, load_latest
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.slotlists import layers_of, of_run
from fp8_safeguard.server.standing import HELD, WAITING, load_standings
from fp8_safeguard.server.tables import alerts

LAYER_STATES = ("healthy", "watch", "unstable", "fallback", "unknown", "stale")
ORDERS = ("severity", "-severity", "layer", "name")
_HEALTHY = ""
_RANKS = ("act", "watch", WAITING, HELD, _HEALTHY)
"""What the alerts of layers say of the present, the worst first."""


def layers(
    conn: Connection,
    run: str,
    *,
    state: str | None = None,
    order_by: str = "severity",
    q: str | None = None,
    page_size: int = DEFAULT_PAGE,
    page_token: str | None = None,
) -> dict[str, Any]:
    """The contract's layer list. `order_by`: severity (worst first), layer (slot order) or name.

    Pages of one token chain describe the step at which the first page was read.
    """
    row = find_run(conn, run)
    check_choice("state", state, LAYER_STATES)
    check_choice("order_by", order_by, ORDERS)
    newest = last_steps(conn, row.id, 1)
    at = decode_token(page_token, ("offset", "upto")) or {"offset": 0, "upto": newest[-1] if newest else 0}
    rows = layer_rows(conn, row, upto=at["upto"])
    if order_by in ("severity", "-severity"):
        troubled = _troubled(conn, row, at["upto"])
        origins = _origins(conn, row, at["upto"])
        rows.sort(key=lambda item: _severity(item[0], item[1], troubled, origins))
    elif order_by == "name":
        rows.sort(key=lambda item: str(item[0]["layer"]))
    matching = [
        (place, item)
        for place, (item, _) in enumerate(rows)
        if place >= at["offset"]
        and state in (None, item["state"])
        and (q or "").lower() in item["layer"].lower()
    ]
    shown = matching[:page_size]
    more = len(matching) > page_size
    token = encode_token({"offset": shown[-1][0] + 1, "upto": at["upto"]}) if more else None
    return {"items": [item for _, item in shown], "next_page_token": token}


def _severity(
    item: dict[str, Any], reading: Reading | None, troubled: dict[str, str], origins: Sequence[str]
) -> tuple[int, int, float]:
    """Worst first: what is in breach, then what waits to be measured again, then what is held, then what is near its limit.

    Where non-finite values begin comes before the layers that hold them because of it.
    """
    broken, layer = _is_broken(reading), item["layer"]
    said = {troubled.get(layer, _HEALTHY), HELD if item["state"] == "fallback" else _HEALTHY}
    if broken:
        said.add("act" if item["state"] == "unstable" else "watch")
    place = origins.index(layer) if broken and layer in origins else len(origins)
    return min(map(_RANKS.index, said)), place, -reading.excess if reading else 1.0


def _is_broken(reading: Reading | None) -> bool:
    """Whether the newest values of a layer hold NaN or Inf."""
    return reading is not None and reading.metric == NON_FINITE.metric


def _then(row: Row[Any], upto: int, *states: str) -> tuple[Any, ...]:
    """Which alerts of layers were in one of these states at a step: pages must not shift."""
    then = (alerts.c.raised_step <= upto, alerts.c.layer.is_not(None))
    return (alerts.c.run_id == row.id, *then, alerts.c.state.in_(states) | (alerts.c.resolved_step > upto))


def _troubled(conn: Connection, row: Row[Any], upto: int) -> dict[str, str]:
    """The worst that the alerts of each layer that has any say, of those that were unresolved at a step."""
    found = conn.execute(select(alerts).where(*_then(row, upto, *UNRESOLVED))).all()
    standings = load_standings(conn, row, plan_from(row), (alert.layer for alert in found))
    said: dict[str, list[str]] = {}
    for alert in found:
        there = alert.state in UNRESOLVED
        says = standings.of(json.loads(alert.body), alert.state).says if there else alert.severity
        said.setdefault(alert.layer, []).append(says)
    return {layer: min(says, key=_RANKS.index) for layer, says in said.items()}


def _origins(conn: Connection, row: Row[Any], upto: int) -> list[str]:
    """The layers in which non-finite values began, by the alerts that were open at a step, the first before the others."""
    query = select(alerts.c.layer).where(*_then(row, upto, "open"), alerts.c.rule == NON_FINITE.rule)
    return list(dict.fromkeys(conn.execute(query.order_by(alerts.c.first_step, alerts.c.id)).scalars()))


def layer_rows(conn: Connection, row: Row[Any], upto: int) -> list[tuple[dict[str, Any], Reading | None]]:
    """Every layer in slot order, with the reading that its order of severity follows."""
    latest = load_latest(conn, row, upto)
    worst = latest.worst_by_layer()
    plan = plan_from(row)
    precision = precision_of(latest, plan)
    fallen = {layer for layer, _ in fallbacks(plan)}
    standings, passed_on = layer_standings(conn, row, plan)
    origins = _origins(conn, row, upto)
    sampled = _sampled_layers(latest)
    ever = layers_of(of_run(conn, row.id))
    rows = []
    for layer in ever:
        reading = worst.get(layer)
        broken = _is_broken(reading)
        item = {
            "layer": layer,
            "state": layer_state(
                sampled=layer in sampled,
                judged=reading is not None,
                fallen=layer in fallen,
                standings=standings.get(layer, set()) | (passed_on if broken else set()),
            ),
            "follows_from": origins[0] if broken and origins and layer not in origins else None,
            "worst": None if reading is None else _worst(reading),
            "precision": precision.get(layer, dict.fromkeys(GEMMS, FP8)),
        }
        rows.append((item, reading))
    return rows


def _sampled_layers(latest: Latest) -> frozenset[str]:
    """Layers with at least one value in the newest samples."""
    _, steps = latest.values("count")
    return frozenset(
        tensor.layer for tensor, step in zip(latest.grid.tensors, steps.tolist(), strict=True) if step >= 0
    )


def layer_state(*, sampled: bool, judged: bool, fallen: bool, standings: Collection[str]) -> str:
    """One of LAYER_STATES. standings: what `Standings` says of its alerts.

    Trouble that nothing holds comes first; what only would be trouble in FP8, or waits to be measured again after a remedy, is
    worth watching. Nobody knows how a layer is of which nothing was there to be judged (judged: a value that has a threshold), such as an expert without a token.
    """
    if not sampled:
        return "stale"
    if "act" in standings:
        return "unstable"
    if fallen:
        return "fallback"
    if standings:
        return "watch"
    return "healthy" if judged else "unknown"


def precision_of(latest: Latest, plan: Plan) -> dict[str, dict[str, str | None]]:
    """What each layer computes its GEMMs in: fp8, bf16, `high` (BF16, FP16 or FP32), or None where nobody knows.

    A layer whose recomputed slots say nothing else, or that has none, is taken to run in FP8 as it is configured.
    """
    fallen = fallbacks(plan)
    errors, _ = latest.values("relative_error")
    slots = [replace(latest.slots[tensor], expert=None) for tensor in latest.grid.tensors]
    seen = list(zip(slots, errors.tolist(), strict=True))
    found = precisions_of(seen, fallen)
    for layer in {slot.layer for slot, _ in seen} | {layer for layer, _ in fallen}:
        if layer not in found:
            found[layer] = {gemm: BF16 if (layer, gemm) in fallen else FP8 for gemm in GEMMS}
    return found


def layer_standings(conn: Connection, row: Row[Any], plan: Plan) -> tuple[dict[str, set[str]], set[str]]:
    """What `Standings` says of each layer's alerts, and of all that hold non-finite values."""
    found: dict[str, set[str]] = {}
    nonfinite: set[str] = set()
    open_now = unresolved(conn, row.id)
    standings = load_standings(conn, row, plan, (alert.layer for alert in open_now))
    for alert in open_now:
        if alert.layer is not None:
            standing = standings.of(json.loads(alert.body), alert.state).says
            found.setdefault(alert.layer, set()).add(standing)
            if alert.rule == NON_FINITE.rule:
                nonfinite.add(standing)
    return found, spreading(nonfinite)


def alerted_layers(conn: Connection, row: Row[Any]) -> dict[str, str]:
    """act or watch for each layer with an alert that nothing holds."""
    standings, _ = layer_standings(conn, row, plan_from(row))
    return {layer: "act" if "act" in says else "watch" for layer, says in standings.items() if says != {HELD}}


def spreading(standings: Collection[str]) -> set[str]:
    """What holds of every layer that holds non-finite values, from the alerts on where they began.

    One that only passes them on is in trouble as their origin is; without such an alert it is worth watching, never healthy.
    """
    return {"act"} if "act" in standings else {"watch"}


def _worst(reading: Reading) -> dict[str, Any]:
    return {
        "metric": reading.metric,
        "operand": reading.tensor.operand,
        "layout": reading.tensor.layout,
        "gemm": reading.tensor.gemm,
        "value": "NaN" if reading.value != reading.value else encode_float(reading.value),
        "threshold": encode_float(reading.threshold),
        "step": reading.step,
    }
