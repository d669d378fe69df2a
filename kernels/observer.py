"""What a GEMM tells whoever watches it."""

# Shapes: T tokens, K input features, N output features, E experts.

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fp8_safeguard.kernels.precision import LinearPrecision


class GemmObserver(Protocol):
    """Sees the real tensors of a linear layer's GEMMs, under no_grad, after each GEMM has run.

    Tensors are the GEMM's own: after `input_gain`, before quantisation, y before the bias. Weights are [N,K],
    or [E,N,K] with `offsets` (int32 [E+1]) for grouped ones; offsets is None for dense layers. Nothing may be
    changed in place. Exceptions are the observer's business: one that escapes stops the training step.
    """

    @property
    def wants(self) -> bool:
        """Read first, once a forward and once a backward; False means no calls at all."""
        ...

    def fprop(self, x_TK: Tensor, w_NK: Tensor, y_TN: Tensor, offsets: Tensor | None) -> None:
        """After the forward GEMM."""
        ...

    def dgrad(self, dy_TN: Tensor, w_NK: Tensor, dx_TK: Tensor | None, offsets: Tensor | None) -> None:
        """In the backward, after dgrad; dx is None if nobody needs it."""
        ...

    def wgrad(self, dy_TN: Tensor, x_TK: Tensor, dw_NK: Tensor | None, offsets: Tensor | None) -> None:
        """In the backward, after wgrad; dw is None if the weight is frozen."""
        ...


class SteeringObserver(GemmObserver, Protocol):
    """An observer whose layer may change its precision without being compiled again.

    A compiled graph keeps its number alone, and asks it for the precision whenever it runs: what was given to the
    layer's function counts in eager code only.
    """

    number: Tensor
    """From `numbers.numbered`."""

    @property
    def precision(self) -> LinearPrecision:
        """What the layer computes with now."""
        ...
