"""Choice of the backend, and what importing the package costs. Each case is a fresh interpreter."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import fp8_safeguard.kernels
from fp8_safeguard.kernels import (
    KernelError,
    UnknownOptionError,
    backend,
    dispatch,
    fp8_linear,
    tiles,
    warm_up,
)

BLOCK_NUMBA = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba":
            raise ImportError("blocked for the test")
sys.meta_path.insert(0, Blocker())
"""
BLOCK_NATIVE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.endswith("._native") else found(name, package)
"""


def run(code: str) -> str:
    """Standard error and output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_native_kernels_run_here() -> None:
    assert backend() == "native"


def test_import_loads_neither_numba_nor_triton_nor_the_compiler() -> None:
    """Nor torch's compiler, which takes seconds: the operators for it are registered without it."""
    names = "numba", "triton", "torch._dynamo"
    said = run(f"import fp8_safeguard.kernels, sys; print([name in sys.modules for name in {names}])")
    assert said.split("\n")[0] == "[False, False, False]"


SMALL_CHECK = """
import logging
logging.basicConfig(level=logging.INFO)
import torch
from fp8_safeguard.kernels import backend, fp8_linear, gemm_backend, quantize, tensor_stats
x = torch.ones(4, 8)
assert torch.equal(quantize(x).dequantize(), x)
assert tensor_stats(x, layout="col")[0] == 32
assert torch.allclose(fp8_linear(x, torch.ones(3, 8)), torch.full((4, 3), 8.0))
print(backend(), gemm_backend())
"""


def test_without_numba_the_native_kernels_still_quantise() -> None:
    said = run(BLOCK_NUMBA + SMALL_CHECK).split("\n")[0].split()
    assert said[0] == "native"
    assert said[1] != "float32"


def test_without_either_the_reference_takes_over_and_says_so_once() -> None:
    said = run(BLOCK_NUMBA + BLOCK_NATIVE + SMALL_CHECK)
    assert "reference float32" in said
    assert said.count("FP8 kernels: backend 'reference'") == 1
    assert said.count("WARNING:fp8_safeguard:FP8 products on cpu: backend 'reference'") == 1
    assert "'native' cannot run: the native kernels were not built" in said
    assert "'numba' cannot run: numba is missing" in said
    assert "fp8_safeguard" in said
    assert "fp8-safeguard[train]" in said


@pytest.mark.parametrize("name", ["numba", "reference"])
def test_the_environment_chooses(name: str) -> None:
    assert f"{name} " in run(f"import os; os.environ['FP8_SAFEGUARD_KERNELS'] = {name!r}" + SMALL_CHECK)


def test_an_unknown_choice_is_refused_with_what_there_is() -> None:
    said = run(
        "import os; os.environ['FP8_SAFEGUARD_KERNELS'] = 'cuda'\n"
        "from fp8_safeguard.kernels import UnknownOptionError, backend\n"
        "try: backend()\nexcept UnknownOptionError as error: print(error)"
    )
    assert "FP8_SAFEGUARD_KERNELS" in said
    assert "'cuda'" in said
    assert "reference" in said


def test_a_process_told_to_compile_for_another_processor_uses_no_tiles() -> None:
    code = "from fp8_safeguard.kernels import backend, gemm_backend; print(backend(), gemm_backend())"
    setting = "import os; os.environ |= {'NUMBA_CPU_NAME': 'generic', 'FP8_SAFEGUARD_KERNELS': 'numba'}; "
    assert run(setting + code).split() == ["numba", "float32"]


def test_warm_up_compiles_and_disturbs_nothing() -> None:
    state = torch.get_rng_state()
    warm_up()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_public_name_exists_and_none_is_forgotten() -> None:
    for name in fp8_safeguard.kernels.__all__:
        assert hasattr(fp8_safeguard.kernels, name)
    assert list(fp8_safeguard.kernels.__all__) == sorted(fp8_safeguard.kernels.__all__)


CPU = torch.device("cpu")


