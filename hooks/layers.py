"""One observed layer: where its statistics go and what one step needs."""

# Shapes: T tokens, N output features, K input features, E experts.

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision
from fp8_safeguard.monitor.slots import Slot


class Part(IntEnum):
    """What one layer reports, in the order of its slots."""

    X_ROW = 0
    X_COL = 1
    W_TILE = 2
    DY_ROW = 3
    DY_COL = 4
    FPROP = 5
    DGRAD = 6
    WGRAD = 7


GEMM_PARTS = frozenset({Part.FPROP, Part.DGRAD, Part.WGRAD})
GRADIENT_PARTS = frozenset({Part.DY_ROW, Part.DY_COL, Part.DGRAD, Part.WGRAD})
"""Parts that a loss scale multiplies."""


@dataclass(slots=True)
class StepState:
    """What a layer keeps from its forward to its backward; gone when the step ends."""

    frame: Frame | None = None
    outer_calls: int = 0
    """Forward calls outside backward: with any of them a call inside backward is a checkpoint's repetition."""
    w_measured: bool = False
    plain: bool | None = None
    """Whether all that the sample does with the layer fits one call (together.fprop); None until somebody asks."""
    cleared: bool = False
    """Whether the rows of all experts were emptied for those that come one by one."""
    codes: tuple[object, Any] | None = None
    """Which weight was measured (judge.place_of), and its FP8 codes (recompute.QuantisedWeight) for its GEMMs."""
    forwards: int = 0
    """Counted forwards of one of our own layers, and what of their backwards was counted."""
    dgrads: int = 0
    wgrads: int = 0
    node: Any = None
    """Where in the graph the weight's gradient arrives."""
    arrivals: list[RemovableHandle] = field(default_factory=list)
    """Of the hooks on such places."""
    wgrad_norm: Tensor | None = None
    """L2 norm of the gradient that arrived there, of several the largest; [] on its device."""
    owed: int = 0
    """Counted forwards whose output has had no gradient yet, though it can have one."""
    precision: LinearPrecision | None = None
    gain_K: Tensor | None = None
    """The layer's input gain at its forward."""
    uses: dict[int, Any] = field(default_factory=dict)
    """Forwards of compiled graphs whose backward is still to come, by token."""
    sites: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of the forwards that each place of such a graph has made and no checkpoint has repeated."""

    def close(self) -> None:
        """No backward finds its frame any more, and no hook stays on a place that outlives the step (DDP keeps some)."""
        self.frame = None
        for arrival in self.arrivals:
            arrival.remove()


class ObservedLayer:
    """A module with a weight GEMM, by name; the module itself is only weakly held."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        own: bool,
        transposed: bool,
        experts: int,
        first_row: int,
        attribute: str = "weight",
        functional: bool = False,
        own_forward: bool = False,
    ) -> None:
        self.name = name
        self.kept: dict[str, Any] = {}
        """What waits for the next sample; gone with the module."""
        self.module = weakref.ref(module, _clearing(self.kept))
        self.own = own
        """One of our FP8 layers: its real GEMMs are compared, and a plan can change it."""
        self.transposed = transposed
        """The weight is [K, N], as in GPT-2's Conv1D."""
        self.all_experts = experts
        self._expert: int | None = None
        self.attribute = attribute
        """Name of the weight in its module."""
        self.functional = functional
        """The module multiplies with this weight by a function of its own, not as a linear layer."""
        self.traced = False
        """Whether a compiler has seen the module of a functional layer."""
        self.bypassed = False
        """Others multiply with its weight; the module itself is not called."""
        self.rows = [first_row + part * experts for part in Part]
        self.slots = [_slot(name, part, emulated=not own) for part in Part]
        self.step = StepState()
        self.own_forward = own_forward
        """The output may be more than x w^T + b: it is not compared."""
        self.seen = False
        """Whether a forward of it was counted in any sample so far."""
        self.seen_at = -10
        """The sample, by its count since attach(), that saw it last."""
        self.answered = False
        """Whether a gradient of its output was counted in any sample so far."""
        self.remark = ""
        """Why it cannot be read here, where that was found out; a note on how it is observed, where it was seen."""

    def row(self, part: Part) -> int:
        """First row of that part in a frame; inside `narrowed` its only one."""
        return self.rows[part] + (self._expert or 0)

    @property
    def experts(self) -> int:
        """How many rows a part has: one for each expert, inside `narrowed` one."""
        return self.all_experts if self._expert is None else 1

    @contextlib.contextmanager
    def narrowed(self, frame: Frame, expert: int | None) -> Iterator[None]:
        """Inside the block the layer is that one of its experts: what is measured belongs to it alone."""
        if expert is None:
            yield
            return
        self._expert = expert
        try:
            for row in self.rows:
                if row in frame.filled:
                    frame.filled.add(row + expert)
                elif not self.step.cleared:
                    frame.values[row : row + self.all_experts].zero_()
            self.step.cleared = True
            yield
        finally:
            self._expert = None
            # A part is known by its first row, whichever expert was the first.
            frame.filled.update(row for row in self.rows if row + expert in frame.filled)

    def enter(self, frame: Frame) -> StepState:
        """The state of the step that fills this frame."""
        if self.step.frame is not frame:
            if self.step.frame is not None:
                self.leave()
            self.step.frame = frame
        return self.step

    def leave(self) -> None:
        """The step is over. Frames take turns: a backward that comes too late must not find its old one."""
        self.step.close()
        self.step = StepState()

    def close(self) -> None:
        """No step comes any more."""
        self.leave()
        self.kept.clear()

    def fp8_module(self) -> Fp8Linear | Fp8GroupedLinear | None:
        """The module, if it is one of our FP8 layers and still exists."""
        module = self.module()
        return module if isinstance(module, Fp8Linear | Fp8GroupedLinear) else None

    def parameter(self) -> Tensor | None:
        """The module's weight as it is stored, found by name: its identity may change from step to step."""
        module = self.module()
        return None if module is None else stored(module, self.attribute)

    def trainable(self) -> list[Tensor]:
        """What an optimizer would update: the weight, or what a weight that is no parameter is computed from."""
        weight, module = self.parameter(), self.module()
        if isinstance(weight, nn.Parameter) or module is None:
            return [] if weight is None else [weight]
        return list(module.parameters())

    def weight(self) -> Tensor | None:
        """The weight as [N, K], or [E, N, K] with experts."""
        parameter = self.parameter()
        return None if parameter is None else self.as_weight(parameter)

    def as_weight(self, parameter: Tensor) -> Tensor:
        """The same, of what `parameter` has found."""
        return parameter.mT if self.transposed else parameter


