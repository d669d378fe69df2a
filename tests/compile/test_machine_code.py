"""What every shipped kernel becomes on Hopper and Blackwell, without a GPU."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from fp8_safeguard.kernels.triton_compile import ARCHITECTURES, SHARED_LIMIT, MachineCode, compile_shipped
from fp8_safeguard.kernels.triton_shipped import Shipped, shipped

RESOURCES = Path(__file__).with_name("resources.json")
UPDATE = "FP8_SAFEGUARD_COMPILE=1 FP8_SAFEGUARD_COMPILE_UPDATE=1 python -m pytest tests/compile"
TENSOR_CORE = {90: "QGMMA", 100: "UTCQMMA"}

SHIPPED = {architecture: shipped(architecture) for architecture in ARCHITECTURES}
CASES = [(architecture, name) for architecture in ARCHITECTURES for name in SHIPPED[architecture]]
VERSION = "triton"
"""Key of the recorded resources: the release that they belong to."""


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], MachineCode]:
    """All of them, two at a time: most of the time goes to one assembler process each."""
    return compile_shipped(CASES, processes=2)


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Any]]:
    """The recorded resources; written anew at the end when that was asked for."""
    known = json.loads(RESOURCES.read_text()) if RESOURCES.exists() else {}
    if known.get(VERSION) != triton.__version__ and not _updating():
        pytest.skip(f"recorded with Triton {known.get(VERSION)}, this is {triton.__version__}")
    known[VERSION] = triton.__version__
    yield known
    if _updating():
        RESOURCES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


@pytest.fixture(params=CASES, ids=lambda case: f"{ARCHITECTURES[case[0]]}-{case[1]}")
def case(
    request: pytest.FixtureRequest, compiled: dict[tuple[int, str], MachineCode]
) -> tuple[Shipped, MachineCode, int]:
    architecture, name = request.param
    return SHIPPED[architecture][name], compiled[request.param], architecture


def test_nothing_is_spilled(case: tuple[Shipped, MachineCode, int]) -> None:
    _, code, _ = case
    assert (code.stack, code.spills) == (0, 0)


def test_shared_memory_fits(case: tuple[Shipped, MachineCode, int]) -> None:
    _, code, _ = case
    assert code.shared <= SHARED_LIMIT


def test_products_use_the_fp8_tensor_core(case: tuple[Shipped, MachineCode, int]) -> None:
    promise, code, architecture = case
    assert (code.count(TENSOR_CORE[architecture]) > 0) == promise.tensor_core


def test_conversions_saturate(case: tuple[Shipped, MachineCode, int]) -> None:
    promise, code, _ = case
    assert (code.count("F2FP.SATFINITE") > 0) == promise.saturating


def test_loads_go_through_the_memory_accelerator(case: tuple[Shipped, MachineCode, int]) -> None:
    promise, code, _ = case
    assert (code.count("UTMALDG") > 0) == promise.tma


def test_warps_specialise(case: tuple[Shipped, MachineCode, int]) -> None:
    """Triton may ignore the request without a word: only the instruction tells."""
    promise, code, _ = case
    assert (code.count("USETMAXREG") > 0) == promise.specialized


def test_divisions_are_ieee(case: tuple[Shipped, MachineCode, int]) -> None:
    promise, code, _ = case
    assert "div.full" not in code.ptx
    assert "div.approx" not in code.ptx
    assert ("div.rn.f32" in code.ptx) == promise.ieee_division


def test_subnormals_are_kept(case: tuple[Shipped, MachineCode, int]) -> None:
    _, code, _ = case
    assert ".ftz" not in code.ptx


def test_programs_that_share_a_multiprocessor_fit(case: tuple[Shipped, MachineCode, int]) -> None:
    """Persistent kernels start as many programs as their configuration says that a multiprocessor holds."""
    promise, code, _ = case
    assert code.resident >= promise.resident


def test_resources_are_as_recorded(
    case: tuple[Shipped, MachineCode, int], request: pytest.FixtureRequest, recorded: dict[str, Any]
) -> None:
    _, code, _ = case
    name = request.node.callspec.id
    found = {
        "registers": code.registers,
        "shared": code.shared,
        "warps": code.warps,
        "barriers": code.count("BAR.SYNC"),
        "loads": code.count("LDG"),
    }
    if _updating():
        recorded[name] = found
    assert recorded.get(name) == found, (
        f"{name} was {recorded.get(name)} and is now {found}; if that is meant, record it: {UPDATE}"
    )


def test_no_recorded_kernel_is_gone(recorded: dict[str, Any]) -> None:
    names = {f"{ARCHITECTURES[architecture]}-{name}" for architecture, name in CASES} | {VERSION}
    if _updating():
        for gone in set(recorded) - names:
            del recorded[gone]
    assert set(recorded) <= names, f"recorded but not shipped; to forget them: {UPDATE}"


def _updating() -> bool:
    return os.environ.get("FP8_SAFEGUARD_COMPILE_UPDATE") == "1"
