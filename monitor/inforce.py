"""Which stored decisions were in force at some steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8_safeguard.monitor.plan import ACTIONS, step_after

HELD = ("approved", "sent", "applied")
"""States of decisions that the plan holds."""
ENDED = ("reverted", "expired")
"""States that end one; its history says at which step."""

Item = Mapping[str, Any]


def in_force(items: Sequence[Item], from_step: int, to_step: int) -> list[Item]:
    """Of decisions as the API shows them, those that were in force at some step of the range, the oldest first.

    One whose end is not dated counts as in force from its first step on.
    """
    oldest = sorted(items, key=lambda item: int(item["step"]))
    return [
        item
        for place, item in enumerate(oldest)
        if item["action"] in ACTIONS and _overlaps(item, oldest[place + 1 :], from_step, to_step)
    ]


def since(item: Item) -> int:
    """The first step at which a decision was in force: as the trainer has said, else the earliest that it can have been.

    A person's approval may come long after the evidence, and holds nothing of the steps before it.
    """
    effective = item.get("effective_step")
    if effective is not None:
        return int(effective)
    asked = [int(act["step"]) for act in item.get("history", ()) if act["what"] in HELD and _is_dated(act)]
    return max([int(item["not_before_step"]), *map(step_after, asked)])


def _overlaps(item: Item, later: Sequence[Item], from_step: int, to_step: int) -> bool:
    if not was_held(item) or since(item) > to_step:
        return False
    began = since(item)
    taken_back = [
        int(act["step"]) for act in item.get("history", ()) if act["what"] in ENDED and _is_dated(act)
    ]
    if item.get("effective_step") is None and any(end < began for end in taken_back):
        return False
    restored = [end for other in later if _undoes(other, item) and (end := since(other)) >= began]
    # What the trainer has applied was in force for a step at least.
    return not any(max(end, began) <= from_step for end in (*restored, *taken_back))


def was_held(item: Item) -> bool:
    """Whether the plan holds a decision, or held it before it ended: a proposal expires without."""
    if item["state"] not in ENDED:
        return item["state"] in HELD
    acts = [act["what"] for act in item.get("history", ())]
    known = any(what in HELD for what in acts)
    return known or item.get("effective_step") is not None or item["state"] == "reverted"


def _is_dated(act: Item) -> bool:
    return act.get("step") is not None


def _undoes(other: Item, item: Item) -> bool:
    same = (other["layer"], other["target"]) == (item["layer"], item["target"])
    return same and other["action"] == "restore" and other["state"] in (*HELD, *ENDED)


def reasons(items: Sequence[Item], from_step: int, to_step: int) -> list[str]:
    """Why a range with decisions in force shows nothing healthy, a sentence each."""
    return [
        f"decision {item['id']} ({item['action']} of {item['layer']}) {_held(item)}; "
        "choose steps before it, or a run without it"
        for item in in_force(items, from_step, to_step)
    ]


def _held(item: Item) -> str:
    if item.get("effective_step") is None and item["state"] == "approved":
        return f"was decided to hold from step {since(item)}, and the trainer has not said since when it does"
    return f"was in force from step {since(item)}"
