"""A function mode for the forward of chosen modules: it sees their weights multiplied."""

# Shapes: T tokens, N output features, K input features, E experts.

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from fp8_safeguard.hooks import products, uses
from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.capture import hook_target
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.products import NotRead, Product, Reader, Weight
from fp8_safeguard.hooks.readable import unreadable
from fp8_safeguard.hooks.uses import GemmCall

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_ATTENTION = F.multi_head_attention_forward
_COPIES = frozenset(
    {
        torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.float, torch.Tensor.double,
        torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.contiguous, torch.Tensor.clone, torch.clone,
    }
)  # fmt: skip
"""What gives the same numbers in another place, perhaps in another dtype."""
_LOOKUPS = frozenset({F.embedding, F.embedding_bag})
_NAMES = {"__getitem__": "indexing", "__get__": "an attribute"}
_LISTED = 3
"""How many functions a remark names."""

Table = dict[int, list[Weight]]


class Scopes(threading.local):
    """The scopes that this thread is inside of; a torch function mode belongs to a thread too."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.tables: list[tuple[object, Table]] = []
        """Scope and weights by the address of their storage, the innermost last."""
        self.mode: _Mode | None = None
        self.on = False
        self.curious = False
        """Whether what happens to a weight outside of products is worth a look: one was not yet seen in any."""
        self.audited: Table = {}
        """Weights whose products are only counted: those of layers that their own modules' hooks observe."""


