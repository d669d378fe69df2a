"""Every case, the most valuable first."""

from __future__ import annotations

from gpu import fused_timing, gemm_checks, gemm_timing, moe_checks, quantise_checks, system_checks, tuning
from gpu.case import Bench, Case, Row, mismatches
from gpu.timing import race

from fp8_safeguard.kernels.triton_config import HOPPER, architecture_of


def control(bench: Bench) -> list[Row]:
    """A copy timed against itself: what a ratio of 1 looks like here."""
    side = bench.size(8192, 64)
    source = bench.normal(side, side)
    target = source.clone()
    timed = race(bench, {"A": lambda: target.copy_(source), "B": lambda: target.copy_(source)})
    ratio, low, high = timed.ratio("A", "B")
    interval = {"ratio": ratio, "low": low, "high": high}
    return [
        {
            "case": "control",
            "value": 1e3 * timed.median("A"),
            "unit": "ms",
            **interval,
            "goal": None,
            "kind": "control",
        }
    ]


def device(bench: Bench) -> list[Row]:
    """The kernels are made for this GPU."""
    if bench.device != "cuda":
        return [mismatches("device", 0)]
    import torch

    found = architecture_of(torch.device("cuda", torch.cuda.current_device()))
    return [mismatches("device", int(found < HOPPER), architecture=found)]


def cases(*, tune: bool = False) -> list[Case]:
    """Checks, then timings; with tune only the sweep of configurations."""
    first = [
        Case(name="device", kind="check", run=device, seconds=4, interpreted=True),
        Case(name="control", kind="timing", run=control, seconds=1, interpreted=True),
    ]
    if tune:
        return [*first, *tuning.cases()]
    checks = [*quantise_checks.cases(), *gemm_checks.cases(), *moe_checks.cases(), *system_checks.cases()]
    timings = [*gemm_timing.cases(), *fused_timing.cases()]
    return [*first, *_by_value(checks), *timings]


SECOND = ("log-Gaussian", "multiplier", "capture moe", "torch.compile")
"""Beginnings and parts of names of checks that come last: others cover most of what they do."""


def _by_value(checks: list[Case]) -> list[Case]:
    """Checks that cover something alone before those that repeat it on other data."""
    return sorted(checks, key=lambda case: any(part in case.name for part in SECOND))
