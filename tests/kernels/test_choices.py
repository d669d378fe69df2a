"""Where the table says FP8 or BF16, and what puts the table in its place."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.kernels import (
    Fp8GroupedLinear,
    Fp8Linear,
    KernelError,
    LinearPrecision,
    OperandFormat,
    choices,
    dispatch,
)
from fp8_safeguard.kernels.choices import fast_precision, gemm_choice, use_results

FILE = {
    "machine": "NVIDIA H200; Linux",
    "choices": [
        {"gemm": "fprop", "m": 4096, "n": 7168, "k": 2048, "precision": "fp8", "ratio": 0.61, "low": 0.6, "high": 0.62},
        {"gemm": "fprop", "m": 4096, "n": 24576, "k": 1536, "precision": "bf16", "ratio": 1.04, "low": 1, "high": 1.1},
        {"gemm": "grouped_wgrad", "m": 32768, "n": 2048, "k": 7168, "e": 8, "precision": "fp8", "ratio": 0.8},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No results from the environment, and none left behind."""
    monkeypatch.delenv(dispatch.RESULTS_VARIABLE, raising=False)
    monkeypatch.setattr(choices._Results, "by_architecture", None)
    gemm_choice.cache_clear()
    choices._say.cache_clear()
    yield
    gemm_choice.cache_clear()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    file = tmp_path / "gpu_check.json"
    file.write_text(json.dumps(FILE))
    return file


def test_without_measurements_public_figures_decide_and_are_named() -> None:
    triton, deep_gemm = gemm_choice(8192, 8192, 8192), gemm_choice(8192, 8192, 8192, backend="deep_gemm")
    assert (triton.precision, deep_gemm.precision) == ("bf16", "fp8")
    assert "580 TFLOP/s" in triton.reason
    assert "DeepGEMM" in deep_gemm.reason
    assert triton.ratio == pytest.approx(690 / 580)
    grouped = {"experts": 8, "backend": "deep_gemm"}
    assert gemm_choice(32768, 2048, 7168, **grouped).precision == "fp8"
    assert gemm_choice(32768, 2048, 7168, gemm="wgrad", **grouped).precision == "bf16"


def test_what_nobody_measured_is_bf16() -> None:
    for choice in (gemm_choice(1, 1, 1, architecture=100), gemm_choice(1, 1, 1, backend="torch")):
        assert (choice.precision, choice.ratio) == ("bf16", None)
        assert "gpu_check" in choice.reason


def test_measurements_replace_the_figures_for_shapes_near_them(results: Path) -> None:
    assert gemm_choice(4096, 7168, 2048).precision == "bf16"
    use_results(results, architecture=90)
    for shape in ((4096, 7168, 2048), (8192, 7168, 2048), (2048, 3600, 1100)):
        choice = gemm_choice(*shape)
        assert (choice.precision, choice.ratio) == ("fp8", 0.61)
        assert "4096x7168x2048, measured on NVIDIA H200" in choice.reason
    assert gemm_choice(4096, 20000, 1600).ratio == 1.04
    assert gemm_choice(4096, 24576, 1536, backend="deep_gemm").ratio != 1.04
    for other in ({"gemm": "dgrad"}, {"experts": 8}, {"architecture": 100}):
        assert "measured on NVIDIA" not in gemm_choice(4096, 7168, 2048, **other).reason
    assert "measured on NVIDIA" not in gemm_choice(40960, 7168, 2048).reason
    assert gemm_choice(32768, 2048, 7168, gemm="wgrad", experts=64).ratio == 0.8
    assert gemm_choice(0, 7168, 2048).precision == "bf16"


def test_the_environment_names_the_results(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.RESULTS_VARIABLE, str(results))
    assert gemm_choice(4096, 7168, 2048).ratio == 0.61


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": "x", "choices": [{"gemm": "fprop"}]}'])
def test_a_file_that_is_no_result_is_explained(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(KernelError, match="gpu_check"):
        use_results(file, architecture=90)
    with pytest.raises(KernelError, match="FileNotFoundError"):
        use_results(tmp_path / "none.json", architecture=90)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU."""
    monkeypatch.setattr(choices, "_architecture", lambda device: 90)
    monkeypatch.setattr(choices, "gemm_backend_of", lambda device: "triton")


def test_a_layer_that_prefers_speed_says_what_it_gives_up_once(
    hopper: None, results: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_results(results, architecture=90)
    asked = LinearPrecision(dy=OperandFormat(fmt="e5m2"))
    with caplog.at_level(logging.INFO, "fp8_safeguard"):
        for _ in range(2):
            layer = Fp8Linear(2048, 7168, precision=asked, device="meta")
            assert layer.precision == asked
            layer.prefer_fast(4096)
    # fprop is measured and faster; dgrad and wgrad have only the public figure.
    assert layer.precision == LinearPrecision(dgrad="bf16", wgrad="bf16", dy=OperandFormat(fmt="e5m2"))
    said = [record.getMessage() for record in caplog.records if "not faster" in record.getMessage()]
    assert len(said) == 2
    assert "dgrad of 4096 tokens, 2048 to 7168 features: BF16" in said[0]


def test_a_grouped_layer_asks_for_its_experts(hopper: None, results: Path) -> None:
    use_results(results, architecture=90)
    layer = Fp8GroupedLinear(8, 7168, 2048, device="meta")
    layer.prefer_fast(32768)
    assert layer.precision == LinearPrecision(fprop="bf16", dgrad="bf16")


def test_bf16_stays_bf16_and_a_cpu_is_never_faster_in_fp8() -> None:
    sizes: dict[str, Any] = {"tokens": 4096, "out_features": 7168, "in_features": 2048, "device": "cpu"}
    bf16 = LinearPrecision(fprop="bf16", dgrad="bf16", wgrad="bf16")
    assert fast_precision(bf16, **sizes) == fast_precision(LinearPrecision(), **sizes) == bf16
    assert "emulates" in gemm_choice(8, 8, 8, architecture=0, backend="native").reason
