"""The layers of a run with their state, worst reading and precision."""

import json
from typing import Any

from sqlalchemy import Connection, Row, select

from fp8_safeguard.monitor.slots import GEMMS
from fp8_safeguard.server.answers import encode_float
from fp8_safeguard.server.branch import last_steps
from fp8_safeguard.server.latest import Reading, load_latest
from fp8_safeguard.server.paging import DEFAULT_PAGE, decode_token, encode_token
from fp8_safeguard.server.problems import invalid
from fp8_safeguard.server.runlookup import find_run
from fp8_safeguard.server.slotlists import layers_of, of_run
from fp8_safeguard.server.tables import alerts

LAYER_STATES = ("healthy", "watch", "unstable", "fallback", "unknown", "stale")
ORDERS = ("severity", "-severity", "layer", "name")


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
    _check_choice("state", state, LAYER_STATES)
    _check_choice("order_by", order_by, ORDERS)
    newest = last_steps(conn, row.id, 1)
    at = decode_token(page_token, ("offset", "upto")) or {"offset": 0, "upto": newest[-1] if newest else 0}
    rows = layer_rows(conn, row, upto=at["upto"])
    if order_by in ("severity", "-severity"):
        rows.sort(key=lambda item: -item[1].excess if item[1] else 1.0)
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


def layer_rows(
    conn: Connection, row: Row[Any], upto: int | None = None
) -> list[tuple[dict[str, Any], Reading | None]]:
    """Every layer in slot order, with the reading that its order of severity follows."""
    latest = load_latest(conn, row, upto)
    worst = latest.worst_by_layer()
    precision = _precision(json.loads(row.plan))
    severities = _open_severities(conn, row)
    sampled = _sampled_layers(latest)
    ever = layers_of(of_run(conn, row.id))
    rows = []
    for layer in ever:
        reading = worst.get(layer)
        item = {
            "layer": layer,
            "state": _state(layer, sampled, precision, severities),
            "worst": None if reading is None else _worst(reading),
            "precision": precision.get(layer, dict.fromkeys(GEMMS, "fp8")),
        }
        rows.append((item, reading))
    return rows


def _sampled_layers(latest: Any) -> frozenset[str]:
    """Layers with at least one value in the newest samples."""
    _, steps = latest.values("count")
    return frozenset(
        tensor.layer for tensor, step in zip(latest.grid.tensors, steps.tolist(), strict=True) if step >= 0
    )


def _state(
    layer: str,
    sampled: frozenset[str],
    precision: dict[str, dict[str, str]],
    severities: dict[str, set[str]],
) -> str:
    if layer not in sampled:
        return "stale"
    if "bf16" in precision.get(layer, {}).values():
        return "fallback"
    found = severities.get(layer, set())
    return "unstable" if "act" in found else "watch" if found else "healthy"


def _precision(plan: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """What each layer of the plan computes its GEMMs in."""
    found: dict[str, dict[str, str]] = {}
    for entry in plan:
        if entry["action"] != "bf16_fallback":
            continue
        gemms = found.setdefault(entry["layer"], dict.fromkeys(GEMMS, "fp8"))
        named = entry["target"].get("gemm")
        gemms.update(dict.fromkeys([named] if named else GEMMS, "bf16"))
    return found


def _open_severities(conn: Connection, row: Row[Any]) -> dict[str, set[str]]:
    query = select(alerts.c.layer, alerts.c.severity).where(
        alerts.c.run_id == row.id, alerts.c.state == "open"
    )
    found: dict[str, set[str]] = {}
    for alert in conn.execute(query):
        found.setdefault(alert.layer, set()).add(alert.severity)
    return found


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


def _check_choice(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        message = f"{name} {value!r} is not one of {', '.join(known)}"
        raise invalid(message, [(f"/query/{name}", message)])
