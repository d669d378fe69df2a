"""Bearer tokens with scopes, and protection from other sites' pages."""

import base64
import binascii
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from fastapi import Request

from fp8_safeguard.server.context import context_of
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.settings import SCOPES, Scope

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def require(scope: Scope) -> Callable[[Request], None]:
    """A dependency that lets a request pass only with the scope (admin has all)."""

    def check(request: Request) -> None:
        _refuse_other_sites(request)
        granted = scopes_of(request)
        if scope not in granted and "admin" not in granted:
            raise Problem(
                403, "forbidden", f"this token lacks the scope {scope!r}; it has {', '.join(sorted(granted))}"
            )

    return check


def scopes_of(request: Request) -> frozenset[str]:
    """The scopes of the request's token; all of them where no token is configured.

    Raises Problem 401.
    """
    tokens = context_of(request).settings.token_scopes()
    if not tokens:
        return frozenset(SCOPES)
    sent = _sent_token(request)
    # Every token is compared, in constant time, so the time tells nothing about any of them.
    matches = [
        scopes for secret, scopes in tokens.items() if secrets.compare_digest(secret.encode(), sent.encode())
    ]
    if not sent or not matches:
        raise Problem(
            401,
            "unauthorized",
            "send a known token as `Authorization: Bearer <token>`",
            headers={"WWW-Authenticate": 'Bearer realm="fp8-safeguard", Basic realm="fp8-safeguard"'},
        )
    return matches[0]


def _sent_token(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    # A browser cannot send a bearer token with a page load; it can send a password. Only to read:
    # it would also send it with a form that another site submits.
    if kind.lower() == "basic" and request.method in _SAFE_METHODS:
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _refuse_other_sites(request: Request) -> None:
    origin = request.headers.get("origin")
    if origin is None or request.method in _SAFE_METHODS:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise Problem(403, "cross-origin", f"a page of {origin!r} may not change anything here")
