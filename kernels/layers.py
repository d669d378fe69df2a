"""nn.Modules around fp8_linear and fp8_grouped_linear."""

# Shapes: T tokens, K input features, N output features, E experts.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fp8_safeguard.kernels import uncompiled
from fp8_safeguard.kernels.choices import fast_precision
from fp8_safeguard.kernels.delayed import DelayedScaling, enter, report_state
from fp8_safeguard.kernels.errors import KernelError
from fp8_safeguard.kernels.linear import fp8_grouped_linear, fp8_linear
from fp8_safeguard.kernels.observer import GemmObserver
from fp8_safeguard.kernels.passes import Tamper
from fp8_safeguard.kernels.precision import OPERANDS, LinearPrecision

_EXTRA = "_extra_state"
"""Key of what a state_dict holds besides tensors of the module, as torch names it."""


class _Fp8Module(nn.Module):
    """What both layers have: a weight, a precision, an observer and an input gain."""

    precision: LinearPrecision
    """Read at each forward; the backward uses the precision of its forward. May be replaced at any time."""
    observer: GemmObserver | None
    """Sees the real tensors of the three GEMMs."""
    input_gain: Tensor | None
    """float32 [K] or None. The GEMMs see x * gain and w / gain, which changes no result in exact arithmetic;
    gradients map back. With powers of two BF16 results keep every bit: an FP8-only fault to inject."""
    tamper: Tamper | None
    """Given each operand's codes and scales just before its product; what it returns is multiplied. An observer is not
    shown it: another fault to inject, which only the GEMM's result tells of."""
    scaling: DelayedScaling
    """What the layer remembers of operands with delayed scaling; saved with the weights, bit for bit."""

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
        self.tamper = None
        self.scaling = DelayedScaling()
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

    @property
    def precision_in_use(self) -> LinearPrecision:
        """The precision with the scales that the latest observed pass had: what its operands were quantised with."""
        return self.precision if self.precision.is_plain else self.scaling.in_use or self.precision

    def _how(self) -> dict[str, Any]:
        """What a forward that begins now needs besides its tensors."""
        if not self.precision.is_plain:
            if torch.compiler.is_compiling():
                uncompiled.prepare()
                uncompiled.enter(self.scaling, self.weight, self.precision, training=self.training)
            else:
                enter(self.scaling, self.weight, self.precision, training=self.training)
        return {
            "precision": self.precision,
            "stats": self.observer,
            "scaling": self.scaling,
            "tamper": self.tamper,
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.scaling:
            destination[prefix + _EXTRA] = self.scaling.state()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """A state that one side has and the other does not is reported, and stops nothing."""
        place = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*place)
        state = state_dict.get(prefix + _EXTRA)
        if prefix + _EXTRA in unexpected_keys:
            unexpected_keys.remove(prefix + _EXTRA)
        remembers = any(getattr(self.precision, name).scaling == "delayed" for name in OPERANDS)
        if state is None:
            if remembers:
                self.scaling = DelayedScaling()
                report_state(prefix[:-1], "not in the checkpoint; its scales are unknown until it is used")
        elif not remembers:
            report_state(prefix[:-1], "in the checkpoint, but the layer has no delayed scaling; not loaded")
        else:
            try:
                self.scaling.load(state, self.precision)
            except (KernelError, AttributeError, TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}{_EXTRA}: {error}")


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
        return fp8_linear(x_gained, weight, self.bias, **self._how())

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
        return fp8_grouped_linear(x_gained, weight, offsets, alignment=alignment, **self._how())

    def extra_repr(self) -> str:
        """Sizes."""
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
