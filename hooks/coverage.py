"""Finds layers to observe; says what is left out and why."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fp8_safeguard.hooks.compiled import plain_name
from fp8_safeguard.hooks.layers import ObservedLayer, Part, stored
from fp8_safeguard.hooks.once import OnceLog
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.monitor.coverage import fitting

if TYPE_CHECKING:
    from fp8_safeguard.hooks.session import Session

Filter = Callable[[nn.Module, str], bool]
CoverageRow = dict[str, Any]

_EVERY = 100
"""Samples after which the rows are made anew whatever happens."""
_UNINITIALISED: tuple[type[Any], ...] = (UninitializedParameter,)
_FP8 = re.compile("fp8|float8", re.IGNORECASE)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's Conv1D as Hugging Face spells it: a linear layer whose weight is [in, out]."""
    weight = stored(module, "weight")
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 2
        and isinstance(getattr(module, "nf", None), int)
    )


def discover(model: nn.Module, keep: Filter) -> tuple[list[ObservedLayer], list[CoverageRow]]:
    """The layers to observe in the model's order, and rows for the eligible ones that are left out."""
    layers: list[ObservedLayer] = []
    left_out: list[CoverageRow] = []
    first_row = 0
    for path, module in model.named_modules():
        if not is_linear(module):
            continue
        name = plain_name(path)
        reason = _refusal(module, name, keep)
        if reason:
            left_out.append(_row(name, _shape(module), "not observed", reason))
            continue
        layer = ObservedLayer(
            name,
            module,
            own=isinstance(module, Fp8Linear | Fp8GroupedLinear),
            transposed=is_conv1d(module),
            experts=int(module.weight.shape[0]) if isinstance(module, Fp8GroupedLinear) else 1,
            first_row=first_row,
            own_forward=_own_forward(module),
        )
        layers.append(layer)
        first_row += len(Part) * layer.experts
    return layers, left_out


class Coverage:
    """What is really seen of a model's weight matrices; says so again when it changes."""

    def __init__(
        self, model: nn.Module, layers: list[ObservedLayer], left_out: list[CoverageRow], once: OnceLog
    ) -> None:
        self._model = weakref.ref(model)
        self._layers = layers
        self._left_out = left_out
        self._once = once
        self._replaced: set[str] = set()
        """Layers whose module is no longer in its place."""
        self._known: list[tuple[bool, bool, str]] = []
        self._sent: tuple[CoverageRow, ...] | None = None

    def rows(self, samples: int) -> list[CoverageRow]:
        """Every layer and every parameter of two or more dimensions: observed, adapted or not observed."""
        model = self._model()
        if model is None:
            return []
        places = _places(model)
        self._look_for_replaced(places, self._layers)
        # A step that no hook saw anything of is no sample, and tells as much of what is never called.
        begun = samples > 0 or "no forward" in self._once.counts
        layers = [_layer_row(layer, begun, layer.name in self._replaced) for layer in self._layers]
        return layers + self._left_out + list(_raw_parameters(places, self._layers, self._left_out))

    def changed(self, samples: int) -> tuple[CoverageRow, ...] | None:
        """The rows if they differ from those returned last; to be asked after each sample.

        They are made anew with the first sample, where a layer is seen for the first time or no longer, and at every
        100th sample. In a model of 3,000 layers that takes less than a tenth of a second, and any other sample 0.3 ms.
        """
        model = self._model()
        if model is None:
            return None
        known = [(layer.seen, layer.answered, layer.remark) for layer in self._layers]
        gone = [layer for layer in self._layers if layer.seen_at == samples - 2]
        if gone:
            self._look_for_replaced(_places(model), gone)
        replaced = len(self._replaced)
        if self._sent is not None and known == self._known and not gone and samples % _EVERY:
            return None
        self._known = known
        rows = tuple(self.rows(samples))
        if len(self._replaced) == replaced and rows == self._sent:
            return None
        self._sent = rows
        return rows

    def _look_for_replaced(self, places: dict[str, nn.Module], layers: list[ObservedLayer]) -> None:
        found = [layer.name for layer in layers if _is_replaced(places, layer)]
        new = [name for name in found if name not in self._replaced]
        if new:
            self._replaced.update(new)
            others = f" and {len(new) - 1} others" if len(new) > 1 else ""
            self._once.warning(
                "replaced",
                "module %s%s was replaced after attach() and is no longer observed: detach(), then attach again last",
                new[0],
                others,
            )


def coverage_rows(session: Session) -> tuple[CoverageRow, ...] | None:
    """The rows for the sample that has just been counted; None where the server knows them. Never raises."""
    try:
        rows = session.coverage.changed(session.samples)
        return None if rows is None else tuple(fitting(rows))
    except Exception as error:
        session.once.failure("the coverage report", error)
        return None


