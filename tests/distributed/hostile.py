"""One rank of a group that meets the worst: killed in mid-step, hung, without a group, at odds with its server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import trouble
import worker
from torch import nn

from fp8_safeguard.hooks import AlreadyAttachedError, Guard, collectives
from fp8_safeguard.kernels import Fp8Linear

Result = dict[str, Any]
FOLDER = Path(sys.argv[3])
PAUSE_SECONDS = 4.0


def in_force(guard: Guard, step: int) -> list[Any]:
    return [step, guard.plan.version, guard._session.controls.effective_step]


def left(name: str, rank: int, guard: Guard, **more: Any) -> None:
    """The end of a rank that can wait for nobody: what it saw, and out."""
    flushed, together = guard.flush(30), worker.ranks_of(guard).together
    begun = time.monotonic()
    guard.detach(timeout=5.0)
    seen = {"flushed": flushed, "together": together, "detach": time.monotonic() - begun, **more}
    (FOLDER / f"{name}.{rank}.json").write_text(json.dumps({**seen, "warnings": []}))
    (FOLDER / f"done.{rank}").touch()
    if rank == 0 and int(sys.argv[2]) > 2:
        trouble.wait_for("done.1")
    os._exit(0)


def killed(rank: int, size: int) -> Result:
    """SIGKILL between the forward and the backward of the last rank."""
    url, server = trouble.shared_server(rank, {1: worker.fallback(1)})
    model, seen, begun = worker.make_model(), [], time.monotonic()
    guard = worker.guard_on(model, url, mode="enforce", rank_timeout=120.0)
    for step in range(14):
        seen.append(in_force(guard, step))
        y = model(worker.batch(step, rank))
        if step == 7 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model.zero_grad()
        (y.square().sum() / 100).backward()
        guard.step(step)
        if step < 7:
            assert guard.flush(60)
            dist.barrier()
    seconds = time.monotonic() - begun
    assert guard.flush(30)
    steps = None if server is None else sorted(each["step"] for each in server.samples)
    left("killed", rank, guard, seen=seen, seconds=seconds, steps=steps)
    return {}


def gone_meeting(rank: int, size: int) -> Result:
    """The last rank says that it is there, and is gone before it connects."""
    url, server = trouble.shared_server(rank, {})
    model = worker.make_model()
    if rank == size - 1:
        collectives._gloo = lambda *_: os._exit(9)
    guard = worker.guard_on(model, url, rank_timeout=1.0)
    begun = time.monotonic()
    for step in range(10):
        if rank == size - 1:
            time.sleep(0.5)
        trouble.alone(guard, model, step, worker.batch(step, rank))
    seconds = time.monotonic() - begun
    assert guard.flush(30)
    steps = [] if server is None else sorted(each["step"] for each in server.samples)
    left("gone_meeting", rank, guard, seconds=seconds, steps=steps)
    return {}


def hung(rank: int, size: int) -> Result:
    """The last rank stands still in mid-step for longer than any round, but not than the time-out."""
    url, _ = trouble.shared_server(rank, {1: worker.fallback(1), 9: worker.fallback(2, "experts")})
    model, seen = worker.make_model(), []
    guard = worker.guard_on(model, url, mode="enforce", rank_timeout=60.0)
    for step in range(16):
        if step == 6 and rank == size - 1:
            time.sleep(PAUSE_SECONDS)
        seen.append(in_force(guard, step))
        worker.train(guard, model, step, worker.batch(step, rank))
        if step in (4, 11):
            assert guard.flush(60)
            dist.barrier()
    assert guard.flush(60)
    together = worker.ranks_of(guard).together
    dist.barrier()
    guard.detach()
    return {"seen": seen, "together": together}


def no_group(rank: int, size: int) -> Result:
    """The trainer's group is destroyed while the guards go on; a plan still comes to all."""
    url, _ = trouble.shared_server(rank, {7: worker.fallback(1)})
    model, seen, begun = worker.make_model(), [], time.monotonic()
    guard = worker.guard_on(model, url, mode="enforce", rank_timeout=30.0)
    for step in range(5):
        worker.train(guard, model, step, worker.batch(step, rank))
    assert guard.flush(60)
    dist.barrier()
    dist.destroy_process_group()
    for step in range(5, 16):
        seen.append(in_force(guard, step))
        trouble.alone(guard, model, step, worker.batch(step, rank))
        assert guard.flush(60)
    together = worker.ranks_of(guard).together
    guard.detach(timeout=3.0)
    seconds, precision = time.monotonic() - begun, model.ours.precision.fprop
    dist.init_process_group(
        "gloo", init_method=f"file://{FOLDER}/again.store", rank=rank, world_size=size
    )  # for the end of main()
    return {"seen": seen, "together": together, "seconds": seconds, "precision": precision}


