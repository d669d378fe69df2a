"""Access tokens in the store: made, listed, revoked, recognised."""

import hashlib
import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, inspect, select
from sqlalchemy.exc import OperationalError

from fp8_safeguard.server.answers import strict_dumps
from fp8_safeguard.server.settings import SCOPES, Settings
from fp8_safeguard.server.store import Store, StoreBusyError, database_url_of, freshness_of, open_store
from fp8_safeguard.server.tables import tokens

SECRET_PREFIX = "fp8s_"
"""Tells people, and programs that look for leaked secrets, what it is."""
_SECRET_BYTES = 32
_LONGEST_NAME = 200
LAST_USED_SECONDS = 60.0
"""How exact last_used_at is: a token in constant use is not written at every request."""


class TokenNameError(ValueError):
    """A name that a token cannot have, or that another has."""


class TokenScopeError(ValueError):
    """Scopes that are none, or no scopes at all."""


class UnknownTokenError(ValueError):
    """There is no token of that name."""


@dataclass(frozen=True, kw_only=True)
class TokenInfo:
    """What is known of a token; its secret is not. Times in seconds since 1970."""

    name: str
    scopes: frozenset[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None

    def active_at(self, now: float) -> bool:
        """Whether it opens anything at that time."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > now)


def create_token(
    store: Store, *, name: str, scopes: Collection[str], expires_at: float | None = None
) -> tuple[TokenInfo, str]:
    """A new token and its secret, which is shown here and never again.

    Raises TokenNameError and TokenScopeError.
    """
    _check_name(name)
    granted = _checked_scopes(scopes)
    secret = SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    with store.write() as conn:
        if conn.execute(select(tokens.c.id).where(tokens.c.name == name)).first() is not None:
            raise TokenNameError(
                f"there is a token {name!r} already, or was (names stay in the record); choose another name"
            )
        row = {
            "name": name,
            "digest": _digest(secret),
            "scopes": strict_dumps(granted),
            "created_at": freshness_of(conn)[0],
            "expires_at": expires_at,
        }
        added = conn.execute(tokens.insert().values(row).returning(*tokens.c)).one()
    return _info(added), secret


def list_tokens(store: Store) -> list[TokenInfo]:
    """All tokens by name, those that open nothing any more among them."""
    with store.read() as conn:
        return [_info(row) for row in conn.execute(select(tokens).order_by(tokens.c.name))]


def revoke_token(store: Store, name: str) -> TokenInfo:
    """Make a token worthless at once; one that is revoked stays as it is. Raises UnknownTokenError."""
    with store.write() as conn:
        still = (tokens.c.name == name, tokens.c.revoked_at.is_(None))
        conn.execute(tokens.update().where(*still).values(revoked_at=freshness_of(conn)[0]))
        row = conn.execute(select(tokens).where(tokens.c.name == name)).one_or_none()
    if row is None:
        raise UnknownTokenError(f"there is no token {name!r}; `fp8-safeguard token list` shows all")
    return _info(row)


def find_token(conn: Connection, secret: str) -> TokenInfo | None:
    """The active token with that secret.

    Looked up by the secret's hash, so the time that takes says nothing about any secret.
    """
    row = conn.execute(select(tokens).where(tokens.c.digest == _digest(secret))).one_or_none()
    info = None if row is None else _info(row)
    return info if info is not None and info.active_at(freshness_of(conn)[0]) else None


def has_tokens(conn: Connection) -> bool:
    """Whether a token was ever made: from then on one is asked for, revoked though they may all be."""
    return conn.execute(select(tokens.c.id).limit(1)).first() is not None


def stored_token(settings: Settings, clock: Callable[[], float]) -> bool:
    """Whether the store of these settings holds a token that opens anything; looking makes no store.

    Raises StoreError for a database that cannot be used.
    """
    url = database_url_of(settings.database_url)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        return False
    store = open_store(settings, clock)
    try:
        with store.opening(), store.read() as conn:
            if not inspect(conn).has_table(tokens.name):
                return False
            now = freshness_of(conn)[0]
            return any(_info(row).active_at(now) for row in conn.execute(select(tokens)))
    finally:
        store.close()


def needs_note(info: TokenInfo, now: float) -> bool:
    """Whether its last use was noted too long ago."""
    return info.last_used_at is None or now - info.last_used_at >= LAST_USED_SECONDS


def note_use(store: Store, name: str, now: float) -> None:
    """Note that a token was used. Where others are writing for too long the note is left to the next use."""
    try:
        with store.write() as conn:
            old = tokens.c.last_used_at.is_(None) | (tokens.c.last_used_at < now)
            conn.execute(tokens.update().where(tokens.c.name == name, old).values(last_used_at=now))
    except (OperationalError, StoreBusyError):
        return


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).hexdigest()


def _info(row: Row[Any]) -> TokenInfo:
    return TokenInfo(
        name=row.name,
        scopes=frozenset(json.loads(row.scopes)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.strip()) <= _LONGEST_NAME:
        raise TokenNameError(
            f"a token's name has 1 to {_LONGEST_NAME} printable characters, not {str(name)[:_LONGEST_NAME]!r}"
        )


def _checked_scopes(scopes: Collection[str]) -> list[str]:
    wrong = sorted(set(scopes) - set(SCOPES))
    if wrong or not scopes or isinstance(scopes, str):
        raise TokenScopeError(f"scopes are one or more of {', '.join(SCOPES)}, not {scopes!r}")
    return [scope for scope in SCOPES if scope in scopes]
