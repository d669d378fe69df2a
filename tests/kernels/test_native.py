"""What only the native kernels do: streamed stores, padded patches, and a check of the library's version."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import native
from fp8_safeguard.kernels.codes import get_format

E4M3 = (get_format("e4m3"), "fp32", 1.0)
LAYOUTS = ("row", "col", "tile")
LEVELS = range(len(native.INSTRUCTION_SETS))


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """An instruction set that this processor has."""
    chosen = int(request.param)
    if chosen > native.level():
        pytest.skip(f"this processor has no {native.INSTRUCTION_SETS[chosen]}")
    monkeypatch.setattr(native, "level", lambda: chosen)
    return chosen


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """The library is looked for anew, and again afterwards."""
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_large_outputs_equal_those_of_their_parts(level: int, generator: torch.Generator) -> None:
    """Codes of 8 MiB and more go past the caches, in pages of 2 MiB, and their lines must still all arrive."""
    x = torch.randn(2048, 4160, generator=generator).bfloat16()
    x[700, 5], x[:, 300] = float("nan"), 0.0
    together = native.layouts_of_rows(x, [0, 2048], LAYOUTS, *E4M3, False)
    for top in range(0, 2048, 512):
        apart = native.layouts_of_rows(x[top : top + 512], [0, 512], LAYOUTS, *E4M3, False)
        for (codes, scales, _), (part, part_scales, _) in zip(together, apart, strict=True):
            assert torch.equal(codes[top : top + 512].view(torch.uint8), part.view(torch.uint8))
            first = top * scales.shape[0] // 2048
            assert torch.equal(scales[first : first + part_scales.shape[0]], part_scales)


@pytest.mark.parametrize("columns", [1, 31, 63, 64, 65, 127, 191, 511, 513, 575])
@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_padding_of_ragged_patches_is_neither_counted_nor_written(
    level: int, columns: int, generator: torch.Generator
) -> None:
    """Widths around lines of codes, blocks and chunks: the neighbours of a view stay as they were."""
    x = torch.randn(130, columns, generator=generator)
    wider = torch.full((130, columns + 70), float("nan"))
    wider[:, :columns] = x
    for layout in LAYOUTS:
        codes, scales, stats_S = native.measured_rows(wider[:, :columns], [0, 130], layout, *E4M3)
        expected = native.measured_rows(x.contiguous(), [0, 130], layout, *E4M3)
        assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales, expected[1])
        assert torch.equal(stats_S, expected[2])
        assert stats_S[0, 0] == 130 * columns
        zeros = int((codes.view(torch.uint8) & 0x7F == 0).sum())
        assert (stats_S[0, 1], stats_S[0, 4]) == (zeros, 0)
        values = native.round_trip_rows(x, [0, 130], layout, *E4M3)
        spread = scales if layout == "row" else scales.repeat_interleave(128, dim=0)[:130]
        spread = spread if layout == "col" else spread.repeat_interleave(128, dim=1)[:, :columns]
        assert torch.equal(values, codes.float() * spread)


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.parametrize("job_bytes", [None, 8])
def test_a_library_of_another_version_is_not_called(
    job_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read fields that the caller has not written: numba takes over, as without one."""
    other: Any = (
        SimpleNamespace() if job_bytes is None else SimpleNamespace(fp8_native_job_bytes=lambda: job_bytes)
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda path: other)
    assert native.library() is None


def test_subnormals_are_kept_whatever_the_caller_flushes(generator: torch.Generator) -> None:
    """A process that flushes subnormals to zero gets the same codes, and still flushes afterwards."""
    x = torch.rand(4, 256, generator=generator) * 2.0**-130
    expected, expected_scales = native.quantize_rows(x, [0, 4], "row", *E4M3)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        codes, scales = native.quantize_rows(x, [0, 4], "row", *E4M3)
        assert (torch.tensor([2.0**-120]) * torch.tensor([2.0**-10])).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    assert (expected.float() != 0).any()
