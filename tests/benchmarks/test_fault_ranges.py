"""How far healthy runs go: the fault suite's ranges, on steps whose values are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from fp8_safeguard.monitor.columns import StatsTable
from fp8_safeguard.monitor.observation import StepObservation
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.stats import TensorStats


@pytest.fixture
def ranges(suite: Callable[[str], ModuleType]) -> ModuleType:
    return suite("faults.ranges")


LAYERS = ("a", "b", "c", "d", "e")


def dy(underflow: float, amax: float) -> TensorStats:
    return TensorStats(
        count=1000, zeros=0, underflow=round(1000 * underflow), saturated=0, nan=0, inf=0, amax=amax, sum_sq=1.0,
        sum_sq_q=1.0, sum_sq_err=0.0,
    )  # fmt: skip


@pytest.fixture
def steps() -> Callable[..., list[StepObservation]]:
    """Observations of dy in five layers; each argument gives one step's (underflow by layer, amax by layer, loss, gain)."""

    def made(*each: tuple[tuple[float, ...], tuple[float, ...], float, float]) -> list[StepObservation]:
        found = []
        for number, (underflows, amaxes, loss, gain) in enumerate(each):
            slots = [
                Slot(layer, operand="dy", layout=layout) for layer in LAYERS for layout in ("row", "col")
            ]
            stats = [
                dy(value, amax)
                for value, amax in zip(underflows, amaxes, strict=True)
                for _ in ("row", "col")
            ]
            found.append(
                StepObservation(
                    step=number, slots=tuple(slots), stats=StatsTable.from_stats(stats), run={"loss": loss},
                    scalars={("norm", "gain_amax"): gain, ("norm", "gain_median"): 1.0},
                )
            )  # fmt: skip
        return found

    return made


QUIET = ((0.0,) * 5, (1.0,) * 5, 2.0, 1.0)


def test_each_name_has_the_largest_value_of_its_kind(ranges: Any, steps: Any) -> None:
    loud = ((0.5, 0.04, 0.03, 0.01, 0.0), (9.0, 2.0, 3.0, 1.0, 1.0), 3.0, 1.5)
    found = ranges.healthy_ranges(steps(QUIET, QUIET, QUIET, QUIET, loud, QUIET))
    # Three layers reach 3 % together; the middle one of the five has doubled.
    assert found["dy_along_tokens"] == pytest.approx(0.03)
    assert found["gradients"] == pytest.approx(2.0)
    assert found["loss"] == pytest.approx(1.5)
    assert found["norm_gain"] == pytest.approx(1.5)
    assert found["rows"] == 0.0


def test_a_jump_is_over_what_was_just_before(ranges: Any, steps: Any) -> None:
    """A loss that falls by itself from 20 to 1 jumps nowhere, though the median of the whole run is 10.5."""
    falling = [(QUIET[0], QUIET[1], 20.0 - step, 1.0) for step in range(20)]
    assert ranges.healthy_ranges(steps(*falling))["loss"] == 1.0


def test_what_a_run_does_not_show_is_left_out(ranges: Any, steps: Any) -> None:
    found = ranges.healthy_ranges(steps(QUIET, QUIET))
    assert "qk_logit" not in found
    assert "gemm_error" not in found
    assert ranges.healthy_ranges([]) == {}


def test_every_name_has_a_level(ranges: Any, steps: Any) -> None:
    assert ranges.healthy_ranges(steps(QUIET)).keys() <= ranges.LEVELS.keys()
    assert all(math.isfinite(level) for level, _ in ranges.LEVELS.values())
