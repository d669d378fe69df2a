"""Remedies by cost, and the cheapest that what-ifs show to help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fp8_safeguard.monitor.cause import percent
from fp8_safeguard.monitor.plan import Plan, Target
from fp8_safeguard.monitor.signals import Breach
from fp8_safeguard.monitor.slots import GEMM_OPERANDS, GEMMS, OPERANDS
from fp8_safeguard.monitor.thresholds import E5M2_ERROR_FACTOR
from fp8_safeguard.monitor.whatifs import BF16_VARIANT, PLAIN, VARIANTS, Look, Measured, Setting, variant_of

COSTS = ("scale_multiplier", "scale_rounding", "format", "amax_history", "margin")
"""What a measured remedy may change, the cheapest first: none of them costs arithmetic, but each costs something that the
configuration was chosen for (range, the smallest error, mantissa, a steady scale)."""

HEALTHY_ERROR = {"fprop": 0.045, "dgrad": 0.045, "wgrad": 0.072}
"""Nine tenths of the levels at which a recomputed GEMM acts: a remedy that only just helps would not help for long."""

REPRODUCED = 0.5
"""Part of the real error that the emulated plain precision has to show, so that emulated alternatives say anything. A stale
inverse scale or a faulty rank is not in the operands, and no scale or format of them heals it."""

AS_GOOD = 1.25
"""Times the smallest error up to which another scale's is as good."""
MATERIAL = 0.5
"""Part of the plain error that a remedy may leave."""
WELL = 0.75
"""Part of what is healthy that is a format's own noise, from wherever it came down."""

_WORDS = {
    "scale_multiplier": "the scales of {} go to {} times what the amax asks for",
    "scale_rounding": "the scales of {} go to {} rounding",
    "format": "{} go to {}",
    "amax_history": "the amax history of {} goes to {}",
    "margin": "the margin of {} goes to {}",
}


