"""How a linear layer's three GEMMs and their operands are quantised."""

from dataclasses import dataclass

from fp8_safeguard.kernels.codes import SCALES, get_format, require_multiplier
from fp8_safeguard.kernels.errors import require_option

GEMM_PRECISIONS = ("fp8", "bf16")


@dataclass(frozen=True, kw_only=True)
class OperandFormat:
    """How one operand becomes FP8, in every layout it is needed in."""

    fmt: str = "e4m3"
    """`e4m3` or `e5m2`."""
    scale: str = "fp32"
    """`fp32`: amax over the format's maximum; `pow2`: the next power of two up."""
    multiplier: float = 1.0
    """Power of two on the scale: below 1 trades head-room (saturation) for less underflow."""

    def __post_init__(self) -> None:
        get_format(self.fmt)
        require_option("scale", self.scale, SCALES)
        require_multiplier(self.multiplier)


@dataclass(frozen=True, kw_only=True)
class LinearPrecision:
    """Precision of a linear layer, GEMM by GEMM and operand by operand; FP8 throughout by default."""

    fprop: str = "fp8"
    """Y = X W^T: `fp8` or `bf16`."""
    dgrad: str = "fp8"
    """dX = dY W: `fp8` or `bf16`."""
    wgrad: str = "fp8"
    """dW = dY^T X: `fp8` or `bf16`."""
    x: OperandFormat = OperandFormat()
    """Activation."""
    w: OperandFormat = OperandFormat()
    """Weight."""
    dy: OperandFormat = OperandFormat()
    """Gradient of the output."""

    def __post_init__(self) -> None:
        for gemm in ("fprop", "dgrad", "wgrad"):
            require_option(gemm, getattr(self, gemm), GEMM_PRECISIONS)
