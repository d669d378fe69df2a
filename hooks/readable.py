"""Says why a tensor's numbers cannot be read here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_ORDINARY = (Tensor, nn.Parameter)

PARTITIONED = "partitioned: not readable here"
META = "meta tensor: it has no values"
SPARSE = "sparse: not supported"
TRANSFORMED = "inside a torch.func transform: not measured"
_SUBCLASS = "stored as "

# The stubs do not know the module.
_functorch: Any = torch._C._functorch


def unreadable(*tensors: Tensor | None) -> str:
    """Why the numbers of these tensors cannot be read on this rank; empty where they can."""
    if transformed():
        return TRANSFORMED
    for tensor in tensors:
        reason = "" if tensor is None else _reason(tensor)
        if reason:
            return reason
    return ""


def unfit(*operands: Tensor | None) -> str:
    """Why these cannot be read as operands of a GEMM: as `unreadable`, and quantised weights kept as integers."""
    reason = unreadable(*operands)
    if reason:
        return reason
    for operand in operands:
        if operand is not None and not operand.is_floating_point():
            return _kept_as(operand.dtype)
    return ""


def version_of(tensor: Tensor) -> int | None:
    """Counts changes in place; None for a tensor made in inference mode, which has no count."""
    return None if tensor.is_inference() else tensor._version


def is_reason(remark: str) -> bool:
    """Whether that is one of the reasons given here."""
    return remark in (PARTITIONED, META, SPARSE, TRANSFORMED) or remark.startswith(_SUBCLASS)


def transformed() -> bool:
    """Whether torch.func (grad, vmap, jvp, ...) or forward-mode differentiation is at work around us."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream: what is launched now would be played back for
    ever, and to wait or to ask for an event would spoil it.
    """
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialised and torch.cuda.is_current_stream_capturing()


def is_freed(tensor: Tensor) -> bool:
    """Whether the memory is gone although the tensor is there: sharding frees a weight between its uses."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _reason(tensor: Tensor) -> str:
    kind = type(tensor)
    if kind not in _ORDINARY and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        # DTensor is not imported only to be recognised.
        sharded = kind.__name__ == "DTensor"
        return PARTITIONED if sharded else _kept_as(kind.__name__)
    if tensor.is_meta:
        return META
    if tensor.layout is not torch.strided:
        return SPARSE
    if tensor.is_complex():
        return _kept_as(tensor.dtype)
    if tensor.numel() == 0:
        # ZeRO-3 leaves an empty tensor in the place of a weight.
        return PARTITIONED if hasattr(tensor, "ds_shape") else ""
    return PARTITIONED if is_freed(tensor) else ""


def _kept_as(kind: object) -> str:
    return f"{_SUBCLASS}{kind}: its numbers are not read"
