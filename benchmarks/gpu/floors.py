"""What each kernel must move and compute, and how fast it could."""

# No torch here: the documentation's tables come from this file too. Sizes: R rows x C columns of a matrix; M tokens, N output
# and K input features of a GEMM; T tokens, D width, k copies a token, R rows of all copies, E experts, F SwiGLU width,
# H heads, C channels of a head (moe). b(n) counts blocks of 128.

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK = 128
PAGE = Path(__file__).parents[2] / "docs" / "gemms.md"
PART = re.compile(
    r"(<!-- (?P<name>[\w-]+): written by benchmarks/gpu/floors\.py -->\n).*?(?=<!-- end -->)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What a GPU reaches at best, by others' measurements and the datasheet; none of it measured here."""

    name: str
    bandwidth: float
    """Bytes a second."""
    fp8: float
    """Dense FLOP/s of the tensor cores on FP8."""
    bf16: float
    """Dense FLOP/s of the tensor cores on BF16."""
    fp32: float
    """FLOP/s outside the tensor cores."""


TENSOR_SHARE, MEMORY_SHARE = 0.78, 0.92
"""Of the datasheet's peak, reached by large GEMMs and by elementwise kernels on an H100 (torchao, roofline_utils.py)."""
FP8_PEAK, BF16_PEAK, FP32_PEAK = 1979e12, 989e12, 67e12
"""Datasheet of the H100 SXM and of the H200, without sparsity."""

H100 = Ceilings(
    name="H100 SXM", bandwidth=MEMORY_SHARE * 3.35e12, fp8=TENSOR_SHARE * FP8_PEAK, bf16=TENSOR_SHARE * BF16_PEAK, fp32=FP32_PEAK
)  # fmt: skip
H200 = Ceilings(
    name="H200", bandwidth=MEMORY_SHARE * 4.8e12, fp8=TENSOR_SHARE * FP8_PEAK, bf16=TENSOR_SHARE * BF16_PEAK, fp32=FP32_PEAK
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes and FLOPs of one call: each input read once, each output written once."""

    reads: int
    writes: int
    tensor: int = 0
    """FLOPs on the tensor cores."""
    vector: int = 0
    """FLOPs outside them."""
    unit: str = "fp8"
    """What the tensor cores multiply: `fp8` or `bf16`."""

    @property
    def bytes(self) -> int:
        """Reads and writes together."""
        return self.reads + self.writes

    def parts(self, ceilings: Ceilings) -> dict[str, float]:
        """Seconds of each resource if it were the only limit."""
        tensor = ceilings.fp8 if self.unit == "fp8" else ceilings.bf16
        return {
            "memory": self.bytes / ceilings.bandwidth,
            "tensor cores": self.tensor / tensor,
            "FP32 units": self.vector / ceilings.fp32,
        }

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor: the slowest resource, the others hidden behind it."""
        return max(self.parts(ceilings).values())

    def bound(self, ceilings: Ceilings) -> str:
        """The resource that decides."""
        parts = self.parts(ceilings)
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Formulas of one kernel's work, as Python expressions of its sizes."""

    does: str
    reads: str
    """Bytes."""
    writes: str
    """Bytes."""
    tensor: str = "0"
    """FLOPs, a multiplication and an addition counting as two."""
    vector: str = "0"
    """FLOPs outside the tensor cores, counted from the source: orders of magnitude, not the last instruction."""
    unit: str = "fp8"
    sizes: tuple[tuple[str, int], ...]
    """The sizes that the tables show."""

    def work(self, **sizes: int) -> Work:
        """The work at these sizes, by default those of the tables."""
        names = dict(self.sizes) | sizes | {"b": blocks}
        reads, writes, tensor, vector = (
            eval(formula, {"__builtins__": {}}, names)
            for formula in (self.reads, self.writes, self.tensor, self.vector)
        )
        return Work(reads=reads, writes=writes, tensor=tensor, vector=vector, unit=self.unit)


def blocks(size: int) -> int:
    """Blocks of 128 that a dimension takes."""
    return -(-size // BLOCK)


SQUARE = (("R", 8192), ("C", 8192))
DENSE = (("M", 8192), ("N", 7168), ("K", 16384))
GROUPED = (("M", 32768), ("N", 2048), ("K", 7168), ("E", 8))
MOE = (("T", 8192), ("D", 8192), ("k", 8), ("R", 65536), ("E", 64))
WIDE = (("R", 8192), ("F", 8192))
NORM = (("T", 8192), ("D", 8192))
HEADS = (("T", 8192), ("H", 64), ("C", 128))
ROUTER = (("T", 8192), ("E", 256), ("k", 8), ("R", 65536))

QUANTISING = {
    "quantize_row": Kernel(
        does="codes and [1,128] scales", reads="2*R*C", writes="R*C + 4*R*b(C)", vector="5*R*C", sizes=SQUARE
    ),
    "quantize_col": Kernel(
        does="codes and [128,1] scales, stored transposed",
        reads="2*R*C", writes="R*C + 4*b(R)*C", vector="5*R*C", sizes=SQUARE,
    ),
    "quantize_tile": Kernel(
        does="codes and [128,128] scales",
        reads="2*R*C", writes="R*C + 4*b(R)*b(C)", vector="5*R*C", sizes=SQUARE,
    ),
    "quantize_row_col": Kernel(
        does="both from one read",
        reads="2*R*C", writes="2*R*C + 4*R*b(C) + 4*b(R)*C", vector="10*R*C", sizes=SQUARE,
    ),
    "quantize_row_col_stats": Kernel(
        does="both, and TensorStats of both: 1,408 bytes of partial sums a tile and layout go out and come back",
        reads="2*R*C + 2816*b(R)*b(C)", writes="2*R*C + 4*R*b(C) + 4*b(R)*C + 2816*b(R)*b(C)",
        vector="44*R*C", sizes=SQUARE,
    ),
    "stats_row_col": Kernel(
        does="TensorStats of both layouts, no codes kept",
        reads="2*R*C + 2816*b(R)*b(C)", writes="2816*b(R)*b(C)", vector="44*R*C", sizes=SQUARE,
    ),
    "transpose_tiles": Kernel(
        does="a tile weight turned, bytes and scales", sizes=(("N", 8192), ("K", 8192)),
        reads="N*K + 4*b(N)*b(K)", writes="N*K + 4*b(N)*b(K)",
    ),
    "reblock": Kernel(
        does="row codes to col codes, power-of-two scales",
        reads="R*C + 4*R*b(C)", writes="R*C + 4*b(R)*C", vector="6*R*C", sizes=SQUARE,
    ),
    "quantize_mx": Kernel(
        does="blocks of 32, E8M0 scales", reads="2*R*C", writes="R*C + R*C//32", vector="6*R*C", sizes=SQUARE
    ),
    "logfmt_encode": Kernel(
        does="LogFMT-8, two numbers a [1,128] tile, in float64 (an operation there counts as two)",
        reads="2*R*C", writes="R*C + 8*R*b(C)", vector="280*R*C", sizes=SQUARE,
    ),
    "logfmt_decode": Kernel(
        does="and back to BF16", reads="R*C + 8*R*b(C)", writes="2*R*C", vector="80*R*C", sizes=SQUARE
    ),
}  # fmt: skip

GEMMS = {
    "fprop": Kernel(
        does="Y = X W^T: x row, w tile, BF16 out", sizes=DENSE,
        reads="M*K + N*K + 4*M*b(K) + 4*b(N)*b(K)", writes="2*M*N", tensor="2*M*N*K", vector="2*M*N*b(K)",
    ),
    "dgrad": Kernel(
        does="dX = dY W: dy row, w tile turned, BF16 out", sizes=DENSE,
        reads="M*N + N*K + 4*M*b(N) + 4*b(N)*b(K)", writes="2*M*K", tensor="2*M*N*K", vector="2*M*K*b(N)",
    ),
    "wgrad": Kernel(
        does="dW = dY^T X: both col, FP32 out", sizes=DENSE,
        reads="M*N + M*K + 4*b(M)*(N + K)", writes="4*N*K", tensor="2*M*N*K", vector="3*N*K*b(M)",
    ),
    "wgrad_accumulate": Kernel(
        does="added to the gradient that is there", sizes=DENSE,
        reads="M*N + M*K + 4*b(M)*(N + K) + 4*N*K", writes="4*N*K", tensor="2*M*N*K", vector="3*N*K*b(M)",
    ),
    "grouped_fprop": Kernel(
        does="each expert's rows times its weight; grouped dgrad with N and K exchanged", sizes=GROUPED,
        reads="M*K + E*N*K + 4*M*b(K) + 4*E*b(N)*b(K) + 4*(E + 1)", writes="2*M*N", tensor="2*M*N*K",
        vector="2*M*N*b(K)",
    ),
    "grouped_wgrad": Kernel(
        does="dY^T X expert by expert, FP32 out", sizes=GROUPED,
        reads="M*(N + K) + 4*(b(M) + E)*(N + K) + 4*(E + 1)", writes="4*E*N*K", tensor="2*M*N*K",
        vector="3*N*K*(b(M) + E)",
    ),
    "bf16": Kernel(
        does="the same product in BF16, for comparison", sizes=DENSE, unit="bf16",
        reads="2*M*K + 2*N*K", writes="2*M*N", tensor="2*M*N*K",
    ),
}  # fmt: skip

FUSED = {
    "topk": Kernel(
        does="group-limited sigmoid router", reads="4*T*E + 4*E", writes="8*T*k", vector="10*T*E", sizes=ROUTER
    ),
    "topk_backward": Kernel(
        does="gradient of the logits", reads="4*T*E + 8*T*k", writes="4*T*E", vector="8*T*E", sizes=ROUTER
    ),
    "routing": Kernel(
        does="rows by expert, padded to 16", reads="4*T*k", writes="4*R + 4*T*k + 8*E", sizes=ROUTER
    ),
    "gather": Kernel(
        does="permute, zero rows, quantise row and col",
        reads="2*T*D + 4*R", writes="2*R*D + 4*R*b(D) + 4*(b(R) + E)*D", vector="10*R*D", sizes=MOE,
    ),
    "sum_copies": Kernel(
        does="unpermute and weighted sum", reads="2*T*k*D + 8*T*k", writes="2*T*D", vector="2*T*k*D", sizes=MOE
    ),
    "combine_backward": Kernel(
        does="its gradient: of the rows, quantised row and col, and of the weights",
        reads="2*T*D + 2*R*D + 8*T*k", writes="2*R*D + 4*R*b(D) + 4*(b(R) + E)*D + 4*T*k", vector="13*R*D", sizes=MOE,
    ),
    "swiglu": Kernel(
        does="SwiGLU times probability, quantised row and col",
        reads="4*R*F + 4*R", writes="2*R*F + 4*R*b(F) + 4*b(R)*F", vector="20*R*F", sizes=WIDE,
    ),
    "swiglu_backward": Kernel(
        does="its gradient, quantised row and col, and of the probability",
        reads="6*R*F + 4*R", writes="4*R*F + 4*R*b(2*F) + 8*b(R)*F + 4*R", vector="45*R*F", sizes=WIDE,
    ),
    "rms_norm": Kernel(
        does="RMSNorm, quantised row and col",
        reads="2*T*D + 4*D", writes="2*T*D + 4*T*b(D) + 4*b(T)*D + 4*T", vector="15*T*D", sizes=NORM,
    ),
    "rms_norm_backward": Kernel(
        does="its gradient and the gain's", reads="4*T*D + 4*D + 4*T", writes="2*T*D + 4*D", vector="12*T*D", sizes=NORM
    ),
    "qk_norm_rope": Kernel(
        does="norm of each head, then rotation, FP32 out",
        reads="2*T*H*C + 8*T*C + 4*C", writes="4*T*H*C + 4*T*H", vector="10*T*H*C", sizes=HEADS,
    ),
    "qk_norm_rope_backward": Kernel(
        does="its gradient and the gain's",
        reads="6*T*H*C + 8*T*C + 4*C + 4*T*H", writes="2*T*H*C + 4*C", vector="18*T*H*C", sizes=HEADS,
    ),
}  # fmt: skip

KERNELS = QUANTISING | GEMMS | FUSED


def table(kernels: dict[str, Kernel]) -> str:
    """The kernels' formulas and floors as Markdown."""
    lines = [
        "| kernel | gives | reads (bytes) | writes (bytes) | FLOPs: tensor cores; FP32 | at | MB moved | floor H100, H200 (µs) | bound by (H200) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kernel in kernels.items():
        work = kernel.work()
        at = ", ".join(f"{size}={value}" for size, value in kernel.sizes)
        flops = "; ".join(f"`{part}`" if part != "0" else "none" for part in (kernel.tensor, kernel.vector))
        floors = ", ".join(f"{1e6 * work.seconds(ceilings):.0f}" for ceilings in (H100, H200))
        cells = (f"`{name}`", kernel.does, f"`{kernel.reads}`", f"`{kernel.writes}`", flops, at)
        lines.append(f"| {' | '.join(cells)} | {work.bytes / 1e6:.0f} | {floors} | {work.bound(H200)} |")
    return "\n".join(lines) + "\n"


def ceilings_table() -> str:
    """The ceilings as Markdown."""
    lines = ["| | memory (TB/s) | FP8 (TFLOP/s) | BF16 (TFLOP/s) | FP32 (TFLOP/s) |", "|---|---|---|---|---|"]
    for gpu in (H100, H200):
        numbers = f"{gpu.bandwidth / 1e12:.2f} | {gpu.fp8 / 1e12:.0f} | {gpu.bf16 / 1e12:.0f} | {gpu.fp32 / 1e12:.0f}"
        lines.append(f"| {gpu.name} | {numbers} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with its generated parts renewed."""
    parts: dict[str, Callable[[], str]] = {
        "ceilings": ceilings_table,
        "quantising": lambda: table(QUANTISING),
        "gemms": lambda: table(GEMMS),
        "fused": lambda: table(FUSED),
    }
    return PART.sub(lambda found: str(found[1]) + parts[str(found["name"])](), page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tables into docs/gemms.md."""
    argparse.ArgumentParser(description="Renew the tables of docs/gemms.md.").parse_args(arguments)
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    main()
