"""Data parallelism: every rank trains on its share of the step's sequences."""

from __future__ import annotations

import atexit
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8_safeguard.kernels import merge_amax
from fp8_safeguard.trainer.config import TrainConfig
from fp8_safeguard.trainer.data import Batch
from fp8_safeguard.trainer.errors import ConfigError
from fp8_safeguard.trainer.model import LanguageModel

T = TypeVar("T")


class Replicas:
    """The processes that hold a copy of the model and train it together; a lone one, where there are no others.

    Ranks come to the same numbers, so they take the same decisions: whether a step is skipped, a run is lost, where it
    ends. What one of them alone may do (write a checkpoint, name an attempt) the first one does, and tells the others.
    """

    def __init__(self, together: bool = False, group: Any = None) -> None:
        """`together`: with the ranks of `group`; None is torch's own, which nothing here holds: it ends when it is told to."""
        self._group = group
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1

    @classmethod
    def join(cls) -> Replicas:
        """With the ranks of torch.distributed, which is begun where torchrun or the like has set RANK and WORLD_SIZE.

        Every rank calls it. Raises ConfigError where the other ranks cannot be reached.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE") or "1") < 2:
                return cls()
            # Its functions have the group of the moment of their import as a default, and would keep it, and its threads,
            # to the very end: a thread that lets go of a tensor while the interpreter ends aborts the process.
            importlib.import_module("torch.distributed.nn")
            try:
                dist.init_process_group("gloo")
            except (ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and the other ranks cannot be reached: {error}. Start with "
                    "torchrun, or without WORLD_SIZE for one process"
                ) from error
            atexit.register(_leave)
        if dist.get_world_size() == 1:
            return cls()
        # The trainer's tensors are on the CPU.
        return cls(
            together=True, group=None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        )

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError where a step's sequences do not divide among the ranks."""
        parts = self.size * config.micro_batches
        if config.sequences_per_step % parts:
            raise ConfigError(
                f"sequences_per_step {config.sequences_per_step} is not a multiple of {parts}: each of {self.size} ranks "
                f"takes {config.micro_batches} micro-batches; change one of the three"
            )

    def share(self, batch: Batch, config: TrainConfig) -> list[Batch]:
        """This rank's micro-batches of a step: what one process would do first is the first rank's."""
        parts = list(batch.split(config.sequences_per_step // (self.size * config.micro_batches)))
        return parts[self.rank * config.micro_batches :][: config.micro_batches]

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum each gradient over the ranks, in one float32 all-reduce; the loss was divided by their number before.

        A parameter without a gradient on any rank keeps none. Sums are the same, bit by bit, on every rank.
        """
        if self.size == 1:
            return
        listed = list(parameters)
        held = torch.tensor([float(p.grad is not None) for p in listed])
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in listed]
        flat = torch.cat([held, *(part.detach().flatten().float() for part in parts)])
        dist.all_reduce(flat, group=self._group)
        held, *sums = torch.split(flat, [len(listed), *(p.numel() for p in listed)])
        for parameter, present, total in zip(listed, held.tolist(), sums, strict=True):
            parameter.grad = total.view_as(parameter).clone() if present else None

    def sum_step(self, model: LanguageModel, loss: float) -> float:
        """The loss of all ranks; gradients, router loads and amax histories are from here on the same on each."""
        if self.size == 1:
            return loss
        self.add_gradients(model.parameters())
        # Whether a layer remembers follows from its precision, which is the same on every rank; what it saw does not.
        merge_amax(
            [layer.scaling for layer in model.linears().values() if not layer.precision.is_plain], self._group
        )
        loads = [router.load_E for router in model.routers().values()]
        own = torch.cat([torch.tensor([loss], dtype=torch.float64), *(load_E.double() for load_E in loads)])
        total, *summed = torch.split(self.sum(own), [1, *(len(load_E) for load_E in loads)])
        for load_E, sum_E in zip(loads, summed, strict=True):
            load_E.copy_(sum_E)
        return float(total)

    def sum(self, values_N: Tensor) -> Tensor:
        """float64 [N]: the sum over ranks; the values themselves where there is one."""
        if self.size > 1:
            dist.all_reduce(values_N, group=self._group)
        return values_N

    def largest(self, value: int) -> int:
        """The largest value of all ranks."""
        if self.size == 1:
            return value
        values_1 = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(values_1, op=dist.ReduceOp.MAX, group=self._group)
        return int(values_1)

    def first(self, action: Callable[[], T]) -> T:
        """The first rank does it, and all get its result, or raise what it raised."""
        if self.size == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        result, failure = outcome
        if failure is not None:
            raise failure
        found: T = result
        return found


def _leave() -> None:
    """A group that we have begun ends with the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
