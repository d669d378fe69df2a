"""The threads that the native kernels share work among: those of torch's own OpenMP."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

ALONE = (1, 0)
"""A team of the calling thread."""

_PROCESS = os.getpid()


def team() -> tuple[int, int]:
    """`struct Team` of cpp/team.h: as many threads as torch uses in this thread, and what runs work on them.

    They are the threads that torch's own operations run on, so that no others wait for a core while these spin. ALONE where
    torch has no OpenMP or one thread, and in a forked child, whose runtime still counts on the parent's threads.
    """
    if os.getpid() != _PROCESS:
        return ALONE
    threads, run = torch.get_num_threads(), runtime()
    return (threads, run) if threads > 1 and run else ALONE


@cache
def runtime() -> int:
    """Where GOMP_parallel of the runtime that torch was linked with begins, whatever others are loaded; 0 without one."""
    try:
        # A symbol is looked for in the library's own dependencies. It is loaded already: nothing new comes in.
        linked = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(linked.GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0
