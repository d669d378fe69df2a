"""Caps what a request may bring, wherever samples are not read."""

import re
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8_safeguard.server.payload import content_length
from fp8_safeguard.server.problems import Problem, respond

_SAMPLES = re.compile(r"/api/v1/runs/[^/]+/samples")
MOST_BYTES = 2**18
"""What people and the command line send is a few names and numbers."""


class SmallBodies:
    """Answers 413 to a large body at any address but that of samples, which has a limit of its own.

    The framework reads a body whole before it asks for a token, so nothing else keeps strangers from filling the memory.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _SAMPLES.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        told = content_length(Request(scope).headers)
        if told is not None and told > MOST_BYTES:
            problem = Problem(413, "body-too-large", _TOO_LARGE, limit_bytes=MOST_BYTES)
            await respond(problem, Request(scope))(scope, receive, send)
            return
        await self._app(scope, _Counted(receive), send)


_TOO_LARGE = f"the body is larger than {MOST_BYTES} bytes, and only samples are as large; their address ends with /samples"


class _Counted:
    """Receives parts of a body until they are too many."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = MOST_BYTES

    async def __call__(self) -> Message:
        message: MutableMapping[str, Any] = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # Not a Problem: the framework's reader makes a 400 of any other error.
            raise HTTPException(413, _TOO_LARGE)
        return message
