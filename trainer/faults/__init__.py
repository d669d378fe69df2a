"""Faults to inject: some harm FP8 alone, some BF16 alike, some nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8_safeguard.trainer.errors import ConfigError
from fp8_safeguard.trainer.faults.base import Fault
from fp8_safeguard.trainer.faults.controls import (
    DataSpike,
    DeadLayer,
    DomainShift,
    NormGain,
    QKGain,
    StarvedExpert,
    TokenWeights,
)
from fp8_safeguard.trainer.faults.outliers import (
    NORM_FED,
    AbruptOutliers,
    FastDrift,
    LateDivergence,
    OutlierDrift,
    SlowDrift,
    outlier_channels,
)
from fp8_safeguard.trainer.faults.scales import (
    ActivationScaleTooSmall,
    FlushedGradients,
    GradientScaleTooLarge,
    GradientScaleTooSmall,
    StuckScale,
)
from fp8_safeguard.trainer.faults.tampering import BadRank, ExpertNaN, IsolatedNaN, StaleInverseScale

_CLASSES: tuple[type[Fault], ...] = (
    OutlierDrift,
    SlowDrift,
    FastDrift,
    AbruptOutliers,
    LateDivergence,
    FlushedGradients,
    StuckScale,
    GradientScaleTooLarge,
    GradientScaleTooSmall,
    ActivationScaleTooSmall,
    StaleInverseScale,
    BadRank,
    ExpertNaN,
    IsolatedNaN,
    NormGain,
    TokenWeights,
    QKGain,
    DataSpike,
    StarvedExpert,
    DeadLayer,
    DomainShift,
)
KINDS: Mapping[str, type[Fault]] = {fault.kind: fault for fault in _CLASSES}
"""Every fault, by the kind that a config names."""


def fault_from_mapping(values: Mapping[str, Any]) -> Fault:
    """The fault of plain values; `kind` chooses it, and is outlier-drift where there is none. ConfigError if unknown."""
    kind = values.get("kind", OutlierDrift.kind)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"fault.kind is {kind!r}; known kinds are {', '.join(KINDS)}")
    return KINDS[kind].from_mapping(values)


__all__ = [
    "KINDS",
    "NORM_FED",
    "AbruptOutliers",
    "ActivationScaleTooSmall",
    "BadRank",
    "DataSpike",
    "DeadLayer",
    "DomainShift",
    "ExpertNaN",
    "FastDrift",
    "Fault",
    "FlushedGradients",
    "GradientScaleTooLarge",
    "GradientScaleTooSmall",
    "IsolatedNaN",
    "LateDivergence",
    "NormGain",
    "OutlierDrift",
    "QKGain",
    "SlowDrift",
    "StaleInverseScale",
    "StarvedExpert",
    "StuckScale",
    "TokenWeights",
    "fault_from_mapping",
    "outlier_channels",
]
