"""Compiles kernel launches without a GPU and reads their machine code."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8_safeguard.kernels.triton_launch import Launch

ARCHITECTURES = {90: "sm_90a", 100: "sm_100a"}
SHARED_LIMIT = 232_448
"""Bytes of shared memory that a program may use, on both architectures."""
SHARED, SHARED_RESERVED, REGISTERS, WARPS = 233_472, 1024, 65_536, 64
"""What a multiprocessor has of each; the second is what every program's shared memory costs besides."""

_TYPES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIGNED = [["tt.divisibility", 16]]
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_WIDTH = re.compile(r"\.[US]?(8|16|64|128)(?:\.|$)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """What a kernel became on one architecture."""

    registers: int
    """A thread."""
    stack: int
    """Bytes a thread."""
    shared: int
    """Bytes of shared memory a program."""
    warps: int
    """Warps a program, those of warp specialisation included."""
    opcodes: Counter[str]
    """Machine instructions by full name, for example QGMMA.64x128x32.F32.E4M3.E4M3."""
    ptx: str

    def count(self, prefix: str) -> int:
        """Instructions whose name starts so."""
        return sum(number for name, number in self.opcodes.items() if name.startswith(prefix))

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.count("STL") + self.count("LDL")

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at a time, by its registers, shared memory and warps."""
        registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(registers, SHARED // (self.shared + SHARED_RESERVED), WARPS // self.warps)

    @property
    def bytes_loaded(self) -> int:
        """Bytes a thread asks global memory for, each load counted once, by its width."""
        return sum(number * _width(name) for name, number in self.opcodes.items() if name.startswith("LDG"))


def compile_launch(launch: Launch, architecture: int) -> MachineCode:
    """Compile a launch as the just-in-time compiler would specialise it. Needs neither GPU nor driver."""
    signature, constants, attributes = _specialised(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, **launch.options}
    built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage, listing = _dumped(built.asm["cubin"])
    found = _USAGE.search(usage)
    assert found, usage
    return MachineCode(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=built.metadata.shared,
        warps=built.metadata.num_warps,
        opcodes=Counter(_OPCODE.findall(listing)),
        ptx=built.asm["ptx"],
    )


def compile_shipped(
    cases: Sequence[tuple[int, str]], processes: int = 1
) -> dict[tuple[int, str], MachineCode]:
    """Machine code of shipped kernels, named by architecture and name."""
    if processes <= 1:
        return {case: _compile_case(case) for case in cases}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return dict(zip(cases, pool.map(_compile_case, cases), strict=True))


def _compile_case(case: tuple[int, str]) -> MachineCode:
    architecture, name = case
    return compile_launch(_shipped(architecture)[name].launch, architecture)


@cache
def _shipped(architecture: int) -> Any:
    # Imported here: what ships is built from launches, which this module only compiles.
    from fp8_safeguard.kernels.triton_shipped import shipped

    return shipped(architecture)


def _width(load: str) -> int:
    """Bytes of a load by its name, of which LDG.E alone reads 4."""
    found = _WIDTH.search(load)
    return int(found[1]) // 8 if found else 4


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and attributes of the arguments' types and values."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        signature[name] = _type_of(value, parameter.is_constexpr)
        if signature[name] == "constexpr":
            constants[name] = value
        elif _is_aligned(value):
            attributes[(index,)] = _ALIGNED
    return signature, constants, attributes


def _type_of(value: Any, constant: bool) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
    if constant or value is None or (value == 1 and isinstance(value, int)):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _dumped(cubin: bytes) -> tuple[str, str]:
    """Resource usage and disassembly of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        return usage, _output("nvdisasm", "-c", file.name)


def _output(tool: str, *arguments: str) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
