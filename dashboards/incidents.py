"""Incidents: each standing cause with the alerts that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8_safeguard.dashboards.alerts import AlertRow
from fp8_safeguard.dashboards.causes import CauseView, cause_view

_GRADIENTS = ("dgrad", "wgrad")
Item = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One cause, and what is folded under it."""

    cause: CauseView
    since: str
    own: tuple[AlertRow, ...]
    """What stands there at once: the alerts of the cause's own layer, or the first one."""
    folded: str
    """How much is folded: "15 alerts in 9 layers"; empty where nothing is."""
    rows: tuple[AlertRow, ...]


def fold(causes: Sequence[Item], items: Sequence[Item], layers: Sequence[str]) -> list[list[Item]]:
    """The unresolved alerts that follow from each cause; one that follows from none is in no list.

    layers: in the model's order. What begins in the forward pass shows in later layers, and in gradients anywhere; what begins
    in a gradient shows in gradients of earlier layers; a wgrad is a leaf. Nothing that began before belongs to a cause,
    and no alert that blames FP8 to a cause that is not FP8's.
    """
    folded: list[list[Item]] = [[] for _ in causes]
    for item in items:
        if item.get("state") not in ("open", "held"):
            continue
        own = [place for place, cause in enumerate(causes) if _same_layer(cause, item)]
        later = [
            place
            for place, cause in enumerate(causes)
            if _began(cause, items) <= int(item["first_step"]) and _downstream(cause, item, layers)
        ]
        chosen = next((place for place in (*own, *later) if _may_explain(causes[place], item)), None)
        if chosen is not None:
            folded[chosen].append(item)
    return folded


def incident(cause: Item, rows: Sequence[AlertRow]) -> Incident:
    """A cause with the entries of the alert list that follow from it."""
    own = [row for row in rows if row.layer and row.layer == cause.get("layer")] or list(rows[:1])
    others = [row for row in rows if row not in own]
    count = sum(len(row.ids) for row in others)
    places = {row.layer for row in others if row.layer}
    alerts = f"{count} alert{'' if count == 1 else 's'}"
    where = f" in {len(places)} layer{'' if len(places) == 1 else 's'}" if places else ""
    return Incident(
        cause=cause_view(cause),
        since=f"since step {int(cause['first_step']):,}{_found(cause)}",
        own=tuple(own),
        folded=alerts + where if others else "",
        rows=tuple(others),
    )


def _found(cause: Item) -> str:
    """When a cause was named, where that was later than what it explains: nobody knew it until then."""
    found = cause.get("found_step")
    return "" if found is None or found <= cause["first_step"] else f", found at step {int(found):,}"


def _same_layer(cause: Item, item: Item) -> bool:
    return bool(cause.get("layer")) and cause["layer"] == item.get("layer")


def _may_explain(cause: Item, item: Item) -> bool:
    return cause.get("kind") != "not-fp8" or item.get("severity") != "act"


def _began(cause: Item, items: Sequence[Item]) -> int:
    """The first step of the cause: a diagnosis comes after the alerts of its own layer."""
    own = [
        int(item["first_step"]) for item in items if _same_layer(cause, item) and item["state"] != "resolved"
    ]
    return min([int(cause["first_step"]), *own])


def _downstream(cause: Item, item: Item, layers: Sequence[str]) -> bool:
    slot = cause.get("slot") or {}
    layer, start = item.get("layer"), _place(cause.get("layer"), layers)
    if layer is None or start is None:
        return start is None
    if layer not in layers or slot.get("gemm") == "wgrad":
        return False
    gradient = any(_of_gradient(part.get("slot") or {}) for part in item.get("slots") or [item])
    at = layers.index(layer)
    if _of_gradient(slot):
        return gradient and at <= start
    return gradient or at >= start


def _of_gradient(slot: Item) -> bool:
    return slot.get("operand") == "dy" or slot.get("gemm") in _GRADIENTS


def _place(layer: Any, layers: Sequence[str]) -> int | None:
    """Where a module stands among the layers: itself, or the first of its block; None: nowhere, so the whole run."""
    if not isinstance(layer, str):
        return None
    if layer in layers:
        return list(layers).index(layer)
    parts = layer.split(".")
    for length in range(len(parts) - 1, 0, -1):
        block = ".".join(parts[:length]) + "."
        found = next((place for place, name in enumerate(layers) if name.startswith(block)), None)
        if found is not None:
            return found
    return None
