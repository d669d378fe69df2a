"""Threshold presets: which values are worth watching or acting on.

`floor`, the default, is per operand, layout and gemm, relative to the format's noise floor and to the slot's own median.
Its values were measured on a small FP8 mixture-of-experts model: none fires in 12,000 healthy slot samples of 4 seeds, 11 of
11 FP8 faults reach an act level, and 7 of 7 faults that are not FP8's (raw norm gain, token weights, data spike, ...) reach
none. Underflow is the early warning; the error of the recomputed GEMM is the judge.

`seed` is one pair for every slot: underflow below 0.5 % and cosine above 0.995. It has no false alarms on healthy runs
either, but calls 4 of the same 7 other faults FP8's: take its word with care.

`autoswitch` is the published rule of Transformer Engine's AutoswitchGemm: where underflow of an operand passes 5 % or its mean
squared error 1e-4, the gemms that read it go to BF16 with the next step. It is here to be compared with, not to be used:
that error has a unit, and 98.6 % of healthy activations are above it.

The noise floor of [1, 128] blocks of Gaussian data is 31.8 dB in E4M3 and 6 dB less in E5M2, which has one mantissa bit
less: levels in dB move by that, levels of a relative error double.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fp8_safeguard.monitor.levels import Healthy, learned_act, learned_factor, learned_watch
from fp8_safeguard.monitor.slots import Slot

if TYPE_CHECKING:
    from fp8_safeguard.monitor.baseline import Baseline

Remedy = Literal["fallback", "unjudged", "scale", "pair", "none"]

E5M2_SHIFT_DB = -6.0
E5M2_ERROR_FACTOR = 2.0
TWO_OPERAND_FLOOR = 0.04
"""Just above what rounding both operands of a GEMM to E4M3 does to Gaussian data: sqrt(2) x 2.57 % = 3.6 %. An error below
it is the format's own, however far it lies above the slot's median."""

MIN_UNDERFLOW_COUNT = 8
"""Fewer vanished elements than this are chance, whatever ratio they make in a small tensor. The preset seed has no such
exception: it is one pair for every slot."""

MEDIAN_CAP = 2.0
"""The own median relaxes an act level up to this factor: a slot that creeps up must not teach its own threshold."""


class UnknownPresetError(ValueError):
    """A preset name that is not one of the known ones."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One rule: a metric of matching slots, its levels, and what reaching the act level leads to."""

    rule: str
    """Stable name, shown in alerts and decisions."""
    metric: str
    above: bool = True
    """Whether values above the levels are bad; False: values below."""
    watch: float | None = None
    act: float | None = None
    operand: str | None = None
    layout: str | None = None
    gemm: str | None = None
    origin: str
    """Where the numbers come from, for people."""
    watch_over_median: float | None = None
    """Watch level as a multiple of the slot's own median (no level until there is one), and not below `watch` if given."""
    act_over_median: float | None = None
    """Raises the act level to this multiple of the slot's own median, up to MEDIAN_CAP times itself."""
    instant: float | None = None
    """Beyond this, one sample at the act level is enough; otherwise it takes two."""
    min_count: int = 0
    """Elements below which the metric is too noisy to judge."""
    min_underflow: int = 0
    """Vanished elements below which the metric is chance."""
    remedy: Remedy = "none"
    """fallback: of the gemms that read the slot. unjudged: the same where no recomputed GEMM can judge. scale: a
    neutral multiplier first, then as unjudged. pair: only together with its partner, x row with w tile. none: for people only."""

    def matches(self, slot: Slot) -> bool:
        """Whether the rule speaks about that slot. A rule without operand, layout and gemm speaks about all."""
        wanted = (self.operand, self.layout, self.gemm)
        if wanted == (None, None, None):
            return True
        if self.gemm is not None:
            return slot.gemm == self.gemm
        return slot.operand == self.operand and self.layout in (None, slot.layout)

    def level(self, severity: Literal["watch", "act", "instant"], fmt: str | None = None) -> float | None:
        """A fixed level, moved to the noise floor of the slot's format."""
        value: float | None = getattr(self, severity)
        if value is None or fmt != "e5m2":
            return value
        if self.metric in ("sqnr_db", "tile_sqnr_p01_db"):
            return value + E5M2_SHIFT_DB
        return value * E5M2_ERROR_FACTOR if self.metric == "relative_error" and value < 0.5 else value