def _places(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by each of its names, without a compiler's wrappers."""
    return {plain_name(path): module for path, module in model.named_modules(remove_duplicate=False)}


def _is_replaced(places: dict[str, nn.Module], layer: ObservedLayer) -> bool:
    """Whether the layer's place in the model is taken by another module that does not contain it."""
    module, there = layer.module(), places.get(layer.name)
    if there is None and layer.functional:
        there = places.get(layer.name.rpartition(".")[0])
    if there is None or there is module:
        return there is None
    # An adapter or a compiler wraps the module and goes on calling it.
    return module is None or all(part is not module for part in there.modules())


def is_linear(module: nn.Module) -> bool:
    """Whether it is one of the linear layers whose calls are observed."""
    return isinstance(module, nn.Linear | Fp8Linear | Fp8GroupedLinear) or is_conv1d(module)


def _own_forward(module: nn.Module) -> bool:
    """Whether a subclass of nn.Linear computes something that need not be x w^T + b.

    Classes that name FP8 (torchao's Float8Linear) do the same GEMM in FP8: what their output says is wanted.
    """
    kind = type(module)
    computes = isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward
    return computes and not _FP8.search(f"{kind.__module__}.{kind.__qualname__}")


def _refusal(module: nn.Module, name: str, keep: Filter) -> str:
    if is_parametrized(module):
        return "parametrized: its weight is computed at every reading, and to read it may change it"
    if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return "weight_norm or spectral_norm: its weight is computed at every forward and is no parameter"
    if isinstance(stored(module, "weight"), UninitializedParameter):
        return "not initialised: run the lazy module once before attach()"
    return "" if keep(module, name) else "excluded by filter"


def _layer_row(layer: ObservedLayer, begun: bool, replaced: bool) -> CoverageRow:
    module = layer.module()
    shape = [] if module is None else _shape(module, layer.attribute)
    if replaced:
        return _row(layer.name, shape, "not observed", "replaced after attach(): attach again last")
    if module is None:
        return _row(layer.name, shape, "not observed", "the module no longer exists")
    if layer.traced and not layer.seen:
        reason = "compiled: products by function are not observed in a compiled graph"
        return _row(layer.name, shape, "not observed", reason)
    if layer.remark and not layer.seen:
        return _row(layer.name, shape, "not observed", layer.remark)
    if begun and not layer.seen:
        reason = "registered, never called: unused, compiled, or its weight is used without the module"
        return _row(layer.name, shape, "not observed", reason)
    status = "adapted" if layer.transposed or layer.bypassed else "observed"
    reasons = [layer.remark] if layer.remark else _how(layer)
    if not begun:
        reasons.insert(0, "no sample yet")
    if begun and not layer.answered:
        reasons.append("seen without dy: no gradient has reached its output")
    return _row(layer.name, shape, status, "; ".join(reasons))


def _how(layer: ObservedLayer) -> list[str]:
    """In what way a layer is observed, where that is not the whole of it."""
    if layer.own:
        return []
    if layer.transposed:
        return ["weight stored as [in, out]; dgrad and wgrad emulated"]
    if layer.own_forward:
        return ["forward of its own: output not compared; dgrad and wgrad emulated"]
    return ["real output compared; dgrad and wgrad emulated"]


def _raw_parameters(
    places: dict[str, nn.Module], layers: list[ObservedLayer], left_out: list[CoverageRow]
) -> Iterator[CoverageRow]:
    """Parameters of two or more dimensions that no row has named yet."""
    claimed = {id(p): layer.name for layer in layers for p in _parameters(layer)}
    named = {row["name"] for row in left_out} | {layer.name for layer in layers}
    seen: set[int] = set()
    for owner, module in places.items():
        # The tensors behind a parametrized weight belong to its layer.
        layer = f".{owner}".partition(".parametrizations.")[0].removeprefix(".")
        for attribute, parameter in module._parameters.items():
            name = f"{owner}.{attribute}".removeprefix(".")
            # isinstance() of a parameter takes as long as the rest of the loop.
            if parameter is None or type(parameter) in _UNINITIALISED or name in named:
                continue
            tied = claimed.get(id(parameter))
            if parameter.dim() < 2 or (tied is None and (layer in named or id(parameter) in seen)):
                continue
            seen.add(id(parameter))
            if tied is None:
                yield _row(name, list(parameter.shape), "not observed", _why_raw(module))
            elif isinstance(module, nn.Embedding):
                # A linear layer that shares the weight has a row of its own.
                yield _row(name, list(parameter.shape), "observed", f"the weight of {tied}: observed there")


def _why_raw(owner: nn.Module) -> str:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding: a look-up, no GEMM"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return "convolution: not supported"
    if is_linear(owner):
        return "added after attach(): attach again last"
    return f"raw parameter of {type(owner).__name__}: its GEMM is no linear module's"


def _parameters(layer: ObservedLayer) -> list[Any]:
    """What the layer's row stands for."""
    module = layer.module()
    if module is None:
        return []
    return [layer.parameter()] if layer.functional else list(module._parameters.values())


def _shape(module: nn.Module, attribute: str = "weight") -> list[int]:
    weight = stored(module, attribute)
    if isinstance(weight, UninitializedParameter):
        return []
    if weight is None:
        features = [getattr(module, "out_features", None), getattr(module, "in_features", None)]
        return [size for size in features if isinstance(size, int)]
    # DeepSpeed's ZeRO-3 leaves an empty tensor behind, and its shape beside it.
    return list(getattr(weight, "ds_shape", weight.shape))


def _row(name: str, shape: list[int], status: str, reason: str) -> CoverageRow:
    return {"name": name, "shape": shape, "status": status, "reason": reason}
