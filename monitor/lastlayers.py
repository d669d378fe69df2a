"""Late NaN: with underflow rising before it, the last layers to BF16."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fp8_safeguard.monitor.nonfinite import layer_order
from fp8_safeguard.monitor.plan import Target
from fp8_safeguard.monitor.remedies import Candidate, percent
from fp8_safeguard.monitor.runwatch import LOSS

if TYPE_CHECKING:
    from fp8_safeguard.monitor.gate import Gate
    from fp8_safeguard.monitor.view import StepView

RULE = "late-nan"
LAST_BLOCKS = 5
"""How many blocks from the end: what is often advised for a NaN late in training. Public runs keep as many in BF16 from the start."""
GEMMS = ("fprop", "dgrad")
"""wgrad is a leaf: what is wrong there goes no further."""
RECENT_SAMPLES, LONG_SAMPLES = 8, 64
"""Samples of the two running means that say how underflow has gone lately and long before."""
RISEN = math.log(2.0)
"""Recent underflow over that of long before, as a logarithm."""
LEAST_UNDERFLOW = 1e-3
"""Below it no trend matters: healthy rows reach 0.08 %."""
_FLOOR = 1e-7

_BLOCK = re.compile(r"(.*?\d+)(\.|$)")


@dataclass(frozen=True)
class UnderflowTrend:
    """Mean underflow of the layers' inputs and output gradients, lately and long before, as logarithms. Immutable."""

    recent: float = 0.0
    before: float = 0.0
    samples: int = 0

    def added(self, view: StepView) -> UnderflowTrend:
        """With one more sample; one with non-finite values says nothing."""
        value = None if view.origin is not None else _underflow(view)
        if value is None:
            return self
        level = math.log(max(value, _FLOOR))
        count = self.samples + 1
        recent = self.recent + (level - self.recent) / min(count, RECENT_SAMPLES)
        before = self.before + (level - self.before) / min(count, LONG_SAMPLES)
        return UnderflowTrend(recent, before, count)

    @property
    def rises(self) -> bool:
        """Whether it has doubled, and matters."""
        long_enough = self.samples >= 2 * RECENT_SAMPLES
        return long_enough and self.recent >= max(self.before + RISEN, math.log(LEAST_UNDERFLOW))

    @property
    def words(self) -> str:
        """`underflow had risen from 0.05 % to 0.4 %`."""
        return (
            f"underflow had risen from {percent(math.exp(self.before))} to {percent(math.exp(self.recent))}"
        )

    def to_list(self) -> list[Any]:
        """JSON form."""
        return [self.recent, self.before, self.samples]

    @classmethod
    def from_list(cls, stored: Sequence[Any]) -> Self:
        """The inverse of to_list; nothing stored is an empty one."""
        return cls(*stored)


def offer_last_layers(gate: Gate, view: StepView, trend: UnderflowTrend) -> None:
    """Two samples with NaN or Inf after a rise of underflow: the last blocks to BF16, the last first, within the budget."""
    if not (trend.rises and _is_lasting(view)):
        return
    blocks = last_blocks(view)
    named = ", ".join(repr(block) for block in blocks)
    because = f"non-finite values at step {view.seen.step} after {trend.words}: of the last {len(blocks)} blocks ({named}) what the budget holds"
    for layer, gemm in _places(view, blocks):
        candidate = Candidate(
            layer=layer,
            target=Target(gemm=gemm),
            action="bf16_fallback",
            rule=RULE,
            breaches=tuple(() if view.origin is None else (view.origin.breach("act"),)),
            priority=5,
            because=because,
        )
        if gate.in_bf16(layer, gemm) or gate.fits([(layer, gemm)]):
            gate.offer(candidate, view.breaches)


def last_blocks(view: StepView) -> dict[str, list[str]]:
    """Layers of the last blocks, the last block first: what comes up to the first number of a name is a block's name."""
    layers = {slot.layer for slot in view.compiled.slots}
    order = layer_order(view.compiled.slots, view.seen.indices, layers)
    blocks: dict[str, list[str]] = {}
    for layer in sorted(layers, key=lambda layer: order[layer], reverse=True):
        found = _BLOCK.match(layer)
        if found is not None:
            blocks.setdefault(found[1], []).append(layer)
    return dict(list(blocks.items())[:LAST_BLOCKS])


def _places(view: StepView, blocks: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    for layers in blocks.values():
        for gemm in GEMMS:
            for layer in layers:
                yield layer, gemm


def _is_lasting(view: StepView) -> bool:
    """Whether two samples in a row held them, at one place or in the loss."""
    if view.origin is not None and view.breaches[view.origin.key].severity == "act":
        return True
    loss = view.everything.get(LOSS.rule)
    return loss is not None and loss.severity == "act"


def _underflow(view: StepView) -> float | None:
    slots = view.compiled.slots
    at = [
        place
        for place in view.compiled.own.tolist()
        if slots[place].operand in ("x", "dy") and slots[place].layout == "row"
    ]
    values = view.measures["underflow_ratio"][at] if at else np.empty(0)
    known = np.sort(values[np.isfinite(values)])
    # Sorted: a sum must not depend on the order of the slots.
    return float(np.mean(known)) if len(known) else None
