"""Fixtures of the command line's tests: a real server, and runs that came over the wire."""

import json
import math
import os
import pty
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from fp8_safeguard.cli.main import app
from fp8_safeguard.server.serve import running_server
from fp8_safeguard.server.settings import Settings

COUNTS = {"count": 65536, "saturated": 0, "nan": 0, "inf": 0, "rows": 64, "rows_flushed": 0}
# -31.8 dB: the noise floor of E4M3 blocks.
SUMS = {"amax": 4.5, "sum_sq": 65536.0, "sum_sq_q": 65540.0, "sum_sq_err": 43.3, "sum_4th": 196608.0}
RECOMPUTED_NULL = ("zeros", "underflow", "saturated", "rows", "rows_flushed", "sum_4th", "tile_sqnr_hist")
HISTOGRAM = [0] * 12 + [100, 400, 12, 0]
LAYERS = ("blocks.0.mlp.up", 'blocks.1/a "b"\n\x1b[31m%')


@dataclass(frozen=True)
class Said:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Service:
    """A running server and its database."""

    url: str
    database: Path

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.database}"

    def get(self, path: str, **params: Any) -> Any:
        """The REST interface's own answer."""
        answer = httpx2.get(f"{self.url}/api/v1{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()


def document(step: int, *, sick: bool, mode: str, loss: float = 2.5) -> dict[str, Any]:
    """A sample of two layers; a sick one has a dgrad that FP8 gets wrong, and flushed activations."""
    slots: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for layer in LAYERS:
        flushed = 4000 if sick else 8
        healthy = {**COUNTS, **SUMS, "zeros": flushed, "underflow": flushed, "tile_sqnr_hist": HISTOGRAM}
        slots.append({"index": len(slots), "layer": layer, "operand": "x", "layout": "row"})
        rows.append(healthy)
        error = {"sum_sq_err": 16384.0} if sick else {}
        slots.append({"index": len(slots), "layer": layer, "gemm": "dgrad"})
        rows.append({**healthy, **dict.fromkeys(RECOMPUTED_NULL), **error})
    header = {"schema": 1, "batch_id": f"b{step}", "attempt": {"id": "0"}, "group": "0", "groups": 1}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    values = {"loss": loss, "gradient_norm": 1.0}
    return {**header, "step": step, "mode": mode, "slots": slots, "columns": columns, "run": values}


def send(url: str, run: str, steps: int, **options: Any) -> None:
    """Post the first steps of a run."""
    for step in range(steps):
        answer = httpx2.post(f"{url}/api/v1/runs/{run}/samples", json=document(step, **options))
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="session")
def send_run() -> Callable[..., None]:
    return send


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with a healthy run, and a sick one in mode advise that reported last."""
    database = tmp_path_factory.mktemp("cli") / "store.db"
    with running_server(Settings(database_url=f"sqlite:///{database}")) as url:
        send(url, "healthy-7b", 3, sick=False, mode="observe")
        send(url, "sick-7b", 6, sick=True, mode="advise")
        yield Service(url, database)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the developer's own, and an empty folder to stand in."""
    for name in [name for name in os.environ if name.startswith("FP8_SAFEGUARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli() -> Callable[..., Said]:
    """Runs a command in this process."""

    def run(*arguments: str) -> Said:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Said]:
    """Runs a command as the shell would."""

    def run(*arguments: str, **environment: str) -> Said:
        command = [sys.executable, "-m", "fp8_safeguard.cli.main", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
            cwd=tmp_path,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def at_terminal(tmp_path: Path) -> Callable[..., Said]:
    """Runs a command as a person does, who has typed this for it."""

    def run(typed: str, *arguments: str) -> Said:
        master, slave = pty.openpty()
        os.write(master, typed.encode())
        command = [sys.executable, "-m", "fp8_safeguard.cli.main", *arguments]
        try:
            done = subprocess.run(
                command, stdin=slave, capture_output=True, text=True, timeout=60, cwd=tmp_path
            )
        finally:
            for end in (master, slave):
                os.close(end)
        return Said(done.returncode, done.stdout, done.stderr)

    return run


STEPS = 60
ONSET = 30


def recipe(step: int, seed: int, *, faulty: bool, **header: Any) -> dict[str, Any]:
    """A sample of eight layers. The last one's dy is flushed in health; a faulty run has a wrong dgrad from ONSET on."""
    slots: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for number in range(8):
        layer = f"layers.{number}"
        flushed = 30_000 if number == 7 else 8
        healthy = {**COUNTS, **SUMS, "zeros": flushed, "underflow": flushed, "tile_sqnr_hist": HISTOGRAM}
        slots.append({"index": len(slots), "layer": layer, "operand": "dy", "layout": "row"})
        rows.append(healthy)
        wrong = faulty and number == 3 and step >= ONSET
        slots.append({"index": len(slots), "layer": layer, "gemm": "dgrad"})
        rows.append(
            {**healthy, **dict.fromkeys(RECOMPUTED_NULL), **({"sum_sq_err": 2621.0} if wrong else {})}
        )
    noise = random.Random(f"{seed} {step}").gauss(0.0, 0.004)
    gap = 0.05 if faulty and step >= ONSET else 0.0
    loss = (1.4 + math.exp(-step / 40)) * (1 + noise + gap)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    values = {"loss": loss, "gradient_norm": 1.0, "tokens": 4096}
    named = {"schema": 1, "attempt": {"id": "0"}, "group": "0", "step": step, "slots": slots}
    return {**named, "columns": columns, "run": values, **header}


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A server with a good run, two twins of it, one with a fault that the policy acts on, and an empty other one."""
    database = tmp_path_factory.mktemp("recipes") / "store.db"
    with running_server(Settings(database_url=f"sqlite:///{database}")) as url:
        for run, seed, options in (
            ("good", 1, {"faulty": False}),
            ("good-twin", 2, {"faulty": False}),
            ("good-other", 3, {"faulty": False}),
            ("faulty", 4, {"faulty": True, "mode": "enforce"}),
        ):
            samples = [recipe(step, seed, **options) for step in range(STEPS)]
            answer = httpx2.post(f"{url}/api/v1/runs/{run}/samples", json={"samples": samples}, timeout=60)
            assert all("accepted" in result for result in answer.json()["results"]), answer.text
        late = recipe(5000, 5, faulty=False)
        assert httpx2.post(f"{url}/api/v1/runs/late/samples", json=late).status_code == 200
        yield Service(url, database)
