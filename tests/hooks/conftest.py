"""Fixtures of the hooks' tests: one thread, small models, and a small real HTTP server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.hooks.clock import OptimizerHook
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.wire import Sample, columns_for, parse_sample

ENVIRONMENT = (
    "FP8_SAFEGUARD_SERVER", "FP8_SAFEGUARD_TOKEN", "FP8_SAFEGUARD_RUN", "FP8_SAFEGUARD_SPOOL_DIR",
    "FP8_SAFEGUARD_SPOOL_MAX_BYTES",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No option from outside, and a state folder of the test's own: nothing is written to the user's."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def spool_dir(tmp_path: Path) -> Path:
    """Where a guard with a server keeps its samples."""
    return tmp_path / "state" / "fp8-safeguard" / "spool"


@pytest.fixture(autouse=True)
def no_trace_left() -> Iterator[None]:
    """Every test gives the process back as it was: no global optimizer hook, no thread."""
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_post_hooks)
    yield
    hooks = {key: hook for key, hook in optimizer._global_optimizer_post_hooks.items() if key not in before}
    left = [hook for hook in hooks.values() if isinstance(hook, OptimizerHook)]
    optimizer._global_optimizer_post_hooks.clear()
    optimizer._global_optimizer_post_hooks.update(before)
    assert all(hook._on_step() is None for hook in left), "a guard was not detached"


@pytest.fixture
def watch() -> Iterator[Callable[..., Guard]]:
    """attach(), and detach at the end of the test; every step by default."""
    guards: list[Guard] = []

    def start(model: nn.Module, **options: Any) -> Guard:
        guards.append(attach(model, **{"every": 1, **options}))
        return guards[-1]

    yield start
    for guard in guards:
        guard.detach(timeout=0.2)


class Reading:
    """The last sample, as the server would read it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.sample: Sample = parse_sample(json.loads(json.dumps(document)))
        self.stats: dict[str, TensorStats] = {
            slot.label: columns_for(self.sample, i) for i, slot in enumerate(self.sample.slots)
        }

    def __getitem__(self, label: str) -> TensorStats:
        return self.stats[label]

    def parts(self, layer: str) -> set[str]:
        """What was reported about a layer: `x row`, `dgrad`, ..."""
        return {s.gemm or f"{s.operand} {s.layout}" for s in self.sample.slots if s.layer == layer}


@pytest.fixture(scope="session")
def read() -> Callable[[Guard], Reading]:
    def last(guard: Guard) -> Reading:
        document = guard.last_sample()
        assert document is not None
        return Reading(document)

    return last


class Endpoint:
    """A loopback server that keeps what it was sent and answers as the test wants."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []
        self.end_status = 200
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: (200, accepted(body))
        """Status and document (or text, sent as HTML) of an answer."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path.endswith(":end"):
                    endpoint.ended.append(json.loads(content))
                    self.reply(endpoint.end_status, {"ended": True})
                    return
                body = msgpack.unpackb(content)
                endpoint.requests.append(body)
                endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
                endpoint.paths.append(self.path)
                self.reply(*endpoint.answer(body))

            def reply(
                self, status: int, answer: Any, headers: Mapping[str, str] = MappingProxyType({})
            ) -> None:
                text = isinstance(answer, str)
                content = answer.encode() if text else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/html" if text else "application/json")
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Every sample in the order of arrival, batches opened."""
        return [sample for body in self.requests for sample in body.get("samples", [body])]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def accepted(body: dict[str, Any], **reply: Any) -> dict[str, Any]:
    def one(sample: dict[str, Any]) -> dict[str, Any]:
        fixed = {"accepted": True, "inserted": 1, "duplicates": 0, "decisions": [], "alerts": []}
        return {**fixed, "plan_version": 0, "plan": None, **reply}

    return {"results": [one(s) for s in body["samples"]]} if "samples" in body else one(body)


@pytest.fixture
def accept() -> Callable[..., dict[str, Any]]:
    """The body of a good reply, with fields replaced."""
    return accepted


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    yield server
    server.stop()


WARM_PROCESS = """
import json, logging, os, signal, sys, time
import httpx2, msgpack, torch
from torch import nn
from fp8_safeguard.hooks import attach, farewell
torch.set_num_threads(1)
logging.basicConfig(format="%(message)s")
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def steps(number):
    for _ in range(number):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def on_disk(guard):
    while guard._session.client._inbox or guard._session.client._busy:
        time.sleep(0.01)
with attach(model, every=1, recompute=1):
    steps(2)
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
else:
    os._exit(0)
for stream, path in ((1, job["out"]), (2, job["err"])):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
os.environ.update(job["environment"])
exec(job["code"])
"""


class TrainingProcess:
    """A process that trains a small model under a guard; it was forked from one that had imported everything."""

    def __init__(self, warm: subprocess.Popen[str], code: str, folder: Path) -> None:
        self._warm, self._out, self._err = warm, folder / "out", folder / "err"
        environment = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
        paths = {"out": str(self._out), "err": str(self._err)}
        self.pid = self._ask({"code": code, "environment": environment, **paths})
        self.returncode: int | None = None

    def _ask(self, job: dict[str, Any]) -> int:
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(job) + "\n")
        self._warm.stdin.flush()
        return int(self._warm.stdout.readline())

    def until(self, word: str = "ready", seconds: float = 60.0) -> None:
        """Wait until it has written that word."""
        end = time.monotonic() + seconds
        while not self._out.exists() or word not in self._out.read_text():
            assert time.monotonic() < end, self._err.read_text()
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> str:
        """Wait for its end; what it wrote to standard error."""
        if self.returncode is None:
            self.returncode = self._ask({"wait": self.pid})
        return self._err.read_text()


@pytest.fixture(scope="session")
def warm_process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WARM_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.communicate(timeout=60)


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., TrainingProcess]]:
    """Start a training process: `head` runs before its guard is made, `tail` after it."""
    started: list[TrainingProcess] = []

    def start(tail: str, url: str, *, head: str = "", **options: Any) -> TrainingProcess:
        given = {"server": url, "run": "exit", "every": 1, **options}
        code = f"{head}\nguard = attach(model, **{given!r})\n{tail}"
        folder = tmp_path / f"process-{len(started)}"
        folder.mkdir()
        started.append(TrainingProcess(request.getfixturevalue("warm_process"), code, folder))
        return started[-1]

    yield start
    for process in started:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            process.end()


@pytest.fixture
def train() -> Callable[..., list[torch.Tensor]]:
    """Run steps of a tiny regression; the inputs of each step."""

    def steps(
        model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 1, width: int = 8
    ) -> list[torch.Tensor]:
        inputs = []
        for _ in range(number):
            inputs.append(torch.randn(4, width))
            model(inputs[-1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return inputs

    return steps


@pytest.fixture
def both(watch: Callable[..., Guard]) -> Callable[..., Guard]:
    """Train the same model without and with a guard: parameters, gradients and random state must be bit-equal."""
    alive = []

    def run(build: Callable[[], nn.Module], drive: Callable[[nn.Module], object], **options: Any) -> Guard:
        ends: list[list[torch.Tensor | None]] = []
        for observed in (False, True):
            torch.manual_seed(0)
            alive.append(model := build())
            guard = watch(model, **options) if observed else None
            torch.manual_seed(1)
            drive(model)
            gradients = [p.grad for p in model.parameters()]
            ends.append([*model.state_dict().values(), *gradients, torch.get_rng_state()])
        assert guard is not None
        for plain, monitored in zip(*ends, strict=True):
            assert (plain is None) == (monitored is None)
            assert plain is None or torch.equal(plain, monitored)
        return guard

    return run
