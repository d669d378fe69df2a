"""Times the products, dense and grouped, against BF16 and other libraries."""

# Shapes: M x N the result, K the summed dimension, E experts.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu import contenders
from gpu.case import Bench, Case, Row, kernels
from gpu.floors import KERNELS, Work
from gpu.gemm_checks import quantised
from gpu.timing import Call, race, rows_of
from torch import Tensor

from fp8_safeguard.kernels import QuantizedTensor
from fp8_safeguard.kernels.triton_products import turned

DENSE_M = (4096, 8192)
DENSE_NK = (
    (24576, 1536), (7168, 16384), (7168, 2048), (4096, 7168), (2112, 7168), (18432, 7168), (8192, 8192), (18432, 8192),
)  # fmt: skip
BACKWARD_NK = ((7168, 2048), (4096, 7168), (2112, 7168), (8192, 8192))
"""Of the dense shapes, those whose backward is timed too."""
GROUPED = ((32768, 8, 2048, 7168), (32768, 64, 2048, 8192))
"""M, E, N, K."""
DENSE_GOAL, GROUPED_GOAL = 1 / 1.5, 1 / 1.4
"""Our time over that of BF16."""
WGRAD_TFLOPS = 457
"""The grouped wgrad of DeepGEMM in torchao on an H100: the figure to pass."""
ALIGNMENT = 16


def works(kernel: str, **sizes: int) -> dict[str, Work]:
    """The work of each contender: theirs in BF16 moves twice the bytes."""
    fp8, bf16 = KERNELS[kernel].work(**sizes), KERNELS["bf16"].work(**{key: sizes[key] for key in "MNK"})
    return defaultdict(lambda: fp8, bf16=bf16)


def shape_of(gemm: str, sizes: dict[str, int]) -> dict[str, Any]:
    """What a choice is made for."""
    return {"shape": {"gemm": gemm, **{key.lower(): value for key, value in sizes.items()}}}


def configurations(bench: Bench, m: int, n: int) -> tuple[Any, list[Any]]:
    """The configuration that a dense product of that size gets, and the others that ship."""
    table, device = kernels("triton_config"), torch.device(bench.device)
    architecture, wanted = table.architecture_of(device), {"scales": "tile", "tma": True}
    choice = table.gemm_config(architecture, m, n, **wanted, processors=table.processors_of(device))
    return choice, [config for config in table.candidates(architecture, **wanted) if config != choice]


def named(config: Any) -> str:
    """A configuration in a few letters."""
    path = "tma" if config.tma else "pointer"
    return f"{path} {config.block_m}x{config.first_n}+{config.second_n} w{config.warps} s{config.stages} g{config.group_m}"


def fprop(bench: Bench, *, m: int, n: int, k: int) -> Sequence[Row]:
    """Y = X W^T, alone and with the quantising of X that BF16 does without."""
    name, sizes = f"fprop {m}x{n}x{k}", {"M": m, "N": n, "K": k}
    m, n, k = (min(m, 128), min(n, 128), min(k, 256)) if bench.small else (m, n, k)
    x_MK, w_NK = bench.normal(m, k), bench.normal(n, k)
    x, w = quantised(bench, x_MK, "row"), quantised(bench, w_NK, "tile")
    gemm, half = kernels("triton_products").fp8_gemm_nt, torch.bfloat16
    calls: dict[str, Call] = {
        "ours": lambda: gemm(x, w, half),
        "bf16": contenders.bf16(x_MK, w_NK),
        "ours with quantise": lambda: gemm(quantised(bench, x_MK, "row"), w, half),
        **contenders.others(x, w, half),
    }
    # What the table of configurations did not choose here: it predicts, this measures.
    choice, rest = configurations(bench, sizes["M"], sizes["N"])
    calls |= {f"ours {named(config)}": partial(gemm, x, w, half, config=config) for config in rest}
    more = shape_of("fprop", sizes) | {"config": named(choice)}
    return rows_of(
        name,
        race(bench, calls),
        ours="ours",
        baseline="bf16",
        works=works("fprop", **sizes),
        goal=DENSE_GOAL,
        **more,
    )


