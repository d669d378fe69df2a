"""What the benchmarks say to options that cannot be served, before they measure anything."""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import ROOT

Main = Callable[[Sequence[str]], object]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of benchmarks/ as a module."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module


def refusal(main: Main, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said on the way out with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--only", "fprop", "--only", "nonsense"], "--only nonsense: no case has that"),
        (["--compile"], "add --dry-run"),
        (["--dry-run", "--interpret"], "leave --interpret and --json out"),
        (["--dry-run", "--json", "result.json"], "leave --interpret and --json out"),
        (["--interpret", "--budget", "0"], "--budget 0: name the seconds"),
    ],
    ids=str,
)
def test_gpu_check_refuses_what_makes_no_sense(
    arguments: list[str],
    said: str,
    benchmark: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said in refusal(benchmark("gpu_check").main, arguments, capsys)


@pytest.mark.parametrize("package", ["torch", "triton", "numpy"])
def test_gpu_check_names_the_package_that_is_missing(
    package: str,
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = benchmark("gpu_check").main
    monkeypatch.setitem(sys.modules, package, None)
    assert f"{package} cannot be imported: install torch, triton, numpy" in refusal(
        main, ["--dry-run"], capsys
    )


def test_gpu_check_without_a_gpu_says_what_works_without(
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = benchmark("gpu_check")
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    assert script.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu_check", "compile_report", "kernels_cpu"])
def test_a_result_that_cannot_be_written_is_refused_first(
    name: str,
    tmp_path: Path,
    benchmark: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = benchmark(name)
    main = getattr(script, "main", None)
    if main is None:
        main = lambda arguments: benchmark("harness").main(name, script.cases, arguments)  # noqa: E731
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "result.json"):
        assert f"--json {place} cannot be written" in refusal(main, ["--json", str(place)], capsys)


def test_kernels_cpu_leaves_out_and_names_what_does_not_run_here(
    benchmark: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = benchmark("kernels_cpu")
    monkeypatch.setattr(script.native, "library", lambda: None)
    monkeypatch.setattr(script.dispatch, "backend", lambda: "numba")
    monkeypatch.setattr(
        script.dispatch, "unavailable", lambda name, device: name if name != "reference" else ""
    )
    names = {case.name for case in script.cases(True)}
    said = capsys.readouterr().err
    assert "quantising with 'native' left out: the native kernels were not built" in said
    assert "quantising with 'numba'" not in said
    assert "products with 'numba' left out: numba" in said
    assert names & {"tensor_stats_bf16_vs_copy", "gemm_vs_bf16_mm", "gemm_vs_bf16_mm_numba"} == set()
    assert {"tensor_stats_bf16_vs_copy_numba", "gemm_vs_bf16_mm_reference"} <= names


def test_the_folder_of_a_result_is_made_and_nothing_is_left_in_it(
    tmp_path: Path, benchmark: Callable[[str], ModuleType]
) -> None:
    harness, file = benchmark("harness"), tmp_path / "new" / "result.json"
    harness.require_writable(harness.argparse.ArgumentParser(), file)
    assert list(file.parent.iterdir()) == []
