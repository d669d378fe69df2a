"""Typed settings of the service, read from FP8_SAFEGUARD_* variables."""

import ipaddress
from collections.abc import Callable
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

Scope = Literal["ingest", "read", "control", "admin"]
SCOPES: tuple[Scope, ...] = ("ingest", "read", "control", "admin")


class InsecureBindError(ValueError):
    """The service would listen beyond this machine without asking for a token."""


class Settings(BaseSettings):
    """Everything that may be configured; each field's variable is FP8_SAFEGUARD_<NAME>."""

    model_config = SettingsConfigDict(env_prefix="FP8_SAFEGUARD_", extra="ignore", frozen=True)

    database_url: str = "sqlite:///fp8-safeguard.db"
    """SQLAlchemy URL of the store."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs a token."""
    port: int = Field(default=8787, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    server: str | None = None
    """Address of a running service, for the command line's reads."""
    token: SecretStr | None = None
    """One token with every scope; the client sends the same variable."""
    tokens: dict[str, list[Scope]] = Field(default_factory=dict)
    """Further tokens with their scopes, as JSON: {"secret": ["ingest", "read"]}."""
    policy_file: str | None = None
    """TOML file with what the policies of all runs have in common; read once, at the start."""
    spool_dir: str | None = None
    """Where a client keeps samples that the service has not acknowledged."""
    max_body_bytes: int = Field(default=64 * 2**20, gt=0)
    """Largest request body, counted after decompression."""
    max_samples_per_request: int = Field(default=256, gt=0)
    """Largest number of samples in one request."""
    busy_timeout_seconds: float = Field(default=30.0, gt=0)
    """How long a writer waits for another process before answering 503."""
    run_stale_seconds: float = Field(default=300.0, gt=0)
    """A run that sent nothing for this long is called stale."""
    metrics_max_series: int = Field(default=2000, gt=0)
    """Most layer series of one run in /metrics; the worst layers are kept."""
    sse_queue_events: int = Field(default=256, gt=0)
    """Events that a slow reader of the live stream may lag behind."""

    def token_scopes(self) -> dict[str, frozenset[str]]:
        """Every configured secret with the scopes it grants."""
        granted: dict[str, frozenset[str]] = {
            secret: frozenset(scopes) for secret, scopes in self.tokens.items()
        }
        if self.token is not None and self.token.get_secret_value():
            granted[self.token.get_secret_value()] = frozenset(SCOPES)
        return granted


def is_loopback(host: str) -> bool:
    """True where only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(settings: Settings, has_stored_token: Callable[[], bool] = lambda: False) -> None:
    """Refuse to listen on a public address when nothing asks for a token.

    has_stored_token: whether the store holds a token that opens anything; asked only where it matters.
    Raises InsecureBindError.
    """
    address = settings.host
    if settings.token_scopes() or is_loopback(address) or has_stored_token():
        return
    raise InsecureBindError(
        f"refusing to listen on {address!r} without a token: anyone who reaches it could change a run. "
        "Make one with `fp8-safeguard token create`, set FP8_SAFEGUARD_TOKEN (or FP8_SAFEGUARD_TOKENS), "
        "or listen on 127.0.0.1."
    )
