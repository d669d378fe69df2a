"""Finds layers to observe; says what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fp8_safeguard.hooks.layers import ObservedLayer, Part, stored
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear

Filter = Callable[[nn.Module, str], bool]
CoverageRow = dict[str, Any]


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
    for name, module in model.named_modules():
        if not _eligible(module):
            continue
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
        )
        layers.append(layer)
        first_row += len(Part) * layer.experts
    return layers, left_out


def report(
    model: nn.Module, layers: list[ObservedLayer], left_out: list[CoverageRow], samples: int
) -> list[CoverageRow]:
    """Every layer and every parameter of two or more dimensions: observed, adapted or not observed."""
    rows = [_layer_row(layer, samples) for layer in layers] + left_out
    claimed = {id(p) for layer in layers for p in _parameters(layer.module())}
    excluded = {row["name"] for row in left_out}
    return rows + list(_raw_parameters(model, claimed, excluded))


def _eligible(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Fp8Linear | Fp8GroupedLinear) or is_conv1d(module)


def _refusal(module: nn.Module, name: str, keep: Filter) -> str:
    if is_parametrized(module):
        return "parametrized: its weight is computed at every reading, and to read it may change it"
    if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
        return "weight_norm or spectral_norm: its weight is computed at every forward and is no parameter"
    if isinstance(stored(module, "weight"), UninitializedParameter):
        return "not initialised: run the lazy module once before attach()"
    return "" if keep(module, name) else "excluded by filter"


def _layer_row(layer: ObservedLayer, samples: int) -> CoverageRow:
    module = layer.module()
    if module is None:
        return _row(layer.name, [], "not observed", "the module no longer exists")
    if samples and not layer.seen:
        reason = f"no forward call in {samples} samples: unused, compiled, or its weight is used without the module"
        return _row(layer.name, _shape(module), "not observed", reason)
    if layer.transposed:
        return _row(
            layer.name, _shape(module), "adapted", "weight stored as [in, out]; dgrad and wgrad emulated"
        )
    reason = "" if layer.own else "real output compared; dgrad and wgrad emulated"
    return _row(layer.name, _shape(module), "observed", reason)


def _raw_parameters(model: nn.Module, claimed: set[int], excluded: set[str]) -> Iterator[CoverageRow]:
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        if isinstance(parameter, UninitializedParameter) or parameter.dim() < 2:
            continue
        # The tensors behind a parametrized weight belong to its layer.
        layer = f".{owner}".partition(".parametrizations.")[0].removeprefix(".")
        if id(parameter) not in claimed and layer not in excluded:
            yield _row(name, list(parameter.shape), "not observed", _why_raw(owners[owner]))


def _why_raw(owner: nn.Module) -> str:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding: a look-up, no GEMM"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return "convolution: not supported"
    return f"raw parameter of {type(owner).__name__}: its GEMM is no linear module's"


def _parameters(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters(recurse=False))


def _shape(module: nn.Module) -> list[int]:
    weight = stored(module, "weight")
    if isinstance(weight, UninitializedParameter):
        return []
    if weight is None:
        features = [getattr(module, "out_features", None), getattr(module, "in_features", None)]
        return [size for size in features if isinstance(size, int)]
    return list(weight.shape)


def _row(name: str, shape: list[int], status: str, reason: str) -> CoverageRow:
    return {"name": name, "shape": shape, "status": status, "reason": reason}
