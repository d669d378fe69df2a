"""Errors as RFC 9457 problem details with stable types."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from fp8_safeguard.server.answers import ProblemResponse

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


def not_found(kind: str, detail: str) -> Problem:
    """404 with the kind of thing that is missing."""
    return Problem(404, kind, detail)


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


def _respond(problem: Problem, request: Request) -> ProblemResponse:
    body = {**problem.to_dict(), "instance": request.url.path}
    return ProblemResponse(body, status_code=problem.status, headers=problem.headers)


async def _on_problem(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, Problem)
    return _respond(error, request)


async def _on_http_error(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, HTTPException)
    kind = _TYPE_OF_STATUS.get(error.status_code, "http-error")
    detail = error.detail
    if error.status_code == 404:
        detail = f"nothing is served at {request.url.path}; see /openapi.json"
    if error.status_code == 405:
        detail = f"{request.method} is not offered at {request.url.path}; see /openapi.json"
    return _respond(Problem(error.status_code, kind, detail, headers=error.headers), request)


def _pointer(location: tuple[Any, ...]) -> str:
    return "/" + "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in location)


async def _on_validation(request: Request, error: Exception) -> ProblemResponse:
    assert isinstance(error, RequestValidationError)
    errors = [(_pointer(tuple(fault["loc"])), str(fault["msg"])) for fault in error.errors()]
    detail = "; ".join(f"{pointer}: {message}" for pointer, message in errors)
    return _respond(invalid(detail, errors), request)


async def _on_database_error(request: Request, error: Exception) -> ProblemResponse:
    _LOGGER.warning("the store refused a statement: %s", error)
    detail = "the store is busy or cannot be written; try again"
    return _respond(Problem(503, "unavailable", detail, headers={"Retry-After": "1"}), request)


async def _on_crash(request: Request, error: Exception) -> ProblemResponse:
    # The traceback belongs in the log; the answer says nothing about the inside.
    _LOGGER.error("unhandled error at %s %s", request.method, request.url.path, exc_info=error)
    return _respond(Problem(500, "internal", "the service failed; its log has the details"), request)


def install(app: FastAPI) -> None:
    """Answer every error, the framework's own included, as a problem."""
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(OperationalError, _on_database_error)
    app.add_exception_handler(Exception, _on_crash)
