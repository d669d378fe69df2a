"""Measures the operands and GEMMs of each layer as they pass by."""

# Shapes: T tokens, N output features, K input features, E experts.

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8_safeguard.hooks import recompute
from fp8_safeguard.hooks.layers import ObservedLayer, Part, StepState, emulated
from fp8_safeguard.kernels import GemmObserver, LinearPrecision, OperandFormat, tensor_stats

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_FOREIGN = LinearPrecision()
"""What an FP8 run of a foreign layer would use."""


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward seen there repeats one under a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def _is_traced() -> bool:
    """Whether a compiler or torch.jit.trace watches: our own operations must not become part of its graph."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def guarded(
    session: Session, direction: str, layer: ObservedLayer, body: Callable[..., None], *arguments: Any
) -> None:
    """Run a measurement; time it, and keep its exceptions away from the training loop."""
    start = time.perf_counter()
    try:
        with torch.no_grad():
            body(*arguments)
    except Exception as error:
        session.once.failure(direction, error, at=layer.name)
    session.spent_seconds += time.perf_counter() - start


def _counts_forward(state: StepState) -> bool:
    """Whether this forward call is to be counted.

    Under a non-reentrant checkpoint the first pass builds the graph and is counted, its repetition inside the
    backward is not. Under a reentrant one the first pass runs without gradients, so the repetition counts.
    """
    if in_backward():
        return state.outer_calls == 0
    state.outer_calls += 1
    return True


class _Inert:
    """What a copy of one of our hooks becomes: a copy of the model reports nothing."""

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing."""


def _nothing() -> None:
    """What a pickled observer loads as."""


class _ModelHook:
    """A hook object on a module: copies and pickles of the model carry an inert one."""

    def __init__(self, session: Session, layer: ObservedLayer) -> None:
        self.session = session
        self.layer = layer

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class ForwardHook(_ModelHook):
    """Forward hook of a foreign linear layer; its dy arrives at a tensor hook on the output.

    Statistics are taken here and now: an in-place activation may overwrite the output, a trainer the input.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _is_traced():
            return
        session, layer = self.session, self.layer
        if not torch.is_grad_enabled() or layer.module() is not module or not session.active:
            return
        session.touch()
        if session.measuring:
            guarded(session, "the forward", layer, self._capture, module, args, kwargs, output)

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        session, layer = self.session, self.layer
        frame, weight_NK = session.frame, layer.weight()
        x = args[0] if args else next(iter(kwargs.values()), None)
        y = output[0] if isinstance(output, tuple | list) and output else output
        if frame is None or weight_NK is None or not isinstance(x, Tensor) or not isinstance(y, Tensor):
            session.once.warning(
                f"operands {layer.name}", "layer %s: no input, weight or output tensor to observe", layer.name
            )
            return
        state = layer.enter(frame)
        if not _counts_forward(state):
            return
        w_NK = weight_NK.detach()
        x_TK = x.detach().reshape(-1, w_NK.shape[1])
        y_TN = y.detach().reshape(-1, w_NK.shape[0])
        frame.add(layer.row(Part.X_ROW), _stats(x_TK, "row", _FOREIGN.x))
        if weight_NK.requires_grad:
            frame.add(layer.row(Part.X_COL), _stats(x_TK, "col", _FOREIGN.x))
        if not state.w_measured:
            frame.add(layer.row(Part.W_TILE), _stats(w_NK, "tile", _FOREIGN.w))
            state.w_measured = True
        self._compare_output(x_TK, w_NK, y_TN, getattr(module, "bias", None))
        if y.requires_grad:
            kept_x = x_TK if weight_NK.requires_grad and session.picks_wgrad(layer) else None
            _hook_target(y, w_NK.shape[0]).register_hook(  # type: ignore[no-untyped-call]
                GradientHook(session, layer, state, w_NK, kept_x, x.requires_grad, weight_NK.requires_grad)
            )

    def _compare_output(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, bias_N: Tensor | None) -> None:
        if x_TK.shape[0] == 0 or self.session.frame is None:
            return
        rows = self.session.sampler.rows(x_TK.shape[0], x_TK.device)
        bias_N = bias_N.detach() if bias_N is not None else None
        vector = recompute.fprop_error(x_TK, w_NK, y_TN, rows, bias_N)
        self.session.frame.add(self.layer.row(Part.FPROP), vector.reshape(1, -1))


class GradientHook:
    """Tensor hook on a foreign layer's output: dy, and the emulated FP8 dgrad and wgrad."""

    def __init__(
        self,
        session: Session,
        layer: ObservedLayer,
        state: StepState,
        w_NK: Tensor,
        x_TK: Tensor | None,
        needs_dx: bool,
        needs_dw: bool,
    ) -> None:
        self.session, self.layer, self.state = session, layer, state
        self.w_NK, self.x_TK = w_NK, x_TK
        self.needs_dx, self.needs_dw = needs_dx, needs_dw
        self.versions = (w_NK._version, None if x_TK is None else x_TK._version)

    def __call__(self, dy: Tensor) -> None:
        session = self.session
        # The frame is another one if this backward belongs to a forward of an earlier step.
        if session.measuring and self.state.frame is session.frame:
            guarded(session, "the backward", self.layer, self._capture, dy)

    def _capture(self, dy: Tensor) -> None:
        frame, layer, session = self.state.frame, self.layer, self.session
        assert frame is not None
        dy_TN = dy.detach().reshape(-1, self.w_NK.shape[0])
        frame.add(layer.row(Part.DY_ROW), _stats(dy_TN, "row", _FOREIGN.dy))
        if self.needs_dw:
            frame.add(layer.row(Part.DY_COL), _stats(dy_TN, "col", _FOREIGN.dy))
        if dy_TN.shape[0] == 0 or self._overwritten():
            return
        if self.needs_dx:
            rows = session.sampler.rows(dy_TN.shape[0], dy_TN.device)
            vector = recompute.dgrad_error(dy_TN, self.w_NK, None, rows, emulate=_FOREIGN)
            frame.add(layer.row(Part.DGRAD), vector.reshape(1, -1))
        if self.x_TK is not None:
            rows = session.sampler.rows(dy_TN.shape[1], dy_TN.device)
            vector = recompute.wgrad_error(dy_TN, self.x_TK, None, rows, emulate=_FOREIGN)
            frame.add(layer.row(Part.WGRAD), vector.reshape(1, -1))

    def _overwritten(self) -> bool:
        """Whether the kept operands changed after the forward: recomputing from them would judge the wrong GEMM."""
        now = (self.w_NK._version, None if self.x_TK is None else self.x_TK._version)
        if now != self.versions:
            self.session.once.warning(
                f"overwritten {self.layer.name}",
                "layer %s: weight or input changed in place before the backward; its gradient GEMMs are not recomputed",
                self.layer.name,
            )
        return now != self.versions


