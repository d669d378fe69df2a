"""How bad what a run measured of a GEMM is.

The judge is the recomputed GEMM: its error against the high-precision result, held against the levels of the preset `floor`.
They are taken as they stand, never relaxed by the slot's own median: of a run that has never trained in FP8 the median is no
norm. Operands that lose values to underflow are the early warning: alone they make a GEMM one to watch.

    keep_bf16   the error was beyond the act level in two samples, or beyond the instant level in one; or half of the rows of
                the gradient were flushed; or weights and activations vanish together, on which the policy acts too
    watch       beyond the act level once, or the watch level twice; or an operand beyond its watch level; or NaN or Inf
    unknown     fewer than SAMPLES_NEEDED samples, and nothing that is bad enough already
    safe        all else

What is lost in an operand is helped only by a change to that operand: `Finding.lost_in` names them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8_safeguard.monitor.coverage import NOT_OBSERVED
from fp8_safeguard.monitor.history import SAMPLES_NEEDED
from fp8_safeguard.monitor.slots import Slot
from fp8_safeguard.monitor.thresholds import FLOOR, Threshold

# Legend: N samples of one slot, oldest first.
Verdict = Literal["safe", "watch", "keep_bf16", "unknown"]
VERDICTS: tuple[Verdict, ...] = ("keep_bf16", "watch", "unknown", "safe")
"""The worst first."""
TWICE = 2
"""Samples beyond a level that make it more than an accident, as for the policy."""


_GRADIENT, _TOGETHER = frozenset({"dy"}), frozenset({"x", "w"})
_NO_GEMM = ("no GEMM",)
"""In the reasons of coverage: a look-up has nothing to do with FP8."""
_NO_FP8 = ("excluded by filter", "convolution")
"""What the user leaves out, and what has no FP8 form."""
_USED_BY = "no product with it was recognised: used by "
_ELEMENTWISE = frozenset({"add", "add_", "sub", "mul", "mul_", "div", "rms_norm", "layer_norm"})
"""A table of positions, a gain: added and multiplied element by element, and never a GEMM's operand as it stands."""


@dataclass(frozen=True, kw_only=True)
class GemmReadings:
    """The error of one recomputed GEMM slot over the samples that have it."""

    slot: Slot
    """As it was sent last."""
    steps: NDArray[np.int64]
    """[N] ascending."""
    errors: NDArray[np.float64]
    """[N] relative_error, no NaN; Inf where the FP8 result overflowed."""
    nonfinite: int = 0
    """Samples that held NaN or Inf, whether or not they have an error."""

    @property
    def samples(self) -> int:
        """N."""
        return len(self.errors)

    @cached_property
    def median(self) -> float | None:
        """The typical error."""
        return float(np.median(self.errors)) if self.samples else None

    @cached_property
    def worst(self) -> tuple[float, int] | None:
        """The largest error and its step, of equals the first."""
        if not self.samples:
            return None
        place = int(np.argmax(self.errors))
        return float(self.errors[place]), int(self.steps[place])

    @property
    def latest(self) -> tuple[float, int] | None:
        """The newest error and its step."""
        return (float(self.errors[-1]), int(self.steps[-1])) if self.samples else None

    @property
    def fmt(self) -> str | None:
        """The coarser format of the operands; a what-if may tell it by its name alone."""
        return self.slot.fmt or ("e5m2" if "e5m2" in (self.slot.variant or "") else None)


