"""What the evidence of a client's own decision says, as far as it can be read."""

from collections.abc import Callable, Mapping
from typing import Any

from fp8_safeguard.monitor.cause import Diagnosis
from fp8_safeguard.monitor.localdecisions import LOCAL_VERSION
from fp8_safeguard.monitor.numbers import decode_number
from fp8_safeguard.monitor.plan import is_finite_number
from fp8_safeguard.monitor.slots import Slot, is_count

UNREAD = "unread"
"""Where what is not of its kind is kept: pages, grades and causes take the rest for the policy's own."""


def readable(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence with what is not of the kind that the policy writes under `unread`; other names stay as they are."""
    wrong = {name: value for name, value in evidence.items() if name in _KINDS and not _is(name, value)}
    kept = {name: value for name, value in evidence.items() if name not in wrong}
    return {**kept, UNREAD: wrong} if wrong else kept


def _is(name: str, value: Any) -> bool:
    try:
        return _KINDS[name](value)
    except (KeyError, TypeError, ValueError):
        return False


def _is_signal(item: Any) -> bool:
    Slot.from_wire(item["slot"])
    for name in ("value", "threshold"):
        decode_number(item.get(name))
    texts = all(isinstance(item[name], str) for name in ("rule", "metric"))
    return texts and is_count(item.get("first_step", 0))


def _is_cause(item: Any) -> bool:
    found = Diagnosis.from_wire(item)
    texts = (found.cause, found.kind, found.layer or "", found.summary, found.advice or "")
    number = found.value is None or is_finite_number(found.value)
    return all(isinstance(text, str) for text in texts) and bool(found.cause) and number


def _are_numbers(item: Any) -> bool:
    return isinstance(item, Mapping) and all(map(is_finite_number, item.values()))


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "signals": lambda value: isinstance(value, list) and all(map(_is_signal, value)),
    "cause": _is_cause,
    "budget": _are_numbers,
    "remedy": lambda value: isinstance(value["name"], str),
    "replaces": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "restorable": lambda value: isinstance(value, bool),
    "unshown": is_finite_number,
    "first_step": is_count,
    "ttl_steps": is_count,
    LOCAL_VERSION: is_count,
}
"""By name, whether a value is of its kind; raises KeyError, TypeError or ValueError for some that are not."""
