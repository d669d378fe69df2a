"""FP8 on tensors: quantise, measure, multiply, and linear layers of them."""

from fp8_safeguard.kernels.dispatch import backend
from fp8_safeguard.kernels.errors import KernelError, OffsetsError, OperandError, UnknownOptionError
from fp8_safeguard.kernels.gemm import fp8_gemm_nt
from fp8_safeguard.kernels.grouped import grouped_gemm_nt, grouped_gemm_wgrad
from fp8_safeguard.kernels.layers import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.kernels.linear import fp8_grouped_linear, fp8_linear
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision, OperandFormat
from fp8_safeguard.kernels.quantize import quantize
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.round_trip import round_trip
from fp8_safeguard.kernels.stats import tensor_stats
from fp8_safeguard.kernels.tiles import gemm_backend
from fp8_safeguard.kernels.warm_up import warm_up

__all__ = [
    "Fp8GroupedLinear",
    "Fp8Linear",
    "GemmObserver",
    "KernelError",
    "LinearPrecision",
    "OffsetsError",
    "OperandError",
    "OperandFormat",
    "QuantizedTensor",
    "UnknownOptionError",
    "backend",
    "fp8_gemm_nt",
    "fp8_grouped_linear",
    "fp8_linear",
    "gemm_backend",
    "grouped_gemm_nt",
    "grouped_gemm_wgrad",
    "quantize",
    "round_trip",
    "tensor_stats",
    "warm_up",
]
