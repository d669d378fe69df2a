"""Oracles and inputs of the kernel tests: independent of the code under test."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fp8_safeguard.kernels import compiled, native, reference, tiles
from fp8_safeguard.monitor.stats import measure

BLOCK_SHAPES = {"row": (1, 128), "col": (128, 1), "tile": (128, 128)}
MAXIMUM = {"e4m3": 448.0, "e5m2": 57344.0}
ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.fixture(autouse=True, scope="session")
def single_thread() -> Iterator[None]:
    """One thread, so that suites running side by side do not wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LEVELS = {f"native {name}": level for level, name in enumerate(native.INSTRUCTION_SETS)}


@pytest.fixture(params=["compiled", "reference", *LEVELS])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each implementation of the rows-and-segments calls, the native one with each instruction set."""
    if request.param not in LEVELS:
        return compiled if request.param == "compiled" else reference
    if native.library() is None:
        pytest.fail("the native kernels were not built: install a C++ compiler and run `make setup`")
    if LEVELS[request.param] > native.level():
        pytest.skip(f"this processor has no {request.param.split()[1]}")
    monkeypatch.setattr(native, "level", lambda: LEVELS[request.param])
    return native


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20240607)


@pytest.fixture
def same_weights() -> Iterator[None]:
    """Initial weights that are the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        yield


ANSWERS_KEPT = 32
"""What an oracle said lately: each implementation and level asks the same questions."""


def remembering(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle, asked once for the same array and options."""
    answers: dict[Any, Any] = {}

    def ask(x: NDArray[np.float32], *options: Any, **named: Any) -> Any:
        digest = hashlib.blake2b(np.ascontiguousarray(x)).digest()
        question = (digest, x.shape, options, tuple(sorted(named.items())))
        if question not in answers:
            if len(answers) == ANSWERS_KEPT:
                del answers[next(iter(answers))]
            answers[question] = oracle(x, *options, **named)
        return answers[question]

    return ask


@pytest.fixture(scope="session")
def defined() -> Callable[..., Any]:
    """TensorStats vector of a tensor by the float64 definition: (x, layout, **options)."""
    oracle = remembering(lambda x, layout, **options: measure(x, layout=layout, **options).to_vector())
    return lambda x, layout, **options: oracle(x.float().numpy(), layout, **options)


@pytest.fixture(scope="session")
def brute_scale() -> Callable[..., np.float32]:
    """Scale of one block, straight from the contract: one float32 division, or powers of two tried in turn."""

    def scale_of(amax: np.float32, fmt: str, scale: str, multiplier: float) -> np.float32:
        if amax == 0:
            return np.float32(1)
        if scale == "fp32":
            s = float(np.float32(amax) / np.float32(MAXIMUM[fmt]))
        else:
            s = 2.0**-170
            while s * MAXIMUM[fmt] < float(amax):
                s *= 2.0
        s = max(max(s, 2.0**-149) * multiplier, 2.0**-149)
        return np.float32(min(s, 2.0**127))

    return scale_of


@pytest.fixture(scope="session")
def brute(brute_scale: Callable[..., np.float32]) -> Callable[..., tuple[NDArray[Any], NDArray[Any]]]:
    """Codes and per-element scales of float32 [R,C], block by block; ml_dtypes encodes after the clamp."""

    def quantise(
        x_RC: NDArray[np.float32], layout: str, fmt: str, scale: str = "fp32", multiplier: float = 1.0
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        codes, scales = np.zeros(x_RC.shape, np.uint8), np.zeros(x_RC.shape, np.float32)
        height, width = BLOCK_SHAPES[layout]
        for top in range(0, x_RC.shape[0], height):
            for left in range(0, x_RC.shape[1], width):
                place = slice(top, top + height), slice(left, left + width)
                block = x_RC[place]
                finite = np.isfinite(block)
                amax = np.abs(np.where(finite, block, 0)).max()
                s = brute_scale(amax, fmt, scale, multiplier)
                with np.errstate(all="ignore"):
                    ratio = (block / s).astype(np.float32)
                clamped = np.clip(np.where(finite, ratio, 0), -MAXIMUM[fmt], MAXIMUM[fmt])
                encoded = clamped.astype(ML_DTYPES[fmt]).view(np.uint8)
                codes[place] = np.where(finite, encoded, 0x7F | (np.signbit(block) * 0x80).astype(np.uint8))
                scales[place] = s
        return codes, scales

    return remembering(quantise)


@pytest.fixture(scope="session")
def bfloat16_values() -> torch.Tensor:
    """All 65,536 bfloat16 values by magnitude [512,128]: neighbours in a block, so that most are not flushed."""
    bits = torch.arange(65536, dtype=torch.int32)
    order = torch.argsort(bits & 0x7FFF, stable=True)
    return bits[order].to(torch.int16).view(torch.bfloat16).reshape(512, 128)


@pytest.fixture(scope="session")
def random_bits() -> torch.Tensor:
    """1M float32 of random bits [8192,128], half of it sorted by magnitude."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=generator, dtype=torch.int64).to(torch.int32)
    half = bits[: 2**19]
    order = torch.argsort(half & 0x7FFFFFFF)
    return torch.cat([half[order], bits[2**19 :]]).view(torch.float32).reshape(8192, 128)


@pytest.fixture(scope="session")
def log_gaussian() -> torch.Tensor:
    """1M log-Gaussian float32 of both signs [2048,512]: about six decades."""
    generator = torch.Generator().manual_seed(2)
    magnitude = torch.exp(2.5 * torch.randn(2**20, generator=generator))
    sign = torch.randint(0, 2, (2**20,), generator=generator) * 2 - 1
    return (magnitude * sign).reshape(2048, 512)


@pytest.fixture(params=["tiles", "float32"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to multiply: compiled kernels, and float32 products of torch."""
    if request.param == "float32":
        monkeypatch.setattr(tiles, "usable", lambda x: False)
    elif not tiles.usable(torch.empty(0)):
        pytest.skip("neither native kernels nor matrix tiles are here")
    return str(request.param)
