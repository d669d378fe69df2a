"""One use of a foreign layer's GEMM, whoever saw it: forward, then gradient."""

# Shapes: T tokens, N output features, K input features, E experts.

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from fp8_safeguard.hooks import arrivals, judge, operands, together
from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import ObservedLayer, Part, StepState
from fp8_safeguard.hooks.readable import is_freed, is_reason, unfit, version_of
from fp8_safeguard.kernels import LinearPrecision

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

FOREIGN = LinearPrecision()
"""What an FP8 run of a foreign layer would use."""
ENDLESS = 128
"""Forward calls of a layer in one step after which the end of the step is asked for."""
UNFINISHED = 8
"""Layers of a sample that say how many of their calls got no gradient: the first ones, since a fault stops them all."""
_CALLERS = (torch.autograd.__file__, torch._tensor.__file__)
"""Functions called `backward` that start one and are no autograd function's."""
_EMULATED = judge.Judgement(emulate=FOREIGN)


@dataclass(slots=True, kw_only=True)
class GemmCall:
    """y = x w^T + b as somebody saw it: the tensors may carry gradients, they are detached here."""

    x_TK: Tensor
    w: Tensor
    """[N, K], or [E, N, K] with offsets."""
    y_TN: Tensor | None
    """None where the output cannot be read: then fprop is not compared."""
    bias_N: Tensor | None = None
    offsets: Tensor | None = None
    """int32 [E+1]: rows offsets[e] to offsets[e+1] are expert e's."""
    expert: int | None = None
    """The one expert of the layer that x, w [N, K] and y are of, where each is multiplied by a call of its own."""
    whole: Tensor | None = None
    """The layer's weight, where w is only a part of it."""
    arranged: Callable[[Tensor], Tensor] | None = None
    """Makes [T, N] of the gradient of the output, where that is more than putting its leading dimensions together."""
    needs_dx: bool
    needs_dw: bool
    lent: bool = False
    """The memory of x is written again after this call: what waits for the backward is a copy."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward seen there repeats one under a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def counts_forward(state: StepState) -> bool:
    """Whether this forward call is to be counted.

    Under a non-reentrant checkpoint the first pass builds the graph and is counted, its repetition inside the
    backward is not. Under a reentrant one the first pass runs without gradients, so the repetition counts.
    """
    if not in_backward():
        state.outer_calls += 1
        return True
    repeats = _repeats()
    # Of a checkpoint of another make: with a call outside backward, one inside is its repetition.
    return state.outer_calls == 0 if repeats is None else not repeats


def _repeats() -> bool | None:
    """Whether the call in a backward repeats one with gradients; None where the stack does not tell.

    The innermost checkpoint decides: torch's non-reentrant one repeats where a saved tensor is unpacked, the reentrant
    ones (torch's and all others') in the backward of an autograd function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return True
        if code.co_name == "backward" and code.co_filename not in _CALLERS:
            # A compiled backward repeats what its graph says: that is known elsewhere.
            return None if "_functorch" in code.co_filename else False
        frame = frame.f_back
    return None


def begin(session: Session, layer: ObservedLayer, *operands_seen: Tensor | None) -> StepState | None:
    """The layer's state of the step, if its operands can be read here; what they are is said where not."""
    if session.frame is None:
        return None
    reason = unfit(*operands_seen)
    if reason:
        layer.remark = reason
        session.once.warning(reason, "layer %s is not measured: %s", layer.name, reason)
        return None
    return layer.enter(session.frame)


def count(session: Session, layer: ObservedLayer, state: StepState) -> None:
    """A forward of the layer is counted in the sample in progress."""
    layer.seen, layer.seen_at = True, session.samples
    if layer.remark and is_reason(layer.remark):
        layer.remark = ""
    session.follow_scale()
    if state.outer_calls == ENDLESS:
        session.once.warning(
            "endless step",
            "layer %s was called %d times since the last optimizer step: give attach() an optimizer that updates no "
            "parameter of the model, and with one that is not torch.optim's call step() after each step, or no sample is "
            "ever finished",
            layer.name,
            ENDLESS,
        )


