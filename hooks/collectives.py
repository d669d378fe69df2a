"""Collectives among the ranks of a group: our own gloo connections, never waited in."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FOREVER = timedelta(days=1)
"""An evaluation on one rank may take hours: who waits too long is told by a step boundary, not by a socket."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.0002, 0.01
_MEETING_SECONDS = 0.25

Nap = Callable[[float], None]
"""Sleeps for at most so many seconds; raises where the caller is to stop."""


class Collectives:
    """Connections of our own to every rank, used from one thread; the trainer's groups never hear of them.

    Nothing here blocks inside a library: an operation is begun and asked after, with naps in between, so that the end of
    the process, or a rank that does not come, is never waited for by more than a nap.
    """

    def __init__(self, rank: int, size: int, nap: Nap) -> None:
        self.rank, self.size = rank, size
        self.count = 0
        """Operations begun so far: on every rank the same."""
        self._nap = nap
        self._group: Any = None
        self._in_flight: Any = None

    def meet(self, store: Any) -> None:
        """Wait until every rank is here, then connect. The store's own waits would hold it against the trainer.

        Raises ConnectionError where there is no store.
        """
        if store is None:
            raise ConnectionError("the process group has no store where they could meet")
        store.set(f"present/{self.rank}", "1")
        everybody = [f"present/{rank}" for rank in range(self.size)]
        seconds = _SHORTEST_SECONDS
        while not store.check(everybody):
            self._nap(seconds)
            seconds = min(2 * seconds, _MEETING_SECONDS)
        self._group = self._made(store)
        # With connections that are made when first needed: all of them now, so that later a rank that goes is noticed.
        self._wait(self._group.alltoall_base(torch.zeros(self.size), torch.zeros(self.size), [], []))

    def _made(self, store: Any) -> Any:
        """The group. An older torch connects within this call, and would wait for a rank that has gone since, or that no
        packet reaches, for as long as for any: so it has a thread of its own. Where the interpreter ends before that thread
        is back, the process is aborted if it comes back meanwhile; with a newer torch it is back at once."""
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(_gloo(store, self.rank, self.size))
            except Exception as error:
                made.append(error)

        threading.Thread(target=connect, name="fp8-safeguard-connect", daemon=True).start()
        seconds = _SHORTEST_SECONDS
        while not made:
            self._nap(seconds)
            seconds = min(1.5 * seconds, _LONGEST_SECONDS)
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def gather(self, mine: Tensor) -> Tensor:
        """[W, ...]: everybody's tensor, of one shape and dtype on all ranks."""
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(self._group.allgather([everybody], [mine]))
        return torch.stack(everybody)

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        self._finish(self._group.allreduce([mine]))
        return mine

    def maximum(self, mine: Tensor) -> Tensor:
        """The maximum over ranks, in place; it may lose a NaN."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._finish(self._group.allreduce([mine], options))
        return mine

    def broadcast(self, text: bytes, length: int) -> bytes:
        """The text of rank 0; `length` of its bytes, known to all."""
        buffer = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._finish(self._group.broadcast([buffer]))
        return bytes(buffer.numpy())

    def _finish(self, work: Any) -> None:
        self.count += 1
        self._wait(work)

    def _wait(self, work: Any) -> None:
        """Raises ConnectionError where the operation failed, and what the nap raises."""
        self._in_flight = work
        seconds = _SHORTEST_SECONDS
        while not work.is_completed():
            self._nap(seconds)
            seconds = min(1.5 * seconds, _LONGEST_SECONDS)
        self._in_flight = None
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError("a rank has gone, or the connection to it") from error

    def close(self) -> None:
        """Let the connections go; those of an operation that will never end stay until the process does."""
        if self._in_flight is not None:
            # The group's end would wait for the operation's. The operation's tensors go with whoever lets go of it last: a
            # thread of the library's, when the other rank has gone, would want the interpreter for that, and abort the
            # process where that is ending too.
            for each in (self._group, self._in_flight):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        self._group = self._in_flight = None


def _gloo(store: Any, rank: int, size: int) -> Any:
    """A group by the interfaces that torch would take, connected by the library's own threads where it can do that."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _FOREVER
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [_device(interface=name) for name in named] or [_device()]
    return gloo(store, rank, size, options)


def _device(**interface: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    make = gloo.create_device if interface else gloo.create_default_device
    try:
        return make(**interface, lazy_init=True)
    except TypeError:  # an older torch
        return make(**interface)
