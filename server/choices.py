"""Refuses a query value that is none of the known ones."""

from collections.abc import Sequence

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server.problems import invalid


def check_choice(name: str, value: str | None, known: Sequence[str]) -> None:
    """Raises Problem 422 for a value that is neither absent nor known."""
    if value is not None and value not in known:
        message = f"{name} {quoted(value)} is not one of {', '.join(known)}"
        raise invalid(message, [(f"/query/{name}", message)])
