"""Tries other GEMM configurations on the timed shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu.case import Bench, Case, Row, kernels
from gpu.floors import KERNELS
from gpu.gemm_checks import quantised
from gpu.gemm_timing import DENSE_NK, GROUPED, named, uneven
from gpu.timing import Call, achieved, race

WARPS, STAGES, GROUPS = (4, 8), (3, 4, 5, 6), (4, 16)
"""Tried on what ships; groups (rows of blocks that walk the columns together) on the best of the others."""


def alternatives(bench: Bench, **wanted: Any) -> list[Any]:
    """Configurations that ship for such operands, and their neighbours."""
    table = kernels("triton_config")
    architecture = table.architecture_of(torch.device(bench.device))
    shipped = [
        config for tma in (True, False) for config in table.candidates(architecture, tma=tma, **wanted)
    ]
    near = [
        replace(config, warps=warps, stages=stages)
        for config in shipped
        for warps in WARPS
        for stages in STAGES
    ]
    return [*shipped, *(config for config in near if config not in shipped)]


def best_of(bench: Bench, case: str, call: Any, work: Any, **wanted: Any) -> Sequence[Row]:
    """Every configuration's time, the first that ships as baseline; then group sizes of the best."""
    tried = alternatives(bench, **wanted)[: 2 if bench.small else None]
    configs = {named(config): config for config in tried}
    rows = _raced(bench, case, call, configs, tried[0], work)
    best = configs[_fastest(rows)["config"]]
    groups = {named(other): other for other in (best, *(replace(best, group_m=size) for size in GROUPS))}
    rows += _raced(bench, case, call, groups, best, work)
    winner = _fastest(rows)
    return [*rows, winner | {"case": f"{case} best: {winner['config']}"}]


def _fastest(rows: list[Row]) -> Row:
    return min((row for row in rows if row["value"] is not None), key=lambda row: row["value"])


def _raced(
    bench: Bench, case: str, call: Any, configs: dict[str, Any], baseline: Any, work: Any
) -> list[Row]:
    calls: dict[str, Call] = {name: partial(call, config) for name, config in configs.items()}
    timed = race(bench, calls)
    rows = []
    for name, seconds in ((name, timed.median(name)) for name in timed.seconds):
        ratio, low, high = (
            timed.ratio(name, named(baseline)) if named(baseline) in timed.seconds else (None,) * 3
        )
        row = {
            "case": f"{case} {name}",
            "value": 1e3 * seconds,
            "unit": "ms",
            "ratio": ratio,
            "low": low,
            "high": high,
        }
        rows.append(row | {"goal": None, "kind": "tune", "config": name} | achieved(work, seconds))
    empty: Row = dict.fromkeys(("value", "ratio", "low", "high", "goal"))
    rows += [
        {"case": f"{case} {name}", **empty, "unit": "ms", "kind": "tune", "config": name, "error": error}
        for name, error in timed.errors.items()
    ]
    return rows


def dense(bench: Bench, *, m: int, n: int, k: int) -> Sequence[Row]:
    """Configurations of one dense shape."""
    work, case = KERNELS["fprop"].work(M=m, N=n, K=k), f"tune fprop {m}x{n}x{k}"
    m, n, k = (128, 128, 128) if bench.small else (m, n, k)
    x, w = quantised(bench, bench.normal(m, k), "row"), quantised(bench, bench.normal(n, k), "tile")
    gemm = kernels("triton_products").fp8_gemm_nt
    return best_of(bench, case, lambda config: gemm(x, w, torch.bfloat16, config=config), work, scales="tile")


def grouped(bench: Bench, *, m: int, e: int, n: int, k: int) -> Sequence[Row]:
    """Configurations of the grouped wgrad."""
    work = KERNELS["grouped_wgrad"].work(M=m, N=n, K=k, E=e)
    case, wanted = f"tune grouped wgrad {m}x{n}x{k} E{e}", {"scales": "col", "grouped": True}
    m, e, n, k = (256, 4, 128, 128) if bench.small else (m, e, n, k)
    offsets = torch.tensor(uneven(m, e), dtype=torch.int32, device=bench.device)
    dy, x = (quantised(bench, bench.normal(m, width), "col", offsets, aligned=True) for width in (n, k))
    gemm = kernels("triton_products").grouped_gemm_wgrad
    return best_of(
        bench, case, lambda config: gemm(dy, x, offsets, aligned=True, config=config), work, **wanted
    )


def cases() -> Iterator[Case]:
    """One case a shape; nothing here is checked."""
    for n, k in DENSE_NK:
        run = partial(dense, m=8192, n=n, k=k)
        yield Case(name=f"tune fprop 8192x{n}x{k}", kind="tune", run=run, seconds=45, interpreted=n == 2112)
    for m, e, n, k in GROUPED:
        run = partial(grouped, m=m, e=e, n=n, k=k)
        yield Case(name=f"tune grouped wgrad {m}x{n}x{k} E{e}", kind="tune", run=run, seconds=50)
