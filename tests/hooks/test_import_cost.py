"""Importing the hooks, attaching and sampling load little: our own modules and a few of the standard library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8_safeguard.kernels import backend

IMPORTED = "import fp8_safeguard.hooks"
TRAINED = """
import torch
def steps(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
steps(torch.nn.Linear(8, 8))
"""
OBSERVED = """
import sys
from fp8_safeguard.hooks import attach
model = torch.nn.Linear(8, 8)
guard = attach(model, every=1, run="r", spool_dir=sys.argv[1])
steps(model)
guard.detach()
"""
ASK = """
import json, sys, threading, torch
{before}
before = set(sys.modules)
{body}
operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp8_safeguard")]
print(json.dumps([sorted(set(sys.modules) - before), operators, threading.active_count()]))
"""


def added(tmp_path: Path, body: str, before: str = "") -> tuple[set[str], list[str], int]:
    """In a process of its own: modules that `body` loads where torch is, operators of ours, threads at the end."""
    code = ASK.format(before=before, body=body)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    modules, operators, threads = json.loads(ran.stdout.splitlines()[-1])
    return set(modules), operators, threads


def strangers(modules: set[str]) -> set[str]:
    """Top-level packages that are neither ours nor the standard library's; Cython's are parts of msgpack."""
    packages = {name.split(".")[0] for name in modules if not name.startswith("_cython")}
    return packages - sys.stdlib_module_names - {"fp8_safeguard"}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], list[str], int]:
    return added(tmp_path_factory.mktemp("import"), IMPORTED)


def test_importing_the_hooks_loads_no_package_that_torch_has_not_loaded(imported: Any) -> None:
    modules, operators, threads = imported
    assert strangers(modules) <= {"numpy"}  # numpy.typing, of a package that torch has loaded
    assert not {name for name in modules if name.startswith("asyncio.")}
    assert (operators, threads) == ([], 1)


def test_importing_the_hooks_loads_what_attach_needs_to_be_called_and_no_more(imported: Any) -> None:
    ours = {name.removeprefix("fp8_safeguard.") for name in imported[0] if name.startswith("fp8_safeguard.")}
    of_hooks = {"attach", "errors", "once", "settings", "transport", "values"}
    of_monitor = {"levels", "quoting", "slots", "thresholds"}
    assert ours == {
        "hooks", "monitor", *(f"hooks.{name}" for name in of_hooks), *(f"monitor.{name}" for name in of_monitor)
    }  # fmt: skip
    assert imported[0] & {"decimal", "fractions", "sqlite3", "statistics"} == set()


@pytest.mark.skipif(backend() != "native", reason="the native kernels were not built: numba measures")
def test_attaching_and_sampling_load_no_compiler(tmp_path: Path) -> None:
    modules, operators, _ = added(tmp_path, OBSERVED, before=TRAINED)
    ours = {name.removeprefix("fp8_safeguard.") for name in modules if name.startswith("fp8_safeguard.")}
    assert {"hooks.guard", "hooks.capture", "kernels.stats", "monitor.wire"} <= ours
    assert not {name for name in ours if name.startswith(("kernels.moe", "kernels.triton"))}
    unused = {"kernels.library", "kernels.logfmt", "kernels.mx", "kernels.numba_stats", "monitor.policy"}
    assert ours & unused == set()
    assert strangers(modules) <= {"numpy", "msgpack"}
    assert operators == []


@pytest.mark.parametrize(
    "asked", ["hooks.Guard.__name__", "hooks.attach(torch.nn.Linear(8, 8)).__class__.__name__"]
)
def test_the_guard_is_found_on_its_first_use(tmp_path: Path, asked: str) -> None:
    body = f"""
from fp8_safeguard import hooks
assert "fp8_safeguard.hooks.guard" not in sys.modules
assert {asked} == "Guard"
assert "fp8_safeguard.hooks.guard" in sys.modules
from fp8_safeguard.hooks import *
assert {{name for name in hooks.__all__ if name not in globals()}} == set()
assert set(hooks.__all__) <= set(dir(hooks))
assert not hasattr(hooks, "no_such_name")
"""
    assert "fp8_safeguard.hooks.guard" in added(tmp_path, body)[0]


def test_public_names_are_found_and_operators_registered_on_first_use(tmp_path: Path) -> None:
    body = """
import fp8_safeguard.kernels as kernels
assert all(getattr(kernels, name).__module__.startswith("fp8_safeguard.kernels") for name in kernels.__all__)
assert set(kernels.__all__) <= set(dir(kernels))
assert not hasattr(kernels, "no_such_name")
x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8)
def both(x):
    return kernels.fp8_linear(x, w).sum() + kernels.tensor_stats(w)[0]
assert "fp8_safeguard.kernels.library" not in sys.modules
torch.compile(both, fullgraph=True, backend="aot_eager")(x).backward()
assert (x.grad - 8).abs().max() < 1e-4
"""
    modules, operators, _ = added(tmp_path, body)
    assert "fp8_safeguard.kernels.moe.experts" in modules
    assert {"fp8_safeguard::linear_forward", "fp8_safeguard::tensor_stats"} <= set(operators)
