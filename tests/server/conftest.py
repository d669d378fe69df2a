"""Fixtures of the service's tests: a store in a folder, a client, and sample documents."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

COUNTS = ("count", "zeros", "underflow", "saturated", "nan", "inf", "rows", "rows_flushed")
SUMS = ("amax", "sum_sq", "sum_sq_q", "sum_sq_err", "sum_4th")
HEALTHY: dict[str, Any] = {
    "count": 65536,
    "zeros": 0,
    "underflow": 0,
    "saturated": 0,
    "nan": 0,
    "inf": 0,
    "rows": 64,
    "rows_flushed": 0,
    "amax": 4.5,
    "sum_sq": 65536.0,
    "sum_sq_q": 65540.0,
    # -31.8 dB: the noise floor of E4M3 blocks.
    "sum_sq_err": 43.3,
    "sum_4th": 3.0 * 65536,
    "tile_sqnr_hist": [0] * 12 + [100, 400, 12, 0],
}
RECOMPUTED_NULL = ("zeros", "underflow", "saturated", "rows", "rows_flushed", "sum_4th", "tile_sqnr_hist")
SLOT_KINDS: tuple[dict[str, str], ...] = (
    {"operand": "x", "layout": "row"},
    {"operand": "x", "layout": "col"},
    {"operand": "w", "layout": "tile"},
    {"operand": "dy", "layout": "row"},
    {"operand": "dy", "layout": "col"},
    {"gemm": "fprop"},
    {"gemm": "dgrad"},
    {"gemm": "wgrad"},
)


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Documents:
    """Builds sample documents as a client sends them."""

    def slots(self, layers: int = 2, kinds: tuple[dict[str, str], ...] = SLOT_KINDS) -> list[dict[str, Any]]:
        """All slots of layers `blocks.<n>.mlp` in model order."""
        listed = [{"layer": f"blocks.{n}.mlp", **kind} for n in range(layers) for kind in kinds]
        return [{"index": index, **slot} for index, slot in enumerate(listed)]

    def values(self, slot: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Healthy column values of one slot, with changes."""
        null = dict.fromkeys(RECOMPUTED_NULL) if "gemm" in slot else {}
        return {**HEALTHY, **null, **changes}

    def sample(
        self,
        step: int,
        slots: list[dict[str, Any]] | None = None,
        values: list[dict[str, Any]] | None = None,
        **header: Any,
    ) -> dict[str, Any]:
        """One sample; healthy values unless given."""
        slots = self.slots() if slots is None else slots
        values = [self.values(slot) for slot in slots] if values is None else values
        columns = {name: [row[name] for row in values] for name in HEALTHY}
        document = {"schema": 1, "batch_id": f"b{step}", "attempt": {"id": "0"}, "group": "0", "step": step}
        return {**document, "slots": slots, "columns": columns, **header}


@pytest.fixture(scope="session")
def documents() -> Documents:
    return Documents()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Ill = dict[tuple[str, str], dict[str, Any]]
UNDERFLOW: Ill = {("blocks.0.mlp", "x row"): {"underflow": 700, "zeros": 700}}


