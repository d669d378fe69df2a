"""CUDA tensors go to Triton's kernels, and their offsets are not read."""

import importlib
import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fp8_safeguard.kernels import OperandError, QuantizedTensor, device, quantize, tensor_stats
from fp8_safeguard.kernels.layouts import quantize_layouts
from fp8_safeguard.kernels.lazy import compiled_module

CALLERS = ("layouts", "quantize", "stats")
UNREADABLE = torch.zeros(3, dtype=torch.int32, device="meta")
"""Offsets without values: reading them raises."""


class Made(NamedTuple):
    row: Any
    block: Any
    stats: Any


class Recorder:
    """In the place of `triton_fused`: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def quantize_layouts(self, x: Tensor, **options: Any) -> Made:
        self.asked.append(options)
        layouts = ("row" if options["row"] else "", options["blocks"])
        tensors = [QuantizedTensor(x, x, layout, options["fmt"]) if layout else None for layout in layouts]
        slots = torch.arange(float(sum(map(bool, layouts))))
        return Made(*tensors, slots if options["stats"] else None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What stands for Triton's kernels, for every tensor."""
    recorder = Recorder()
    for caller in CALLERS:
        module = importlib.import_module(f"fp8_safeguard.kernels.{caller}")
        monkeypatch.setattr(module, "device_kernels", lambda x: recorder)
    return recorder


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_quantize_and_tensor_stats_ask_for_one_layout(layout: str, kernels: Recorder) -> None:
    x = torch.ones(4, 4)
    options: dict[str, Any] = {"fmt": "e5m2", "scale": "pow2", "multiplier": 0.5}
    quantized, stats = quantize(x, layout=layout, stats=True, offsets=UNREADABLE, **options)
    assert (quantized.layout, quantized.fmt) == (layout, "e5m2")
    assert stats.shape == ()
    assert quantize(x, layout=layout).layout == layout
    assert tensor_stats(x, layout=layout, offsets=UNREADABLE, **options).shape == ()
    wanted = {"row": layout == "row", "blocks": "" if layout == "row" else layout}
    with_stats, plain, measured = kernels.asked
    assert with_stats == {**wanted, **options, "stats": True, "offsets": UNREADABLE}
    assert plain == {
        **wanted,
        "fmt": "e4m3",
        "scale": "fp32",
        "multiplier": 1.0,
        "stats": False,
        "offsets": None,
    }
    assert measured == {**with_stats, "store": False}


def test_quantize_layouts_passes_everything_on(kernels: Recorder) -> None:
    row, block, stats = quantize_layouts(
        torch.ones(32, 4), blocks="tile", stats=True, offsets=UNREADABLE, aligned=True, multiplier=2.0
    )
    assert row is not None
    assert block is not None
    assert stats is not None
    assert (row.layout, block.layout, len(stats)) == ("row", "tile", 2)
    assert kernels.asked == [{
        "row": True, "blocks": "tile", "fmt": "e4m3", "scale": "fp32", "multiplier": 2.0, "stats": True,
        "offsets": UNREADABLE, "aligned": True,
    }]  # fmt: skip


def test_mistakes_are_found_before_the_device_is_asked(kernels: Recorder) -> None:
    for call in (quantize, tensor_stats, quantize_layouts):
        with pytest.raises(OperandError, match="floating-point"):
            call(torch.ones(4, dtype=torch.int32))
    assert kernels.asked == []


def test_only_cuda_tensors_with_triton_installed_go_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cuda: Any = SimpleNamespace(is_cuda=True)
    device.triton_installed.cache_clear()
    try:
        assert device.device_kernels(torch.ones(1)) is None
        assert device.device_kernels(on_cuda) is compiled_module("triton_fused")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        device.triton_installed.cache_clear()
        with caplog.at_level(logging.WARNING, "fp8_safeguard"):
            assert device.device_kernels(on_cuda) is None
            assert device.device_kernels(on_cuda) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "'reference'" in caplog.text
    finally:
        device.triton_installed.cache_clear()