class Watcher:
    """Sees the products of the weights of the scopes in progress, each once."""

    def __init__(self, session: Session, on_use: Callable[[ObservedLayer], None]) -> None:
        self.session = session
        self._on_use = on_use
        self._scopes = Scopes()
        self.products: Counter[ObservedLayer] = Counter()
        """Products with the weights of audited layers."""
        self._ways: dict[str, list[str]] = {}
        """Functions that a layer's weight went through without being recognised afterwards."""

    def enter(
        self, scope: object, layers: Iterable[ObservedLayer], audited: Iterable[ObservedLayer] = ()
    ) -> None:
        """The forward of that scope's module begins, in a step that is measured."""
        scopes = self._scopes
        if scopes.frame is not self.session.frame:
            self.leave_all()
        scopes.frame = self.session.frame
        with torch._C.DisableTorchFunction():
            scopes.tables.append((scope, _table(layers)))
            scopes.audited.update(_table(audited))
        scopes.curious = scopes.curious or not all(layer.seen for layer in layers)
        if not scopes.on:
            # One object for all steps: a compiler that meets it knows it again.
            scopes.mode = scopes.mode or _Mode(self)
            scopes.on = True
            scopes.mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, scope: object) -> None:
        """That forward has ended, perhaps by an exception. Nothing where it was not entered."""
        scopes = self._scopes
        if scopes.tables and scopes.tables[-1][0] is scope:
            scopes.tables.pop()
            if not scopes.tables:
                self.leave_all()

    def leave_all(self) -> None:
        """No scope is in progress: what is left of them was interrupted (Ctrl-C runs no forward hook)."""
        scopes = self._scopes
        scopes.tables.clear()
        scopes.audited.clear()
        scopes.frame, scopes.curious = None, False
        if not scopes.on or scopes.mode is None:
            return
        scopes.on = False
        if _get_current_function_mode() is scopes.mode:  # type: ignore[no-untyped-call]
            scopes.mode.__exit__(None, None, None)
        else:
            # Under a mode that somebody has left behind it cannot go: it does nothing from now on.
            scopes.mode.watcher, scopes.mode = None, None

    @property
    def entered(self) -> bool:
        """Whether any scope is in progress on this thread."""
        return self._scopes.on

    def attention(self) -> Any:
        """torch's attention function as it is, but for its first question: whether a mode is on. Never raises.

        Asked that, it would call the mode again, without end; and called outside the mode, its products are not seen.
        """
        try:
            names = {**_ATTENTION.__globals__, "has_torch_function": lambda tensors: False}
            defaults, closure = _ATTENTION.__defaults__, _ATTENTION.__closure__
            inner = FunctionType(_ATTENTION.__code__, names, _ATTENTION.__name__, defaults, closure)
            inner.__kwdefaults__ = _ATTENTION.__kwdefaults__
            return inner
        except Exception as error:
            self.session.once.failure("reading torch's attention", error)
            return None

    def find(self, value: Any) -> Weight | None:
        """The weight that this operand is, or is a view of."""
        if not isinstance(value, Tensor):
            return None
        tables = (table for _, table in reversed(self._scopes.tables))
        return _look_up(tables, value)

    def seen(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """A function was called inside a scope. Never raises."""
        reader = products.READERS.get(function)
        if reader is None and isinstance(function, OpOverloadPacket):
            reader = products.OPERATORS.get(function._qualified_op_name)
        if reader is None and function not in _COPIES and not self._scopes.curious:
            return  # nearly every call ends here
        if not torch.is_grad_enabled() or not self.session.measuring:
            return
        try:
            # A trainer's own mode around ours must not see what we ask of the tensors.
            with torch._C.DisableTorchFunction():
                if reader is None:
                    self._passed(function, args, output)
                else:
                    self._multiplied(reader, args, kwargs, output)
        except Exception as error:
            self.session.once.failure("reading a function call", error)

    def _multiplied(
        self, reader: Reader, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        operands = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
        weights = [weight for weight in map(self.find, operands) if weight is not None]
        if self._scopes.audited:
            found = (_look_up([self._scopes.audited], value) for value in operands)
            with self.session.lock:
                self.products.update(weight.layer for weight in found if weight is not None)
        if not weights or not isinstance(output, Tensor) or "out" in kwargs:
            return
        reason = unreadable(*operands)
        try:
            if reason:
                raise NotRead(reason)
            # Views of operands: with gradients on they still say whether one is needed.
            begun = self.session.meter.begin()
            try:
                product = reader(self.find, *args, **kwargs)
            finally:
                self.session.meter.end(begun)
        except NotRead as how:
            for weight in weights:
                self._remark(weight.layer, str(how))
            return
        if product is not None:
            layer = product.weight.layer
            guarded(self.session, "the forward", layer, self._observe, product, output)

    def _observe(self, product: Product, y: Tensor) -> None:
        layer = product.weight.layer
        self._on_use(layer)
        layer.transposed = product.transposed
        layer.remark = _how(layer)
        call = GemmCall(
            x_TK=product.x_TK,
            w=product.w,
            y_TN=product.arranged(y) if product.exact else None,
            bias_N=product.bias_N,
            offsets=product.offsets,
            expert=product.expert,
            whole=product.whole,
            needs_dx=product.x_TK.requires_grad,
            needs_dw=product.w.requires_grad,
            arranged=product.arranged,
        )
        use = uses.forward(self.session, layer, call)
        if use is not None and y.requires_grad:
            straight = product.arranged is products.as_rows
            target = hook_target(y, product.w.shape[-2]) if straight else y
            uses.listen(target, use)

    def _passed(self, function: Any, args: tuple[Any, ...], output: Any) -> None:
        """A function that multiplies nothing: it may hand the weight on in another place."""
        if function in _LOOKUPS:
            return
        for value in _flat(args[:2]):
            weight = self.find(value)
            if weight is None or not isinstance(output, Tensor) or self.find(output) is not None:
                continue
            if function in _COPIES and output.shape == value.shape:
                self._copied(weight, value, output)
            elif output.is_floating_point() and not weight.layer.seen:
                name = getattr(function, "__name__", str(function))
                self._remark(weight.layer, _NAMES.get(name, name))

    def _copied(self, weight: Weight, value: Tensor, copy: Tensor) -> None:
        """Known from now on until the scope ends, which keeps it alive: no other tensor gets its address."""
        base, expert = weight.base, weight.expert
        if value.shape == base.shape and value.stride() == base.stride():
            made = Weight(weight.layer, copy, expert)
        elif value.shape == base.mT.shape and value.stride() == base.mT.stride():
            made = Weight(weight.layer, copy.mT, expert)
        elif base.dim() == 3 and value.dim() == 2 and value.stride() == base.stride()[1:]:
            offset = value.storage_offset() - base.storage_offset()
            made = Weight(weight.layer, copy, offset // base.stride(0))
        else:
            return
        self._scopes.tables[-1][1].setdefault(_address(copy), []).append(made)

    def _remark(self, layer: ObservedLayer, way: str) -> None:
        if layer.seen:
            self.session.once.warning(
                f"way {layer.name} {way}", "layer %s: its use by %s is not observed", layer.name, way
            )
            return
        ways = self._ways.setdefault(layer.name, [])
        if way not in ways and len(ways) < _LISTED:
            ways.append(way)
        layer.remark = f"no product with it was recognised: used by {', '.join(ways)}"


class _Mode(TorchFunctionMode):
    """On while a scope is in progress; only there does a function call cost anything."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher: weakref.ref[Watcher] | None = weakref.ref(watcher)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watcher = None if self.watcher is None else self.watcher()
        if watcher is None or not watcher.entered:
            return function(*args, **kwargs)
        inner = watcher.attention() if function is _ATTENTION else None
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        output = function(*args, **kwargs)
        # A mode of the user's around this one is to see the model's functions, and not ours.
        with torch._C.DisableTorchFunction():
            watcher.seen(function, args, kwargs, output)
        return output


def _look_up(tables: Iterable[Table], value: Tensor) -> Weight | None:
    address = _address(value)
    for table in tables if address else ():
        for weight in table.get(address, ()):
            if _within(weight.base, value):
                return weight
    return None


def _table(layers: Iterable[ObservedLayer]) -> Table:
    """The weights where they are now: sharding moves them from forward to forward."""
    with torch._C.DisableTorchFunction():
        return _by_address(layers)


def _by_address(layers: Iterable[ObservedLayer]) -> Table:
    table: Table = {}
    for layer in layers:
        parameter = layer.parameter()
        reason = "" if parameter is None else unreadable(parameter)
        if reason and not layer.seen:
            layer.remark = reason
        address = 0 if parameter is None or reason else _address(parameter)
        if parameter is not None and address:
            table.setdefault(address, []).append(Weight(layer, parameter))
    return table


def _address(tensor: Tensor) -> int:
    """Where its memory begins; 0 for a tensor that has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _within(base: Tensor, view: Tensor) -> bool:
    """Whether the view begins inside the base: parameters may share one storage."""
    last = sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    return 0 <= view.storage_offset() - base.storage_offset() <= last


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _how(layer: ObservedLayer) -> str:
    """In what way it is observed."""
    reasons = (
        ["its weight is used without the module; seen by function"]
        if layer.bypassed
        else ["seen by function"]
    )
    if layer.transposed:
        reasons.append("weight stored as [in, out]")
    return "; ".join([*reasons, "dgrad and wgrad emulated"])
