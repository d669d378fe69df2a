"""What is broken, how large, where, when, and what follows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

FORK_STEP = 500
"""Steps of the shared checkpoint."""
SETTLE_STEPS = 10
"""Healthy steps of each arm before the earliest onset: own medians need some samples."""
SPREAD_STEPS = 8
"""Onsets are drawn from so many steps."""
AFTER_STEPS = 120
"""Steps of each arm from the latest onset on."""
SEEDS = (201, 202, 203)
"""Not used to set any threshold: the research had 0 and 1, the demo 0 to 2, and 101 to 104 changed two rules of attribution."""

Kind = Literal["abrupt", "drift", "isolated", "control", "healthy"]
Draw = Callable[[random.Random], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of the suite."""

    name: str
    """Kind of the fault, as trainer.faults has it."""
    letter: str
    """As research/faults.md has it; empty for controls."""
    kind: Kind
    """abrupt: seen with the first sample. drift: before separation. isolated: must not act. control: hurts BF16 alike."""
    causes: tuple[str, ...]
    """Right names of the cause."""
    draw: Draw
    """Layer, size and the like, from a seed's own generator."""
    ranks: int = 1
    """Processes of the arms that are watched; in the others as many micro-batches stand in for them."""
    first_alert: bool = False
    """Whether any alert detects it, not one that asks for action: a NaN that comes once must not act."""
    remark: str = ""
    """What a reader has to know."""

    @property
    def harms_fp8(self) -> bool:
        """Whether BF16 is left alone."""
        return self.kind in ("abrupt", "drift", "isolated")

    def fault(self, seed: int) -> dict[str, Any]:
        """The fault of that seed, as a config has it."""
        draws = random.Random(f"{self.name} {seed}")
        onset = FORK_STEP + SETTLE_STEPS + draws.randrange(SPREAD_STEPS)
        return {"kind": self.name, "start_step": onset, **self.draw(draws)}


def end_step() -> int:
    """Steps of every arm, the checkpoint's included: the latest onset has AFTER_STEPS behind it."""
    return FORK_STEP + SETTLE_STEPS + SPREAD_STEPS - 1 + AFTER_STEPS


def _everywhere(**sizes: tuple[float, ...]) -> Draw:
    """Some size, in every layer."""
    return lambda draws: {name: draws.choice(values) for name, values in sizes.items()}


def _somewhere(layers: tuple[int, ...], **sizes: tuple[Any, ...]) -> Draw:
    """Some layer, some size."""
    return lambda draws: {
        "layer": draws.choice(layers),
        **{name: draws.choice(values) for name, values in sizes.items()},
    }


_ANY = (0, 1, 2, 3)
_LATE = (2, 3)
"""Blocks whose flush costs loss: a residual network routes round an early one."""
_SEEDS = tuple(range(1000))
_ONE_NAN = (
    "detected is the first alert, which names the origin: one sample with a NaN must not act, the second may"
)

