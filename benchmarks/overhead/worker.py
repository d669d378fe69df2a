"""A training process of its own, which trains when it is told to."""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection

import torch
from overhead.workload import SMALL, Trainer

from fp8_safeguard.hooks import attach

FULL_BYTES = 64 * 1024
"""Largest file that a process whose disk is full may write: room for the empty spool."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the samples of a training process meet."""

    name: str
    server: str
    spool: str
    disk_full: bool = False


@dataclass(frozen=True)
class Turn:
    """Some steps: how long each took, and the CPU time of the process for all, its threads' included."""

    step_seconds: list[float]
    cpu_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Where the samples are at the end."""

    steps: int
    delivered: int
    waiting: int
    dropped: int


def train(told: Connection, scenario: Scenario) -> None:
    """For each number that comes train so many steps, every one of them sampled, and send a Turn; 0 ends it."""
    torch.set_num_threads(1)
    logging.getLogger("fp8_safeguard").setLevel(logging.ERROR)
    trainer, done = Trainer("fp32", SMALL), 0
    guard = attach(
        trainer.model, every=1, server=scenario.server, run=scenario.name, spool_dir=scenario.spool
    )
    if scenario.disk_full:
        _fill_disk()
    while steps := told.recv():
        done += steps
        told.send(_turn(trainer, steps))
    guard.last_sample()
    guard.flush(2)
    client = guard._session.client
    told.send(Outcome(done, guard.delivered, client.waiting, client._builder.dropped))
    guard.detach(timeout=0.1, finished=False)


def _turn(trainer: Trainer, steps: int) -> Turn:
    cpu, times = time.process_time(), [time.perf_counter()]
    for _ in range(steps):
        trainer.step()
        times.append(time.perf_counter())
    seconds = [end - start for start, end in pairwise(times)]
    return Turn(seconds, time.process_time() - cpu)


def _fill_disk() -> None:
    """From now on no file of this process can grow beyond a limit: writes fail, as they do on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
