"""Where answers come from: a server, or a database read directly."""

import difflib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from fp8_safeguard.cli.api import DEFAULT_SERVER, Api, ApiError, in_path
from fp8_safeguard.cli.output import Item, fail, printable, say

if TYPE_CHECKING:
    from fp8_safeguard.monitor.observation import StepObservation

USUAL_FILES = ("fp8-safeguard.db", "demo-data/demo.db")
"""What `serve` and `demo` write into the folder that they are started in."""
_MOST_NAMES = 5
_CONNECT_SECONDS = 2.0


class Source(Protocol):
    """What can be asked about runs. Every method raises ApiError."""

    name: str
    """The server's address or the database's URL, for messages."""

    def runs(self) -> list[Item]: ...

    def run(self, run: str) -> Item: ...

    def plan(self, run: str) -> Item: ...

    def layers(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]: ...

    def alerts(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]: ...

    def decisions(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]: ...

    def audit(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]: ...

    def readiness(self, run: str, *, from_step: int | None = None, to_step: int | None = None) -> Item: ...

    def compare(self, a: str, b: str) -> Item: ...

    def heatmap(self, run: str, **wanted: str | int | None) -> Item: ...

    def attempts(self, run: str) -> list[Item]: ...

    def pins(self, run: str) -> list[Item]: ...

    def baselines(self, run: str) -> list[Item]: ...

    def baseline(self, run: str, number: int) -> Item: ...

    def observations(
        self, run: str, from_step: int | None = None, to_step: int | None = None
    ) -> Iterator["StepObservation"]: ...

    @contextmanager
    def export(self, run: str, form: str) -> Iterator[Iterator[bytes]]: ...


