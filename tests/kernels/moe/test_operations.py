"""Which operations a tensor gets, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import torch

from fp8_safeguard.kernels.moe import eager
from fp8_safeguard.kernels.moe.operations import operations


def test_a_cpu_and_float64_get_plain_torch() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int32):
        assert operations(torch.zeros(1, dtype=dtype)) is eager


def test_importing_the_operations_imports_no_compiler() -> None:
    script = (
        "import sys, fp8_safeguard.kernels.moe, fp8_safeguard.kernels.logfmt\n"
        "raise SystemExit(sorted({'triton', 'numba'} & set(sys.modules)) or 0)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
