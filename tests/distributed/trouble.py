"""One rank in trouble: it is silent, dies, leaves early, or its server is away."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import worker
from torch import nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear, QuantizedTensor

Result = dict[str, Any]


def alone(guard: Guard, model: nn.Module, step: int, x: torch.Tensor) -> None:
    """A step that no other rank is needed for."""
    model.zero_grad()
    (model(x).square().sum() / 100).backward()
    guard.step(step)


def shared_server(rank: int, plans: dict[int, Any]) -> tuple[str, Any]:
    """One server for all ranks, in the process of the first."""
    server = worker.PlanServer(plans) if rank == 0 else None
    told = [None if server is None else server.url]
    dist.broadcast_object_list(told, src=0)
    return str(told[0]), server


def goes_on(rank: int, guard: Guard, server: Any) -> Result:
    """What became of a rank after trouble with the others."""
    result = {
        "together": worker.ranks_of(guard).together,
        "plan": guard.plan.version,
        "flushed": guard.flush(30),
    }
    guard.detach(timeout=2.0)
    (Path(sys.argv[3]) / f"done.{rank}").touch()
    if server is not None:
        wait_for("done.1")
        result["sent"] = sorted([s["group"], s["step"]] for s in server.samples)
    return result


def wait_for(name: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not (Path(sys.argv[3]) / name).exists() and time.monotonic() < end:
        time.sleep(0.01)


def silent(rank: int, size: int) -> Result:
    """The last rank stops saying that its steps end: nobody waits for longer than the time-out, and only once."""
    url, server = shared_server(rank, {1: worker.fallback(1), 4: worker.fallback(2, "experts")})
    model = worker.make_model()
    guard = worker.guard_on(model, url, mode="enforce", rank_timeout=0.5)
    begun = time.monotonic()
    for step in range(20):
        worker.train(guard, model, step, worker.batch(step, rank), counted=step < 4 or rank < size - 1)
        if step < 4:
            assert guard.flush(60)
            dist.barrier()
    seconds = time.monotonic() - begun
    return {"seconds": seconds, **goes_on(rank, guard, server)}


def crash(rank: int, size: int) -> Result:
    """The last rank dies in the middle; the others have no need of it."""
    url, server = shared_server(rank, {})
    model = worker.make_model()
    guard = worker.guard_on(model, url, rank_timeout=20.0)
    begun = time.monotonic()
    for step in range(12):
        if step < 4:
            worker.train(guard, model, step, worker.batch(step, rank))
            assert guard.flush(60)
            dist.barrier()
            continue
        if rank == size - 1:
            os._exit(9)
        alone(guard, model, step, worker.batch(step, rank))
    seconds = time.monotonic() - begun
    return {"seconds": seconds, **goes_on(rank, guard, server)}


def leaves(rank: int, size: int) -> Result:
    """An exception on the last rank takes its guard off; the other one trains on alone."""
    url, server = shared_server(rank, {})
    model = worker.make_model()
    guard = worker.guard_on(model, url, rank_timeout=20.0)
    begun = time.monotonic()
    try:
        with guard:
            for step in range(10):
                if step < 4:
                    worker.train(guard, model, step, worker.batch(step, rank))
                    continue
                if rank == size - 1:
                    raise ArithmeticError
                alone(guard, model, step, worker.batch(step, rank))
            seconds = time.monotonic() - begun
            return {"seconds": seconds, **goes_on(rank, guard, server)}
    except ArithmeticError:
        (Path(sys.argv[3]) / f"done.{rank}").touch()
    return {"seconds": time.monotonic() - begun}


def only_first(rank: int, size: int) -> Result:
    """Only rank 0 has a guard, as it once was enough."""
    model = worker.make_model()
    if rank:
        wait_for("done.0")
        return {}
    guard = worker.guard_on(model, rank_timeout=0.5)
    begun = time.monotonic()
    for step in range(6):
        alone(guard, model, step, worker.batch(step, rank))
    sample = guard.last_sample()
    assert sample is not None
    return {"seconds": time.monotonic() - begun, "step": sample["step"], **goes_on(rank, guard, None)}


def different(rank: int, size: int) -> Result:
    """The ranks hold different layers, as in a pipeline, and say nothing of it."""
    url, server = shared_server(rank, {})
    model = nn.Sequential(nn.Linear(worker.FEATURES, 16 + rank))
    guard = worker.guard_on(model, url, rank_timeout=20.0)
    for step in range(4):
        alone(guard, model, step, worker.batch(step, rank))
    return goes_on(rank, guard, server)


def skipped(rank: int, size: int) -> Result:
    """The last rank does not count step 3, and pauses its guard in step 5; then the plans still change together."""
    model, seen = worker.make_model(), []
    with worker.answering(rank, {2: worker.fallback(1), 6: worker.fallback(2, "experts")}) as (url, samples):
        guard = worker.guard_on(model, url, mode="enforce")
        for step in range(12):
            seen.append([step, model.ours.precision.fprop, model.experts.precision.fprop])
            odd = rank == size - 1
            if odd and step == 5:
                with guard.paused():
                    worker.train(guard, model, step, worker.batch(step, rank))
            else:
                worker.train(guard, model, step, worker.batch(step, rank), counted=not (odd and step == 3))
            if step != 3:  # of that one the other rank says nothing before the next
                assert guard.flush(60)
                dist.barrier()
        flushed = guard.flush(60)
        together, count = worker.ranks_of(guard).together, worker.ranks_of(guard).collectives
        guard.detach()
        steps = [each["step"] for each in samples]
    return {"seen": seen, "together": together, "collectives": count, "sent": steps, "flushed": flushed}


def flagged(rank: int, size: int) -> Result:
    """A fault on the last rank alone: all ranks look closely at its layer, in the same steps."""
    model, looked = worker.make_model(), []
    with worker.guard_on(model) as guard:
        if rank == size - 1:
            model.ours.tamper = worker.broken
        for step in range(8):
            worker.train(guard, model, step, worker.batch(step, rank, 4 * worker.TOKENS))
            assert guard.flush(60)
            dist.barrier()
            sample = guard.last_sample()
            assert sample is not None
            looked.append(sorted({slot["layer"] for slot in sample["slots"] if slot.get("variant")}))
    return {"looked": looked, "sample": sample}


def real_server(rank: int, size: int) -> Result:
    """Against a server of the real kind at FP8_SAFEGUARD_SERVER, which is away for the first steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Fp8Linear(32, 32) for _ in range(4)))
    seen = []
    guard = worker.guard_on(
        model, os.environ["REAL_SERVER"], mode="enforce", run="away", spool_dir=sys.argv[3]
    )
    step, last, ill = 0, 200, False
    while step < last:
        seen.append([step, model[1].precision.fprop, guard.plan.version])
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 12:
            (Path(sys.argv[3]) / "come").touch()
            wait_for("here")
        known = torch.tensor([float(rank == 0 and worker.ranks_of(guard)._client._outage.away)])
        dist.broadcast(
            known, src=0
        )  # from then on, so that every such sample is one that the server does not see
        ill = ill or bool(known)
        broken_product(model[1], on=ill)
        (model(x).nan_to_num(0.0).square().mean()).backward()
        model.zero_grad()
        guard.step(step)
        time.sleep(0.1)
        if step > 12:
            guard.flush(5)
        dist.barrier()
        step += 1
        if last == 200 and guard.plan.version > 1:  # the server's: on every rank at the same step
            last = step + 4
    guard.flush(30)
    plan = guard.plan.to_wire()
    guard.detach()
    return {"seen": seen, "plan": plan, "local": guard.state_dict()["local_decisions"]}


def broken_product(layer: Fp8Linear, *, on: bool) -> None:
    """Its FP8 product is not finite; in BF16 it is."""

    def poison(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        if (gemm, operand) != ("fprop", "x"):
            return codes
        scale = codes.scale.clone()
        scale[0] = float("nan")
        return QuantizedTensor(codes.data, scale, codes.layout, codes.fmt)

    layer.tamper = poison if on else None


SCENARIOS: dict[str, Callable[[int, int], Result]] = {
    each.__name__: each
    for each in (silent, crash, leaves, only_first, different, skipped, flagged, real_server)
}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    worker.main(SCENARIOS)
