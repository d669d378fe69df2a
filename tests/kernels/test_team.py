"""The same results, bit for bit, on however many of torch's threads; and none of them where they are not to be had."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fp8_safeguard.hooks import recompute
from fp8_safeguard.kernels import LinearPrecision, native_use
from fp8_safeguard.kernels import team as threads
from fp8_safeguard.kernels.quantized import QuantizedTensor

PRECISION = LinearPrecision()
X, W = torch.zeros(2, 3), torch.zeros(4, 3)
needs_tiles = pytest.mark.skipif(
    not native_use.fits(X, W, PRECISION.x, PRECISION.w), reason="needs the native kernels and matrix tiles"
)
needs_openmp = pytest.mark.skipif(not threads.runtime(), reason="needs a torch with OpenMP")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def used(
    x_TK: torch.Tensor,
    w_NK: torch.Tensor,
    y_TN: torch.Tensor | None,
    codes: QuantizedTensor,
    *,
    weighs: bool = True,
) -> native_use.Measured:
    rows = torch.arange(0, len(x_TK), max(1, len(x_TK) // 64))[:64]
    return native_use.measure(
        x_TK, w_NK, rows, operand=PRECISION.x, weight=PRECISION.w, wants=(True, True), y_TN=y_TN, codes=codes,
        weighs=weighs,
    )  # fmt: skip


def both_ways(
    x_TK: torch.Tensor, w_NK: torch.Tensor
) -> tuple[list[native_use.Measured], list[QuantizedTensor]]:
    """A forward, an input gradient with its codes, and one that makes them too; the codes."""
    dy_TN = x_TK @ w_NK.T.to(x_TK.dtype)
    rooms = [native_use.room_for_codes(w_NK, "e4m3") for _ in range(2)]
    found = [
        used(x_TK, w_NK, dy_TN, rooms[0]),
        used(dy_TN, w_NK, None, rooms[0], weighs=False),
        used(dy_TN, w_NK, None, rooms[1]),
    ]
    return found, rooms


@needs_tiles
@needs_openmp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 700, 520), (513, 1024, 130), (300, 129, 1100), (1024, 512, 2048)])
def test_any_number_of_threads_gives_the_same_bits(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, features, inputs = shape
    x_TK = torch.randn(tokens, inputs, generator=generator).to(dtype)
    x_TK[5, 7], x_TK[-1] = 3e4, 0.0
    w_NK = torch.randn(features, inputs, generator=generator)
    monkeypatch.setattr(native_use, "team", lambda: threads.ALONE)
    alone, codes = both_ways(x_TK, w_NK)
    for size in (2, 3, 7):
        monkeypatch.setattr(native_use, "team", lambda size=size: (size, threads.runtime()))
        shared, codes_shared = both_ways(x_TK, w_NK)
        for one, several in zip(alone, shared, strict=True):
            np.testing.assert_array_equal(several.stats, one.stats)
            assert several.judged
            assert one.judged
            assert several.operand_seconds > 0
        for known, other in zip(codes, codes_shared, strict=True):
            assert torch.equal(other.data.view(torch.uint8), known.data.view(torch.uint8))
            assert torch.equal(other.scale, known.scale)


@needs_tiles
@needs_openmp
def test_numbers_that_tiles_cannot_multiply_are_found_by_every_thread(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one huge weight is among the columns of another piece than the first."""
    x_TK, w_NK = torch.randn(512, 256, generator=generator), torch.randn(900, 256, generator=generator)
    w_NK[850, 3] = 1e30
    for team in (threads.ALONE, (3, threads.runtime())):
        monkeypatch.setattr(native_use, "team", lambda team=team: team)
        found = used(x_TK, w_NK, x_TK @ w_NK.T, native_use.room_for_codes(w_NK, "e4m3"))
        assert not found.judged
        of_w, _ = recompute.weigh(w_NK, PRECISION.w)
        np.testing.assert_array_equal(found.stats[native_use.WEIGHT][0], of_w[0].numpy())


@needs_openmp
def test_the_team_is_as_large_as_torch_says(three_threads: None) -> None:
    assert threads.team() == (3, threads.runtime())
    torch.set_num_threads(1)
    assert threads.team() == threads.ALONE


@needs_openmp
def test_work_runs_on_that_many_threads_of_torchs_runtime(three_threads: None) -> None:
    """OpenMP's own count from inside, asked of the runtime that torch was linked with."""
    size, run = threads.team()
    seen: list[int] = []
    inside = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(1))
    parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(run)
    parallel(ctypes.cast(inside, ctypes.c_void_p), None, size, 0)
    assert len(seen) == 3


def test_a_torch_without_openmp_leaves_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(path)

    monkeypatch.setattr(threads.ctypes, "CDLL", refuse)
    threads.runtime.cache_clear()
    try:
        assert threads.team() == threads.ALONE
    finally:
        threads.runtime.cache_clear()


@needs_tiles
@needs_openmp
def test_a_forked_child_measures_alone(three_threads: None, generator: torch.Generator) -> None:
    """The parent's threads are not there: a team would wait for them for ever."""
    x_TK, w_NK = torch.randn(512, 256, generator=generator), torch.randn(512, 256, generator=generator)
    y_TN = x_TK @ w_NK.T
    codes = native_use.room_for_codes(w_NK, "e4m3")
    expected = np.concatenate(used(x_TK, w_NK, y_TN, codes).stats)
    child = os.fork()
    if not child:
        try:
            same = np.array_equal(np.concatenate(used(x_TK, w_NK, y_TN, codes).stats), expected)
            os._exit(0 if same and threads.team() == threads.ALONE else 3)
        finally:
            os._exit(4)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