def attached_again(rank: int, size: int) -> Result:
    """A second attach() is refused; after detach() it is not; then the last rank alone does both."""
    model, refused = worker.make_model(), 0
    guard = worker.guard_on(model)
    try:
        worker.guard_on(model)
    except AlreadyAttachedError:
        refused += 1
    for first in (0, 3):
        for step in range(first, first + 3):
            worker.train(guard, model, step, worker.batch(step, rank))
        assert guard.flush(60)
        together = worker.ranks_of(guard).together
        if not first:
            guard.detach()
            guard = worker.guard_on(model, rank_timeout=1.0)
    begun = time.monotonic()
    if rank == size - 1:
        guard.detach(timeout=2.0)
        guard = worker.guard_on(model, rank_timeout=1.0)
    for step in range(6, 12):
        worker.train(guard, model, step, worker.batch(step, rank))
    guard.detach(timeout=3.0)
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    return {
        "refused": refused, "together": together, "seconds": time.monotonic() - begun, "weights": weights,
    }  # fmt: skip


def bare(rank: int, size: int) -> Result:
    """The twelve steps of `attached_again` without us."""

    class Nobody:
        def step(self, number: int) -> None:
            """Nothing."""

    model = worker.make_model()
    for step in range(12):
        worker.train(Nobody(), model, step, worker.batch(step, rank))
    return {"weights": [parameter.double().sum().item() for parameter in model.parameters()]}


class Server:
    """Decides something while its replies are lost; back, it hears of our decision late, and takes it over at last."""

    def __init__(self) -> None:
        self.phase = "there"
        self.taken: set[str] = set()
        self._entries: list[Result] = []
        self._listening = worker.PlanServer({}, self.answer)
        self.url = self._listening.url

    def goes_away(self) -> None:
        self._listening.stop()

    def is_back(self) -> None:
        """At the same address, with a plan of the version that the client has given its own by now."""
        self.phase = "deaf"
        self._listening = worker.PlanServer({}, self.answer, urlsplit(self.url).port)

    def answer(self, sample: Result) -> Result:
        if self.phase == "there":
            return {"plan": None}
        own = entry("server-1", "2", "dgrad")
        if self.phase == "deaf":
            return {"plan": {"version": 1 + sample["step"] % 2, "entries": [own]}}
        for made in sample.get("local_decisions", ()):
            if made["id"] not in self.taken:
                self.taken.add(made["id"])
                self._entries.append(entry(made["id"], made["layer"], made["target"]["gemm"]))
        told = {"local_decisions": sorted(self.taken), "plan_version": 9}
        whole = {"version": 9, "entries": [own, *self._entries]}
        return {**told, "plan": whole if sample["plan_version"] < 9 else None}


def entry(decision: str, layer: str, gemm: str) -> Result:
    return {
        "layer": layer, "target": {"gemm": gemm}, "action": "bf16_fallback", "value": None, "decision_id": decision,
        "not_before_step": 0, "expires_step": None,
    }  # fmt: skip


def crossing(rank: int, size: int) -> Result:
    """Values of the last rank are not finite while the server is away; its own plan crosses ours when it is back."""
    torch.manual_seed(0)
    model, seen = nn.Sequential(*(Fp8Linear(32, 32) for _ in range(3))), []
    server = Server() if rank == 0 else None
    told = [None if server is None else server.url]
    dist.broadcast_object_list(told, src=0)
    guard = worker.guard_on(model, told[0], mode="enforce", run="cross", spool_dir=str(FOLDER / str(rank)))
    phases = {3: Server.goes_away, 24: Server.is_back, 44: lambda each: setattr(each, "phase", "hears")}
    for step in range(60):
        if server is not None and step in phases:
            phases[step](server)
        dist.barrier()
        if rank == size - 1:
            trouble.broken_product(model[1], on=step >= 8)
        seen.append([*in_force(guard, step)[1:], model[1].precision.fprop, model[2].precision.dgrad])
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).nan_to_num(0.0).square().mean().backward()
        guard.step(step)
        time.sleep(0.1)
        if rank == 0 and step >= 24:
            guard.flush(5)
        dist.barrier()
    assert guard.flush(30)
    waiting = guard.state_dict()["local_decisions"]
    guard.detach()
    taken = [] if server is None else sorted(server.taken)
    return {"seen": seen, "taken": taken, "waiting": waiting}


SCENARIOS: dict[str, Callable[[int, int], Result]] = {
    each.__name__: each for each in (killed, gone_meeting, hung, no_group, attached_again, bare, crossing)
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worker.main(SCENARIOS)