@dataclass(frozen=True)
class Remedy:
    """One way to quantise a layer's operands otherwise: one plan entry for each operand named, or one for the layer."""

    action: str
    value: str | float | None
    operands: tuple[str, ...] = ()
    """What it changes; empty: all of them, with one entry for the layer."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The operands that it changes."""
        return self.operands or OPERANDS

    @property
    def name(self) -> str:
        """Stable text: `format=e5m2: x, w`."""
        return f"{self.action}={self.value}: {', '.join(self.operands) or 'layer'}"

    @property
    def targets(self) -> tuple[Target, ...]:
        """What its entries name."""
        if not self.operands:
            return (Target(),)
        return tuple(
            Target(operand=operand, layout="tile" if operand == "w" else "row") for operand in self.operands
        )

    @property
    def cost(self) -> tuple[int, int]:
        """Lower is cheaper: what kind of change, and of how many operands. Scales as the amax asks for cost nothing."""
        neutral = (self.action, self.value) == ("scale_multiplier", 1.0)
        return COSTS.index(self.action), 0 if neutral else len(self.changed)

    @property
    def words(self) -> str:
        """What happens, for people: `x and w go to E5M2`."""
        if not self.operands:
            what = "all operands"
        else:
            what = " and ".join(self.operands)
        value = _said(self.value) if isinstance(self.value, (int, float)) else str(self.value).upper()
        if (self.action, self.value) == ("scale_multiplier", 1.0):
            return f"the scales of {what} go back to what the amax asks for"
        text = _WORDS[self.action].format(what, value)
        return (
            text.replace(" go to ", " goes to ")
            if self.action == "format" and len(self.operands) == 1
            else text
        )

    def beyond(self, plan: Plan, layer: str) -> tuple[tuple[str, Setting], ...]:
        """The (operand, setting) that the plan does not have yet."""
        return tuple(
            (operand, (self.action, self.value))
            for operand in self.changed
            if not _is_so(plan, layer, operand, self.action, self.value)
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """What asks for a remedy in one layer at one step."""

    layer: str
    breaches: tuple[Breach, ...]
    """At the act level, the worst first."""
    failing: frozenset[str] = frozenset()
    """GEMMs to be cured."""
    judged: Mapping[str, float]
    """The real error of those whose recomputed result is what failed."""
    vanishing: bool = False
    """Whether x and w vanish together: the results may be healthy still, so the range has to grow."""
    lost: frozenset[str] = frozenset()
    """Operands that saturate or whose rows are flushed."""
    first_step: int
    """Where the oldest of it began."""
    because: str
    rule: str

    @property
    def concerned(self) -> frozenset[str]:
        """GEMMs that would have to leave FP8: those that fail, and all that read an operand that is lost."""
        readers = {
            gemm for gemm, read in GEMM_OPERANDS.items() if any(operand in self.lost for operand, _ in read)
        }
        return self.failing | readers

    @property
    def read(self) -> frozenset[str]:
        """Operands that the failing GEMMs read, and those that are lost."""
        return self.lost.union(operand for gemm in self.failing for operand, _ in GEMM_OPERANDS[gemm])

    @property
    def blamed(self) -> frozenset[str]:
        """Operands in breach, where no GEMM's own result is: what else the GEMM reads is not at fault."""
        if any(breach.slot.gemm for breach in self.breaches):
            return frozenset()
        return frozenset(breach.slot.operand for breach in self.breaches if breach.slot.operand)

    @property
    def kind(self) -> str:
        """What layers with one fault have in common: the GEMM that fails first, or the operand."""
        gemm = next((gemm for gemm in GEMMS if gemm in self.failing), "")
        return f"{gemm}{' vanishing' if self.vanishing else ''}"


@dataclass(frozen=True)
class Choice:
    """A remedy with what was measured of it, by GEMM."""

    remedy: Remedy
    errors: Mapping[str, Measured]
    plain: Mapping[str, Measured]
    step: int
    """Of the look."""

    @property
    def worst(self) -> float:
        """The largest of its errors, as a part of what is healthy."""
        return max((seen.error / level(gemm, seen) for gemm, seen in self.errors.items()), default=0.0)

    @property
    def order(self) -> tuple[Any, ...]:
        """The cheapest kind first, and of one kind the one with the smallest errors."""
        return (*self.remedy.cost, self.worst, self.remedy.name)

    @property
    def words(self) -> str:
        """`fprop 74 % -> 5.9 %, dgrad 12 % -> 5.7 %`."""

        def told(gemm: str, seen: Measured) -> str:
            plain = self.plain.get(gemm)
            before = "" if plain is None else f"{percent(plain.error)} -> "
            return f"{gemm} {before}{percent(seen.error)}"

        return ", ".join(told(gemm, seen) for gemm, seen in self.errors.items())

    def to_wire(self) -> dict[str, Any]:
        """For the evidence of a decision."""
        return {
            "step": self.step,
            "plain": {gemm: seen.error for gemm, seen in self.plain.items()},
            "remedy": {gemm: seen.error for gemm, seen in self.errors.items()},
            "limits": {gemm: level(gemm, seen) for gemm, seen in self.errors.items()},
        }


def _said(value: float) -> str:
    """`16`, and `2^-20` for what nobody reads as a decimal fraction."""
    exponent = math.log2(value) if value > 0 else math.nan
    return f"2^{exponent:.0f}" if exponent < -3 and exponent == round(exponent) else f"{value:g}"


def level(gemm: str, seen: Measured) -> float:
    """The error up to which a what-if is healthy, by its format's noise."""
    return HEALTHY_ERROR[gemm] * (E5M2_ERROR_FACTOR if seen.fmt == "e5m2" else 1.0)


def healthy(gemm: str, seen: Measured) -> bool:
    """Whether a measured error is the format's own. NaN is not."""
    return seen.error <= level(gemm, seen)


@lru_cache(maxsize=1)
def catalogue() -> tuple[Remedy, ...]:
    """Every remedy that what-ifs can speak about, the cheapest first."""
    found = {
        Remedy(variant.action or "", variant.value, () if variant.operand is None else (variant.operand,))
        for name, variant in VARIANTS.items()
        if variant.plannable and name not in (PLAIN, BF16_VARIANT)
    }
    # Outliers flush x and w together, and neither alone heals it.
    found |= {Remedy("format", "e5m2", pair) for pair in (("x", "w"), ("dy", "w"), ("x", "dy"))}
    return tuple(sorted(found, key=lambda remedy: (remedy.cost, remedy.name)))


def is_reproduced(case: Case, look: Look) -> bool:
    """Whether the emulated plain precision shows what the real results do."""
    for gemm, error in case.judged.items():
        plain = look.plain(gemm)
        if plain is None or not shows(gemm, error, plain):
            return False
    return True


def shows(gemm: str, error: float, emulated: Measured) -> bool:
    """Whether an emulated result shows the fault that a real one has."""
    return emulated.error >= REPRODUCED * error and not healthy(gemm, emulated)


def choices(case: Case, look: Look, plan: Plan, allowed: Callable[[Remedy], bool]) -> list[Choice]:
    """The remedies that the look shows to cure the case, the cheapest first."""
    if not is_reproduced(case, look):
        return []
    measured = (
        _measured(case, look, plan, remedy)
        for remedy in catalogue()
        if _suits(case, remedy) and allowed(remedy)
    )
    return ranked([choice for choice in measured if choice is not None])


def ranked(found: Sequence[Choice]) -> list[Choice]:
    """The same, in the order in which the policy takes them and the readiness report advises them."""
    return sorted(found, key=lambda choice: (choice.remedy.cost, *_room(choice, found), choice.order))


def _room(choice: Choice, found: Iterable[Choice]) -> tuple[bool, float]:
    """Of a scale's healthy values the one with the most room on both sides: as good as the best, and the nearest to 1.

    The smallest error alone takes the scale whose largest values only just fit: a held scale then saturates as they grow.
    """
    remedy = choice.remedy
    if remedy.action != "scale_multiplier":
        return False, 0.0
    best = min(
        other.worst
        for other in found
        if (other.remedy.action, other.remedy.operands) == (remedy.action, remedy.operands)
    )
    return choice.worst > AS_GOOD * best, abs(math.log2(float(remedy.value or 1.0)))


def common(lists: Iterable[list[Choice]]) -> Choice | None:
    """The cheapest remedy that is in every list, as it stands in the first."""
    first, *others = lists
    shared = [{choice.remedy for choice in found} for found in others]
    return next((choice for choice in first if all(choice.remedy in found for found in shared)), None)


def reaches(case: Case, remedy: Remedy) -> bool:
    """Whether a remedy changes something that every failing GEMM of the case reads, and suits its kind."""
    changes = tuple((operand, (remedy.action, remedy.value)) for operand in remedy.changed)
    return _suits(case, remedy) and all(variant_of(gemm, changes) != PLAIN for gemm in case.failing)


def _suits(case: Case, remedy: Remedy) -> bool:
    """Whether its kind can help at all, whatever was measured while the fault was small."""
    if case.lost and not case.lost & set(remedy.changed):
        return False
    if case.vanishing:
        return (remedy.action, remedy.value) == ("format", "e5m2") and {"x", "w"} <= set(remedy.changed)
    if case.blamed and not case.blamed & set(remedy.changed):
        return False
    return not _spends(remedy) or set(remedy.changed) <= case.read


def _spends(remedy: Remedy) -> bool:
    """Whether it takes something away from what it changes; scales as the amax asks, and E4M3, do not."""
    return bool(remedy.operands) or (remedy.action, remedy.value) == ("format", "e5m2")


def _measured(case: Case, look: Look, plan: Plan, remedy: Remedy) -> Choice | None:
    """The remedy with its errors, if every GEMM that it changes was measured and is healthy, and none stays ill."""
    changes = remedy.beyond(plan, case.layer)
    errors: dict[str, Measured] = {}
    for gemm in sorted(look.gemms, key=GEMMS.index):
        name = variant_of(gemm, changes)
        seen = None if name is None else look.errors.get((gemm, name))
        # A variant that changes nothing about a GEMM is not measured there.
        unchanged = name == PLAIN or (seen is None and not remedy.operands)
        if unchanged:
            if gemm in case.failing:
                return None
            continue
        if seen is None or not _helps(case, look, gemm, seen):
            return None
        errors[gemm] = seen
    if not errors or not case.failing <= set(errors):
        return None
    plain = {gemm: seen for gemm in errors if (seen := look.plain(gemm)) is not None}
    if not case.vanishing and not any(_gains(gemm, errors[gemm], seen) for gemm, seen in plain.items()):
        return None
    return Choice(remedy, errors, plain, look.step)


def _helps(case: Case, look: Look, gemm: str, seen: Measured) -> bool:
    plain = look.plain(gemm)
    loses = any(operand in case.lost for operand, _ in GEMM_OPERANDS[gemm])
    if gemm in case.failing and not case.vanishing:
        return healthy(gemm, seen) and plain is not None and _gains(gemm, seen, plain)
    if loses:
        return healthy(gemm, seen) and plain is not None and seen.error < plain.error
    # A leaf's noise goes no further: what does not fail there may stay as it is, but must not grow.
    leaf = gemm == "wgrad" and gemm not in case.failing
    tolerated = leaf and plain is not None and seen.error <= plain.error
    return healthy(gemm, seen) or tolerated


def _gains(gemm: str, seen: Measured, plain: Measured) -> bool:
    """Whether an error that is none of the format's own came down by half, or to the noise of the remedy's format."""
    if healthy(gemm, plain):
        return False
    by_half = not seen.error > MATERIAL * plain.error
    return by_half or (seen.error < plain.error and seen.error <= WELL * level(gemm, seen))


def _is_so(plan: Plan, layer: str, operand: str, action: str, value: Any) -> bool:
    target = Target(operand=operand, layout="tile" if operand == "w" else "row")
    entry = plan.find(layer, target, action) or plan.find(layer, Target(), action)
    return entry is not None and entry.value == value


def clashes(plan: Plan, layer: str, remedy: Remedy) -> bool:
    """Whether the plan has entries of that action for operands where the remedy is for the layer, or the reverse."""
    same = [entry for entry in plan.entries if entry.layer == layer and entry.action == remedy.action]
    return any((entry.target.operand is None) != (not remedy.operands) for entry in same)


def undo(action: str) -> Setting | None:
    """The setting that stands for the plain configuration, where a what-if measures it."""
    return _PLAIN_SETTINGS.get(action)


_PLAIN_SETTINGS: dict[str, Setting] = {
    "format": ("format", "e4m3"),
    "scale_rounding": ("scale_rounding", "fp32"),
    "scale_multiplier": ("scale_multiplier", 1.0),
}


def undone(layer_actions: Iterable[str], look: Look) -> Iterator[tuple[str, Measured]]:
    """(gemm, error) that the plain configuration would have in a layer whose entries have that one action."""
    actions = set(layer_actions)
    setting = undo(actions.pop()) if len(actions) == 1 else None
    if setting is None:
        return
    for gemm in sorted(look.gemms, key=GEMMS.index):
        seen = look.find(gemm, tuple((operand, setting) for operand in OPERANDS))
        if seen is not None:
            yield gemm, seen