def dgrad(bench: Bench, *, m: int, n: int, k: int) -> Sequence[Row]:
    """dX = dY W: W turned before, or on its way to the tensor core."""
    name, sizes = f"dgrad {m}x{n}x{k}", {"M": m, "N": n, "K": k}
    m, n, k = (min(m, 128), min(n, 128), min(k, 128)) if bench.small else (m, n, k)
    dy_MN, w_NK = bench.normal(m, n), bench.normal(n, k)
    dy, w = quantised(bench, dy_MN, "row"), quantised(bench, w_NK, "tile")
    w_KN, view = kernels("triton_transpose").transpose_tiles(w), turned(w)
    gemm, turn, half = (
        kernels("triton_products").fp8_gemm_nt,
        kernels("triton_transpose").transpose_tiles,
        torch.bfloat16,
    )
    calls: dict[str, Call] = {
        "ours": lambda: gemm(dy, w_KN, half),
        "bf16": lambda: torch.mm(dy_MN, w_NK),
        "ours with transpose": lambda: gemm(dy, turn(w), half),
        "ours fused transpose": lambda: gemm(dy, view, half),
        **contenders.others(dy, w_KN, half),
    }
    more = shape_of("dgrad", sizes)
    return rows_of(
        name,
        race(bench, calls),
        ours="ours",
        baseline="bf16",
        works=works("dgrad", **sizes),
        goal=DENSE_GOAL,
        **more,
    )


def wgrad(bench: Bench, *, m: int, n: int, k: int) -> Sequence[Row]:
    """dW = dY^T X in float32."""
    name, sizes = f"wgrad {m}x{n}x{k}", {"M": m, "N": n, "K": k}
    m, n, k = (min(m, 256), min(n, 128), min(k, 128)) if bench.small else (m, n, k)
    dy_MN, x_MK = bench.normal(m, n), bench.normal(m, k)
    dy, x = quantised(bench, dy_MN, "col"), quantised(bench, x_MK, "col")
    gemm, full = kernels("triton_products").fp8_gemm_wgrad, torch.float32
    into = torch.zeros(n, k, device=bench.device)
    calls: dict[str, Call] = {
        "ours": lambda: gemm(dy, x, full),
        "bf16": lambda: torch.mm(dy_MN.t(), x_MK),
        "ours accumulating": lambda: gemm(dy, x, out=into),
        **contenders.others(turned(dy), turned(x), full),
    }
    more = shape_of("wgrad", sizes)
    done = works("wgrad", **sizes) | {"ours accumulating": KERNELS["wgrad_accumulate"].work(**sizes)}
    return rows_of(
        name, race(bench, calls), ours="ours", baseline="bf16", works=done, goal=DENSE_GOAL, **more
    )


