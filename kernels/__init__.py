"""FP8 on tensors: quantise, measure, multiply, and linear layers of them."""

import importlib
from typing import TYPE_CHECKING, Any

from fp8_safeguard.kernels.choices import fast_precision, gemm_choice, use_results
from fp8_safeguard.kernels.delayed import DelayedScaling, merge_amax
from fp8_safeguard.kernels.dispatch import backend, gemm_backend_of, use_gemm_backend
from fp8_safeguard.kernels.errors import KernelError, OffsetsError, OperandError, UnknownOptionError
from fp8_safeguard.kernels.gemm import fp8_gemm_nt
from fp8_safeguard.kernels.grouped import grouped_gemm_nt, grouped_gemm_wgrad
from fp8_safeguard.kernels.layers import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.kernels.layouts import Layouts, quantize_layouts, reblock
from fp8_safeguard.kernels.linear import fp8_grouped_linear, fp8_linear
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision, OperandFormat, ScaledFormat
from fp8_safeguard.kernels.quantize import quantize
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.kernels.stats import layout_stats, tensor_stats
from fp8_safeguard.kernels.tiles import gemm_backend
from fp8_safeguard.kernels.warm_up import warm_up

if TYPE_CHECKING:
    from fp8_safeguard.kernels.logfmt import LogFmt8, logfmt8_encode
    from fp8_safeguard.kernels.moe import FastMoEFunction, QKNorm, fast_moe
    from fp8_safeguard.kernels.mx import MxTensor, mx_round_trip, mx_stats, quantize_mx

# What a trainer without mixture-of-experts layers and a monitored one do not use is imported when it is asked for. A
# function with the name of its module cannot be: the module would be found first.
_ON_FIRST_USE = {
    "FastMoEFunction": "moe",
    "LogFmt8": "logfmt",
    "MxTensor": "mx",
    "QKNorm": "moe",
    "fast_moe": "moe",
    "logfmt8_encode": "logfmt",
    "mx_round_trip": "mx",
    "mx_stats": "mx",
    "quantize_mx": "mx",
}
"""Public names and the modules that have them."""

__all__ = [
    "DelayedScaling",
    "FastMoEFunction",
    "Fp8GroupedLinear",
    "Fp8Linear",
    "GemmObserver",
    "KernelError",
    "Layouts",
    "LinearPrecision",
    "LogFmt8",
    "MxTensor",
    "OffsetsError",
    "OperandError",
    "OperandFormat",
    "QKNorm",
    "QuantizedTensor",
    "ScaledFormat",
    "UnknownOptionError",
    "backend",
    "fast_moe",
    "fast_precision",
    "fp8_gemm_nt",
    "fp8_grouped_linear",
    "fp8_linear",
    "gemm_backend",
    "gemm_backend_of",
    "gemm_choice",
    "grouped_gemm_nt",
    "grouped_gemm_wgrad",
    "layout_stats",
    "logfmt8_encode",
    "merge_amax",
    "mx_round_trip",
    "mx_stats",
    "quantize",
    "quantize_layouts",
    "quantize_mx",
    "reblock",
    "round_trip",
    "tensor_stats",
    "use_gemm_backend",
    "use_results",
    "warm_up",
]


if not TYPE_CHECKING:  # otherwise every misspelt name would have a type

    def __getattr__(name: str) -> Any:
        """A public name on its first use; from then on it is an attribute like any other."""
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_ON_FIRST_USE[name]}")
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
