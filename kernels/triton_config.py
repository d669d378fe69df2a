"""Triton: the GEMM configuration for an architecture and shape."""

# Every configuration here is compiled by tests/compile for its architecture: no spills, shared memory within the limit,
# tensor-core instructions. Nothing is tuned when a module is imported.

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from fp8_safeguard.kernels.errors import KernelError

HOPPER, BLACKWELL = 90, 100
ASSUMED_PROCESSORS = 132
"""Multiprocessors assumed where there is no device to ask: an H100's."""


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How one GEMM is cut and scheduled. Every block is 128 deep: one scale, one promotion to float32."""

    block_m: int
    """Rows of the result a program computes at a time."""
    block_n: int = 128
    """Columns of the result; 128 so that a tile-quantised weight has one scale a block."""
    warps: int
    stages: int
    """Blocks of the summed dimension in flight."""
    tma: bool
    """Whether operands come through the tensor memory accelerator (aligned, K-major) or by pointers."""
    specialize: bool = False
    """Whether loads and products run in warps of their own."""
    group_m: int = 8
    """Blocks of rows that walk the columns together, to share their operands in the L2 cache."""


_TMA = GemmConfig(block_m=128, warps=8, stages=3, tma=True)
_POINTER = GemmConfig(block_m=128, warps=8, stages=3, tma=False)
_SMALL = GemmConfig(block_m=64, warps=4, stages=3, tma=False)
_TABLE = {
    (HOPPER, "tile", True): _TMA,
    (HOPPER, "row", True): _TMA,
    (HOPPER, "tile", False): _POINTER,
    (HOPPER, "row", False): _POINTER,
    # On Hopper Triton 3.7 ignores warp specialisation of these blocks without a word, so it is not asked for.
    (BLACKWELL, "tile", True): replace(_TMA, specialize=True),
    (BLACKWELL, "row", True): _TMA,
    (BLACKWELL, "tile", False): _POINTER,
    (BLACKWELL, "row", False): _POINTER,
}
"""By architecture, layout of the second operand's scales (`row`: a vector a block) and whether it goes through TMA."""

SMALL_M = 64
"""Rows up to which a block of 64 wastes less than one of 128."""


def gemm_config(architecture: int, m: int, *, scales: str, tma: bool) -> GemmConfig:
    """The configuration for a result of m rows; tma says that the operands allow it."""
    if architecture not in (HOPPER, BLACKWELL):
        raise KernelError(
            f"compute capability {architecture / 10} has no FP8 GEMM here: 9.0 (Hopper) and 10.0 (Blackwell) do; "
            "use precision bf16"
        )
    if m <= SMALL_M:
        return _SMALL
    return _TABLE[architecture, "tile" if scales == "tile" else "row", tma]


@cache
def architecture_of(device: torch.device) -> int:
    """Compute capability of a CUDA device as 90 or 100; Hopper's for tensors without one."""
    if device.type != "cuda":
        return HOPPER
    major, _minor = torch.cuda.get_device_capability(device)
    return major * 10


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors: the programs of a persistent kernel."""
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
