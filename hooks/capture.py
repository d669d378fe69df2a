"""Hooks that show each layer's GEMMs to the measurement as they pass by."""

# Shapes: T tokens, N output features, K input features, E experts.

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from fp8_safeguard.hooks import arrivals, compiled, judge, operands, uses
from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.layers import ObservedLayer, Part, emulated, stored
from fp8_safeguard.hooks.uses import FOREIGN, GemmCall, counts_forward, in_backward
from fp8_safeguard.kernels import GemmObserver, LinearPrecision
from fp8_safeguard.kernels.numbers import numbered

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session


def _is_traced() -> bool:
    """Whether a compiler or torch.jit.trace watches: our own operations must not become part of its graph."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


class Inert:
    """What a copy of one of our hooks becomes: a copy of the model reports nothing."""

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing."""


def _nothing() -> None:
    """What a pickled observer loads as."""


class ModelHook:
    """A hook object on a module: copies and pickles of the model carry an inert one."""

    def __init__(self, session: Session, module: Callable[[], nn.Module | None]) -> None:
        self.session = session
        self.module = module
        """A weak reference to the module that it was made for: shallow copies share their hooks."""

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class ForwardHook(ModelHook):
    """Forward hook of a foreign linear layer; its dy arrives at a hook on the output's place in the graph.

    Statistics are taken here and now: an in-place activation may overwrite the output, a trainer the input.
    """

    def __init__(self, session: Session, layer: ObservedLayer) -> None:
        super().__init__(session, layer.module)
        self.layer = layer
        self.number = numbered(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """None leaves the output as it is; a compiler gets one with a probe on it."""
        if is_dynamo_compiling():
            return compiled.probe(self, module, args, kwargs, output)
        session = self.session
        # Nearly every call of a run ends here.
        if session.idle:
            return None
        if torch.compiler.is_compiling():
            return compiled.probe(self, module, args, kwargs, output)
        layer = self.layer
        traced = torch._C._is_tracing()
        if torch.is_grad_enabled() and layer.module() is module and session.active and not traced:
            session.touch()
            if session.measuring:
                guarded(session, "the forward", layer, self._capture, module, args, kwargs, output)
        return None

    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        session, layer = self.session, self.layer
        parameter = stored(module, layer.attribute)
        x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
        if parameter is None or not isinstance(x, Tensor):
            if not isinstance(x, torch.fx.Proxy):
                self._cannot("no input or weight tensor")
            return
        # Before any operation: one on a sharded tensor may wait for other ranks.
        if uses.begin(session, layer, x, parameter) is None:
            return
        weight_NK = layer.as_weight(parameter)
        if weight_NK.dim() != 2 or not weight_NK.numel():
            self._cannot(f"a weight of shape {list(parameter.shape)}")
            return
        features, inputs = weight_NK.shape
        y = output if isinstance(output, Tensor) and _ends_in(output, features) else None
        if y is None:
            y = next((each for each in tensors_in(output) if _ends_in(each, features)), None)
        if y is None or x.dim() == 0 or x.shape[-1] != inputs:
            self._cannot(f"input or output does not fit a weight of [{features}, {inputs}]")
            return
        call = GemmCall(
            x_TK=x.reshape(-1, inputs), w=weight_NK, y_TN=None if layer.own_forward else y.reshape(-1, features),
            bias_N=_bias_of(module), needs_dx=x.requires_grad, needs_dw=parameter.requires_grad,
        )  # fmt: skip
        use = uses.forward(session, layer, call, begun=True)
        if use is not None and y.requires_grad:
            uses.listen(hook_target(y, features), use)

    def _cannot(self, why: str) -> None:
        layer = self.layer
        layer.remark = layer.remark or f"not read: {why}"
        self.session.once.warning(f"operands {layer.name}", "layer %s is not measured: %s", layer.name, why)


class PassHook(ModelHook):
    """Forward pre-hook of our own layers: the observer runs where gradients are always off, so it is told here."""

    def __init__(self, session: Session, layer: ObservedLayer, observer: LayerObserver) -> None:
        super().__init__(session, layer.module)
        self.layer = layer
        self.observer = observer

    def __call__(self, module: nn.Module, args: Any) -> None:
        if is_dynamo_compiling() or self.session.idle:
            return
        if not _is_traced():
            # A shallow copy of the module shares its hooks and its observer.
            self.observer.with_gradients = torch.is_grad_enabled() and self.layer.module() is module


class LayerObserver:
    """What one of our own layers (Fp8Linear, Fp8GroupedLinear) tells: a `kernels.GemmObserver`."""

    def __init__(self, session: Session, layer: ObservedLayer) -> None:
        self.session = session
        self.layer = layer
        self.number = numbered(self)
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
        if session.idle or _is_traced() or not session.active:
            return False
        if in_backward():
            return session.measuring
        if not self.with_gradients:
            # The pre-hook speaks of one forward; those of compiled graphs have none, and come with gradients only.
            self.with_gradients = True
            return False
        session.touch()
        return session.measuring

    @property
    def precision(self) -> LinearPrecision:
        """What the layer computes with now: a compiled graph asks at run time, so that a plan makes no other graph."""
        module = self.layer.fp8_module()
        return FOREIGN if module is None else module.precision

    def fprop(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, offsets: Tensor | None) -> None:
        """x row, w tile once a step, and the real output (FP8's, emulated, in a fallback) against the recomputed one."""
        guarded(self.session, "the forward", self.layer, self._fprop, x_TK, w_NK, y_TN, offsets)

    def dgrad(self, dy_TN: Tensor, w_NK: Tensor, dx_TK: Tensor | None, offsets: Tensor | None) -> None:
        """dy row, and the real input gradient against the recomputed one."""
        step = self.layer.step
        if self._current() and step.dgrads < step.forwards and uses.reaches(step.node):
            step.dgrads += 1
            step.owed = max(0, step.owed - 1)
            self.layer.answered = True
            guarded(self.session, "the backward", self.layer, self._dgrad, dy_TN, w_NK, dx_TK, offsets)

    def wgrad(self, dy_TN: Tensor, x_TK: Tensor, dw_NK: Tensor | None, offsets: Tensor | None) -> None:
        """x col, dy col, and when its turn has come the real weight gradient against the recomputed one."""
        step = self.layer.step
        if dw_NK is not None and self._current() and step.wgrads < step.forwards:
            step.wgrads += 1
            guarded(self.session, "the backward", self.layer, self._wgrad, dy_TN, x_TK, dw_NK, offsets)

    def _current(self) -> bool:
        """Whether this backward belongs to a forward of the step in progress."""
        return self.session.frame is not None and self.layer.step.frame is self.session.frame

    def _fprop(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, offsets: Tensor | None) -> None:
        session, layer = self.session, self.layer
        if not self.with_gradients:
            # A checkpoint in a checkpoint, whose first pass is part of a backward.
            self.with_gradients = True
            return
        state = uses.begin(session, layer, x_TK, w_NK)
        if state is None or not counts_forward(state):
            return
        uses.count(session, layer, state)
        state.forwards += 1
        state.owed += x_TK.requires_grad or w_NK.requires_grad
        arrivals.watch(session, layer, state, uses.accumulator(layer.parameter()))
        module = layer.fp8_module()
        state.precision = precision = FOREIGN if module is None else module.precision_in_use
        state.gain_K = None if module is None or module.input_gain is None else module.input_gain.detach()
        operands.measure(session, layer, x_TK, precision.x, row=Part.X_ROW, offsets=offsets)
        if not state.w_measured:
            operands.measure_weight(session, layer, w_NK, precision.w)
            state.w_measured = True
        how = judge.Judgement(emulate=emulated(precision, Part.FPROP))
        judge.fprop(session, layer, x_TK, w_NK, y_TN, how, offsets=offsets)

    def _dgrad(self, dy_TN: Tensor, w_NK: Tensor, dx_TK: Tensor | None, offsets: Tensor | None) -> None:
        precision = self._in_use()
        operands.measure(self.session, self.layer, dy_TN, precision.dy, row=Part.DY_ROW, offsets=offsets)
        if dx_TK is not None:
            judge.dgrad(
                self.session, self.layer, dy_TN, w_NK, dx_TK, self._judged(Part.DGRAD), offsets=offsets
            )

    def _wgrad(self, dy_TN: Tensor, x_TK: Tensor, dw_NK: Tensor, offsets: Tensor | None) -> None:
        session, layer, precision = self.session, self.layer, self._in_use()
        operands.measure(session, layer, x_TK, precision.x, col=Part.X_COL, offsets=offsets)
        operands.measure(session, layer, dy_TN, precision.dy, col=Part.DY_COL, offsets=offsets)
        judge.wgrad(session, layer, dy_TN, x_TK, dw_NK, self._judged(Part.WGRAD), offsets=offsets)

    def _in_use(self) -> LinearPrecision:
        """The precision of the step's forward, with the scales of this backward where they are not its blocks'."""
        step, module = self.layer.step, self.layer.fp8_module()
        known = step.precision or FOREIGN
        if not known.is_plain and module is not None:
            # One of dy alone may not have been known before dy was there.
            known = step.precision = module.scaling.in_use or known
        return known

    def _judged(self, part: Part) -> judge.Judgement:
        step = self.layer.step
        return judge.Judgement(emulate=emulated(step.precision or FOREIGN, part), gain_K=step.gain_K)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output in their order, whatever holds them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_of(output.values())
    elif isinstance(output, list | tuple):
        yield from _tensors_of(output)
    elif dataclasses.is_dataclass(output):
        yield from _tensors_of(getattr(output, field.name) for field in dataclasses.fields(output))


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from tensors_in(value)


def _ends_in(y: Tensor, features: int) -> bool:
    """Whether its last dimension has that many."""
    return y.dim() > 0 and y.shape[-1] == features


def _bias_of(module: nn.Module) -> Tensor | None:
    """Its bias, wherever it has one: as a parameter it is found without asking the module's own __getattr__."""
    bias = module._parameters.get("bias")
    return getattr(module, "bias", None) if bias is None else bias


def hook_target(y: Tensor, features: int) -> Tensor:
    """The tensor whose gradient is dy even if y is changed in place behind us.

    F.linear returns a view of [T, N] for inputs of three dimensions with a bias. An in-place change of a view
    gives it a new place in the graph, and a hook on its old one would never fire; the base keeps its own.
    """
    base = y._base if y._is_view() else None
    if base is None or not base.requires_grad or base.numel() != y.numel():
        return y
    same_order = base.is_contiguous() and y.is_contiguous() and base.shape[-1] == features
    return base if same_order else y


def hook_of(module: nn.Module) -> Session | None:
    """The session whose hook or observer sits on this module, if any."""
    observer = getattr(module, "observer", None)
    if isinstance(observer, LayerObserver) and observer.layer.module() is module:
        return observer.session
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if isinstance(hook, ModelHook) and hook.module() is module:
            return hook.session
    return None
