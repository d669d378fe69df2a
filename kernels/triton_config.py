"""Triton: the GEMM configuration for an architecture and shape."""

# Every configuration here is compiled by tests/compile for its architecture: no spills, shared memory within the limit,
# tensor-core instructions. Nothing is tuned when a module is imported: of a few candidates the one is taken that a model
# of two limits predicts to be fastest, the tensor core and what the L2 cache delivers.

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.errors import KernelError

HOPPER, BLACKWELL = 90, 100
ASSUMED_PROCESSORS = 132
"""Multiprocessors assumed where there is no device to ask: an H100's."""
PRODUCTS_PER_CLOCK = {HOPPER: 4096, BLACKWELL: 8192}
"""FP8 multiply-adds of a multiprocessor: 1979 TFLOP/s of 132 at 1.83 GHz, 4500 of 148 at 1.85 GHz."""
L2_BYTES_PER_CLOCK = 38
"""What a multiprocessor gets from the L2 cache when all read: an A100's 5120 bytes, over 132. Assumed, not measured."""


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How one GEMM is cut and scheduled. Every block is 128 deep: one scale, one promotion to float32."""

    block_m: int
    """Rows of the result a program computes at a time."""
    block_n: int = 128
    """Columns of the result: 128, or 192 through TMA, of which a fifth less has to come from the L2 cache."""
    warps: int
    stages: int
    """Blocks of the summed dimension in flight."""
    tma: bool
    """Whether operands come through the tensor memory accelerator (aligned, K-major) or by pointers."""
    specialize: bool = False
    """Whether loads and products run in warps of their own."""
    second_n: int = 0
    """Columns of the block's second product, which runs while the first is scaled and added; through TMA only."""
    group_m: int = 8
    """Blocks of rows that walk the columns together, to share their operands in the L2 cache."""
    resident: int = 1
    """Programs that a multiprocessor holds at a time, by registers and shared memory."""

    @property
    def first_n(self) -> int:
        """Columns of the block's first product."""
        return self.block_n - self.second_n


_WIDE = GemmConfig(block_m=128, block_n=192, second_n=64, warps=8, stages=4, tma=True)
_TMA = GemmConfig(block_m=128, warps=8, stages=4, tma=True)
_HALVES = replace(_TMA, second_n=64)
_LOW = GemmConfig(block_m=64, warps=4, stages=4, tma=True, resident=2)
_POINTER = GemmConfig(block_m=128, warps=8, stages=3, tma=False)
_SMALL = GemmConfig(block_m=64, warps=4, stages=3, tma=False)
_THIN = GemmConfig(block_m=64, warps=8, stages=3, tma=False)
_TABLE = {
    # 192 columns are the most of which two warp groups hold both sums and products without spilling.
    (HOPPER, "tile"): (_WIDE, _TMA, _LOW),
    # A scale a column takes registers: two halves of a block, one promoted while the other is multiplied.
    (HOPPER, "row"): (_HALVES,),
    (HOPPER, "grouped tile"): (_WIDE, _LOW),
    (HOPPER, "grouped row"): (_HALVES,),
    (HOPPER, "grouped col"): (_HALVES,),
    # On Hopper Triton 3.7 ignores warp specialisation of these blocks without a word, so it is not asked for.
    (BLACKWELL, "tile"): (replace(_TMA, specialize=True), _LOW),
    (BLACKWELL, "row"): (replace(_TMA, stages=3),),
    (BLACKWELL, "grouped tile"): (_TMA, _LOW),
    (BLACKWELL, "grouped row"): (replace(_THIN, tma=True),),
    (BLACKWELL, "grouped col"): (replace(_LOW, stages=3),),
}
"""Candidates through TMA by architecture and scales of the second operand: `tile` has one a block, others a vector."""

ANY = 8192
"""Rows or columns of a result of which nothing is known."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a configuration makes of a shape, before any measurement."""

    blocks: int
    waves: float
    """Blocks over what all multiprocessors hold; the last, partial wave takes as long as a full one."""
    busy: float
    """Share of the multiprocessors' time with work, and of the blocks with results."""
    bound: str
    """`L2 cache` or `tensor core`: the slower of the two."""
    peak: float
    """Upper bound on the share of the tensor core's peak, from waves, ragged edges and the L2 cache."""
    clocks: float
    """Clocks of a multiprocessor for 128 of the summed dimension."""


def predict(
    architecture: int, config: GemmConfig, m: int, n: int, processors: int = ASSUMED_PROCESSORS
) -> Prediction:
    """The model's view of a result of m rows and n columns, whatever K."""
    rate = PRODUCTS_PER_CLOCK[architecture]
    blocks = -(-m // config.block_m) * -(-n // config.block_n)
    tensor = config.block_m * config.block_n * BLOCK / rate
    cache = (config.block_m + config.block_n) * BLOCK / L2_BYTES_PER_CLOCK
    together = min(config.resident, -(-blocks // processors))
    waves = blocks / (processors * together)
    rounds = -(-blocks // (processors * together)) * together
    clocks = rounds * max(tensor, cache)
    return Prediction(
        blocks=blocks,
        waves=waves,
        busy=m * n / (rounds * processors * config.block_m * config.block_n),
        bound="L2 cache" if cache > tensor else "tensor core",
        peak=m * n * BLOCK / rate / processors / clocks,
        clocks=clocks,
    )


def gemm_config(
    architecture: int,
    m: int,
    n: int = ANY,
    *,
    scales: str,
    tma: bool,
    grouped: bool = False,
    processors: int = ASSUMED_PROCESSORS,
) -> GemmConfig:
    """The configuration for a result [m,n]; tma says that the operands allow it.

    `scales` is the layout of the second operand. Of a `grouped` product m is what an expert has on average; `col` is
    its weight gradient.
    """
    choices = candidates(architecture, scales=scales, tma=tma, grouped=grouped)
    if grouped or not tma:
        return choices[-1] if m <= choices[-1].block_m else choices[0]
    return min(choices, key=lambda config: predict(architecture, config, m, n, processors).clocks)


def candidates(architecture: int, *, scales: str, tma: bool, grouped: bool = False) -> tuple[GemmConfig, ...]:
    """Configurations that ship, for large results first."""
    if architecture not in PRODUCTS_PER_CLOCK:
        raise KernelError(
            f"compute capability {architecture / 10} has no FP8 GEMM here: 9.0 (Hopper) and 10.0 (Blackwell) do; "
            "use precision bf16"
        )
    if not tma:
        thin = grouped and scales != "tile" and architecture == BLACKWELL
        return (_THIN,) if thin else (_POINTER, _SMALL)
    if scales == "col" and not grouped:
        scales = "row"
    return _TABLE[architecture, f"grouped {scales}" if grouped else scales]


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