@dataclass(frozen=True)
class Preset:
    """A named set of rules; for any slot at most one rule of each name matches."""

    name: str
    rules: tuple[Threshold, ...]

    def matching(self, slot: Slot) -> tuple[Threshold, ...]:
        """The rules that speak about that slot."""
        return tuple(rule for rule in self.rules if rule.matches(slot))


def _gemm_errors() -> Sequence[Threshold]:
    origin = "twice the largest healthy error of a recomputed GEMM, or of this slot's own median"
    both = [
        Threshold(
            rule="gemm-error",
            metric="relative_error",
            gemm=gemm,
            watch=TWO_OPERAND_FLOOR,
            act=0.05,
            instant=0.15,
            watch_over_median=1.3,
            act_over_median=2.0,
            remedy="fallback",
            origin=origin,
        )
        for gemm in ("fprop", "dgrad")
    ]
    # wgrad is a leaf: its noise goes no further, and healthy runs swing up to 1.8 times their own median.
    wgrad = Threshold(
        rule="gemm-error",
        metric="relative_error",
        gemm="wgrad",
        watch=TWO_OPERAND_FLOOR,
        act=0.08,
        instant=0.90,
        watch_over_median=2.0,
        act_over_median=3.0,
        remedy="fallback",
        origin="twice the largest healthy error of a recomputed wgrad, or three times this slot's own median",
    )
    return (*both, wgrad)


def _underflow() -> Sequence[Threshold]:
    def rule(operand: str, layout: str, watch: float, act: float | None, origin: str) -> Threshold:
        return Threshold(
            rule="underflow",
            metric="underflow_ratio",
            operand=operand,
            layout=layout,
            watch=watch,
            act=act,
            min_underflow=MIN_UNDERFLOW_COUNT,
            remedy="none" if act is None else "pair",
            origin=origin,
        )

    rows = "watch: six times the healthy maximum of row blocks; act: where a flushed x has always done harm"
    columns = "six times the healthy maximum of column blocks; for information"
    return (
        rule("x", "row", 0.005, 0.20, rows),
        rule("dy", "row", 0.005, None, rows),
        rule(
            "w",
            "tile",
            0.001,
            0.003,
            "watch: ten times the healthy maximum of weights; act: thirty times, with x row of the same layer in breach",
        ),
        rule("x", "col", 0.02, None, columns),
        rule("dy", "col", 0.02, None, columns),
    )


def _operand_rules() -> Sequence[Threshold]:
    rules = []
    for operand in ("x", "w", "dy"):
        rules += [
            Threshold(
                rule="sqnr",
                metric="sqnr_db",
                above=False,
                operand=operand,
                watch=28.5,
                act=20.0,
                min_count=1024,
                remedy="unjudged",
                origin="3 dB under the format's noise floor; act: 15 times its noise power",
            ),
            Threshold(
                rule="tile-sqnr",
                metric="tile_sqnr_p01_db",
                above=False,
                operand=operand,
                watch=24.0,
                min_count=1024,
                origin="two bins under the healthy minimum of the worst hundredth of the blocks",
            ),
            Threshold(
                rule="saturation",
                metric="saturation_ratio",
                operand=operand,
                watch=0.0001,
                act=0.01,
                instant=0.01,
                remedy="scale",
                origin="block scales saturate nothing; a multiplier below 1 or a stale scale does",
            ),
            # Every layout of an operand has the same amax and kurtosis: one of them speaks.
            Threshold(
                rule="amax-jump",
                metric="amax",
                operand=operand,
                layout="tile" if operand == "w" else "row",
                watch_over_median=16.0,
                origin="twice the largest healthy swing of a slot's amax; never a reason to act",
            ),
            Threshold(
                rule="kurtosis-jump",
                metric="kurtosis",
                operand=operand,
                layout="tile" if operand == "w" else "row",
                watch_over_median=100.0,
                origin="twice the largest healthy swing of a slot's kurtosis; never a reason to act",
            ),
        ]
    return rules


def _rows_flushed() -> Sequence[Threshold]:
    origin = "healthy rows are never flushed whole"
    dy = Threshold(
        rule="rows-flushed",
        metric="rows_flushed_ratio",
        operand="dy",
        layout="row",
        watch=0.01,
        act=0.50,
        instant=0.50,
        remedy="scale",
        origin=origin,
    )
    x = Threshold(
        rule="rows-flushed",
        metric="rows_flushed_ratio",
        operand="x",
        layout="row",
        watch=0.01,
        origin=origin,
    )
    return (dy, x)


