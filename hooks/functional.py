"""Observes GEMMs that a module computes with functions, not with linear layers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from fp8_safeguard.hooks import bypass
from fp8_safeguard.hooks.capture import ForwardHook, ModelHook
from fp8_safeguard.hooks.compiled import plain_name
from fp8_safeguard.hooks.coverage import CoverageRow, Filter, is_linear
from fp8_safeguard.hooks.layers import ObservedLayer, Part
from fp8_safeguard.hooks.scoped import Watcher

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

_NO_GEMM = (
    nn.modules.conv._ConvNd, nn.LayerNorm, nn.RMSNorm, nn.RNNBase, nn.RNNCellBase, nn.Bilinear, ParametrizationList,
)  # fmt: skip
"""Owners of matrices that no product can be recognised of; coverage says what each is."""
PATIENCE = 8
"""For so many samples a weight is looked for in the modules around its own; each keeps the mode on in their forwards."""
_HOLDS_COMPILED = "parts of its module are compiled: products by function are not looked for around them"


def find(
    model: nn.Module, taken: list[ObservedLayer], keep: Filter, first_row: int
) -> tuple[list[ObservedLayer], list[CoverageRow]]:
    """Layers for the weights that no module of `taken` holds, and rows for those that cannot be observed.

    A linear layer of `taken` whose module is known not to be called becomes one of these.
    """
    layers: list[ObservedLayer] = []
    refused: list[CoverageRow] = []
    modules = {id(layer.module()): layer for layer in taken}
    claimed = {id(layer.parameter()) for layer in taken}
    for path, module in model.named_modules():
        place = plain_name(path)
        for name, parameter in _matrices(module, modules, taken):
            if id(parameter) in claimed:
                continue
            claimed.add(id(parameter))
            reason = "" if keep(module, place) else "excluded by filter"
            reason = reason or _refusal(parameter)
            full = f"{place}.{name}" if place else name
            if reason:
                refused.append(
                    {"name": full, "shape": list(parameter.shape), "status": "not observed", "reason": reason}
                )
                continue
            layers.append(_layer(full, module, name, parameter, first_row))
            first_row += len(Part) * layers[-1].all_experts
            _take_over(module, modules)
    for module in model.modules():
        if _is_attention(module) and id(module.out_proj) in modules:
            layer = modules[id(module.out_proj)]
            layer.functional = layer.bypassed = True
    return layers, refused


def in_order(model: nn.Module, layers: list[ObservedLayer]) -> list[ObservedLayer]:
    """The layers in the order of the model's modules, which is that of the heatmap's rows."""
    places = {id(module): place for place, module in enumerate(model.modules())}
    return sorted(layers, key=lambda layer: places.get(id(layer.module()), len(places)))


def _layer(
    name: str, module: nn.Module, attribute: str, parameter: nn.Parameter, first_row: int
) -> ObservedLayer:
    layer = ObservedLayer(
        name,
        module,
        own=False,
        transposed=False,
        experts=parameter.shape[0] if parameter.dim() == 3 else 1,
        first_row=first_row,
        attribute=attribute,
        functional=True,
    )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        layer.remark = "embedding: a look-up, no GEMM"
    else:
        layer.remark = f"raw parameter of {type(module).__name__}: no product with it was seen yet"
    return layer


def _matrices(
    module: nn.Module, modules: dict[int, ObservedLayer], taken: list[ObservedLayer]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a module that products by function may use."""
    if isinstance(module, _NO_GEMM):
        return
    linear = is_linear(module)
    if linear and id(module) not in modules:
        return  # left out already, by filter or because its weight is computed
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and not _may_be_a_head(module, taken):
        return
    for name, parameter in module._parameters.items():
        if parameter is None or isinstance(parameter, UninitializedParameter) or parameter.dim() < 2:
            continue
        if not (linear and name == "weight"):
            yield name, parameter


def _may_be_a_head(module: nn.Embedding | nn.EmbeddingBag, taken: list[ObservedLayer]) -> bool:
    """Whether the model may multiply with an embedding: it has no linear layer that gives as many outputs."""
    weights = [layer.weight() for layer in taken]
    return all(weight is None or weight.shape[-2] != module.num_embeddings for weight in weights)


