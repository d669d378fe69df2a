"""What the hooks leave in a compiled graph, and graphs compiled without them."""

# A compiler traces a hook once and never asks again. So what a hook leaves in the graph is an operator
# (hooks/operators.py) that finds the hook at run time, by a number that is data of the graph and not a constant: one
# graph serves every layer of its kind, and no sampling, pause or plan makes another.

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from fp8_safeguard.hooks.errors import HookError
from fp8_safeguard.hooks.once import logger
from fp8_safeguard.hooks.readable import transformed

if TYPE_CHECKING:
    from fp8_safeguard.hooks.capture import ForwardHook

_WRAPPER = "_orig_mod"
"""Under this name a module compiled by torch.compile() holds the one that it was made from."""
_WRAPPERS = (_WRAPPER, "_checkpoint_wrapped_module")
"""That, and the name under which torch's checkpoint_wrapper holds its module: state_dict() leaves both out."""


def probe(
    hook: ForwardHook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """The output as the compiled graph is to go on with it; None leaves it as it is.

    Traced, and run once for each graph: what raises here stops the training. Sharded and other special tensors, whose
    operations our operators would have to know, and outputs in containers of other kinds are left alone.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_exporting() or _is_transformed():
        return None
    x = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
    several = type(output) is tuple or type(output) is list
    y = output[0] if several and len(output) > 0 else output
    w, bias = getattr(module, hook.layer.attribute, None), getattr(module, "bias", None)
    if not (_is_ordinary(x) and _is_ordinary(y) and _is_ordinary(w)):
        return None
    from fp8_safeguard.hooks import operators

    seen = operators.observe(
        hook.number, x, w, y, bias if _is_ordinary(bias) else None, transposed=hook.layer.transposed
    )
    if not several:
        return seen
    return (seen, *output[1:]) if type(output) is tuple else [seen, *output[1:]]


def _is_ordinary(value: Any) -> TypeGuard[Tensor]:
    return type(value) is Tensor or type(value) is nn.Parameter


def _is_transformed() -> bool:
    """Whether a transform of torch.func is at work around the trace: it knows no rule for our operators."""
    return transformed()


# What torch.compiler.assume_constant_result does, without importing the compiler.
_is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def plain_name(name: str) -> str:
    """The name that a module or parameter has without the wrappers of torch.compile and checkpoints around it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile()'s result, or the module itself."""
    inner = model._modules.get(_WRAPPER)
    return model if inner is None else inner


def prepare(*hooks: type) -> None:
    """Before hooks of these classes go on a model: no graph may go on without them, and none consist of one alone.

    A compiler does not guard on hooks that come later, and which graph holds which module is not known here: all
    that was compiled so far is compiled again. Raises HookError where the user has forbidden that.
    """
    _forget_graphs()
    # A hook that is called where the module itself is not traced would be compiled for itself, and the gradient of an
    # output that its graph is given does not pass through that graph.
    for kind in hooks:
        _leave_alone(vars(kind)["__call__"].__code__)


def _leave_alone(code: CodeType) -> None:
    """Have the compiler run the code, and what it calls, as it is, where no trace goes through it."""
    evaluation: Any = torch._C._dynamo.eval_frame
    try:
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(code, evaluation._FrameExecStrategy(skip, skip))
    except AttributeError:
        # Of an older torch, where what it calls may be compiled still.
        evaluation.skip_code(code)


def _forget_graphs() -> None:
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None or not any(_has_graph(code) for code in _traced(compiler)):
        return
    if _forbidden(compiler):
        raise HookError(
            "attach() after the first compiled call has to compile again, which torch.compiler.set_stance or "
            "torch._dynamo.config.error_on_recompile forbids: call attach() before the first compiled call"
        )
    compiler.reset_code_caches()
    logger.warning(
        "attach() after the first compiled call: graphs without the hooks are dropped, the next call compiles again; "
        "attach before it to save that time"
    )


def _traced(compiler: ModuleType) -> Iterator[CodeType]:
    """Code that the compiler has seen and that still exists."""
    return (
        code for reference in compiler.convert_frame.input_codes.seen if (code := reference()) is not None
    )


def _has_graph(code: CodeType) -> bool:
    evaluation: Any = torch._C._dynamo.eval_frame
    if hasattr(evaluation, "_get_total_cache_entry_count"):
        return bool(evaluation._get_total_cache_entry_count(code))
    return bool(evaluation._debug_get_cache_entry_list(code))


def _forbidden(compiler: ModuleType) -> bool:
    stance = getattr(getattr(compiler.eval_frame, "_stance", None), "stance", "default")
    return bool(getattr(compiler.config, "error_on_recompile", False)) or stance == "fail_on_recompile"
