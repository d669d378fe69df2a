"""One rank of processes that end: what torch's threads still do while the interpreter goes must not abort it."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterable

last: list[Iterable[int]] = []
"""Gone through at the very end, in C: no other thread gets the interpreter, and those that wait for it find it gone."""
# The first one registered is the last one called: before any import that registers something too.
atexit.register(any, itertools.chain.from_iterable(last))

# ruff: noqa: E402
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fp8_safeguard.hooks.collectives import Collectives
from fp8_safeguard.trainer import TrainConfig, Trainer

kept: list[object] = []
"""Goes with the module, when the interpreter is already ending."""


def library_threads() -> list[str]:
    """Names of this process's threads that torch's groups have begun."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)


def trained(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A trainer that joins the others itself, and is still held at the end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}

    def at_the_end() -> None:
        (folder / f"threads.{rank}.json").write_text(json.dumps(library_threads()))

    # Registered before the trainer's own: called after it.
    atexit.register(at_the_end)
    trainer = Trainer(TrainConfig.tiny(corpus=str(folder / "text.txt"), sequences_per_step=4))
    trainer.run(1)
    kept.append(trainer)
    return {"threads": library_threads()}


def interrupted(rank: int, folder: Path, use: Callable[[Collectives], Any]) -> dict[str, Any]:
    """The first rank leaves in the middle of what it does with the second one, which dies while the first one ends."""
    ending, over = folder / "ending", threading.Event()

    def nap(seconds: float) -> None:
        if over.wait(seconds):
            raise InterruptedError

    ours = Collectives(rank, 2, nap)
    if rank == 0:
        threading.Timer(1.0, over.set).start()
    try:
        use(ours)
    except InterruptedError:
        ours.close()
    if rank:
        while not ending.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os._exit(0)
    last.append(itertools.repeat(0, 100_000_000))  # half a second or more
    ending.touch()
    return {"threads": library_threads()}


def in_flight(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """In an operation that the second rank never begins."""

    def use(ours: Collectives) -> None:
        ours.meet(dist.FileStore(str(folder / "meeting"), size))
        if rank == 0:
            ours.gather(torch.ones(3))

    return interrupted(rank, folder, use)


def connecting(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """While the library connects to the second rank, which is there, holds the store, and never connects."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 1)

    def use(ours: Collectives) -> None:
        if rank == 0:
            ours.meet(store)
        else:
            store.set("present/1", "1")

    return interrupted(rank, folder, use)


SCENARIOS = {each.__name__: each for each in (trained, in_flight, connecting)}


def main() -> None:
    rank, size, folder, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    found = SCENARIOS[name](rank, size, folder)
    (folder / f"{name}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
