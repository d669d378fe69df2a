"""Refuses addresses that name what no store can hold."""

import re
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from fp8_safeguard.server.answers import ProblemResponse
from fp8_safeguard.server.problems import Problem, invalid, respond

_NUL = "\x00"
# A run's id has no colon, so these are never a run that a PATCH or DELETE could mean.
_VERB = re.compile(r"/api/v1/runs/[^/]*:(end|kill-switch)")


class PlainAddresses:
    """Answers 404 or 422 to a NUL character in path or query: PostgreSQL cannot even look for one.

    And 405 to what is no POST at an address that ends with a verb, which would match the run's own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _wrong(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        answer: ProblemResponse = respond(problem, Request(scope))
        await answer(scope, receive, send)


def _wrong(scope: dict[str, Any] | Scope) -> Problem | None:
    if _NUL in scope["path"]:
        return Problem(404, "not-found", "nothing here has a NUL character in its name; see /openapi.json")
    if scope["method"] != "POST" and _VERB.fullmatch(scope["path"]):
        detail = f"{scope['method']} is not offered at {scope['path']}, only POST"
        return Problem(405, "method-not-allowed", detail, headers={"Allow": "POST"})
    query = scope["query_string"]
    if b"%00" not in query and b"\x00" not in query:
        return None
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    errors = [(f"/query/{name}", "holds a NUL character") for name, value in pairs if _NUL in name + value]
    return invalid("; ".join(f"{pointer} {message}" for pointer, message in errors), errors)
