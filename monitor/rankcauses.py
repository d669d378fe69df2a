"""Tells one bad rank, or host, from a fault of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8_safeguard.monitor.cause import Diagnosis, Finding, numbers, percent
from fp8_safeguard.monitor.slots import gemm_slot
from fp8_safeguard.monitor.symptoms import Symptoms

RANK_RATIO = 1.35
"""One rank's error over the merged one: 1 where R ranks are alike, the root of R where all of it is that rank's."""
RANK_ERROR = 0.10
"""Relative error of one rank from which on it is worth naming."""
RANK_SURE = 0.15
"""And from which on one sample is enough, as for a GEMM's own error."""


def rank_findings(seen: Symptoms) -> Iterator[Finding]:
    """One rank whose results are wrong, and whose alone; or several of one host."""
    suspects = [record for record in seen.view.seen.ranks if _stands_out(seen, record)]
    ranks = sorted({int(record["rank"]) for record in suspects})
    hosts = {str(record.get("host") or "") for record in suspects}
    if not suspects or (len(ranks) > 1 and (len(hosts) > 1 or hosts == {""})):
        return
    host = hosts.pop()
    # Where it begins; what comes after it is wrong by then, too.
    worst = min(suspects, key=lambda record: (record["gemm"] != "fprop", seen.rank[record["layer"]]))
    layer, gemm, value = str(worst["layer"]), str(worst["gemm"]), float(worst["value"])
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    merged = seen.value(layer, gemm, "relative_error")
    said = Diagnosis(
        cause="one-rank",
        kind="hardware",
        layer=layer,
        slot=gemm_slot(layer, gemm),
        summary=f"{layer!r} {gemm} is {percent(value)} off on {who} alone"
        f"{f', host {host}' if host else ''} (all ranks together {percent(merged)})",
        advice=f"take {f'host {host}' if host else who} out and test its memory",
        evidence={"ranks": ranks, "host": host, **numbers(gemm_error=value, merged_gemm_error=merged)},
    )
    yield Finding(said=said, group="one-rank", samples=1 if value >= RANK_SURE else 2)


def _stands_out(seen: Symptoms, record: Mapping[str, Any]) -> bool:
    """Whether a rank's recomputed GEMM is wrong, and so much more so than that of all ranks together."""
    layer, gemm, value = record.get("layer"), record.get("gemm"), record.get("value")
    known = isinstance(layer, str) and isinstance(gemm, str) and seen.has(layer, gemm)
    if not known or record.get("metric") != "relative_error" or not isinstance(value, int | float):
        return False
    merged = seen.value(str(layer), str(gemm), "relative_error")
    return value >= RANK_ERROR and value >= RANK_RATIO * merged
