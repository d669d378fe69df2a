"""Fixtures of the hooks' tests: one thread, small models, and a small real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.monitor.stats import TensorStats
from fp8_safeguard.monitor.wire import Sample, columns_for, parse_sample

ENVIRONMENT = (
    "FP8_SAFEGUARD_SERVER", "FP8_SAFEGUARD_TOKEN", "FP8_SAFEGUARD_RUN", "FP8_SAFEGUARD_SPOOL_DIR",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_trace_left() -> Iterator[None]:
    """Every test gives the process back as it was: no global optimizer hook, no thread."""
    from torch.optim import optimizer

    before = dict(optimizer._global_optimizer_post_hooks)
    yield
    left = [hook for key, hook in optimizer._global_optimizer_post_hooks.items() if key not in before]
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


@pytest.fixture
def read() -> Callable[[Guard], Reading]:
    def last(guard: Guard) -> Reading:
        document = guard.last_sample()
        assert document is not None
        return Reading(document)

    return last


class Endpoint:
    """A loopback server that keeps what it was sent and answers as the test wants."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] = lambda body: (
            200,
            accepted(body),
        )
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = msgpack.unpackb(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(body)
                endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
                endpoint.paths.append(self.path)
                status, answer = endpoint.answer(body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
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
