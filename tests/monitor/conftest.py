"""A small model's slots and statistics: healthy as measured, with any slot made ill."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.policy import StepObservation
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats

LINEARS = ("qkv", "o", "shared_up", "shared_down", "expert_up", "expert_down")
OPERANDS = (("x", "row"), ("x", "col"), ("w", "tile"), ("dy", "row"), ("dy", "col"))
HEALTHY_UNDERFLOW = {
    ("x", "row"): 7.7e-4,
    ("x", "col"): 5.9e-4,
    ("w", "tile"): 9.2e-5,
    ("dy", "row"): 7.2e-4,
    ("dy", "col"): 3.2e-3,
}
HEALTHY_ERROR = {"fprop": 0.039, "dgrad": 0.038, "wgrad": 0.037}
HEALTHY_SQNR_DB = 31.4
TOKENS, WIDTH = 1024, 256

Ill = Mapping[tuple[str, str], Mapping[str, Any]]
"""(layer, "x row" or "fprop") to the columns that differ there, or `underflow_ratio`, `error` and such."""


def model_slots(layers: int = 4, gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad")) -> tuple[Slot, ...]:
    """Every slot of a model of so many blocks, in forward order."""
    names = [f"blocks.{block}.{linear}" for block in range(layers) for linear in LINEARS]
    return tuple(
        slot
        for name in names
        for slot in (
            *(Slot(name, operand=operand, layout=layout) for operand, layout in OPERANDS),
            *(Slot(name, gemm=gemm) for gemm in gemms),
        )
    )


def slot_stats(slot: Slot, rng: np.random.Generator | None = None, **ill: Any) -> TensorStats:
    """A slot at its healthy maximum, or below it where a generator is given; `ill` overrides."""
    swing = 1.0 if rng is None else float(rng.uniform(0.0, 1.0))
    if slot.gemm is not None:
        # Swings of a GEMM error against its own median stay below 1.14 (fprop, dgrad) and 1.78 (wgrad).
        least = 0.6 if slot.gemm == "wgrad" else 0.9
        error = ill.pop("error", HEALTHY_ERROR[slot.gemm] * (least + (1 - least) * swing))
        fields = {"count": 16384, "nan": 0, "inf": 0, "amax": 4.0, "sum_sq": 1e4, "sum_sq_q": 1e4}
        return TensorStats(**{**fields, "sum_sq_err": 1e4 * error**2, **ill})
    count = TOKENS * WIDTH
    ratio = ill.pop("underflow_ratio", HEALTHY_UNDERFLOW[slot.operand or "", slot.layout or ""] * swing)
    sqnr_db = ill.pop("sqnr_db", HEALTHY_SQNR_DB)
    fields = {
        "count": count,
        "zeros": round(ratio * count),
        "underflow": round(ratio * count),
        "saturated": 0,
        "nan": 0,
        "inf": 0,
        "rows": TOKENS,
        "rows_flushed": 0,
        # Healthy swings against the own median: amax up to 7.7, kurtosis up to 44.
        "amax": 1.0 if rng is None else float(rng.uniform(1.0, 7.7)),
        "sum_sq": float(count),
        "sum_sq_q": float(count),
        "sum_sq_err": count * 10.0 ** (-sqnr_db / 10.0),
        "sum_4th": 3.0 * count * (1.0 if rng is None else float(rng.uniform(1.0, 44.0))),
        "histogram": (*[0] * 11, 100, 1900, 40, 0, 0),
    }
    return TensorStats(**{**fields, **ill})


@pytest.fixture
def slots() -> tuple[Slot, ...]:
    """The slots of a model of four blocks."""
    return model_slots()


@pytest.fixture
def observation() -> Callable[..., StepObservation]:
    """Makes the observation of a step: healthy but for what `ill` says."""

    def make(
        step: int,
        slots: tuple[Slot, ...],
        ill: Ill | None = None,
        rng: np.random.Generator | None = None,
        **fields: Any,
    ) -> StepObservation:
        wrong = ill or {}
        stats = [
            slot_stats(slot, rng, **wrong.get((slot.layer, slot.gemm or f"{slot.operand} {slot.layout}"), {}))
            for slot in slots
        ]
        return StepObservation(
            step=step,
            slots=slots,
            stats=StatsTable.from_stats(stats),
            indices=fields.pop("indices", tuple(range(len(slots)))),
            **fields,
        )

    return make


@pytest.fixture
def make_slots() -> Callable[..., tuple[Slot, ...]]:
    """Makes the slots of a model of so many blocks."""
    return model_slots
