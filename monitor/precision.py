"""Which precision each GEMM ran in, as far as samples show.

The wire tells a GEMM's precision only through its recomputed slot, which says `emulated` where the layer gave no FP8 result
to compare. One of our layers marks so every GEMM that runs in BF16, its fprop included. A foreign layer marks its dgrad and
wgrad always, and hands over its real output: if that is nearer to the high-precision result than 8 bits can be, the layer is
plain high precision; if not, its fprop is FP8 and nobody knows about the other two.
"""

from collections.abc import Collection, Iterable, Mapping

from fp8_safeguard.monitor.slots import GEMMS, Slot

FP8_LEAST_ERROR = 0.01
"""No FP8 GEMM of real data is nearer than this (E4M3 blocks: 3.6 %, SYSTEMS 1); rounding the output to BF16 leaves 0.2 %."""

FP8 = "fp8"
BF16 = "bf16"
HIGH = "high"
"""Plain high precision: BF16, FP16 or FP32, the wire does not say which."""

Precisions = Mapping[str, str | None]
"""By gemm; None where it cannot be known."""


def precisions_of(
    seen: Iterable[tuple[Slot, float]], fallen: Collection[tuple[str, str]]
) -> dict[str, dict[str, str | None]]:
    """Precision of every GEMM, by layer, of those layers that have a recomputed slot.

    seen: slots with their relative error (NaN: none). fallen: (layer, gemm) that the plan runs in BF16.
    """
    layers: dict[str, dict[str, tuple[bool, float]]] = {}
    for slot, error in seen:
        if slot.gemm is not None and slot.expert is None and slot.variant is None:
            layers.setdefault(slot.layer, {})[slot.gemm] = (slot.emulated, error)
    return {
        layer: _of_layer(gemms, {gemm for gemm in GEMMS if (layer, gemm) in fallen})
        for layer, gemms in layers.items()
    }


def _of_layer(gemms: Mapping[str, tuple[bool, float]], fallen: Collection[str]) -> dict[str, str | None]:
    emulated = {gemm for gemm, (is_emulated, _) in gemms.items() if is_emulated}
    found = {**_configured(gemms, emulated, fallen), **dict.fromkeys(fallen, BF16)}
    return {gemm: found[gemm] for gemm in GEMMS}


def _configured(
    gemms: Mapping[str, tuple[bool, float]], emulated: Collection[str], fallen: Collection[str]
) -> dict[str, str | None]:
    """Precision without the plan."""
    fp8: dict[str, str | None] = dict.fromkeys(GEMMS, FP8)
    by_itself = {gemm for gemm in emulated if gemm not in fallen}
    if not by_itself:
        return fp8
    if "fprop" in emulated:
        # Ours. One whose every sampled GEMM is in BF16 without a plan is configured so: the wgrad that is not due, too.
        whole = "fprop" not in fallen and len(emulated) == len(gemms)
        return dict.fromkeys(GEMMS, BF16) if whole else {**fp8, **dict.fromkeys(by_itself, BF16)}
    if "dgrad" not in by_itself:
        return {**fp8, **dict.fromkeys(by_itself, None)}
    _, error = gemms.get("fprop", (False, float("nan")))
    if error < FP8_LEAST_ERROR:
        return dict.fromkeys(GEMMS, HIGH)
    return {"fprop": FP8 if error >= FP8_LEAST_ERROR else None, "dgrad": None, "wgrad": None}
