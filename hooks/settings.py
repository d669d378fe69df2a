"""Options of attach, checked; what is not given comes from the environment."""

from __future__ import annotations

import numbers
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fp8_safeguard.hooks.errors import OptionError
from fp8_safeguard.hooks.once import logger
from fp8_safeguard.hooks.transport import address_of
from fp8_safeguard.hooks.values import whole
from fp8_safeguard.monitor.thresholds import get_preset

MODES = ("observe", "advise", "enforce")
SPOOL_MAX_BYTES = 2**30
"""Most that the samples of one attempt and group take on disk, unless FP8_SAFEGUARD_SPOOL_MAX_BYTES says otherwise."""
RANK_TIMEOUT_SECONDS = 30.0
_LONGEST_SECONDS = 86400.0
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
    """Steps with step % every == 0 are sampled; under a budget only some of them."""
    recompute: int
    """Weight-gradient GEMMs recomputed in each sample, in rotation."""
    overhead_budget: float | None
    """Largest fraction of the training time that sampling may take: it then decides how often and how much is
    measured, see Guard.sampling_plan. None is no limit: every due step, everything in full."""
    mode: str
    """`observe`, `advise` or `enforce`."""
    thresholds: str
    """Name of the threshold preset."""
    shadow: bool
    """Whether an FP8 forward is emulated for layers that run in BF16."""
    spool_dir: Path | None
    """Folder where samples are kept until the server has them, and for good without a server; None keeps no file."""
    rank_timeout: float
    """Longest that a step boundary waits for the other ranks of the group, in seconds; then each reports for itself."""
    spool_max_bytes: int
    """Most that the samples on disk take, packed; beyond it the oldest are dropped and counted. Around them the file
    takes more: up to as much again for samples of a few kilobytes, and a log of some megabytes."""

    @property
    def address(self) -> str:
        """The server as it may stand in a log."""
        return "no server" if self.server is None else address_of(self.server)


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
    shadow: bool,
    rank_timeout: float = RANK_TIMEOUT_SECONDS,
) -> Options:
    """Fill in defaults from the environment and refuse what cannot work."""
    environment = os.environ
    server = _server_url(server or environment.get("FP8_SAFEGUARD_SERVER") or None)
    get_preset(thresholds)
    return Options(
        server=server,
        token=_token(token or environment.get("FP8_SAFEGUARD_TOKEN") or None),
        run=_identifier("run", _default_run() if run is None else run),
        attempt=_text("attempt", attempt if attempt is not None else _default_attempt()),
        group=_text("group", group),
        groups=whole("groups", groups, 1),
        every=whole("every", every, 1),
        recompute=whole("recompute", recompute, 0),
        overhead_budget=_fraction(overhead_budget),
        mode=_one_of("mode", mode, MODES),
        thresholds=thresholds,
        shadow=_switch("shadow", shadow),
        rank_timeout=_seconds("rank_timeout", rank_timeout),
        spool_dir=_spool_folder(spool_dir, with_server=server is not None),
        spool_max_bytes=_spool_limit(environment.get("FP8_SAFEGUARD_SPOOL_MAX_BYTES", "")),
    )


def _spool_folder(given: str | os.PathLike[str] | None, *, with_server: bool) -> Path | None:
    """The folder as given, else the environment's, else the user's state folder where a server is named.

    An empty text turns the disk off.
    """
    if given is not None and not isinstance(given, str | os.PathLike):
        raise OptionError(f"spool_dir is {given!r}: give a folder, or an empty text to keep nothing on disk")
    folder = os.environ.get("FP8_SAFEGUARD_SPOOL_DIR") if given is None else os.fspath(given)
    try:
        if folder is not None:
            return Path(folder).expanduser().absolute() if folder else None
        if not with_server:
            return None
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        # The XDG rule: a relative path there is to be ignored.
        state = state if state.is_absolute() else Path.home() / ".local" / "state"
        return state / "fp8-safeguard" / "spool"
    except RuntimeError as error:
        logger.warning("samples are not kept on disk (%s): set FP8_SAFEGUARD_SPOOL_DIR to a folder", error)
        return None


def _spool_limit(text: str) -> int:
    if not text:
        return SPOOL_MAX_BYTES
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise OptionError(
            f"FP8_SAFEGUARD_SPOOL_MAX_BYTES is {text!r}: give a whole number of bytes, such as {SPOOL_MAX_BYTES}"
        )
    return int(text)


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
    said = f"server is {server!r}: give its base URL, for example http://127.0.0.1:8787"
    if not isinstance(server, str) or not server.startswith(("http://", "https://")):
        raise OptionError(said)
    try:
        parts = urlsplit(server)
        usable = bool(parts.hostname) and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError as error:  # a port that is no number, a bracket that is not closed
        raise OptionError(f"{said} ({error})") from error
    if not usable or any(c.isspace() for c in server):
        raise OptionError(said)
    return server.rstrip("/")


def _token(token: str | None) -> str | None:
    """The token, if a header can carry it. It is a secret: the message must not show it."""
    if token is None or (
        isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token
    ):
        return token
    raise OptionError("the token is not one line of printable ASCII without spaces: copy it again")


def _identifier(name: str, value: str) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise OptionError(
            f"{name} is {value!r}: a letter or digit, then up to 127 letters, digits, '.', '_' or '-'"
        )
    return value


def _text(name: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{name} is {value!r}: give a text of at least one character")
    return value


def _fraction(value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 < value <= 1.0:
        raise OptionError(f"overhead_budget is {value!r}: give a fraction above 0 and up to 1, or None")
    return float(value)


def _seconds(name: str, value: float) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not 0.0 < value <= _LONGEST_SECONDS:
        raise OptionError(f"{name} is {value!r}: give seconds, above 0 and up to {_LONGEST_SECONDS:g}")
    return float(value)


def _switch(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}: give True or False")
    return value


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}: allowed are {', '.join(allowed)}")
    return value
