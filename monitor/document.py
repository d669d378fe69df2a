"""Reads a decoded document and notes every fault under its JSON pointer."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fp8_safeguard.monitor.numbers import NumberError, decode_count, decode_number
from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.monitor.slots import SlotError, check_text, is_count

MAX_FAULTS = 1000
"""Enough for any honest mistake, and a bound on the answer to a dishonest one."""


class WireError(ValueError):
    """A document that is not a sample: `.errors` lists (JSON pointer, message) for every fault found.

    `.kind` is `validation`, `schema` (see ACCEPTED_SCHEMAS) or `slots-unknown` (send the slot list itself).
    """

    def __init__(self, errors: Sequence[tuple[str, str]], kind: str = "validation") -> None:
        self.errors = list(errors)
        self.kind = kind
        super().__init__("; ".join(f"{pointer or 'body'}: {message}" for pointer, message in self.errors[:5]))


class Reader:
    """Reads fields of one document and notes every fault under its pointer."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.faults: list[tuple[str, str]] = []

    @property
    def full(self) -> bool:
        """Whether so much is wrong that reading on would only cost time."""
        return len(self.faults) >= MAX_FAULTS

    def fault(self, pointer: str, message: str) -> None:
        if not self.full:
            self.faults.append((pointer, message))

    def raise_faults(self) -> None:
        if self.faults:
            raise WireError(self.faults)

    def text(self, name: str, default: str | None = None, *, required: bool = False) -> str | None:
        value = self.body.get(name)
        if value is None:
            if required:
                self.fault(f"/{name}", f"{name} is required")
            return default
        return self.checked_text(f"/{name}", name, value)

    def checked_text(self, pointer: str, name: str, value: Any) -> str | None:
        try:
            return check_text(name, value)
        except SlotError as error:
            self.fault(pointer, str(error))
            return None

    def count(
        self, name: str, default: int | None = None, *, required: bool = False, least: int = 0
    ) -> int | None:
        return self.count_in(self.body, "", name, default, required=required, least=least)

    def count_in(
        self,
        parent: Mapping[str, Any],
        base: str,
        name: str,
        default: int | None,
        *,
        required: bool = False,
        least: int = 0,
    ) -> int | None:
        value = parent.get(name)
        if value is None and not required:
            return default
        if value is not None and is_count(value) and value >= least:
            return int(value)
        problem = (
            "is required" if value is None else f"is an integer from {least} to 2^63 - 1, not {quoted(value)}"
        )
        self.fault(f"{base}/{name}", f"{name} {problem}")
        return default

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            self.fault(f"/{name}", f"{name} {quoted(value)} is not one of {', '.join(choices)}")
            return default
        return value

    def number(self, name: str, *, finite: bool) -> float | None:
        return self.checked_number(f"/{name}", name, self.body.get(name), finite=finite)

    def checked_number(self, pointer: str, name: str, value: Any, *, finite: bool) -> float | None:
        try:
            return decode_number(value, finite=finite)
        except NumberError as error:
            self.fault(pointer, f"{name}: {error}")
            return None

    def records(self, name: str, kinds: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
        """A list of small objects; `kinds` maps their fields to text, count or number, `required` in front or not."""
        wire = self.body.get(name)
        if wire is None:
            return ()
        if not isinstance(wire, (list, tuple)):
            self.fault(f"/{name}", f"{name} is a list, not {type(wire).__name__}")
            return ()
        listed = itertools.takewhile(lambda placed: not self.full, enumerate(wire))
        return tuple(self._record(f"/{name}/{place}", item, kinds) for place, item in listed)

    def _record(self, pointer: str, wire: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
        if not isinstance(wire, Mapping):
            self.fault(pointer, f"is an object, not {quoted(wire)}")
            return {}
        record = {}
        for name, kind in kinds.items():
            value, at = wire.get(name), f"{pointer}/{name}"
            if value is None and kind.startswith("required"):
                self.fault(at, f"{name} is required")
            record[name] = None if value is None else self._value(at, name, value, kind)
        return record

    def _value(self, pointer: str, name: str, value: Any, kind: str) -> Any:
        if kind == "number":
            return self.checked_number(pointer, name, value, finite=False)
        if kind == "count":
            return self._checked_count(pointer, name, value)
        return self.checked_text(pointer, name, value)

    def _checked_count(self, pointer: str, name: str, value: Any) -> int | None:
        try:
            return decode_count(value)
        except NumberError as error:
            self.fault(pointer, f"{name}: {error}")
            return None


def escape(name: Any) -> str:
    """RFC 6901: ~ and / in a name."""
    return str(name).replace("~", "~0").replace("/", "~1")


def distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A decoded object whose names are all different: of two values under one name, readers take either. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the name {quoted(twice)} stands twice in one object; keep one of the two")
    return found
