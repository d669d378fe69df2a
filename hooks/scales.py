"""Scalars of layers with one scale for a whole operand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8_safeguard.hooks.layers import ObservedLayer


def scale_scalars(layers: Iterable[ObservedLayer]) -> Iterator[tuple[str, str, float]]:
    """(layer, `{operand}_scale` or `{operand}_history_amax`, value) of what the sample's last pass was made with.

    A scale that nobody has measured an amax for is not told: it is unknown.
    """
    for layer in layers:
        precision, module = layer.step.precision, layer.fp8_module()
        if precision is not None and not precision.is_plain and module is not None:
            for name, value in module.scaling.scalars().items():
                yield layer.name, name, value
