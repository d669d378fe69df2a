"""What the benchmark of recomputed GEMMs writes, and that its numbers can tell good from bad."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from .conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/recompute_cost.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("recompute_cost")


def test_every_gemm_is_timed_and_sampled(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "QUICK_SHAPES", ((70, 40, 30),))
    monkeypatch.setattr(benchmark, "SAMPLED", (130, 70, 60))
    monkeypatch.setattr(benchmark, "QUICK_DRAWS", 2)
    benchmark.main(["--quick", "--json", str(tmp_path / "result.json")])
    report = json.loads((tmp_path / "result.json").read_text())
    rows = {row["case"]: row for row in report["rows"]}
    for gemm in ("fprop", "dgrad", "wgrad"):
        for dtype in ("fp32", "bf16"):
            for part in ("rows", "whole"):
                assert rows[f"{gemm}_{part}_{dtype}_70x40x30_vs_layer"]["ratio"] > 0
        for kind in ("gaussian", "lognormal", "outlier_channels", "gradient_like"):
            for said in ("bias", "error"):
                row = rows[f"{gemm}_{kind}_sample_{said}"]
                assert row["unit"] == "%"
                assert row["goal"] > 1


def test_bias_and_error_of_known_samples(benchmark: ModuleType) -> None:
    bias, error = benchmark.described("fprop_gaussian", [0.9, 1.3])
    assert (bias["value"], bias["ratio"]) == (pytest.approx(10), pytest.approx(1.1))
    assert bias["low"] < 1.1 < bias["high"]
    assert error["value"] == pytest.approx(100 * ((0.1**2 + 0.3**2) / 2) ** 0.5)
    assert (error["low"], error["high"]) == (0.9, 1.3)


def test_the_whole_gemm_is_what_the_samples_are_held_against(benchmark: ModuleType) -> None:
    """Against float64: quantised operands, multiplied exactly."""
    layer = benchmark.Layer((96, 64, 256), torch.float32)
    vector = layer.error("dgrad", torch.arange(96))
    low = benchmark.recompute.round_trip(layer.dy_TN, "row", benchmark.FP8.dy).double()
    low = low @ benchmark.recompute.round_trip(layer.w_NK, "tile", benchmark.FP8.w).double()
    high = layer.dy_TN.double() @ layer.w_NK.double()
    expected = ((high - low).norm() / high.norm()).item()
    assert benchmark.relative_error(vector) == pytest.approx(expected, rel=1e-4)