def _clearing(kept: dict[str, Any]) -> Callable[[object], None]:
    """What a weak reference calls: not a method, which would keep its layer alive."""
    return lambda _: kept.clear()


def stored(module: nn.Module, name: str) -> Tensor | None:
    """A tensor of the module as it is stored; None for one that a property computes (parametrizations)."""
    parameter = module._parameters.get(name)
    if parameter is not None:  # as nearly always
        return parameter
    for store in (module._buffers, vars(module)):
        value = store.get(name)
        if isinstance(value, Tensor):
            return value
    return None


def rows_of(layers: list[ObservedLayer]) -> int:
    """How many rows a frame needs for these layers."""
    return sum(len(Part) * layer.experts for layer in layers)


def _slot(name: str, part: Part, *, emulated: bool) -> Slot:
    if part in GEMM_PARTS:
        # A foreign layer's own output is compared, so only its gradients are emulated.
        return Slot(layer=name, gemm=part.name.lower(), emulated=emulated and part is not Part.FPROP)
    operand, layout = part.name.lower().split("_")
    return Slot(layer=name, operand=operand, layout=layout)


_OPERANDS_OF = {
    Part.X_ROW: "x", Part.X_COL: "x", Part.W_TILE: "w", Part.DY_ROW: "dy", Part.DY_COL: "dy",
    Part.FPROP: "x w", Part.DGRAD: "dy w", Part.WGRAD: "dy x",
}  # fmt: skip


def emulated(precision: LinearPrecision, part: Part) -> LinearPrecision | None:
    """The precision to emulate for a GEMM that runs in BF16: the statistics go on saying what FP8 would do.

    None for a GEMM that runs in FP8, whose own result is there to be judged.
    """
    return precision if part in GEMM_PARTS and getattr(precision, part.name.lower()) == "bf16" else None


def format_of(precision: LinearPrecision, part: Part) -> str:
    """Format that a part is judged by: of a GEMM the coarser one of its two operands."""
    formats = {getattr(precision, operand).fmt for operand in _OPERANDS_OF[part].split()}
    return "e5m2" if "e5m2" in formats else "e4m3"
