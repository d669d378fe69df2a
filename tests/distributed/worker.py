"""One rank of the tests of several: trains under a guard in each scenario, and writes what it saw."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import nn

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, QuantizedTensor

Result = dict[str, Any]
TOKENS, FEATURES = 40, 64


class Model(nn.Module):
    """One layer of each kind; fewer rows than are sampled, so that every row of a GEMM is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.plain = Fp8Linear(FEATURES, 32), nn.Linear(32, 32)
        self.experts = Fp8GroupedLinear(3, 32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, min(10, len(x)), min(10, len(x)), len(x)], dtype=torch.int32)
        out: torch.Tensor = self.experts(torch.relu(self.plain(self.ours(x))), offsets)
        return out


def broken(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
    """What a broken multiplier does to a rank: one product is off, its operands are healthy."""
    if (gemm, operand) != ("fprop", "x"):
        return codes
    scale = codes.scale.clone()
    scale[: len(scale) // 2] *= 1.5
    return QuantizedTensor(codes.data, scale, codes.layout, codes.fmt)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, rank: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))


def train(guard: Guard, model: nn.Module, step: int, x: torch.Tensor, *, counted: bool = True) -> None:
    """One step as under DDP: the gradients of all ranks are added up."""
    model.zero_grad()
    (model(x).square().sum() / 100).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    if counted:
        guard.step(step)


class PlanServer:
    """Accepts samples, and answers that of a step with the plan which the test has put down for it, or as `answer` says."""

    def __init__(
        self, plans: dict[int, Any], answer: Callable[[Result], Result] | None = None, port: int = 0
    ) -> None:
        self.samples: list[Result] = []
        answered = answer or (lambda sample: {"plan": plans.get(sample["step"])})
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                body = {} if self.path.endswith(":end") else msgpack.unpackb(content)
                listed = body.get("samples", [body] if body else [])
                server.samples += listed
                fixed = {"accepted": True, "inserted": 1, "duplicates": 0, "decisions": [], "alerts": []}
                each = [{**fixed, "plan_version": 0, **answered(s)} for s in listed]
                answer = json.dumps(each[0] if "samples" not in body and each else {"results": each}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def answering(rank: int, plans: dict[int, Any]) -> Iterator[tuple[str, list[Result]]]:
    """A server in the process of rank 0: its address and what it gets; the others have nobody to send to."""
    if rank:
        yield NOBODY, []
        return
    server = PlanServer(plans)
    yield server.url, server.samples
    server.stop()


def fallback(version: int, layer: str = "ours") -> Result:
    entry = {
        "layer": layer, "target": {"gemm": "fprop"}, "action": "bf16_fallback", "value": None,
        "decision_id": f"d{version}", "not_before_step": 0, "expires_step": None,
    }  # fmt: skip
    return {"version": version, "entries": [entry]}


NOBODY = "http://127.0.0.1:9"
"""Address of the server on a rank that must not send anything."""


def guard_on(model: nn.Module, server: str | None = None, **options: Any) -> Guard:
    chosen = {"every": 1, "recompute": 3, "run": "ranks", "rank_timeout": 60.0, "spool_dir": "", **options}
    return attach(model, server=server, **chosen)


def merged(rank: int, size: int) -> Result:
    """Six steps; the last sample as both have it."""
    model = make_model()
    with guard_on(model) as guard:
        for step in range(6):
            train(guard, model, step, batch(step, rank))
        assert guard.flush(60)
        return {"sample": guard.last_sample(), "collectives": ranks_of(guard).collectives}


def ranks_of(guard: Guard) -> Any:
    return guard._session.client


def empty_shard(rank: int, size: int) -> Result:
    """B23: rank 0 reports, every third step is sampled, rank 1 has no tokens."""
    begun = time.monotonic()
    model = make_model()
    with answering(rank, {}) as (url, samples):
        guard = guard_on(model, url, every=3)
        for step in range(10):
            train(guard, model, step, batch(step, rank, TOKENS if rank == 0 else 0))
        flushed = guard.flush(60)
        sample, count, together = guard.last_sample(), ranks_of(guard).collectives, ranks_of(guard).together
        guard.detach()
        sent = [each["step"] for each in samples]
    return {
        "seconds": time.monotonic() - begun, "sent": sent, "collectives": count, "flushed": flushed, "sample": sample,
        "together": together, "delivered": guard.delivered,
    }  # fmt: skip


def switch(rank: int, size: int) -> Result:
    """The reply to step 2 brings a plan, that to step 5 another one and that to step 6 an old one again."""
    model = make_model()
    seen = []
    with answering(rank, {2: fallback(1), 5: fallback(2, "experts"), 6: fallback(1)}) as (url, samples):
        guard = guard_on(model, url, mode="enforce")
        for step in range(12):
            seen.append([model.ours.precision.fprop, model.experts.precision.fprop])
            train(guard, model, step, batch(step, rank))
            assert guard.flush(60)
            dist.barrier()  # a reply has come before any rank goes on
        state = guard.state_dict()
        guard.detach()
        reported = [[s["step"], s["plan_version"], s["effective_step"]] for s in samples]
    kept = {name: state[name] for name in ("plan", "effective_step", "waiting_plan", "step")}
    return {"seen": seen, "reported": reported, "state": kept}


def bad_rank(rank: int, size: int) -> Result:
    """The last rank multiplies wrongly in one layer; in the last step its input is not finite either."""
    model, found = make_model(), []
    with guard_on(model) as guard:
        for step in range(3):
            x = batch(step, rank)
            if rank == size - 1:
                model.ours.tamper = broken
                x[3, 5] = float("nan") if step == 2 else x[3, 5]
            train(guard, model, step, x)
            assert guard.flush(60)
            sample = guard.last_sample()
            assert sample is not None
            found.append(sample["ranks"])
    return {"ranks": found}


def resume(rank: int, size: int) -> Result:
    """A plan waits while a state is taken on every rank; a second guard goes on from it. Then a rewind within it."""
    model, seen = make_model(), []
    with answering(rank, {1: fallback(1), 7: fallback(2, "experts")}) as (url, _):
        first = guard_on(model, url, mode="enforce")
        for step in range(3):
            train(first, model, step, batch(step, rank))
            assert first.flush(60)
            dist.barrier()
        state = first.state_dict()
        first.detach()
        second = guard_on(model, url, attempt="1", mode="enforce")
        second.load_state_dict(state)
        for step in range(3, 9):
            seen.append([step, model.ours.precision.fprop, model.experts.precision.fprop])
            train(second, model, step, batch(step, rank))
            assert second.flush(60)
            dist.barrier()
        second.load_state_dict(state)
        for step in range(3, 6):
            seen.append([step, model.ours.precision.fprop, model.experts.precision.fprop])
            train(second, model, step, batch(step, rank))
        assert second.flush(60)
        together = ranks_of(second).together
        second.detach()
    return {"seen": seen, "waiting": state["waiting_plan"], "together": together}


SCENARIOS: dict[str, Callable[[int, int], Result]] = {
    each.__name__: each for each in (merged, empty_shard, switch, bad_rank, resume)
}


class Lines(logging.Handler):
    """What was logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(scenarios: dict[str, Callable[[int, int], Result]]) -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    for name in sys.argv[4:]:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=size
        )
        lines = Lines()
        logging.getLogger("fp8_safeguard").addHandler(lines)
        result = scenarios[name](rank, size)
        logging.getLogger("fp8_safeguard").removeHandler(lines)
        (folder / f"{name}.{rank}.json").write_text(json.dumps({**result, "warnings": lines.lines}))
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(SCENARIOS)
