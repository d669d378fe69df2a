"""One rank of test_sharded.py: trains without and with a guard, and writes what it saw."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fp8_safeguard.hooks import attach, uses
from fp8_safeguard.kernels import tensor_stats

STEPS = 2
Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.unused = nn.Linear(16, 16) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Raw(nn.Module):
    """Products with parameters of its own: a matrix, and two experts that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w_NK, self.experts_ENK = (
            nn.Parameter(torch.randn(16, 16) / 4),
            nn.Parameter(torch.randn(2, 16, 16) / 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(nn.functional.linear(x, self.w_NK))
        return torch.cat([x[:1] @ self.experts_ENK[0].t(), x[1:] @ self.experts_ENK[1].t()])


class Model(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.second = Block(False), Block(unused)
        self.raw, self.head = Raw(), nn.Linear(16, 8, bias=False)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second, self.raw):
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return self.head(x)


def sharded(*, each: bool, reshard: bool = True, dtype: torch.dtype | None = None) -> Wrap:
    """FSDP2 of each linear layer, or of each block, and of what is left; computing in another dtype if one is given."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        how: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if dtype is not None:
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype)
        for module in list(model.modules()):
            if isinstance(module, (nn.Linear, Raw) if each else (Block, Raw)):
                fully_shard(module, **how)
        fully_shard(model, **how)
        return model

    return wrap


def replicated(**options: Any) -> Wrap:
    return lambda model: DistributedDataParallel(model, **options)


def split(model: nn.Module) -> nn.Module:
    """Tensor parallelism: the weights of the blocks are parts for good."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first.up": ColwiseParallel(), "first.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


WAYS: dict[str, tuple[bool, Wrap]] = {
    # Whether attach() comes before the wrapping, and the wrapping.
    "blocks_after": (False, sharded(each=False)),
    "blocks_before": (True, sharded(each=False)),
    "layers_after": (False, sharded(each=True)),
    "layers_before": (True, sharded(each=True)),
    "kept_after": (False, sharded(each=True, reshard=False)),
    "mixed_after": (False, sharded(each=True, dtype=torch.bfloat16)),
    "mixed_before": (True, sharded(each=False, dtype=torch.bfloat16)),
    "checkpointed_after": (False, sharded(each=False)),
    "checkpointed_before": (True, sharded(each=True)),
    "split_after": (False, split),
    "split_before": (True, split),
    "ddp": (False, replicated()),
    "ddp_static": (False, replicated(static_graph=True)),
    "ddp_unused": (False, replicated(find_unused_parameters=True)),
    "ddp_no_sync": (False, replicated()),
}


def train(way: str, *, observed: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Gradients of each step and final parameters on this rank, and what the guard saw."""
    before, wrap = WAYS[way]
    torch.manual_seed(0)
    model = Model(unused=way == "ddp_unused")
    model.checkpointed = way.startswith("checkpointed")
    guard, samples = None, []
    if observed and before:
        guard = attach(model, every=1, recompute=8, group=str(dist.get_rank()), groups=2)
    wrapped = wrap(model)
    if observed and not before:
        guard = attach(model, every=1, recompute=8, group=str(dist.get_rank()), groups=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(10 + dist.get_rank())
    tensors: list[torch.Tensor] = []
    for _ in range(STEPS):
        for micro in range(2):
            with wrapped.no_sync() if way == "ddp_no_sync" and micro == 0 else contextlib.nullcontext():
                wrapped(torch.randn(3 + micro, 16)).square().sum().backward()
        tensors += [_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if guard is not None:
            samples.append(guard.last_sample())
    tensors += [_local(p).clone() for p in model.parameters()]
    if guard is None:
        return tensors, {}
    seen = {"samples": samples, "coverage": guard.coverage(), "said": guard._session.once.counts}
    guard.detach(timeout=0.1)
    return tensors, seen


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole_weights(way: str) -> dict[str, float]:
    """Sum of squares of each weight at the first step, from a model that nobody sharded."""
    torch.manual_seed(0)
    model = Model(unused=way == "ddp_unused")
    column = 9  # sum_sq
    return {
        name.removesuffix(".weight"): float(tensor_stats(parameter.detach(), layout="tile")[column])
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
    }


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    freed: list[bool] = []
    is_freed = uses.is_freed
    uses.is_freed = lambda tensor: freed.append(is_freed(tensor)) or freed[-1]
    found = {}
    for way in WAYS:
        freed.clear()
        plain, _ = train(way, observed=False)
        watched, seen = train(way, observed=True)
        equal = len(plain) == len(watched) and all(map(torch.equal, plain, watched))
        found[way] = {"equal": equal, "freed": sum(freed), "weights": whole_weights(way), **seen}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
