"""nn.Modules around fp8_linear and fp8_grouped_linear."""

# Shapes: T tokens, K input features, N output features, E experts.

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fp8_safeguard.kernels.choices import fast_precision
from fp8_safeguard.kernels.linear import fp8_grouped_linear, fp8_linear
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.precision import LinearPrecision


class _Fp8Module(nn.Module):
    """What both layers have: a weight, a precision, an observer and an input gain."""

    precision: LinearPrecision
    """Read at each forward; the backward uses the precision of its forward. May be replaced at any time."""
    observer: GemmObserver | None
    """Sees the real tensors of the three GEMMs."""
    input_gain: Tensor | None
    """float32 [K] or None. The GEMMs see x * gain and w / gain, which changes no result in exact arithmetic;
    gradients map back. With powers of two BF16 results keep every bit: an FP8-only fault to inject."""

    def __init__(
        self,
        shape: tuple[int, ...],
        precision: LinearPrecision,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.precision = precision
        self.observer = None
        self.input_gain = None
        # nn.Linear's own initialisation: uniform within 1/sqrt(K).
        bound = 1.0 / math.sqrt(shape[-1]) if shape[-1] > 0 else 0.0
        nn.init.uniform_(self.weight, -bound, bound)

    def prefer_fast(self, tokens: int) -> None:
        """Put BF16 in the place of FP8 in each GEMM that is not faster in FP8 with that many tokens (all experts').

        Changes `precision`, so that whatever reads it sees what runs; said once for a shape (choices.gemm_choice).
        """
        experts = self.weight.shape[0] if self.weight.dim() == 3 else 0
        out_features, in_features = self.weight.shape[-2:]
        self.precision = fast_precision(
            self.precision, tokens=tokens, out_features=out_features, in_features=in_features, experts=experts,
            device=self.weight.device,
        )  # fmt: skip

    def gained(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and the weight as the GEMMs see them."""
        if self.input_gain is None:
            return x, self.weight
        gain = self.input_gain.to(x.dtype)
        return x * gain, self.weight / gain.to(self.weight.dtype)


class Fp8Linear(_Fp8Module):
    """nn.Linear whose three GEMMs run in FP8 or BF16."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        precision: LinearPrecision | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_features, in_features), precision or LinearPrecision(), device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N]."""
        x_gained, weight = self.gained(x)
        return fp8_linear(x_gained, weight, self.bias, precision=self.precision, stats=self.observer)

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class Fp8GroupedLinear(_Fp8Module):
    """One weight an expert, applied to that expert's rows."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        precision: LinearPrecision | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            (num_experts, out_features, in_features), precision or LinearPrecision(), device, dtype
        )
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features

    def forward(self, x_TK: Tensor, offsets: Tensor, *, alignment: int = 1) -> Tensor:
        """x [T,K] sorted by expert, offsets int32 [E+1], all multiples of `alignment`: [T,N]."""
        x_gained, weight = self.gained(x_TK)
        return fp8_grouped_linear(
            x_gained, weight, offsets, precision=self.precision, stats=self.observer, alignment=alignment
        )

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