def forward(
    session: Session,
    layer: ObservedLayer,
    call: GemmCall,
    *,
    repeats: bool | None = None,
    begun: bool = False,
) -> Use | None:
    """Measure x, w and the output; what the gradient of y is to be given to. None where the call does not count.

    `begun` says that `begin` has been asked about x and w: only the output is left to ask about.
    `repeats` says whether the call repeats one that was counted, where that is known: then only its gradient counts.
    To be called inside `guarded`, without gradients, while `session.measuring`.
    """
    unasked = (call.y_TN,) if begun else (call.x_TK, call.w, call.whole, call.y_TN)
    state, frame = begin(session, layer, *unasked), session.frame
    if state is None or frame is None or (repeats is None and not counts_forward(state)):
        return None
    count(session, layer, state)
    w = call.w.detach()
    if repeats or state.w_measured or not _measure_together(session, layer, call, w):
        _measure_apart(session, layer, call, w, state, frame, repeats=bool(repeats))
    state.w_measured = True
    kept_x = None
    if call.needs_dw:
        parameter = layer.parameter()
        arrivals.watch(session, layer, state, accumulator(parameter))
        if judge.keeps_x(session, layer):
            kept_x = call.x_TK.detach()
            kept_x = kept_x.clone() if call.lent else kept_x
    return Use(session, layer, state, call, w, kept_x)


def _measure_together(session: Session, layer: ObservedLayer, call: GemmCall, w: Tensor) -> bool:
    """Weight, x and the output of a dense layer in one call, where there is one for them."""
    if call.offsets is not None or call.expert is not None or call.whole is not None:
        return False
    return together.fprop(
        session, layer, call.x_TK, w, call.y_TN, call.bias_N, FOREIGN, columns=call.needs_dw
    )


def _measure_apart(
    session: Session,
    layer: ObservedLayer,
    call: GemmCall,
    w: Tensor,
    state: StepState,
    frame: Frame,
    *,
    repeats: bool,
) -> None:
    if not state.w_measured:
        operands.measure_weight(session, layer, w if call.whole is None else call.whole.detach(), FOREIGN.w)
    if not repeats:
        with layer.narrowed(frame, call.expert):
            _measure(session, layer, call, w)


def _measure(session: Session, layer: ObservedLayer, call: GemmCall, w: Tensor) -> None:
    x_TK = call.x_TK.detach()
    col = Part.X_COL if call.needs_dw else None
    operands.measure(session, layer, x_TK, FOREIGN.x, row=Part.X_ROW, col=col, offsets=call.offsets)
    y_TN, bias_N = (None if each is None else each.detach() for each in (call.y_TN, call.bias_N))
    how = judge.Judgement()
    judge.fprop(session, layer, x_TK, w, y_TN, how, bias_N=bias_N, offsets=call.offsets)


def unfinished(layers: list[ObservedLayer]) -> list[tuple[str, str, float]]:
    """Scalars for layers with calls whose output got no gradient: an exception, or a loss that does not use them."""
    owing = ((layer.name, layer.step.owed) for layer in layers if layer.step.owed > 0)
    return [(name, "unfinished_calls", float(owed)) for name, owed in itertools.islice(owing, UNFINISHED)]


def accumulator(weight: Tensor | None) -> Any:
    """The place in the graph where the weight's gradient arrives; None for a weight that gets none."""
    if weight is None or not weight.requires_grad:
        return None
    node = weight.grad_fn
    if node is not None:
        return node
    gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        view = weight.view_as(weight).grad_fn
    finally:
        torch._C._set_grad_enabled(gradients)
    # None inside an operator of a compiled graph: there the graph itself says which gradients come.
    return None if view is None else view.next_functions[0][0]


def reaches(node: Any) -> bool:
    """Whether the backward in progress goes on to that place: one for the inputs alone does not (a penalty's)."""
    if node is None:
        return True
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # So torch says of the weight of an autograd.grad() that asks for its gradient.
        return True


def listen(y: Tensor, use: Use) -> None:
    """Have the use told the gradient of y as its GEMMs get it: after every hook on y, and before they run.

    A tensor hook would run before those of sharding, which bring the weight back, and of a trainer that changes the
    gradient. In-place changes of y behind us give it a new place in the graph; ours is the one of the GEMM's result.
    """
    node = y.grad_fn
    if node is None:
        y.register_hook(use)  # type: ignore[no-untyped-call]
    else:
        node.register_prehook(_Arrival(use, y.output_nr))
    use.expect()