def _refusal(parameter: nn.Parameter) -> str:
    if parameter.dim() > 3:
        return f"raw parameter of {parameter.dim()} dimensions: no product with it is recognised"
    if parameter.dim() == 3 and 1 in parameter.shape[1:]:
        return "raw parameter: vectors, no matrices"
    return ""


def _take_over(module: nn.Module, modules: dict[int, ObservedLayer]) -> None:
    """A linear layer with other matrices beside its weight (adapters) gives more than x w^T: each is seen by itself."""
    layer = modules.get(id(module))
    if layer is not None and not layer.own:
        layer.functional = True


def _has_no_forward(module: nn.Module | None) -> bool:
    """Whether it only holds what the modules around it use, as a ParameterList does."""
    return module is not None and type(module).forward is nn.Module.forward


def _is_attention(module: nn.Module) -> bool:
    """Whether it multiplies with its output projection's weight and never calls it."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def install(session: Session, layers: list[ObservedLayer]) -> list[Any]:
    """Hooks on the modules that own those weights; the handles that take them off."""
    return [_Tier(session, layers)]


class _Tier:
    """The scopes of one guard: modules in whose forward products by function are looked for."""

    def __init__(self, session: Session, layers: list[ObservedLayer]) -> None:
        self.session = session
        self.watcher = Watcher(session, _convert)
        # The hooks keep the scopes and they this object: what only the model keeps ends with the model.
        self._scopes: WeakValueDictionary[int, _Scope] = WeakValueDictionary()
        self._searched: dict[str, int] = {}
        """Layers that are looked for in the forward of every module around them, and since which sample."""
        self._beside: set[str] = set()
        """Layers with products beside their modules' calls."""
        self._inside: set[int] = set()
        """Threads in an audited forward of the model."""
        self._samples = 0
        model = session.model()
        if model is None:
            return
        paths = _paths(model)
        for layer in layers:
            module = layer.module()
            if layer.bypassed:
                self._scope(model.get_submodule(_around(paths[id(module)]))).layers.append(layer)
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag) or _has_no_forward(module):
                self._search(model, layer, paths)
            elif module is not None:
                self._scope(module).layers.append(layer)
        # The model itself, if only to look around after a sample.
        self._scope(model).is_model = True
        for scope in list(self._scopes.values()):
            scope.own = tuple(layer for layer in layers if layer.module() is scope.module())

    def remove(self) -> None:
        """Take every hook off."""
        self.watcher.leave_all()
        for scope in list(self._scopes.values()):
            scope.remove()

    def enter(self, scope: _Scope, module: nn.Module) -> None:
        """A forward of a scope's module begins. Never raises."""
        session = self.session
        try:
            if scope.module() is not module or not torch.is_grad_enabled() or not session.active:
                return
            session.touch()
            if session.samples != self._samples:
                self._look_around()
            audited = self._audited() if scope.is_model and not session.samples else []
            if audited:
                self._inside.add(threading.get_ident())
            if session.measuring and (scope.layers or audited):
                begun = session.meter.begin()
                if not _holds_compiled(scope, module):
                    self.watcher.enter(scope, scope.layers, audited)
                session.meter.end(begun)
        except Exception as error:
            session.once.failure("the start of a forward", error)

    def leave(self, scope: _Scope) -> None:
        """It has ended. Never raises."""
        session = self.session
        try:
            self.watcher.leave(scope)
            if scope.is_model:
                self._inside.discard(threading.get_ident())
            if (
                scope.is_model
                and session.measuring
                and torch.is_grad_enabled()
                and not torch._C._is_tracing()
            ):
                bypass.measure_weights(session)
                self._compare()
        except Exception as error:
            session.once.failure("the end of a forward", error)

    def _audited(self) -> list[ObservedLayer]:
        """In the first sample: the layers that their own hooks observe, for something else may multiply with them too."""
        return [layer for layer in self.session.layers if not layer.functional and not layer.own]

    def _compare(self) -> None:
        """A call of a linear module makes one product: more of them come from somewhere else.

        Each other thread may just have made one whose call is counted in a moment.
        """
        with self.session.lock:
            for layer, products in self.watcher.products.items():
                if products > layer.step.outer_calls + len(self._inside):
                    self._beside.add(layer.name)

    def _look_around(self) -> None:
        """After a sample: layers that were not seen may be multiplied in the forward of any module around them."""
        self._samples = self.session.samples
        model = self.session.model()
        self.watcher.products.clear()
        beside, self._beside = self._beside, set()
        found = [layer for layer in self.session.layers if layer.name in beside and layer.seen]
        for layer in found:
            _convert(layer)
        unseen = [each for each in self.session.layers if not (each.seen or each.own or each.traced)] + found
        if model is None or not unseen:
            return
        given_up = [
            each
            for each in unseen
            if self._samples - self._searched.get(each.name, self._samples) >= PATIENCE
        ]
        for layer in given_up:
            for scope in list(self._scopes.values()):
                if scope.module() is not layer.module() and layer in scope.layers:
                    scope.layers.remove(layer)
        new = [layer for layer in unseen if layer.name not in self._searched]
        paths = _paths(model) if new else {}
        for layer in new:
            self._search(model, layer, paths)

    def _search(self, model: nn.Module, layer: ObservedLayer, paths: dict[int, str]) -> None:
        """Look for a layer in the forward of its module and of each around it, up to the model itself."""
        self._searched[layer.name] = self._samples
        path = paths.get(id(layer.module()), "")
        around = [] if isinstance(layer.module(), nn.Embedding | nn.EmbeddingBag) else [path]
        while path:
            path = _around(path)
            around.append(path)
        for module in map(model.get_submodule, around):
            scope = None if _has_no_forward(module) else self._scope(module)
            if scope is not None and layer not in scope.layers:
                scope.layers.append(layer)

    def _scope(self, module: nn.Module) -> _Scope:
        scope = self._scopes.get(id(module))
        if scope is None or scope.module() is not module:
            scope = self._scopes[id(module)] = _Scope(self, module)
        return scope


