"""What-ifs: which alternatives are measured, and what they showed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from fp8_safeguard.monitor.numbers import decode_number, encode_number
from fp8_safeguard.monitor.plan import ACTIONS
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, Slot

if TYPE_CHECKING:
    from fp8_safeguard.monitor.view import StepView

PLAIN = "fp8"
"""Name of the variant that is no alternative: the configured precision, emulated."""
BF16_VARIANT = "bf16"

LOOK_SAMPLES = 16
"""Samples for which a close look goes on speaking for its layer: twice the longest wait for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One alternative to how a GEMM's operands are quantised."""

    action: str | None
    """Action of the plan entry that would bring it about; `blocks` is none of those: only people can change block
    shapes. None for the variant that changes nothing."""
    operand: str | None = None
    """What it changes; None for every operand of the GEMM."""
    value: str | float | None = None
    """The action's value, as a plan entry takes it: absolute, not relative to what is configured."""
    meaning: str
    """What is measured, for people."""

    @property
    def plannable(self) -> bool:
        """Whether a plan entry can bring it about."""
        return self.action in ACTIONS


def _multipliers(operand: str, *more: int) -> dict[str, Variant]:
    """Scales of one operand that are smaller (less underflow, saturation) or larger (head-room, more underflow)."""
    wants = {
        power: f"{2 ** abs(power)} times {'smaller' if power < 0 else 'larger'}"
        for power in (*more, -12, -4, 4)
    }
    return {
        f"{operand}_multiplier_2^{power}": Variant(
            action="scale_multiplier",
            operand=operand,
            value=2.0**power,
            meaning=f"scales of {operand} {words} than its blocks' amax asks for",
        )
        for power, words in wants.items()
    }


def _margins(operand: str) -> dict[str, Variant]:
    """Another head-room of a scale for a whole operand; block scales have none."""
    wants = {-4: "16 times smaller", 2: "4 times larger", 4: "16 times larger", 8: "256 times larger"}
    return {
        f"{operand}_margin_2^{octaves}": Variant(
            action="margin",
            operand=operand,
            value=float(octaves),
            meaning=f"the one scale of {operand} {words} than its amax history asks for",
        )
        for octaves, words in wants.items()
    }


VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(
        action=None,
        meaning="the configured precision, emulated on the rows that the alternatives are measured on",
    ),
    BF16_VARIANT: Variant(
        action="bf16_fallback", meaning="the GEMM in BF16: operands and result rounded to BF16, no FP8"
    ),
    "e5m2": Variant(action="format", value="e5m2", meaning="both operands of the GEMM in E5M2"),
    "x_e5m2": Variant(action="format", operand="x", value="e5m2", meaning="x in E5M2"),
    "w_e5m2": Variant(action="format", operand="w", value="e5m2", meaning="w in E5M2"),
    "dy_e5m2": Variant(action="format", operand="dy", value="e5m2", meaning="dy in E5M2"),
    "e4m3": Variant(
        action="format", value="e4m3", meaning="both operands in E4M3, where the configuration is not"
    ),
    "pow2": Variant(action="scale_rounding", value="pow2", meaning="scales rounded up to powers of two"),
    "fp32": Variant(
        action="scale_rounding", value="fp32", meaning="float32 scales, where the configuration has others"
    ),
    "multiplier_2^0": Variant(
        action="scale_multiplier",
        value=1.0,
        meaning="scales as the amax asks, where the configuration has a multiplier",
    ),
    **_multipliers("x"),
    # Gradients are what an amax floor for activations flushes, by many orders of magnitude.
    **_multipliers("dy", -20, -16),
    "x_tile128": Variant(
        action="blocks", operand="x", value="128x128", meaning="x in 128x128 blocks, as weights are"
    ),
    "dy_tile128": Variant(
        action="blocks", operand="dy", value="128x128", meaning="dy in 128x128 blocks, as weights are"
    ),
    **_margins("x"),
    **_margins("dy"),
    "tensor": Variant(action="blocks", value="tensor", meaning="one scale for each whole operand"),
    "fresh": Variant(
        action="blocks",
        value="fresh",
        meaning="one scale for each whole operand from its amax now, where the configuration has one of other making",
    ),
    "block": Variant(
        action="blocks",
        value="block",
        meaning="scales of blocks from their own amax, where the configuration has one scale for an operand, or a floor",
    ),
    "mx32": Variant(
        action="blocks", value="1x32", meaning="MXFP8: blocks of 32 along the summed dimension, power-of-two scales"
    ),
}  # fmt: skip
"""Every alternative by the name that its slots carry. One that a GEMM's operands have nothing to do with, or that would
change nothing about what is configured, is not measured there."""

Setting = tuple[str, str | float | None]
"""(action, value) of a plan entry."""


@lru_cache(maxsize=1)
def _names() -> Mapping[tuple[Setting, str | None], str]:
    return {
        ((variant.action or "", variant.value), variant.operand): name
        for name, variant in VARIANTS.items()
        if variant.plannable
    }