FP8_FAULTS = (
    Case(
        name="slow-drift", letter="A", kind="drift", causes=("outlier-channels",),
        draw=_somewhere(_LATE, growth=(1.10, 1.12, 1.14), channels=(6, 8, 10), seed=_SEEDS),
    ),
    Case(
        name="fast-drift", letter="B", kind="drift", causes=("outlier-channels",),
        draw=_somewhere(_LATE, growth=(1.22, 1.25, 1.30), channels=(6, 8, 10), seed=_SEEDS),
    ),
    Case(
        name="abrupt-outliers", letter="C", kind="abrupt", causes=("outlier-channels",),
        draw=_somewhere(_LATE, channels=(6, 8, 10), seed=_SEEDS),
    ),
    Case(
        name="flushed-gradients", letter="D", kind="abrupt", causes=("flushed-gradients",),
        draw=_everywhere(gradient_scale=(1e-9, 1e-8, 1e-7)),
    ),
    Case(
        name="dy-scale-stuck", letter="E", kind="abrupt", causes=("stuck-scale",),
        draw=_everywhere(scale_log2=(-2, 0, 2)),
    ),
    Case(
        name="dy-scale-too-large", letter="F", kind="abrupt", causes=("scale-too-large",),
        draw=_everywhere(factor_log2=(15, 16, 17)),
    ),
    Case(
        name="dy-scale-too-small", letter="F2", kind="abrupt", causes=("scale-too-small",),
        draw=_everywhere(factor_log2=(-9, -8, -7)),
    ),
    Case(
        name="x-scale-too-small", letter="G", kind="abrupt", causes=("scale-too-small",),
        draw=_everywhere(factor_log2=(-5, -4, -3)),
    ),
    Case(
        name="stale-inverse-scale", letter="H", kind="abrupt", causes=("stale-inverse-scale",),
        draw=_somewhere((0, 1, 2), factor=(4.0, 8.0, 16.0)),
    ),
    Case(
        name="bad-rank", letter="I", kind="abrupt", causes=("one-rank",), ranks=2,
        draw=_somewhere((0, 1, 2), share=(0.005, 0.01, 0.02), seed=_SEEDS),
        remark="watched arms train as two data-parallel processes; without a safeguard, two micro-batches stand in",
    ),
    Case(
        name="expert-nan", letter="J", kind="abrupt", causes=("nonfinite-origin",), first_alert=True,
        draw=_somewhere(_ANY, expert=tuple(range(8))), remark=_ONE_NAN,
    ),
    Case(
        name="isolated-nan", letter="K", kind="isolated", causes=("nonfinite-origin",), first_alert=True,
        draw=_somewhere(_ANY, expert=tuple(range(8))), remark=_ONE_NAN,
    ),
    Case(
        name="late-divergence", letter="L", kind="drift", causes=("outlier-channels",),
        draw=_everywhere(growth=(1.045, 1.05, 1.06), seed=_SEEDS),
        remark="played in 80 steps; Apertus took 3e11 tokens, and nothing like that is shown here",
    ),
)  # fmt: skip

CONTROLS = (
    Case(
        name="norm-gain", letter="", kind="control", causes=("norm-gain",),
        draw=_somewhere(_ANY, factor=(64.0, 128.0, 256.0), channels=(2, 4, 6), seed=_SEEDS),
    ),
    Case(
        name="token-weights", letter="", kind="control", causes=("token-imbalance",),
        draw=_everywhere(decades=(5.0, 6.0, 7.0), seed=_SEEDS),
    ),
    Case(
        name="qk-gain", letter="", kind="control", causes=("qk-growth",),
        draw=_somewhere(_ANY, factor=(4.0, 8.0, 16.0)),
    ),
    Case(name="data-spike", letter="", kind="control", causes=("data-spike",), draw=_everywhere(seed=_SEEDS)),
    Case(
        name="starved-expert", letter="", kind="control", causes=("starved-expert",),
        draw=_somewhere(_ANY, expert=tuple(range(8))),
    ),
    Case(name="dead-layer", letter="", kind="control", causes=("dead-layer",), draw=_somewhere(_ANY)),
)  # fmt: skip

BRANCH = Case(name="healthy", letter="", kind="healthy", causes=(), draw=_everywhere())
"""Goes on from the checkpoint, with nothing wrong: with its BF16 twin the suite's control."""
SHIFT = Case(name="domain-shift", letter="", kind="healthy", causes=(), draw=_everywhere(seed=_SEEDS))
WARM_UP = Case(name="warm-up", letter="", kind="healthy", causes=(), draw=_everywhere())
"""A run from its first step on, through the warm-up of the learning rate."""
HEALTHY = (BRANCH, SHIFT, WARM_UP)
WARM_UP_SEEDS = (201, 202, 203, 204)

CASES: Mapping[str, Case] = {case.name: case for case in (*FP8_FAULTS, *CONTROLS, *HEALTHY)}
QUICK = ("fast-drift", "abrupt-outliers", "x-scale-too-small", "expert-nan", "norm-gain")
"""One of each sort: a drift, an abrupt fault of operands, one of scales, NaN, and one that is not FP8's."""
