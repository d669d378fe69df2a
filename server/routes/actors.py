"""Who asks for a change, as the audit log names them."""

from typing import Annotated, Any

from fastapi import Body, Depends, Request

from fp8_safeguard.monitor.quoting import quoted
from fp8_safeguard.server import control
from fp8_safeguard.server.auth import caller_of
from fp8_safeguard.server.problems import invalid

_LONGEST_NAME = 200


def actor_of(request: Request, body: Annotated[dict[str, Any] | None, Body()] = None) -> str:
    """Who does it, from an optional `{"by": "name"}`; else the token's name, if it has one."""
    named = (body or {}).get("by", caller_of(request).name or control.PERSON)
    if not isinstance(named, str) or not named.isprintable() or not 0 < len(named) <= _LONGEST_NAME:
        message = f"by is a printable name of 1 to {_LONGEST_NAME} characters, not {quoted(named)}"
        raise invalid(message, [("/by", message)])
    return named


Actor = Annotated[str, Depends(actor_of)]
