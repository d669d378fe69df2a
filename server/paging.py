"""Page tokens: opaque, checked, and stable while rows are added."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.problems import invalid

DEFAULT_PAGE = 100
MOST_PAGE = 1000


def encode_token(position: Mapping[str, Any]) -> str:
    """A page token for a position in a list."""
    return base64.urlsafe_b64encode(strict_dumps(dict(position)).encode()).decode().rstrip("=")


def decode_token(token: str | None, names: tuple[str, ...]) -> dict[str, int] | None:
    """The whole numbers that a page token holds under `names`; None for the first page.

    Raises Problem 422 for a token that this service did not make.
    """
    if not token:
        return None
    try:
        position = json.loads(base64.urlsafe_b64decode(token.encode() + b"=" * (-len(token) % 4)))
        values = {name: position[name] for name in names}
    except (binascii.Error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unknown(token) from error
    if not all(type(value) is int and -(2**63) <= value < 2**63 for value in values.values()):
        raise _unknown(token)
    return values


def _unknown(token: str) -> Exception:
    message = f"page token {token!r} was not made by this service for this list; begin without one"
    return invalid(message, [("/query/page_token", message)])
