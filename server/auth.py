"""Bearer tokens with scopes, browsers' sessions, and protection from other sites."""

import base64
import binascii
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fastapi import BackgroundTasks, Request

from fp8_safeguard.server.context import Context, context_of
from fp8_safeguard.server.problems import Problem
from fp8_safeguard.server.settings import SCOPES, Scope
from fp8_safeguard.server.tokens import TokenInfo, find_token, has_tokens, needs_note, note_use

SESSION_COOKIE = "fp8_safeguard_session"
"""Holds the token that a person gave to the login page, as base64: scripts cannot read it, other sites cannot send it."""

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_REALM = 'realm="fp8-safeguard"'
CHALLENGE = f"Bearer {_REALM}"


@dataclass(frozen=True)
class Caller:
    """Who sent a request, as far as its token says."""

    scopes: frozenset[str]
    name: str | None = None
    """Name of a token from the store; None for one of the settings, or where none is asked for."""


def require(scope: Scope) -> Callable[[Request, BackgroundTasks], None]:
    """A dependency that lets a request pass only with the scope (admin has all)."""

    def check(request: Request, background: BackgroundTasks) -> None:
        refuse_other_sites(request)
        caller, info = _recognise(request)
        request.state.caller = caller
        if info is not None:
            context = context_of(request)
            now = context.clock()
            if needs_note(info, now):
                # After the answer: a note must not wait for its turn to write before it.
                background.add_task(note_use, context.store, info.name, now)
        if scope not in caller.scopes and "admin" not in caller.scopes:
            raise _lacks(scope, caller)

    return check


def caller_of(request: Request) -> Caller:
    """Who sent the request. Raises Problem 401, or 303 to the login page for a browser that opens a page."""
    known = getattr(request.state, "caller", None)
    if isinstance(known, Caller):
        return known
    return _recognise(request)[0]


def scopes_of(request: Request) -> frozenset[str]:
    """The scopes of the request's token; all of them where no token was ever configured. Raises as caller_of."""
    return caller_of(request).scopes


def find_caller(context: Context, secret: str) -> tuple[Caller, TokenInfo | None] | None:
    """Whom a secret belongs to; None for one that opens nothing."""
    # Every token of the settings is compared, in constant time, so the time tells nothing about any of them.
    sent = secret.encode("utf-8", errors="surrogatepass")
    matches = [
        scopes
        for known, scopes in context.settings.token_scopes().items()
        if secrets.compare_digest(known.encode("utf-8", errors="surrogatepass"), sent)
    ]
    if not secret:
        return None
    if matches:
        return Caller(matches[0]), None
    with context.store.read() as conn:
        info = find_token(conn, secret)
    return None if info is None else (Caller(info.scopes, info.name), info)


def asks_for_tokens(context: Context) -> bool:
    """Whether anybody has configured a token, in the settings or the store."""
    if context.settings.token_scopes():
        return True
    with context.store.read() as conn:
        return has_tokens(conn)


def _recognise(request: Request) -> tuple[Caller, TokenInfo | None]:
    context = context_of(request)
    secret, by_cookie = _sent_secret(request)
    found = find_caller(context, secret)
    if found is None and not asks_for_tokens(context):
        return Caller(frozenset(SCOPES)), None
    if found is None:
        raise _unknown(request, sent=bool(secret))
    if by_cookie and request.method not in _SAFE_METHODS and "origin" not in request.headers:
        # A browser says where a change comes from; what does not say it is no page of ours.
        raise Problem(
            403, "cross-origin", "a change made with a session names its Origin; send a bearer token"
        )
    return found


def _sent_secret(request: Request) -> tuple[str, bool]:
    """The token that came with a request, and whether a cookie brought it."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return _in_utf8(value.strip()), False
    # A program may send a token as a password, but only to read: a browser would also send it
    # with a form that another site submits.
    if kind.lower() == "basic":
        return (_decoded(value).partition(":")[2] if request.method in _SAFE_METHODS else ""), False
    return _decoded(request.cookies.get(SESSION_COOKIE, "")), True


def session_value(secret: str) -> str:
    """A token as a cookie can hold it, whatever its characters."""
    return base64.b64encode(secret.encode("utf-8", errors="surrogatepass")).decode("ascii")


def _in_utf8(value: str) -> str:
    """A header that its sender wrote in UTF-8 and the server read as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _decoded(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _unknown(request: Request, *, sent: bool) -> Problem:
    wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    if wants_page:
        place = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {"Location": f"/login?next={quote(place, safe='')}", "Cache-Control": "no-store"}
        return Problem(303, "login-needed", "log in with a token first", headers=headers)
    bearer = f'Bearer {_REALM}, error="invalid_token"' if sent else CHALLENGE
    # A script of a page that met "Basic" would make the browser ask for a password.
    challenge = bearer if "sec-fetch-mode" in request.headers else f"{bearer}, Basic {_REALM}"
    return Problem(
        401,
        "unauthorized",
        "this token is unknown, revoked or expired; send a known one as `Authorization: Bearer <token>`"
        if sent
        else "send a known token as `Authorization: Bearer <token>`",
        headers={"WWW-Authenticate": challenge},
    )


def _lacks(scope: str, caller: Caller) -> Problem:
    has = ", ".join(sorted(caller.scopes)) or "none"
    challenge = f'Bearer {_REALM}, error="insufficient_scope", scope="{scope}"'
    detail = f"this token lacks the scope {scope!r}; it has {has}"
    return Problem(403, "forbidden", detail, headers={"WWW-Authenticate": challenge})


def refuse_other_sites(request: Request) -> None:
    """Refuse a change that a page of another site sends. Raises Problem 403."""
    origin = request.headers.get("origin")
    if origin is None or request.method in _SAFE_METHODS:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise Problem(403, "cross-origin", f"a page of {origin!r} may not change anything here")