class ServerSource:
    """A server's answers."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.name = api.server

    def runs(self) -> list[Item]:
        """All runs, the newest first."""
        return self._api.items("/runs")

    def run(self, run: str) -> Item:
        """One run with its verdict."""
        detail: Item = self._api.get(f"/runs/{in_path(run)}")
        return detail

    def plan(self, run: str) -> Item:
        """The plan in force."""
        plan: Item = self._api.get(f"/runs/{in_path(run)}/plan")
        return plan

    def layers(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Layers; filters are state, order_by and q."""
        return self._api.items(f"/runs/{in_path(run)}/layers", limit=limit, **filters)

    def alerts(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Alerts, the newest first; the filter is state."""
        return self._api.items(f"/runs/{in_path(run)}/alerts", limit=limit, **filters)

    def decisions(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Decisions, the newest first; filters are state and layer."""
        return self._api.items(f"/runs/{in_path(run)}/decisions", limit=limit, **filters)

    def audit(self, run: str, *, limit: int | None = None, **filters: str | None) -> list[Item]:
        """Who did what, the newest first; the filter is decision."""
        return self._api.items(f"/runs/{in_path(run)}/audit", limit=limit, **filters)

    def readiness(self, run: str, *, from_step: int | None = None, to_step: int | None = None) -> Item:
        """Whether each GEMM could run in FP8, over a range of steps."""
        found: Item = self._api.get(f"/runs/{in_path(run)}/readiness", from_step=from_step, to_step=to_step)
        return found

    def compare(self, a: str, b: str) -> Item:
        """The losses of two runs at the steps that both have."""
        found: Item = self._api.get("/compare", a=a, b=b)
        return found

    def heatmap(self, run: str, **wanted: str | int | None) -> Item:
        """One metric of all layers over steps; wanted are metric, from_step, to_step and max_cols."""
        found: Item = self._api.get(f"/runs/{in_path(run)}/heatmap", **wanted)
        return found

    def attempts(self, run: str) -> list[Item]:
        """The tree of attempts."""
        return self._api.items(f"/runs/{in_path(run)}/attempts")

    def pins(self, run: str) -> list[Item]:
        """What people have fixed."""
        return self._api.items(f"/runs/{in_path(run)}/pins")

    def baselines(self, run: str) -> list[Item]:
        """Baselines, the newest first."""
        return self._api.items(f"/runs/{in_path(run)}/baselines")

    def baseline(self, run: str, number: int) -> Item:
        """One baseline with its values."""
        found: Item = self._api.get(f"/runs/{in_path(run)}/baselines/{number}")
        return found

    def observations(
        self, run: str, from_step: int | None = None, to_step: int | None = None
    ) -> Iterator["StepObservation"]:
        """What the policy sees of each step of the live branch, in order."""
        from fp8_safeguard.cli.export import lines
        from fp8_safeguard.cli.observed import observed

        span = {"from_step": from_step, "to_step": to_step}
        wanted = {name: value for name, value in span.items() if value is not None}
        with self._api.stream(f"/runs/{in_path(run)}/samples", **wanted) as pieces:
            yield from observed(lines(pieces))

    @contextmanager
    def export(self, run: str, form: str) -> Iterator[Iterator[bytes]]:
        """Everything stored of a run, in pieces."""
        with self._api.stream(f"/runs/{in_path(run)}/export", format=form) as pieces:
            yield pieces


@contextmanager
def source(server: str | None, database_url: str | None, token: str | None) -> Iterator[Source]:
    """The source that is named; every ApiError in the block becomes one line on stderr and an exit code.

    The first of these that is given: --server or --database-url; FP8_SAFEGUARD_SERVER; FP8_SAFEGUARD_DATABASE_URL.
    Otherwise the default address, and where nobody answers there, the database of this folder.
    """
    try:
        with _opened(server, database_url, token) as chosen:
            yield chosen
    except ApiError as error:
        fail(str(error), error.exit_code)


@contextmanager
def api(server: str | None, token: str | None) -> Iterator[Api]:
    """The server that is named, or the default one, for commands that change something."""
    try:
        with Api(server or os.environ.get("FP8_SAFEGUARD_SERVER"), token) as opened:
            yield opened
    except ApiError as error:
        fail(str(error), error.exit_code)


def chosen_run(asked: Source, run: str | None) -> str:
    """The run that was named, or else the one that reported last; of several the newest."""
    if run is not None:
        return run
    runs = asked.runs()
    if not runs:
        raise ApiError(f"{asked.name} has no run yet. Attach a trainer to it, or try `fp8-safeguard demo`.")
    # The newest comes first in the list, and max keeps the first of equals.
    latest = str(max(runs, key=lambda item: item.get("last_report") or "")["id"])
    if len(runs) > 1:
        say(f"{latest} reported last; `fp8-safeguard runs` lists all {len(runs)}, name one to see it.")
    return latest


def about(asked: Source, run: str, error: ApiError) -> ApiError:
    """The error, with close matches where there is no such run."""
    if error.kind != "run-not-found":
        return error
    names = [str(item["id"]) for item in asked.runs()]
    close = [name for name in names if run and run.lower() in name.lower()]
    close += [name for name in difflib.get_close_matches(run, names, n=_MOST_NAMES) if name not in close]
    if close:
        hint = f"Did you mean {' or '.join(close[:_MOST_NAMES])}?"
    else:
        hint = "`fp8-safeguard runs` lists the runs." if names else "It has no run yet."
    return ApiError(f"{asked.name} has no run {printable(run)!r} (404). {hint}", status=404, kind=error.kind)


@contextmanager
def _opened(server: str | None, database_url: str | None, token: str | None) -> Iterator[Source]:
    if server and database_url:
        raise ApiError("Give --server or --database-url, not both: they are two sources.", status=400)
    if not server and not database_url:
        server = os.environ.get("FP8_SAFEGUARD_SERVER")
        database_url = None if server else os.environ.get("FP8_SAFEGUARD_DATABASE_URL")
    if not server and not database_url:
        database_url = None if _default_answers() else _database_here()
    if database_url:
        from fp8_safeguard.cli.local import database_source

        with database_source(database_url) as local:
            yield local
    else:
        with Api(server, token) as opened:
            yield ServerSource(opened)


def _default_answers() -> bool:
    """True when anybody listens at the default address."""
    parts = urlsplit(DEFAULT_SERVER)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _database_here() -> str | None:
    """The one database of this folder, which is said; None where there is none."""
    here = [name for name in USUAL_FILES if Path(name).is_file()]
    if len(here) > 1:
        choices = " or ".join(f"--database-url sqlite:///{name}" for name in here)
        raise ApiError(
            f"No server answers at {DEFAULT_SERVER}, and this folder has {len(here)} databases: give {choices}."
        )
    if not here:
        return None
    say(f"No server answers at {DEFAULT_SERVER}; reading {here[0]} of this folder.")
    return f"sqlite:///{here[0]}"
