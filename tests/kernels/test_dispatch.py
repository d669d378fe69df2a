"""Choice of the backend, and what importing the package costs. Each case is a fresh interpreter."""

import subprocess
import sys

import pytest
import torch

import fp8_safeguard.kernels
from fp8_safeguard.kernels import backend, warm_up

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


def test_import_loads_neither_numba_nor_triton() -> None:
    said = run("import fp8_safeguard.kernels, sys; print('numba' in sys.modules, 'triton' in sys.modules)")
    assert said.split()[0] == "False"


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
    assert "native float32" in run(BLOCK_NUMBA + SMALL_CHECK)


def test_without_either_the_reference_takes_over_and_says_so_once() -> None:
    said = run(BLOCK_NUMBA + BLOCK_NATIVE + SMALL_CHECK)
    assert "reference float32" in said
    assert said.count("backend 'reference'") == 1
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
    assert run("import os; os.environ['NUMBA_CPU_NAME'] = 'generic'; " + code).split() == [
        "native",
        "float32",
    ]


def test_warm_up_compiles_and_disturbs_nothing() -> None:
    state = torch.get_rng_state()
    warm_up()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_public_name_exists_and_none_is_forgotten() -> None:
    for name in fp8_safeguard.kernels.__all__:
        assert hasattr(fp8_safeguard.kernels, name)
    assert list(fp8_safeguard.kernels.__all__) == sorted(fp8_safeguard.kernels.__all__)
