"""Operators that observe from inside a compiled graph, at run time."""

# Shapes: T tokens, N output features, K input features.
# The forward operator is pure: the backward one takes its token, so it runs wherever its gradient needs it, in the
# backward too if all it reads waits there anyway, and a checkpoint may repeat it. The backward operator has no result:
# it is declared to have a side effect. Neither mutates what a backward saves, since two passes under way at once would
# then fail autograd's version check.
# Registering operators takes time: importing this module does it, and only a compiler's trace imports it.

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fp8_safeguard.hooks import uses
from fp8_safeguard.hooks.aside import guarded
from fp8_safeguard.hooks.uses import GemmCall, Use, in_backward
from fp8_safeguard.kernels import numbers

if TYPE_CHECKING:
    from fp8_safeguard.hooks.capture import ForwardHook
    from fp8_safeguard.hooks.layers import StepState

_UNSEEN = 0
"""Token of a forward that is not measured."""
_NAMESPACE = "fp8_safeguard"

_uses: WeakValueDictionary[int, Use] = WeakValueDictionary()
"""Measured forwards by token; the layer's step owns them."""
_tokens = itertools.count(_UNSEEN + 1)
_sites = itertools.count()

# Inductor cuts its CUDA graphs around operators with the first tag, and need not copy strided operands for us.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("cudagraph_unsafe", "flexible_layout", "pt2_compliant_tag")
    if hasattr(torch.Tag, name)
)


def observe(
    number: Tensor, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *, transposed: bool
) -> Tensor:
    """y with the operators on it; to be traced."""
    needs_dx, needs_dw = x.requires_grad, w.requires_grad
    bias = None if bias is None else bias.detach()
    operands = x.detach(), w.detach(), y.detach(), bias
    if not y.requires_grad:
        observe_frozen(number, *operands, transposed, needs_dw)
        return y
    token = observe_forward(number, *operands, transposed, _site(), needs_dx, needs_dw)
    probed: Tensor = _Probe.apply(y, token)  # type: ignore[no-untyped-call]
    return probed


def _site() -> int:
    """Another number at each place of a graph: equal calls must not become one."""
    return next(_sites)


# What torch.compiler.assume_constant_result does, without importing the compiler.
_site._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Probe(torch.autograd.Function):
    """Identity whose backward shows dy; declared to be in place, so that an in-place operation may follow."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, token: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(token)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (token,) = ctx.saved_tensors
        observe_backward(dy.detach(), token)
        return dy, None


def _observe_forward(
    number: Tensor, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, transposed: bool, site: int,
    needs_dx: bool, needs_dw: bool,
) -> Tensor:  # fmt: skip
    """Measure one forward; int64 [1] on the CPU, the token by which its backward is known."""
    hook: ForwardHook | None = numbers.found(number)
    token = _UNSEEN
    if hook is not None and _begins(hook):
        token = next(_tokens)
        operands = x, w, y, bias, transposed, needs_dx, needs_dw
        guarded(hook.session, "the forward", hook.layer, _measure, hook, operands, site, token)
    return torch.tensor([token])


def _observe_frozen(
    number: Tensor, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, transposed: bool, needs_dw: bool
) -> None:
    """Measure a forward that no gradient comes back to."""
    hook: ForwardHook | None = numbers.found(number)
    if hook is not None and _begins(hook):
        operands = x, w, y, bias, transposed, False, needs_dw
        guarded(hook.session, "the forward", hook.layer, _measure_frozen, hook, operands)


def _observe_backward(dy: Tensor, token: Tensor) -> None:
    """Measure the gradient of that forward's output."""
    use = _uses.get(int(token))
    if use is not None:
        use(dy)
        use.state.uses.pop(int(token), None)


def _begins(hook: ForwardHook) -> bool:
    """Whether the forward in progress is measured; the first of a step opens it."""
    session = hook.session
    # Nearly every call of a run ends here.
    if session.idle or not session.active:
        return False
    session.touch()
    return session.measuring


def _measure(hook: ForwardHook, operands: tuple[Any, ...], site: int, token: int) -> None:
    session, layer = hook.session, hook.layer
    assert session.frame is not None
    state = layer.enter(session.frame)
    repeats = _repeats(state, site, token)
    use = uses.forward(session, layer, _call(hook, *operands), repeats=repeats)
    if use is None:
        return
    if repeats:
        # The first pass has said already that a gradient is expected.
        use.expected = True
    else:
        use.expect()
    state.uses[token] = _uses[token] = use


def _repeats(state: StepState, site: int, token: int) -> bool:
    """Whether a checkpoint repeats a forward of this place that was counted: the gradient comes to the repetition.

    The compiler may also leave the first pass out and keep the repetition alone: then that one counts.
    """
    made = state.sites.setdefault(site, [])
    if not in_backward():
        made.append(token)
        return False
    if made:
        state.uses.pop(made.pop(), None)
        return True
    return False


def _measure_frozen(hook: ForwardHook, operands: tuple[Any, ...]) -> None:
    uses.forward(hook.session, hook.layer, _call(hook, *operands), repeats=False)


def _call(
    hook: ForwardHook, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, transposed: bool, needs_dx: bool,
    needs_dw: bool,
) -> GemmCall:  # fmt: skip
    w_NK = w.mT if transposed else w
    y_TN = None if hook.layer.own_forward else y.reshape(-1, w_NK.shape[0])
    x_TK = x.reshape(-1, w_NK.shape[1])
    return GemmCall(
        x_TK=x_TK, w=w_NK, y_TN=y_TN, bias_N=bias, needs_dx=needs_dx, needs_dw=needs_dw, lent=True
    )


def _register(schema: str, run: Callable[..., Any], promise: Callable[..., Any]) -> Any:
    """One operator: its schema, what it does on every device, and the shape of its result."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]
    # torch.library.custom_op would compare every operand's memory in every call.
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", promise, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


_library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERANDS = "Tensor x, Tensor w, Tensor y, Tensor? bias, bool transposed"
observe_forward = _register(
    f"observe_forward(Tensor number, {_OPERANDS}, int site, bool needs_dx, bool needs_dw) -> Tensor",
    _observe_forward,
    lambda *operands: torch.empty(1, dtype=torch.int64, device="cpu"),
)
observe_backward = _register(
    "observe_backward(Tensor dy, Tensor token) -> ()", _observe_backward, lambda *operands: None
)
has_side_effect(observe_backward)
# It mutates nothing: what has no result and mutates nothing is dropped, and to have a side effect is not allowed in a
# forward that is checkpointed.
observe_frozen = _register(
    f"observe_frozen(Tensor(a!) number, {_OPERANDS}, bool needs_dw) -> ()",
    _observe_frozen,
    lambda *operands: None,
)
