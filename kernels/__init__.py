"""FP8 on tensors: quantise, measure, multiply, and linear layers of them."""

from fp8_safeguard.kernels.choices import fast_precision, gemm_choice, use_results
from fp8_safeguard.kernels.dispatch import backend, gemm_backend_of, use_gemm_backend
from fp8_safeguard.kernels.errors import KernelError, OffsetsError, OperandError, UnknownOptionError
from fp8_safeguard.kernels.gemm import fp8_gemm_nt
from fp8_safeguard.kernels.grouped import grouped_gemm_nt, grouped_gemm_wgrad
from fp8_safeguard.kernels.layers import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.kernels.layouts import Layouts, quantize_layouts, reblock
from fp8_safeguard.kernels.linear import fp8_grouped_linear, fp8_linear
from fp8_safeguard.kernels.logfmt import LogFmt8, logfmt8_encode
from fp8_safeguard.kernels.moe import FastMoEFunction, QKNorm, fast_moe
from fp8_safeguard.kernels.mx import MxTensor, mx_round_trip, mx_stats, quantize_mx
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision, OperandFormat
from fp8_safeguard.kernels.quantize import quantize
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.kernels.stats import tensor_stats
from fp8_safeguard.kernels.tiles import gemm_backend
from fp8_safeguard.kernels.warm_up import warm_up

__all__ = [
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
    "logfmt8_encode",
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
