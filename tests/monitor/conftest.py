"""A small model's slots and statistics: healthy as measured, with any slot made ill."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.plan import Decision
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, StepObservation, decide
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats

ENFORCE = PolicyConfig(run="r", mode="enforce")
DRIFTING = ("blocks.3.qkv", "blocks.3.shared_up", "blocks.3.expert_up")
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
TAKEN_UP = 2
"""Steps from the evidence of a decision to the first step with it."""

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
    """Makes the observation of a step: healthy but for what `ill` says. Equal steps share their table."""
    tables: dict[str, StatsTable] = {}

    def table(slots: tuple[Slot, ...], ill: Ill, rng: np.random.Generator | None) -> StatsTable:
        key = f"{hash(slots)} {ill}"
        if rng is None and key in tables:
            return tables[key]
        named = [(slot.layer, slot.gemm or f"{slot.operand} {slot.layout}") for slot in slots]
        stats = [slot_stats(slot, rng, **ill.get(name, {})) for slot, name in zip(slots, named, strict=True)]
        made = StatsTable.from_stats(stats)
        if rng is None:
            tables[key] = made
        return made

    def make(
        step: int,
        slots: tuple[Slot, ...],
        ill: Ill | None = None,
        rng: np.random.Generator | None = None,
        **fields: Any,
    ) -> StepObservation:
        return StepObservation(
            step=step,
            slots=slots,
            stats=table(slots, ill or {}, rng),
            indices=fields.pop("indices", tuple(range(len(slots)))),
            **fields,
        )

    return make


@pytest.fixture
def make_slots() -> Callable[..., tuple[Slot, ...]]:
    """Makes the slots of a model of so many blocks."""
    return model_slots


def follow(
    observations: Iterable[StepObservation], config: PolicyConfig = ENFORCE, state: PolicyState | None = None
) -> tuple[PolicyState, list[Decision]]:
    """The state after all of them, and the decisions in order. A plan is in force two steps after its evidence."""
    made: list[Decision] = []
    state = state or PolicyState()
    plans = [(-TAKEN_UP, state.plan.version)]
    for seen in observations:
        in_force = max(version for step, version in plans if step + TAKEN_UP <= seen.step or step < 0)
        seen = dataclasses.replace(seen, plan_version=max(seen.plan_version, in_force))
        state, decisions = decide(state, seen, config)
        plans.append((seen.step, state.plan.version))
        made += decisions
    return state, made


def looked(seen: StepObservation, layer: str, errors: Mapping[str, Mapping[str, float]]) -> StepObservation:
    """The observation with a close look at a layer: the error of each variant by gemm, in E5M2 where its name says so."""
    named = [(gemm, name, error) for gemm, variants in errors.items() for name, error in variants.items()]
    extra = tuple(
        Slot(layer, gemm=gemm, variant=name, emulated=True, fmt="e5m2" if "e5m2" in name else None)
        for gemm, name, _ in named
    )
    return with_slots(seen, extra, [error for _, _, error in named])


def asked(decisions: Iterable[Decision]) -> list[tuple[str, str, str]]:
    return [(made.layer, made.target.key, made.action) for made in decisions]


def drift(steps_after_onset: float) -> dict[tuple[str, str], dict[str, float]]:
    """Underflow of x row and w tile in the fast drift, between its measured points (0.32 % at +0, 0.9 % at +5, ...)."""
    at = [0, 5, 10, 15, 20, 25, 30]
    x = np.log([0.0032, 0.009, 0.028, 0.085, 0.25, 0.65, 0.87])
    w = np.log([0.00055, 0.0016, 0.0045, 0.013, 0.036, 0.062, 0.063])
    ill = {}
    for layer in DRIFTING:
        ill[layer, "x row"] = {"underflow_ratio": float(np.exp(np.interp(steps_after_onset, at, x)))}
        ill[layer, "w tile"] = {"underflow_ratio": float(np.exp(np.interp(steps_after_onset, at, w)))}
    return ill


def with_stats(seen: StepObservation, slot: Slot, error: float, count: int = 16384) -> StepObservation:
    """The observation with one more GEMM slot."""
    return with_slots(seen, (slot,), [error], count)


def with_slots(
    seen: StepObservation, extra: tuple[Slot, ...], errors: list[float], count: int = 16384
) -> StepObservation:
    """The observation with more GEMM slots behind it."""
    made = StatsTable.from_stats(
        [
            TensorStats(count=count, nan=0, inf=0, amax=1.0, sum_sq=1.0, sum_sq_q=1.0, sum_sq_err=error**2)
            for error in errors
        ]
    )
    table = StatsTable(
        {name: np.concatenate([seen.stats.columns[name], made.columns[name]]) for name in made.columns},
        {name: np.concatenate([seen.stats.nulls[name], made.nulls[name]]) for name in made.nulls},
    )
    indices = (*seen.indices, *([0] * len(extra)))
    return dataclasses.replace(seen, slots=(*seen.slots, *extra), stats=table, indices=indices)


@pytest.fixture(name="follow")
def follow_fixture() -> Callable[..., Any]:
    """`follow`."""
    return follow


@pytest.fixture(name="asked")
def asked_fixture() -> Callable[..., Any]:
    """`asked`."""
    return asked


@pytest.fixture(name="drift")
def drift_fixture() -> Callable[..., Any]:
    """`drift`."""
    return drift


@pytest.fixture(name="looked")
def looked_fixture() -> Callable[..., Any]:
    """`looked`."""
    return looked


@pytest.fixture(name="with_stats")
def with_stats_fixture() -> Callable[..., Any]:
    """`with_stats`."""
    return with_stats


OBSERVE = PolicyConfig(run="r", mode="observe")


def causes_of(state: PolicyState) -> list[Mapping[str, Any]]:
    """What is told at the end."""
    return [lasting.said for lasting in state.trends.causes.values() if lasting.told]


def told_in(
    course: Iterable[StepObservation], state: PolicyState | None = None, config: PolicyConfig = OBSERVE
) -> tuple[PolicyState, list[tuple[int, str, str | None]], list[Any]]:
    """The state at the end, (step, cause, layer) of each diagnosis when it was told first, and the decisions."""
    state, told, decisions = state or PolicyState(), [], []
    before: set[tuple[str, str | None]] = set()
    for seen in course:
        state, made = decide(state, seen, config)
        decisions += made
        now = {(said["name"], said["layer"]) for said in causes_of(state)}
        told += [(seen.step, *key) for key in sorted(now - before, key=str)]
        before = now
    return state, told, decisions


@pytest.fixture
def course(slots: Any, observation: Any) -> Any:
    """Eight healthy samples, then one for each `ill`, with what the steps carry besides."""

    def make(
        ills: Sequence[Mapping[Any, Any]],
        healthy: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> list[StepObservation]:
        before = [observation(first + at, slots, **(healthy or {})) for at in range(8)]
        after = [observation(first + 8 + at, slots, ill, **(fields or {})) for at, ill in enumerate(ills)]
        return [*before, *after]

    return make


@pytest.fixture(name="causes")
def causes_fixture() -> Callable[..., Any]:
    """`causes_of`."""
    return causes_of


@pytest.fixture(name="followed")
def followed_fixture() -> Callable[..., Any]:
    """`told_in`."""
    return told_in