class PassHook(_ModelHook):
    """Forward pre-hook of our own layers: the observer runs where gradients are always off, so it is told here."""

    def __init__(self, session: Session, layer: ObservedLayer, observer: LayerObserver) -> None:
        super().__init__(session, layer)
        self.observer = observer

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not _is_traced():
            # A shallow copy of the module shares its hooks and its observer.
            self.observer.with_gradients = torch.is_grad_enabled() and self.layer.module() is module


class LayerObserver:
    """What one of our own layers (Fp8Linear, Fp8GroupedLinear) tells: a `kernels.GemmObserver`."""

    def __init__(self, session: Session, layer: ObservedLayer) -> None:
        self.session = session
        self.layer = layer
        self.with_gradients = True
        """Whether the forward in progress builds a graph."""
        self.paused: GemmObserver | None = None
        """The user's own observer, whose place this one takes until detach()."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()

    @property
    def wants(self) -> bool:
        """Whether the pass in progress is measured; never raises."""
        session = self.session
        if _is_traced() or not session.active:
            return False
        if in_backward():
            return session.measuring
        if not self.with_gradients:
            return False
        session.touch()
        return session.measuring

    def fprop(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, offsets: Tensor | None) -> None:
        """x row, w tile once a step, and the real output (FP8's, emulated, in a fallback) against the recomputed one."""
        guarded(self.session, "the forward", self.layer, self._fprop, x_TK, w_NK, y_TN, offsets)

    def dgrad(self, dy_TN: Tensor, w_NK: Tensor, dx_TK: Tensor | None, offsets: Tensor | None) -> None:
        """dy row, and the real input gradient against the recomputed one."""
        if self._current():
            guarded(self.session, "the backward", self.layer, self._dgrad, dy_TN, w_NK, dx_TK, offsets)

    def wgrad(self, dy_TN: Tensor, x_TK: Tensor, dw_NK: Tensor | None, offsets: Tensor | None) -> None:
        """x col, dy col, and when its turn has come the real weight gradient against the recomputed one."""
        if dw_NK is not None and self._current():
            guarded(self.session, "the backward", self.layer, self._wgrad, dy_TN, x_TK, dw_NK, offsets)

    def _current(self) -> bool:
        """Whether this backward belongs to a forward of the step in progress."""
        return self.session.frame is not None and self.layer.step.frame is self.session.frame

    def _fprop(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, offsets: Tensor | None) -> None:
        session, layer, frame = self.session, self.layer, self.session.frame
        if frame is None:
            return
        state = layer.enter(frame)
        if not _counts_forward(state):
            return
        module = layer.fp8_module()
        precision = _FOREIGN if module is None else module.precision
        state.precision = precision
        state.gain_K = None if module is None or module.input_gain is None else module.input_gain.detach()
        frame.add(layer.row(Part.X_ROW), _stats(x_TK, "row", precision.x, offsets))
        if not state.w_measured:
            frame.add(layer.row(Part.W_TILE), _weight_stats(w_NK, precision.w))
            state.w_measured = True
        if x_TK.shape[0] == 0:
            return
        if offsets is None:
            rows = session.sampler.rows(x_TK.shape[0], x_TK.device)
            vectors = recompute.fprop_error(x_TK, w_NK, y_TN, rows, emulate=emulated(precision, Part.FPROP))
        else:
            vectors = recompute.grouped_fprop_error(
                x_TK, w_NK, y_TN, offsets.tolist(), session.sampler, emulate=emulated(precision, Part.FPROP)
            )
        frame.add(layer.row(Part.FPROP), vectors.reshape(layer.experts, -1))

    def _dgrad(self, dy_TN: Tensor, w_NK: Tensor, dx_TK: Tensor | None, offsets: Tensor | None) -> None:
        session, layer, frame = self.session, self.layer, self.session.frame
        if frame is None:
            return
        precision = layer.step.precision or _FOREIGN
        frame.add(layer.row(Part.DY_ROW), _stats(dy_TN, "row", precision.dy, offsets))
        if dx_TK is None or dy_TN.shape[0] == 0:
            return
        how: recompute.Judged = {"gain_K": layer.step.gain_K, "emulate": emulated(precision, Part.DGRAD)}
        if offsets is None:
            rows = session.sampler.rows(dy_TN.shape[0], dy_TN.device)
            vectors = recompute.dgrad_error(dy_TN, w_NK, dx_TK, rows, **how)
        else:
            bounds = offsets.tolist()
            vectors = recompute.grouped_dgrad_error(dy_TN, w_NK, dx_TK, bounds, session.sampler, **how)
        frame.add(layer.row(Part.DGRAD), vectors.reshape(layer.experts, -1))

    def _wgrad(self, dy_TN: Tensor, x_TK: Tensor, dw_NK: Tensor, offsets: Tensor | None) -> None:
        session, layer, frame = self.session, self.layer, self.session.frame
        if frame is None:
            return
        precision = layer.step.precision or _FOREIGN
        frame.add(layer.row(Part.X_COL), _stats(x_TK, "col", precision.x, offsets))
        frame.add(layer.row(Part.DY_COL), _stats(dy_TN, "col", precision.dy, offsets))
        if not session.picks_wgrad(layer) or dy_TN.shape[0] == 0:
            return
        rows = session.sampler.rows(dy_TN.shape[1], dy_TN.device)
        how: recompute.Judged = {"gain_K": layer.step.gain_K, "emulate": emulated(precision, Part.WGRAD)}
        if offsets is None:
            vectors = recompute.wgrad_error(dy_TN, x_TK, dw_NK, rows, **how)
        else:
            vectors = recompute.grouped_wgrad_error(dy_TN, x_TK, dw_NK, offsets.tolist(), rows, **how)
        frame.add(layer.row(Part.WGRAD), vectors.reshape(layer.experts, -1))


def _hook_target(y: Tensor, features: int) -> Tensor:
    """The tensor whose gradient is dy even if y is changed in place behind us.

    F.linear returns a view of [T, N] for inputs of three dimensions with a bias. An in-place change of a view
    gives it a new place in the graph, and a hook on its old one would never fire; the base keeps its own.
    """
    base = y._base if y._is_view() else None
    if base is None or not base.requires_grad or base.numel() != y.numel():
        return y
    same_order = base.is_contiguous() and y.is_contiguous() and base.shape[-1] == features
    return base if same_order else y


def _stats(x: Tensor, layout: str, operand: OperandFormat, offsets: Tensor | None = None) -> Tensor:
    """float64 [E, V], E = 1 without offsets."""
    vectors = tensor_stats(
        x, layout=layout, fmt=operand.fmt, scale=operand.scale, multiplier=operand.multiplier, offsets=offsets
    )
    return vectors if offsets is not None else vectors.reshape(1, -1)


def _weight_stats(w: Tensor, operand: OperandFormat) -> Tensor:
    """float64 [E, V] of a [N, K] or [E, N, K] weight; no tile straddles two experts."""
    if w.dim() == 2:
        return _stats(w, "tile", operand)
    experts, features, inputs = w.shape
    bounds = torch.arange(experts + 1, dtype=torch.int32, device=w.device) * features
    return _stats(w.reshape(experts * features, inputs), "tile", operand, bounds)


def hook_of(module: nn.Module) -> Session | None:
    """The session whose hook or observer sits on this module, if any."""
    observer = getattr(module, "observer", None)
    if isinstance(observer, LayerObserver) and observer.layer.module() is module:
        return observer.session
    for hook in module._forward_hooks.values():
        if isinstance(hook, ForwardHook) and hook.layer.module() is module:
            return hook.session
    return None