class _Arrival:
    """Hook of a node of the graph: picks the gradient of one of its outputs."""

    __slots__ = ("output", "use")

    def __init__(self, use: Use, output: int) -> None:
        self.use, self.output = use, output

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        dy = gradients[self.output]
        if dy is not None:
            self.use(dy)


class Use:
    """One counted forward that waits for its dy, and for the emulated FP8 dgrad and wgrad.

    It counts once: the first backward that reaches the weight. A second one through a retained graph, and one for
    the inputs alone (a gradient penalty's), add nothing.
    """

    __slots__ = (
        "__weakref__", "arranged", "counted", "expected", "expert", "layer", "needs_dw", "needs_dx", "node", "offsets",
        "session", "state", "versions", "w", "x_TK",
    )  # fmt: skip

    def __init__(
        self,
        session: Session,
        layer: ObservedLayer,
        state: StepState,
        call: GemmCall,
        w: Tensor,
        x_TK: Tensor | None,
    ) -> None:
        self.session, self.layer, self.state = session, layer, state
        self.w, self.x_TK, self.offsets, self.expert = w, x_TK, call.offsets, call.expert
        self.arranged = call.arranged
        self.needs_dx, self.needs_dw = call.needs_dx, call.needs_dw
        self.versions = self._versions()
        self.node = state.node if call.needs_dw else None
        self.counted = self.expected = False

    def expect(self) -> None:
        """Its output can get a gradient: the sample says if none comes."""
        self.expected = True
        self.state.owed += 1

    def __call__(self, dy: Tensor) -> None:
        """Measure dy, of any shape [..., N]. Never raises."""
        session = self.session
        # The frame is another one if this backward belongs to a forward of an earlier step.
        current = session.measuring and self.state.frame is session.frame
        if current and not self.counted and reaches(self.node):
            self.counted = self.layer.answered = True
            self.state.owed -= self.expected
            guarded(session, "the backward", self.layer, self._capture, session.frame, dy)

    def _capture(self, frame: Frame, dy: Tensor) -> None:
        if self.expert is None:
            self._measure(dy)
            return
        with self.layer.narrowed(frame, self.expert):
            self._measure(dy)

    def _measure(self, dy: Tensor) -> None:
        layer, session = self.layer, self.session
        dy_TN = dy if self.arranged is None else self.arranged(dy)
        if dy_TN.dim() != 2:
            dy_TN = dy_TN.reshape(-1, self.w.shape[-2])
        dense = self.offsets is None and self.expert is None and self.needs_dx
        overwritten = self._overwritten()
        if overwritten or not dense or not self._measured_together(dy_TN):
            col = Part.DY_COL if self.needs_dw else None
            operands.measure(
                session, layer, dy_TN, FOREIGN.dy, row=Part.DY_ROW, col=col, offsets=self.offsets
            )
            if overwritten:
                return
            if self.needs_dx and not self._freed():
                judge.dgrad(session, layer, dy_TN, self.w, None, _EMULATED, offsets=self.offsets)
        if self.x_TK is not None:
            judge.wgrad(session, layer, dy_TN, self.x_TK, None, _EMULATED, offsets=self.offsets)

    def _measured_together(self, dy_TN: Tensor) -> bool:
        """dy and the emulated dgrad of a dense layer in one call, where there is one for them."""
        # Codes of a weight that sharding has freed since are no codes of it: its address is another one.
        return together.dgrad(self.session, self.layer, dy_TN, self.w, FOREIGN, columns=self.needs_dw)

    def _freed(self) -> bool:
        """Whether sharding has freed the weight again: its memory must not be read."""
        freed = is_freed(self.w)
        if freed:
            self.session.once.warning(
                "freed",
                "layer %s: its weight is not here when dy arrives; dgrad is not recomputed",
                self.layer.name,
            )
        return freed

    def _overwritten(self) -> bool:
        """Whether the kept operands changed after the forward: recomputing from them would judge the wrong GEMM."""
        overwritten = self._versions() != self.versions
        if overwritten:
            self.session.once.warning(
                f"overwritten {self.layer.name}",
                "layer %s: weight or input changed in place before the backward; its gradient GEMMs are not recomputed",
                self.layer.name,
            )
        return overwritten

    def _versions(self) -> tuple[int | None, int | None]:
        x_TK = self.x_TK
        return version_of(self.w), None if x_TK is None else version_of(x_TK)
