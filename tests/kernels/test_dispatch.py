"""Choice of the backend, and what importing the package costs. Each case is a fresh interpreter."""

import subprocess
import sys

import fp8_safeguard.kernels
from fp8_safeguard.kernels import backend

BLOCK_NUMBA = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba":
            raise ImportError("blocked for the test")
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> str:
    """Standard error and output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_numba_runs_the_kernels_here() -> None:
    assert backend() == "numba"


def test_import_loads_neither_numba_nor_triton() -> None:
    said = run("import fp8_safeguard.kernels, sys; print('numba' in sys.modules, 'triton' in sys.modules)")
    assert said.split()[0] == "False"


def test_without_numba_the_reference_takes_over_and_says_so_once() -> None:
    said = run(
        BLOCK_NUMBA
        + """
import logging
logging.basicConfig(level=logging.INFO)
import torch
from fp8_safeguard.kernels import backend, fp8_linear, quantize, tensor_stats
x = torch.ones(4, 8)
assert backend() == "reference"
assert torch.equal(quantize(x).dequantize(), x)
assert tensor_stats(x, layout="col")[0] == 32
assert torch.equal(fp8_linear(x, torch.ones(3, 8)), torch.full((4, 3), 8.0))
"""
    )
    assert said.count("backend 'reference'") == 1
    assert "fp8_safeguard" in said
    assert "fp8-safeguard[train]" in said


def test_every_public_name_exists_and_none_is_forgotten() -> None:
    for name in fp8_safeguard.kernels.__all__:
        assert hasattr(fp8_safeguard.kernels, name)
    assert list(fp8_safeguard.kernels.__all__) == sorted(fp8_safeguard.kernels.__all__)
