"""Errors as RFC 9457 problem details with stable types."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from fp8_safeguard.server.answers import ProblemResponse
from fp8_safeguard.server.faults import refusal
from fp8_safeguard.server.store import StoreBusyError

_LOGGER = logging.getLogger("fp8_safeguard.server")


class Problem(ValueError):
    """A mistake of the caller; becomes the answer as it is."""

    def __init__(
        self, status: int, kind: str, detail: str, *, headers: Mapping[str, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra

    def to_dict(self) -> dict[str, Any]:
        """The members of problem+json."""
        title = HTTPStatus(self.status).phrase
        return {
            "type": self.kind,
            "title": title,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }


def invalid(detail: str, errors: list[tuple[str, str]] | None = None) -> Problem:
    """422 with the JSON pointers of all faults found."""
    listed = [{"pointer": pointer, "message": message} for pointer, message in errors or []]
    return Problem(422, "validation", detail, errors=listed)


def shortened(text: str) -> str:
    """A message without the tail of what it quotes, which may be as long as a body."""
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def not_found(kind: str, detail: str) -> Problem:
    """404 with the kind of thing that is missing."""
    return Problem(404, kind, detail)


def busy() -> Problem:
    """503 for a request that found no turn at the store."""
    detail = "the store is busy or cannot be written; try again"
    return Problem(503, "unavailable", detail, headers={"Retry-After": "1"})


_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_LONGEST_MESSAGE = 500
_TYPE_OF_STATUS = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    413: "body-too-large",
    415: "unsupported-media-type",
    429: "too-many-requests",
    503: "unavailable",
}


def respond(problem: Problem, request: Request) -> ProblemResponse:
    """The answer that a problem becomes."""
    body = {**problem.to_dict(), "instance": request.url.path}
    return ProblemResponse(body, status_code=problem.status, headers=problem.headers)


async def _on_problem(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, Problem)
    return respond(error, request)


async def _on_http_error(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, HTTPException)
    kind = _TYPE_OF_STATUS.get(error.status_code, "http-error")
    detail, headers = error.detail, dict(error.headers or {})
    if error.status_code == 404:
        detail = f"nothing is served at {request.url.path}; see /openapi.json"
    if error.status_code == 405:
        offered = _methods_at(request)
        headers["Allow"] = ", ".join(offered)
        detail = f"{request.method} is not offered at {request.url.path}, only {' and '.join(offered)}"
    return respond(Problem(error.status_code, kind, detail, headers=headers), request)


def _methods_at(request: Request) -> list[str]:
    """What is offered at the request's path; the framework names the methods of one route only."""
    asked = ({**request.scope, "method": method} for method in _METHODS)
    return [
        scope["method"]
        for scope in asked
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]


def _pointer(location: tuple[Any, ...]) -> str:
    # A body is its own document, as in the problems of a sample; what is no body says where it stands.
    parts = location[1:] if location and location[0] == "body" else location
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


async def _on_validation(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, RequestValidationError)
    faults = list(error.errors())
    broken = next((fault for fault in faults if fault["type"] == "json_invalid"), None)
    if broken is not None:
        detail = f"the body is not JSON: {broken.get('ctx', {}).get('error', broken['msg'])}"
        return respond(Problem(400, "bad-request", detail), request)
    if _is_no_json(request) and any(tuple(fault["loc"]) == ("body",) for fault in faults):
        detail = "the body was not read: send it as Content-Type application/json"
        accepted = {"Accept": "application/json"}
        return respond(Problem(415, "unsupported-media-type", detail, headers=accepted), request)
    # A body that two parameters read is wrong once.
    errors = list(dict.fromkeys((_pointer(tuple(fault["loc"])), refusal(fault)) for fault in faults))
    return respond(invalid("; ".join(message for _, message in errors), errors), request)


def _is_no_json(request: Request) -> bool:
    """Whether there is a body that is said to be something else, or of which nothing is said."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    some = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    return some and kind != "application/json"


async def _on_database_error(request: Request, error: Exception) -> ProblemResponse:
    _LOGGER.warning("the store is busy or refused a statement: %s", error)
    return respond(busy(), request)


async def _on_crash(request: Request, error: Exception) -> ProblemResponse:
    # The traceback belongs in the log; the answer says nothing about the inside.
    _LOGGER.error("unhandled error at %s %s", request.method, request.url.path, exc_info=error)
    return respond(Problem(500, "internal", "the service failed; its log has the details"), request)


def install(app: FastAPI) -> None:
    """Answer every error, the framework's own included, as a problem."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    for kind in (OperationalError, PoolTimeoutError, StoreBusyError):
        app.add_exception_handler(kind, _on_database_error)
    app.add_exception_handler(Exception, _on_crash)