@pytest.fixture
def choose_anew() -> Iterator[None]:
    """Backends are chosen, and logged, as in a new process."""
    dispatch._resolved.cache_clear()
    yield
    dispatch._resolved.cache_clear()


@pytest.mark.parametrize("name", ["native", "numba", "reference"])
def test_the_environment_chooses_what_multiplies(
    name: str, choose_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FP8_SAFEGUARD_GEMM", name)
    with caplog.at_level(logging.INFO, "fp8_safeguard"):
        assert [dispatch.gemm_backend_of(CPU) for _ in range(2)] == [name, name]
    said = [record.getMessage() for record in caplog.records]
    assert said.count(f"FP8 products on cpu: backend {name!r}, asked for by name") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("triton", "on CUDA devices only"),
        ("deep_gemm", "use 'native'"),
        ("torch", "cannot run here"),
        ("cuda", "does not exist"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused(
    name: str, said: str, choose_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8_SAFEGUARD_GEMM", name)
    with pytest.raises(KernelError, match=said):
        fp8_linear(torch.ones(4, 8), torch.ones(3, 8))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str = "13.0") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "said"),
    [
        ("triton", (9, 0), "13.0", ""),
        ("triton", (10, 3), "13.0", ""),
        ("triton", (8, 0), "13.0", "this device has 8.0; use precision bf16"),
        ("torch", (9, 0), "13.0", ""),
        ("torch", (10, 0), "13.0", "compute capability 9.0 only"),
        ("torch", (9, 0), "12.8", "need 12.9 or newer"),
        ("deep_gemm", (9, 0), "13.0", "not installed"),
        ("native", (9, 0), "13.0", "on a CPU only; use 'triton'"),
    ],
)
def test_what_a_gpu_offers(
    name: str, capability: tuple[int, int], cuda: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, capability, cuda)
    missing = dispatch.unavailable(name, "cuda", 0)
    assert said in missing
    assert bool(said) == bool(missing)


def test_an_older_gpu_emulates_and_says_why(
    choose_anew: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu(monkeypatch, (8, 0))
    with caplog.at_level(logging.WARNING, "fp8_safeguard"):
        assert dispatch.gemm_backend_of(torch.device("cuda", 0)) == "reference"
    assert "this device has 8.0" in caplog.text


def test_a_gpu_s_default_is_triton(choose_anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0))
    assert dispatch.gemm_backend_of(torch.device("cuda", 0)) == "triton"
    with pytest.raises(KernelError, match=r"deep_gemm is not installed"):
        dispatch.gemm_backend_of(torch.device("cuda", 0), "deep_gemm")


def test_a_block_and_an_argument_choose_the_argument_first() -> None:
    before = dispatch.gemm_backend_of(CPU)
    with dispatch.use_gemm_backend("reference"):
        assert dispatch.gemm_backend_of(CPU) == "reference"
        assert dispatch.gemm_backend_of(CPU, "native") == "native"
        with dispatch.use_gemm_backend("numba"):
            assert dispatch.gemm_backend_of(CPU) == "numba"
        assert dispatch.gemm_backend_of(CPU) == "reference"
    assert dispatch.gemm_backend_of(CPU) == before == "native"
    with pytest.raises(UnknownOptionError, match="'deep_gemm'"), dispatch.use_gemm_backend("cutlass"):
        pass
    with pytest.raises(KernelError, match="CUDA devices only"):
        dispatch.gemm_backend_of(CPU, "torch")


def test_a_name_for_gpus_leaves_the_cpu_of_a_machine_with_one_alone(
    choose_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with dispatch.use_gemm_backend("triton"):
        assert dispatch.gemm_backend_of(CPU) == "native"


def test_a_backward_keeps_the_backend_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(20, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    with dispatch.use_gemm_backend("reference"):
        y = fp8_linear(x, w)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a compiled kernel ran")

    monkeypatch.setattr(tiles, "weight", refuse)
    monkeypatch.setattr(tiles, "wgrad", refuse)
    y.sum().backward()
    assert w.grad is not None