@dataclass(frozen=True, kw_only=True)
class OperandReadings:
    """The worst of what one operand slot lost over the samples that have it."""

    slot: Slot
    underflow: float | None = None
    """Largest underflow_ratio."""
    underflow_step: int | None = None
    sure_underflow: float | None = None
    """The largest of those with at least MIN_UNDERFLOW_COUNT vanished elements: fewer are chance."""
    rows_flushed: float | None = None
    """Largest rows_flushed_ratio."""
    rows_flushed_step: int | None = None

    @property
    def name(self) -> str:
        """The operand in its layout: `dy row`."""
        return f"{self.slot.operand} {self.slot.layout}"


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A weight matrix of which nothing is known."""

    name: str
    reason: str


class Finding(NamedTuple):
    """The verdict on a GEMM with its reasons."""

    verdict: Verdict
    reason: str
    """Why it is not safe; empty where it is."""
    cause: str = ""
    """What beside the error keeps it in BF16; empty where the error alone does."""
    lost_in: tuple[frozenset[str], ...] = ()
    """Of each reason that is no error, the operands of which one must change to help; empty where nothing would."""
    fails: bool = False
    """Whether the error alone keeps it in BF16."""

    @property
    def vanishing(self) -> bool:
        """Whether it stays in BF16 because weights and activations vanish together."""
        return self.verdict == "keep_bf16" and _TOGETHER in self.lost_in

    @property
    def flushed(self) -> bool:
        """Whether it stays in BF16 because rows of the gradient are flushed."""
        return self.verdict == "keep_bf16" and _GRADIENT in self.lost_in


def verdict_of(readings: GemmReadings, operands: Sequence[OperandReadings], together: str = "") -> Finding:
    """The verdict on a GEMM and what it reads.

    together: what `vanishing_together` says of its layer, where the GEMM reads the weight.
    """
    harm, flush = _harm(readings), _flush(operands)
    said = "; ".join(each for each in (harm, flush, together) if each)
    if said:
        causes = {"rows of dy flushed": flush, "x and w vanish together": together}
        places = [_GRADIENT] * bool(flush) + [_TOGETHER] * bool(together)
        cause = ", ".join(cause for cause, there in causes.items() if there)
        return Finding("keep_bf16", said, cause, tuple(places), bool(harm))
    broken = f"NaN or Inf in {_samples(readings.nonfinite)}" if readings.nonfinite else ""
    missing = SAMPLES_NEEDED - readings.samples
    if missing > 0:
        few = f"{_samples(readings.samples) if readings.samples else 'no sample'}, {missing} more needed"
        return Finding("unknown", f"{few}; {broken}" if broken else few)
    losses = {each: loss for each in operands if (loss := _loss(each))}
    doubts = [doubt for doubt in (_doubt(readings), *losses.values(), broken) if doubt]
    places = [frozenset({each.slot.operand or ""}) for each in losses] + [frozenset[str]()] * bool(broken)
    return Finding("watch", "; ".join(doubts), "", tuple(places)) if doubts else Finding("safe", "")


def vanishing_together(operands: Mapping[tuple[str, str], OperandReadings]) -> str:
    """Whether a layer's weights and activations underflow together as they do in an FP8 fault; empty where they do not.

    operands by (operand, layout). Both beyond their watch levels, one beyond its act level, as for the policy; here at any
    steps of the range.
    """
    x, w = operands.get(("x", "row")), operands.get(("w", "tile"))
    if x is None or w is None or not (_underflows(x, "watch") and _underflows(w, "watch")):
        return ""
    if not (_underflows(x, "act") or _underflows(w, "act")):
        return ""
    return (
        f"{percent(x.sure_underflow or 0.0)} of x and {percent(w.sure_underflow or 0.0)} of w vanish together"
    )


def unseen(coverage: Iterable[Mapping[str, Any]]) -> tuple[tuple[Unseen, ...], tuple[Unseen, ...]]:
    """Matrices that coverage says were not observed: those that a verdict needs, and those that it does without."""
    needed: list[Unseen] = []
    left_out: list[Unseen] = []
    for row in coverage:
        reason = str(row["reason"])
        if row["status"] != NOT_OBSERVED or any(words in reason for words in _NO_GEMM):
            continue
        found = Unseen(name=str(row["name"]), reason=reason)
        (left_out if reason.startswith(_NO_FP8) or _is_elementwise(reason) else needed).append(found)
    return tuple(needed), tuple(left_out)


def _is_elementwise(reason: str) -> bool:
    return reason.startswith(_USED_BY) and _ELEMENTWISE.issuperset(reason.removeprefix(_USED_BY).split(", "))


def _underflows(each: OperandReadings, severity: Literal["watch", "act"]) -> bool:
    rule = _rule("underflow", each.slot.operand, each.slot.layout)
    level = None if rule is None else rule.level(severity)
    return level is not None and (each.sure_underflow or 0.0) > level


def _harm(readings: GemmReadings) -> str:
    """Why the error alone keeps a GEMM in BF16; empty where it does not."""
    gemm, fmt = readings.slot.gemm or "", readings.fmt
    act, instant = level_of(gemm, "act", fmt), level_of(gemm, "instant", fmt)
    if readings.worst is None:
        return ""
    value, step = readings.worst
    if value > instant:
        return f"error {percent(value)} at step {step}: beyond {percent(instant)} one sample is enough"
    beyond = int(np.count_nonzero(readings.errors > act))
    if beyond >= TWICE:
        return f"error beyond {percent(act)} in {beyond} of {_samples(readings.samples)}"
    return ""


def _flush(operands: Sequence[OperandReadings]) -> str:
    for each in operands:
        rule = _rule("rows-flushed", each.slot.operand, each.slot.layout)
        level = None if rule is None else rule.act
        if level is not None and each.rows_flushed is not None and each.rows_flushed > level:
            return f"{percent(each.rows_flushed)} of the rows of {each.name} flushed at step {each.rows_flushed_step}"
    return ""


def _doubt(readings: GemmReadings) -> str:
    gemm, fmt = readings.slot.gemm or "", readings.fmt
    act, watch = level_of(gemm, "act", fmt), level_of(gemm, "watch", fmt)
    if readings.worst is not None and readings.worst[0] > act:
        value, step = readings.worst
        return f"error {percent(value)} once, at step {step}, of {percent(act)} allowed"
    beyond = int(np.count_nonzero(readings.errors > watch))
    return (
        f"error beyond {percent(watch)} in {beyond} of {_samples(readings.samples)}"
        if beyond >= TWICE
        else ""
    )


def _loss(each: OperandReadings) -> str:
    """What makes an operand worth watching; empty where nothing does."""
    said = []
    if _underflows(each, "watch"):
        said.append(f"{percent(each.sure_underflow or 0.0)} of {each.name} underflows")
    rule = _rule("rows-flushed", each.slot.operand, each.slot.layout)
    if rule is not None and rule.watch is not None and (each.rows_flushed or 0.0) > rule.watch:
        said.append(f"{percent(each.rows_flushed or 0.0)} of the rows of {each.name} flushed")
    return ", ".join(said)


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def percent(value: float) -> str:
    """A share in words, three digits."""
    return f"{100 * value:.3g} %" if np.isfinite(value) else "infinite"


def level_of(gemm: str, severity: Literal["watch", "act", "instant"], fmt: str | None) -> float:
    """A level of the error of a GEMM, moved to the noise floor of its format."""
    rule = _gemm_rule(gemm)
    level = rule.level(severity, fmt)
    assert level is not None
    return level


@lru_cache(maxsize=8)
def _gemm_rule(gemm: str) -> Threshold:
    return next(rule for rule in FLOOR.rules if rule.rule == "gemm-error" and rule.gemm == gemm)


@lru_cache(maxsize=64)
def _rule(name: str, operand: str | None, layout: str | None) -> Threshold | None:
    found = (rule for rule in FLOOR.rules if rule.rule == name)
    return next((rule for rule in found if (rule.operand, rule.layout) == (operand, layout)), None)