class Posts:
    """Posts steps of an observed run of eight layers, and reads its alerts."""

    def __init__(self, client: TestClient, documents: Documents, run: str = "demo") -> None:
        self._client, self._documents = client, documents
        self._url = f"/api/v1/runs/{run}"

    def __call__(
        self,
        step: int,
        ill: Ill | None = None,
        *,
        marks: Ill | None = None,
        worst_expert: int | None = None,
        **header: Any,
    ) -> dict[str, Any]:
        """The reply to a step, healthy but for what `ill` says of the values and `marks` of the slots."""
        slots = self._documents.slots(8)
        if worst_expert is not None:
            slots += [{**slot, "expert": worst_expert} for slot in slots if slot["layer"] == "blocks.0.mlp"]
        named = [(slot["layer"], slot.get("gemm") or f"{slot['operand']} {slot['layout']}") for slot in slots]
        pairs = list(zip(slots, named, strict=True))
        values = [self._documents.values(slot, **(ill or {}).get(name, {})) for slot, name in pairs]
        for slot, name in pairs:
            slot.update((marks or {}).get(name, {}))
        sample = self._documents.sample(step, slots, values, **header)
        answer = self._client.post(f"{self._url}/samples", json=sample)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def breach(self, *steps: int, ill: Ill = UNDERFLOW, **header: Any) -> list[int]:
        """Ids that these steps raised, one list for all."""
        return [alert["id"] for step in steps for alert in self(step, ill, **header)["alerts"]]

    def alerts(self, **filters: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self._client.get(f"{self._url}/alerts", params=filters).json()["items"]
        return listed

    def one(self) -> dict[str, Any]:
        """The only alert there is."""
        (item,) = self.alerts()
        return item

    def active(self) -> dict[tuple[str, str], float]:
        """alerts_active by rule and severity."""
        families = text_string_to_metric_families(self._client.get("/metrics").text)
        return {
            (sample.labels["rule"], sample.labels["severity"]): sample.value
            for family in families
            if family.name == "fp8_safeguard_alerts_active"
            for sample in family.samples
        }


class Postgres:
    """A PostgreSQL cluster of its own, on a socket in its folder."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        # PostgreSQL refuses to run as root; Debian's package made a user for it.
        self._user = "postgres" if os.geteuid() == 0 else None
        self._names = (f"t{number}" for number in itertools.count())

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, user=self._user, cwd="/", capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def start(self) -> None:
        if self._user:
            shutil.chown(self._folder, self._user)
        data = str(self._folder / "data")
        # What SQLite and production do not differ in is not tested here: the disk may lie.
        self._call("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c fsync=off -c max_connections=300 -k {self._folder}"
        log = str(self._folder / "log")
        self._call("pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        self._call("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")

    def fresh(self) -> str:
        """The URL of a new, empty database."""
        name = next(self._names)
        with psycopg.connect(f"host={self._folder} user=postgres dbname=postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A cluster for the whole session; a database for each test comes from `fresh`."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if not found:
        missing = "PostgreSQL is not installed; on Debian: apt-get install postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    folder = Path(tempfile.mkdtemp(prefix="fp8-postgres-"))
    cluster = Postgres(found[-1], folder)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The database of the test: SQLite, unless it is parametrised (indirectly) with others."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path, backend: str) -> Settings:
    if backend == "postgresql":
        return Settings(database_url=request.getfixturevalue("postgres").fresh())
    return Settings(database_url=f"sqlite:///{tmp_path}/store.db")


@pytest.fixture
def make_client(settings: Settings, clock: Clock) -> Iterator[Callable[..., TestClient]]:
    """Makes clients of an in-process service on the test's store; settings may be changed by name."""
    opened: list[TestClient] = []

    def make(**changes: Any) -> TestClient:
        client = TestClient(create_app(settings.model_copy(update=changes), clock=clock))
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()


@pytest.fixture
def post(client: TestClient, documents: Documents) -> Posts:
    return Posts(client, documents)


@pytest.fixture
def live(settings: Settings) -> Iterator[httpx2.Client]:
    """A client of a real server on a loopback port."""
    with running_server(settings) as url, httpx2.Client(base_url=url, timeout=30) as client:
        yield client


class Serving:
    """`fp8-safeguard serve` as a process of its own."""

    def __init__(self, database_url: str, log: Path, **settings: Any) -> None:
        named = {
            "DATABASE_URL": database_url,
            **{name.upper(): str(value) for name, value in settings.items()},
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FP8_SAFEGUARD_")}
        environment = {**kept, **{f"FP8_SAFEGUARD_{name}": value for name, value in named.items()}}
        command = [sys.executable, "-m", "fp8_safeguard.cli.main", "serve", "--port", "0"]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout is not None
        addresses = (re.search(r"http://\S+", line) for line in self.process.stdout)
        found = next((address for address in addresses if address), None)
        if found is None:
            self.end()
            pytest.fail(f"the server did not start: {log.read_text()}")
        self.url = found.group()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture(scope="session")
def server_process() -> type[Serving]:
    """For a server that several tests of a module share."""
    return Serving


@pytest.fixture
def serve(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts processes that serve the test's store; they end with the test."""
    started: list[Serving] = []

    def start(**changes: Any) -> Serving:
        started.append(Serving(settings.database_url, tmp_path / "serve.log", **changes))
        return started[-1]

    yield start
    for serving in started:
        serving.end()