@lru_cache(maxsize=1024)
def variant_of(gemm: str, changes: tuple[tuple[str, Setting], ...]) -> str | None:
    """The variant that says what these (operand, setting) do to a gemm; PLAIN where it reads none of them.

    None where no variant says it.
    """
    read = [(operand, setting) for operand, setting in changes if operand in _operands(gemm)]
    if not read:
        return PLAIN
    settings = {setting for _, setting in read}
    if len(settings) > 1:
        return None
    whole = len(read) == len(_operands(gemm))
    return _names().get((settings.pop(), None if whole else read[0][0]))


def _operands(gemm: str) -> frozenset[str]:
    return frozenset(operand for operand, _ in GEMM_OPERANDS[gemm])


@dataclass(frozen=True)
class Measured:
    """What one variant would do to one GEMM."""

    error: float
    """Relative error against the high-precision result."""
    fmt: str | None = None
    """Format that it is judged by, if not E4M3."""


@dataclass(frozen=True)
class Look:
    """One close look at a layer: every what-if of its GEMMs that one sample held."""

    step: int
    errors: Mapping[tuple[str, str], Measured]
    """By (gemm, variant); of a layer's experts the worst."""
    age: int = 0
    """Samples since."""

    @property
    def gemms(self) -> frozenset[str]:
        """The GEMMs that were looked at."""
        return frozenset(gemm for gemm, _ in self.errors)

    def find(self, gemm: str, changes: tuple[tuple[str, Setting], ...]) -> Measured | None:
        """What those changes would do to a GEMM; None where that was not measured."""
        name = variant_of(gemm, changes)
        return None if name is None else self.errors.get((gemm, name))

    def plain(self, gemm: str) -> Measured | None:
        """What the configured precision does, emulated: without what no format and no scale can change."""
        return self.errors.get((gemm, PLAIN))

    def to_list(self) -> list[Any]:
        """JSON form."""
        rows = sorted(
            [gemm, name, encode_number(seen.error), seen.fmt] for (gemm, name), seen in self.errors.items()
        )
        return [self.step, self.age, rows]

    @classmethod
    def from_list(cls, stored: Iterable[Any]) -> Self:
        """The inverse of to_list."""
        step, age, rows = stored
        found = {}
        for gemm, name, error, fmt in rows:
            value = decode_number(error)
            found[gemm, name] = Measured(math.nan if value is None else value, fmt)
        return cls(step, found, age)


@dataclass(frozen=True)
class WhatIfs:
    """The latest look at each layer. Immutable: `added` gives a new one."""

    looks: Mapping[str, Look] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    """The latest samples' steps: any of them could have held a look."""

    @classmethod
    def of(cls, view: StepView) -> Self:
        """The looks of one step's sample alone."""
        found: dict[str, dict[tuple[str, str], Measured]] = {}
        errors, counts = view.measures["relative_error"], view.measures["count"]
        for at, slot in enumerate(view.compiled.slots):
            if slot.variant is None or slot.gemm is None or not _counts(slot, float(counts[at])):
                continue
            variant = VARIANTS.get(slot.variant)
            if slot.variant != PLAIN and (variant is None or not variant.plannable):
                # What no plan can bring about, people look up; the state is stored with every sample.
                continue
            of_layer = found.setdefault(slot.layer, {})
            value, key = float(errors[at]), (slot.gemm, slot.variant)
            # No number is worse than any.
            if key not in of_layer or not value <= of_layer[key].error:
                of_layer[key] = Measured(value, slot.fmt)
        return cls(
            {
                layer: Look(view.seen.step, of_layer)
                for layer, of_layer in found.items()
                if _is_look(of_layer)
            },
            (view.seen.step,),
        )

    def added(self, newer: WhatIfs) -> WhatIfs:
        """With one more sample's looks; those that are too old are dropped."""
        aged = {layer: replace(look, age=look.age + 1) for layer, look in self.looks.items()}
        kept = {layer: look for layer, look in aged.items() if look.age < LOOK_SAMPLES}
        return WhatIfs({**kept, **newer.looks}, (*self.steps, *newer.steps)[-LOOK_SAMPLES:])

    def samples_since(self, step: int) -> int:
        """Samples from that step on."""
        return sum(each >= step for each in self.steps)

    def without(self, layers: Iterable[str]) -> WhatIfs:
        """Without those layers: what was measured under another precision says nothing now."""
        gone = set(layers) & set(self.looks)
        if not gone:
            return self
        return replace(self, looks={layer: look for layer, look in self.looks.items() if layer not in gone})

    def to_dict(self) -> dict[str, Any]:
        """JSON object; `from_dict` gives an equal one."""
        return {
            "looks": {layer: look.to_list() for layer, look in self.looks.items()},
            "steps": list(self.steps),
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The inverse of to_dict."""
        looks = {layer: Look.from_list(look) for layer, look in stored.get("looks", {}).items()}
        return cls(looks, tuple(stored.get("steps", ())))


def _counts(slot: Slot, count: float) -> bool:
    """One expert with a handful of tokens is too noisy to speak for its layer."""
    # Not before a policy reads: the hooks import this module for its variants alone.
    from fp8_safeguard.monitor.signals import EXPERT_MIN_COUNT

    return slot.expert is None or count >= EXPERT_MIN_COUNT


def _is_look(errors: Iterable[tuple[str, str]]) -> bool:
    """Whether alternatives were measured, and not the plain precision alone, as in a shadow run."""
    return any(name not in (PLAIN, BF16_VARIANT) for _, name in errors)