def uneven(rows: int, experts: int) -> list[int]:
    """Aligned offsets of experts whose shares run from a quarter to about twice the mean; one has none."""
    weights = [
        0.0 if expert == experts // 2 else 0.25 + (expert * 7 % experts) * 1.75 / experts
        for expert in range(experts)
    ]
    shares = [int(weight / sum(weights) * rows) // ALIGNMENT * ALIGNMENT for weight in weights]
    shares[0] += rows - sum(shares)
    return torch.tensor([0, *shares]).cumsum(0).tolist()


def grouped_operands(
    bench: Bench, rows: int, experts: int, n: int, k: int
) -> tuple[Tensor, Tensor, QuantizedTensor, QuantizedTensor, Tensor]:
    """x, w, both quantised, and the offsets."""
    offsets = torch.tensor(uneven(rows, experts), dtype=torch.int32, device=bench.device)
    x_MK, w_NK = bench.normal(rows, k), bench.normal(experts * n, k)
    w_ENK = w_NK.reshape(experts, n, k)
    return x_MK, w_ENK, quantised(bench, x_MK, "row"), quantised(bench, w_ENK, "tile"), offsets


def grouped(bench: Bench, *, gemm: str, m: int, e: int, n: int, k: int) -> Sequence[Row]:
    """Grouped fprop, or dgrad, which is the same with N and K exchanged and W turned."""
    name, sizes = f"grouped {gemm} {m}x{n}x{k} E{e}", {"M": m, "N": n, "K": k, "E": e}
    n_out, k_sum = (n, k) if gemm == "fprop" else (k, n)
    work = KERNELS["grouped_fprop"].work(M=m, N=n_out, K=k_sum, E=e)
    if bench.small:
        m, e, n_out, k_sum = 256, 4, 128, 128
    x_MK, w_ENK, x, w, offsets = grouped_operands(bench, m, e, n_out, k_sum)
    call, half = kernels("triton_products").grouped_gemm_nt, torch.bfloat16
    calls: dict[str, Call] = {
        "ours": lambda: call(x, w, offsets, half),
        "bf16": contenders.bf16_grouped(x_MK, w_ENK, offsets),
    }
    more = shape_of(f"grouped_{gemm}", sizes)
    return rows_of(
        name, race(bench, calls), ours="ours", baseline="bf16", work=work, goal=GROUPED_GOAL, **more
    )


def grouped_wgrad(bench: Bench, *, m: int, e: int, n: int, k: int) -> Sequence[Row]:
    """dW of every expert, float32."""
    name, sizes = f"grouped wgrad {m}x{n}x{k} E{e}", {"M": m, "N": n, "K": k, "E": e}
    work = KERNELS["grouped_wgrad"].work(**sizes)
    if bench.small:
        m, e, n, k = 256, 4, 128, 128
    offsets = torch.tensor(uneven(m, e), dtype=torch.int32, device=bench.device)
    dy_MN, x_MK = bench.normal(m, n), bench.normal(m, k)
    dy, x = (quantised(bench, source, "col", offsets, aligned=True) for source in (dy_MN, x_MK))
    call = kernels("triton_products").grouped_gemm_wgrad
    calls: dict[str, Call] = {
        "ours": lambda: call(dy, x, offsets, aligned=True),
        "bf16": contenders.bf16_grouped_wgrad(dy_MN, x_MK, offsets),
    }
    more = shape_of("grouped_wgrad", sizes)
    rows = rows_of(name, race(bench, calls), ours="ours", baseline="bf16", work=work, **more)
    return rows + [_throughput(row) for row in rows if row["case"] == f"{name} ours" and "tflops" in row]


def _throughput(row: Row) -> Row:
    """The same time as TFLOP/s, for a goal that others have set in those."""
    named = {
        "case": f"{row['case']} throughput",
        "value": row["tflops"],
        "unit": "TFLOP/s",
        "goal": WGRAD_TFLOPS,
    }
    return (
        row
        | named
        | {"ratio": WGRAD_TFLOPS / row["tflops"], "low": None, "high": None, "baseline": "457 TFLOP/s"}
    )


def _case(run: Any, name: str, seconds: float, *, interpreted: bool, work: Work, **sizes: int) -> Case:
    return Case(
        name=f"time {name}", kind="timing", run=partial(run, **sizes), seconds=seconds, work=work, interpreted=interpreted,
    )  # fmt: skip


def cases() -> Iterator[Case]:
    """The timings: fprop of every dense shape, the grouped ones, then the backward."""
    for m in DENSE_M:
        for n, k in DENSE_NK:
            work, first = KERNELS["fprop"].work(M=m, N=n, K=k), (m, n, k) == (4096, 24576, 1536)
            yield _case(fprop, f"fprop {m}x{n}x{k}", 1.5, interpreted=first, work=work, m=m, n=n, k=k)
    for m, e, n, k in GROUPED:
        first = e == 8
        for gemm in ("fprop", "dgrad"):
            columns, depth = (n, k) if gemm == "fprop" else (k, n)
            work = KERNELS["grouped_fprop"].work(M=m, N=columns, K=depth, E=e)
            run = partial(grouped, gemm=gemm)
            name = f"grouped {gemm} {m}x{n}x{k} E{e}"
            yield _case(run, name, 4, interpreted=first and gemm == "dgrad", work=work, m=m, e=e, n=n, k=k)
        work = KERNELS["grouped_wgrad"].work(M=m, N=n, K=k, E=e)
        name = f"grouped wgrad {m}x{n}x{k} E{e}"
        yield _case(grouped_wgrad, name, 4, interpreted=first, work=work, m=m, e=e, n=n, k=k)
    for gemm, backward in (("dgrad", dgrad), ("wgrad", wgrad)):
        for n, k in BACKWARD_NK:
            work, first = KERNELS[gemm].work(M=8192, N=n, K=k), (n, k) == BACKWARD_NK[0]
            yield _case(backward, f"{gemm} 8192x{n}x{k}", 2, interpreted=first, work=work, m=8192, n=n, k=k)