FLOOR = Preset("floor", (*_gemm_errors(), *_underflow(), *_operand_rules(), *_rows_flushed()))

SEED = Preset(
    "seed",
    (
        Threshold(
            rule="seed-underflow",
            metric="underflow_ratio",
            watch=0.005,
            act=0.005,
            remedy="fallback",
            origin="preset seed: one pair for every slot",
        ),
        Threshold(
            rule="seed-cosine",
            metric="cosine",
            above=False,
            watch=0.995,
            act=0.995,
            remedy="fallback",
            origin="preset seed: one pair for every slot",
        ),
    ),
)


def _autoswitch(rule: str, metric: str, level: float) -> tuple[Threshold, ...]:
    return tuple(
        Threshold(
            rule=rule,
            metric=metric,
            operand=operand,
            act=level,
            watch=level,
            instant=level,
            remedy="fallback",
            origin="preset autoswitch: Transformer Engine's AutoswitchGemm, for comparison only",
        )
        for operand in ("x", "w", "dy")
    )


AUTOSWITCH = Preset(
    "autoswitch",
    (
        *_autoswitch("autoswitch-underflow", "underflow_ratio", 0.05),
        *_autoswitch("autoswitch-mse", "mse", 1e-4),
    ),
)

PRESETS = {preset.name: preset for preset in (FLOOR, SEED, AUTOSWITCH)}


def get_preset(name: str | Preset) -> Preset:
    """The preset of that name; a Preset is returned as it is. Raises UnknownPresetError."""
    if isinstance(name, Preset):
        return name
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise UnknownPresetError(
            f"thresholds {name!r} are not known; choose one of {', '.join(PRESETS)}"
        ) from None


def thresholds_for(
    preset: str | Preset,
    slot: Slot | None,
    metric: str,
    *,
    median: float | None = None,
    baseline: "Baseline | None" = None,
) -> list[dict[str, float | str]]:
    """The lines to draw beside a series: `{"value", "severity", "origin"}`, watch before act.

    slot: None for a metric of the whole layer or run, which only rules for every slot speak about. With the slot's own
    `median`, levels relative to it are given as well. Cosine rules also give lines for the two distortions. A level that the
    `baseline` moves says where it was learned.
    """
    lines: list[dict[str, float | str]] = []
    complement = metric in ("cosine_distortion", "gradient_distortion")
    fmt = slot.fmt if slot is not None else None
    for rule in get_preset(preset).rules:
        everywhere = rule.operand is None and rule.gemm is None
        if rule.metric != ("cosine" if complement else metric):
            continue
        if not (everywhere if slot is None else rule.matches(slot)):
            continue
        healthy = None if baseline is None or slot is None else baseline.healthy(slot, rule.metric)
        for severity, level in (("watch", watch_level), ("act", act_level)):
            value = level(rule, fmt, median, healthy)
            if value is not None:
                learned = baseline is not None and value != level(rule, fmt, median)
                shown = 1.0 - value if complement else value
                origin = baseline.origin if baseline is not None and learned else rule.origin
                lines.append({"value": shown, "severity": severity, "origin": origin})
    return lines


def watch_level(
    rule: Threshold, fmt: str | None, median: float | None, healthy: Healthy | None = None
) -> float | None:
    """The level in force for a slot of that format and own median; None where there is none yet.

    healthy: what a baseline learned of the slot; its median stands in until there is an own one.
    """
    fixed = learned_watch(rule, rule.level("watch", fmt), healthy)
    factor = learned_factor(rule, healthy)
    if factor is None:
        return fixed
    own = median if median is not None or healthy is None else healthy.median
    if own is None or own <= 0:
        return None
    return max(fixed or 0.0, factor * own)


def act_level(
    rule: Threshold, fmt: str | None, median: float | None, healthy: Healthy | None = None
) -> float | None:
    """As watch_level, for acting."""
    preset = rule.level("act", fmt)
    fixed = learned_act(rule, preset, healthy, MEDIAN_CAP)
    own = median if median is not None or healthy is None else healthy.median
    if fixed is None or preset is None or rule.act_over_median is None or own is None:
        return fixed
    return min(max(fixed, rule.act_over_median * own), MEDIAN_CAP * preset)