def _paths(model: nn.Module) -> dict[int, str]:
    """Where each module is, by the names of the modules around it; empty for the model itself."""
    return {id(module): path for path, module in model.named_modules()}


def _around(path: str) -> str:
    """Path of the module that this one is in."""
    return path.rpartition(".")[0]


def _convert(layer: ObservedLayer) -> None:
    """A product with a layer's weight was seen: from now on each is, and the module's own hook would count it twice."""
    if layer.functional:
        return
    layer.functional = layer.bypassed = True
    module = layer.module()
    hooks = {} if module is None else module._forward_hooks
    for key in [k for k, hook in hooks.items() if isinstance(hook, ForwardHook) and hook.layer is layer]:
        del hooks[key]


class _Scope:
    """One module in whose forward the mode is on, and the layers looked for there."""

    def __init__(self, tier: _Tier, module: nn.Module) -> None:
        self.tier = tier
        self.module = weakref.ref(module)
        self.layers: list[ObservedLayer] = []
        self.own: tuple[ObservedLayer, ...] = ()
        """The module's own layers as they were at attach(): what a compiler reads of this must not change."""
        self.is_model = False
        self._handles = [
            # Behind those of sharding, which bring the weights.
            module.register_forward_pre_hook(EnterHook(self)),
            module.register_forward_hook(LeaveHook(self), prepend=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class EnterHook(ModelHook):
    """Forward pre-hook: the mode goes on in a step that is measured."""

    def __init__(self, scope: _Scope) -> None:
        super().__init__(scope.tier.session, scope.module)
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any) -> None:
        if is_dynamo_compiling():
            for layer in self.scope.own:
                layer.traced = True
            return
        if self.session.idle or torch.compiler.is_compiling() or torch._C._is_tracing():
            return
        self.scope.tier.enter(self.scope, module)


class LeaveHook(ModelHook):
    """Forward hook, called after an exception too: the mode goes off."""

    def __init__(self, scope: _Scope) -> None:
        super().__init__(scope.tier.session, scope.module)
        self.scope = scope

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_dynamo_compiling() or self.session.idle or torch.compiler.is_compiling():
            return
        self.scope.tier.leave(self.scope)


def _holds_compiled(scope: _Scope, module: nn.Module) -> bool:
    """Whether a compiled module would be called with the mode on: it would be compiled again for that."""
    held = any(
        part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )
    for layer in scope.layers if held else ():
        if not layer.seen and layer.functional:
            layer.remark = _HOLDS_COMPILED
    return held
