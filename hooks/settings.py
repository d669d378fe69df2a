"""Options of attach, checked; what is not given comes from the environment."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from fp8_safeguard.hooks.errors import OptionError
from fp8_safeguard.monitor.thresholds import get_preset

MODES = ("observe", "advise", "enforce")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# torchrun without --rdzv-id calls every job "none": no name at all.
_NO_NAME = ("", "none")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one guard was asked to do."""

    server: str | None
    """Base URL of the server, without a trailing slash; None sends nothing."""
    token: str | None
    """Bearer token for the server."""
    run: str
    """Id of the run."""
    attempt: str
    """Id of this attempt of the run."""
    group: str
    """Id of the ranks that report together."""
    groups: int
    """How many groups the run has."""
    every: int
    """Steps with step % every == 0 are sampled."""
    recompute: int
    """Weight-gradient GEMMs recomputed in each sample, in rotation."""
    overhead_budget: float | None
    """Largest fraction of the training time that sampling may take; None is no limit."""
    mode: str
    """`observe`, `advise` or `enforce`."""
    thresholds: str
    """Name of the threshold preset."""
    spool_dir: Path | None
    """Folder where samples go when no server is given."""


def resolve(
    *,
    server: str | None,
    token: str | None,
    run: str | None,
    attempt: str | None,
    group: str,
    groups: int,
    every: int,
    recompute: int,
    overhead_budget: float | None,
    mode: str,
    thresholds: str,
    spool_dir: str | os.PathLike[str] | None,
) -> Options:
    """Fill in defaults from the environment and refuse what cannot work."""
    environment = os.environ
    server = server or environment.get("FP8_SAFEGUARD_SERVER") or None
    folder = spool_dir or environment.get("FP8_SAFEGUARD_SPOOL_DIR") or None
    get_preset(thresholds)
    return Options(
        server=_server_url(server),
        token=token or environment.get("FP8_SAFEGUARD_TOKEN") or None,
        run=_identifier("run", run or _default_run()),
        attempt=_text("attempt", attempt if attempt is not None else _default_attempt()),
        group=_text("group", group),
        groups=_at_least("groups", groups, 1),
        every=_at_least("every", every, 1),
        recompute=_at_least("recompute", recompute, 0),
        overhead_budget=_fraction(overhead_budget),
        mode=_one_of("mode", mode, MODES),
        thresholds=thresholds,
        spool_dir=Path(folder) if folder else None,
    )


def _default_run() -> str:
    """The launcher's name of this job, else a readable unique one."""
    for variable in ("FP8_SAFEGUARD_RUN", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        name = os.environ.get(variable, "")
        if name.lower() not in _NO_NAME:
            return name
    return f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def _default_attempt() -> str:
    """The launcher's count of restarts: each restart is an attempt of its own."""
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        count = os.environ.get(variable, "")
        if count:
            return count
    return "0"


def _server_url(server: str | None) -> str | None:
    if server is None:
        return None
    if not server.startswith(("http://", "https://")):
        raise OptionError(f"server is {server!r}: give its base URL, for example http://127.0.0.1:8787")
    return server.rstrip("/")


def _identifier(name: str, value: str) -> str:
    if not _RUN_ID.fullmatch(value):
        raise OptionError(
            f"{name} is {value!r}: a letter or digit, then up to 127 letters, digits, '.', '_' or '-'"
        )
    return value


def _text(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{name} is {value!r}: give a text of at least one character")
    return value


def _at_least(name: str, value: int, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise OptionError(f"{name} is {value!r}: give a whole number of at least {lowest}")
    return value


def _fraction(value: float | None) -> float | None:
    if value is not None and not 0.0 < value <= 1.0:
        raise OptionError(f"overhead_budget is {value!r}: give a fraction above 0 and up to 1, or None")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}: allowed are {', '.join(allowed)}")
    return value
