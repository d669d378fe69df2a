"""Reads a matrix product with a weight out of a function call."""

# Shapes: T tokens, N output features, K input features, E experts, G experts of one call.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_safeguard.hooks.layers import ObservedLayer


@dataclass(slots=True, frozen=True)
class Weight:
    """What an operand turned out to be: a layer's weight, or a view of it."""

    layer: ObservedLayer
    base: Tensor
    """The parameter, or its copy in another dtype: the operand is this tensor or a view of it."""
    expert: int | None = None
    """Where the base is a copy of one expert's slice."""


@dataclass(slots=True, frozen=True)
class Product:
    """y = x w^T (+ b) with a layer's weight."""

    weight: Weight
    x_TK: Tensor
    w: Tensor
    """[N, K], or [E, N, K] with offsets."""
    arranged: Callable[[Tensor], Tensor]
    """The output, or its gradient, as [T, N]."""
    whole: Tensor
    """The layer's weight as [N, K] or [E, N, K]."""
    transposed: bool
    """The layer keeps its weight as [K, N]."""
    expert: int | None = None
    offsets: Tensor | None = None
    """int32 [E+1]."""
    bias_N: Tensor | None = None
    exact: bool = True
    """The output is x w^T + b and nothing else."""


class NotRead(Exception):
    """A function multiplies with a weight in a way that is not understood; the text says which."""


Find = Callable[[Any], Weight | None]
"""Says whether an operand is a weight."""
Reader = Callable[..., Product | None]
"""Of a Find and a function's own arguments; None where it multiplies with no weight. Raises NotRead."""


def _linear(find: Find, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Product | None:
    return _matmul(find, input, weight.mT if weight.dim() > 1 else weight, bias_N=bias)


def _matmul(
    find: Find, input: Tensor, other: Tensor, *, bias_N: Tensor | None = None, exact: bool = True
) -> Product | None:
    right = find(other)
    if right is not None and other.dim() > 1:
        return _with_weight(right, input, other.mT, bias_N=bias_N, exact=exact)
    left = find(input)
    if left is None or input.dim() < 2:
        return None
    # W X = (X^T W^T)^T: the same GEMM with everything turned.
    if other.dim() == 1:
        return _with_weight(left, other, input, bias_N=None, exact=exact and bias_N is None)
    exact = exact and bias_N is None
    return _with_weight(left, other.mT, input, bias_N=None, exact=exact, turned=True)


def _addmm(
    find: Find, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Product | None:
    product = _matmul(find, mat1, mat2, exact=False)
    if product is None:
        return None
    if alpha != 1:
        raise NotRead(f"addmm with alpha {alpha}")
    plain = beta == 1 and input.dim() == 1 and product.offsets is None and product.w is not mat1
    if not plain or input.shape[0] != product.w.shape[0]:
        return product
    return _matmul(find, mat1, mat2, bias_N=input)


def _addmm_in_place(find: Find, input: Tensor, mat1: Tensor, mat2: Tensor, **scales: float) -> Product | None:
    # The output takes the place of what is added: only the product's operands can be read.
    return _addmm(find, input.new_empty(()), mat1, mat2, **scales)


def _grouped(
    find: Find,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Product | None:
    if offs is None:
        return _matmul(find, input, mat2, exact=bias is None)
    ends_G = offs.to(torch.int32)
    offsets = torch.cat([ends_G.new_zeros(1), ends_G])
    right = find(mat2)
    if right is not None and mat2.dim() == 3 and input.dim() == 2:
        return _by_expert(right, input, mat2.mT, offsets, as_rows, exact=bias is None)
    left = find(input)
    if left is not None and input.dim() == 3 and mat2.dim() == 2:
        return _by_expert(left, mat2.mT, input, offsets, _turned_rows, exact=bias is None)
    if right is not None or left is not None:
        raise NotRead("grouped product over the rows of the weight")
    return None


def _einsum(find: Find, equation: Any, *operands: Any) -> Product | None:
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    hits = [find(tensor) for tensor in tensors]
    known = [index for index, hit in enumerate(hits) if hit is not None]
    if not known:
        return None
    if len(tensors) != 2 or not isinstance(equation, str):
        raise NotRead(f"einsum {equation!r}")
    at = known[-1]
    weight, w, x = hits[at], tensors[at], tensors[1 - at]
    assert weight is not None
    names, y_names = _indices(equation, [tensor.dim() for tensor in tensors])
    roles = _roles(equation, names[at], names[1 - at], y_names, experts=w.shape[0] if w.dim() == 3 else 0)
    if weight.base.dim() != w.dim():
        raise NotRead(f"einsum {equation!r}")
    w_ordered = _ordered(w, names[at], roles, "outer", "inner")
    x_TK = as_rows(_ordered(x, names[1 - at], roles, "tokens", "inner"))
    arranged = partial(_ordered_rows, names=y_names, roles=roles)
    if not roles.experts:
        return _dense(weight, x_TK, w_ordered, arranged)
    offsets = _even_offsets(w.shape[0], x_TK.shape[0] // w.shape[0], x)
    return _by_expert(weight, x_TK, w_ordered, offsets, arranged, exact=roles.groups in y_names)


@dataclass(slots=True, frozen=True)
class _Roles:
    """What the dimensions of an einsum are for the product."""

    groups: str
    """The one that tells experts (attention heads) apart; empty without any."""
    experts: int
    tokens: list[str]
    outer: list[str]
    inner: list[str]


def _roles(
    equation: str, w_names: list[str], x_names: list[str], y_names: list[str], *, experts: int
) -> _Roles:
    """A weight of three dimensions holds a matrix for each index of its first, wherever else that occurs."""
    groups = w_names[0] if experts else ""
    w_left = [name for name in w_names if name != groups]
    inner = [name for name in w_left if name in x_names and name not in y_names]
    outer = [name for name in w_left if name in y_names and name not in x_names]
    tokens = [name for name in x_names if name in y_names and name not in w_names]
    known = {groups, *inner, *outer, *tokens}
    if not inner or not outer or not known.issuperset((*w_names, *x_names, *y_names)):
        raise NotRead(f"einsum {equation!r}")
    if groups and groups not in x_names and groups not in y_names:
        raise NotRead(f"einsum {equation!r}")
    return _Roles(groups, experts, tokens, outer, inner)


def _indices(equation: str, dims: list[int]) -> tuple[list[list[str]], list[str]]:
    """Names of the dimensions of each operand and of the result; an ellipsis gets names of its own."""
    text, arrow, result = equation.replace(" ", "").partition("->")
    named = [len(part.replace("...", "")) for part in text.split(",")]
    missing = max(dim - count for dim, count in zip(dims, named, strict=True))
    more = [chr(0x3B1 + k) for k in range(missing)]
    parts = [
        list(part.replace("...", "".join(more[len(more) - (dim - count) :])))
        for part, dim, count in zip(text.split(","), dims, named, strict=True)
    ]
    if any(len(set(part)) != len(part) for part in parts):
        raise NotRead(f"einsum {equation!r}")
    letters = [name for part in parts for name in part]
    if arrow:
        return parts, list(result.replace("...", "".join(more)))
    once = sorted(name for name in set(letters) if letters.count(name) == 1 and name not in more)
    return parts, more + once


def _ordered(x: Tensor, names: list[str], roles: _Roles, rows: str, columns: str) -> Tensor:
    """[rows, columns]; with experts [E, rows, columns], the same rows for each where x does not tell them apart."""
    order = [*getattr(roles, rows), *getattr(roles, columns)]
    told_apart = roles.groups in names
    lead = [roles.groups] if told_apart else []
    ordered = x.permute([names.index(name) for name in (*lead, *order)])
    height = math.prod(ordered.shape[len(lead) : len(lead) + len(getattr(roles, rows))])
    matrix = ordered.reshape(*ordered.shape[: len(lead)], height, -1)
    if roles.experts and not told_apart:
        matrix = matrix.expand(roles.experts, *matrix.shape)
    return matrix


def _ordered_rows(y: Tensor, *, names: list[str], roles: _Roles) -> Tensor:
    """The output as [T, N]."""
    return as_rows(_ordered(y, names, roles, "tokens", "outer"))


def _with_weight(
    weight: Weight, x: Tensor, w: Tensor, *, bias_N: Tensor | None, exact: bool, turned: bool = False
) -> Product:
    """x [..., T, K] by a weight [N, K] or [G, N, K]; `turned`: the output has its features before its tokens."""
    if w.dim() == 3 and (w.shape[0] == 1 or w.stride(0) == 0):
        w = w[0]
    if w.dim() == 2:
        arranged = _turned_rows if turned else as_rows
        return _dense(weight, x.reshape(-1, x.shape[-1]), w, arranged, bias_N=bias_N, exact=exact)
    if w.dim() != 3 or bias_N is not None:
        raise NotRead(f"a product with its view of {w.dim()} dimensions")
    groups = w.shape[0]
    if x.dim() < 3 or x.shape[-3] != groups:
        x = x.expand(*x.shape[:-3], groups, *x.shape[-2:]) if x.dim() > 1 else x.expand(groups, 1, -1)
    x_GTK = x.movedim(-3, 0).reshape(groups, -1, x.shape[-1])
    offsets = _even_offsets(groups, x_GTK.shape[1], x)
    arranged = _turned_groups if turned else _group_rows
    return _by_expert(weight, x_GTK.reshape(-1, x.shape[-1]), w, offsets, arranged, exact=exact)


def _dense(
    weight: Weight,
    x_TK: Tensor,
    w_NK: Tensor,
    arranged: Callable[[Tensor], Tensor],
    *,
    bias_N: Tensor | None = None,
    exact: bool = True,
) -> Product:
    base = weight.base
    transposed = _is_transposed(base, w_NK)
    whole = base.mT if transposed else base
    expert = weight.expert
    if expert is not None:
        parameter = weight.layer.parameter()
        assert parameter is not None
        whole = parameter.mT if transposed else parameter
    elif base.dim() == 3:
        expert = _expert_of(base, w_NK, whole)
    return Product(
        weight, x_TK, w_NK, arranged, whole,
        transposed=transposed, expert=expert, bias_N=bias_N, exact=exact,
    )  # fmt: skip


def _by_expert(
    weight: Weight,
    x_TK: Tensor,
    w_GNK: Tensor,
    offsets: Tensor,
    arranged: Callable[[Tensor], Tensor],
    *,
    exact: bool = True,
) -> Product:
    base = weight.base
    if base.dim() != 3:
        raise NotRead("several products with parts of it in one call")
    transposed = _is_transposed(base, w_GNK)
    whole = base.mT if transposed else base
    if w_GNK.shape[0] < base.shape[0]:
        # A slice of the experts: the others have no rows.
        first = (w_GNK.storage_offset() - base.storage_offset()) // base.stride(0)
        behind = base.shape[0] - first - w_GNK.shape[0]
        offsets = torch.cat([offsets[:1].expand(first), offsets, offsets[-1:].expand(behind)])
        if w_GNK.shape[1:] != whole.shape[1:] or behind < 0:
            raise NotRead("a part of some of its experts")
        w_GNK = whole
    return Product(weight, x_TK, w_GNK, arranged, whole, transposed=transposed, offsets=offsets, exact=exact)


def _expert_of(base_E: Tensor, w_NK: Tensor, whole_ENK: Tensor) -> int | None:
    """The expert whose slice this is; None where there is one only."""
    if base_E.shape[0] == 1:
        return None
    _, features, inputs = whole_ENK.shape
    if w_NK.stride() != whole_ENK.stride()[1:] or w_NK.shape[0] > features or w_NK.shape[1] > inputs:
        raise NotRead("its experts multiplied as one matrix")
    return (w_NK.storage_offset() - base_E.storage_offset()) // base_E.stride(0)


def _is_transposed(base: Tensor, w: Tensor) -> bool:
    """Whether a base of [..., K, N] was turned to give w [..., N, K]."""
    return w.stride()[-2:] != base.stride()[-2:] and w.mT.stride()[-2:] == base.stride()[-2:]


def _even_offsets(groups: int, size: int, like: Tensor) -> Tensor:
    return torch.arange(groups + 1, dtype=torch.int32, device=like.device) * size


def as_rows(y: Tensor) -> Tensor:
    """[..., N] as [T, N]."""
    return y.reshape(-1, y.shape[-1])


def _turned_rows(y: Tensor) -> Tensor:
    return y.mT.reshape(-1, y.shape[-2])


def _group_rows(y: Tensor) -> Tensor:
    """[..., G, T, N] as [G T, N]."""
    return y.movedim(-3, 0).reshape(-1, y.shape[-1])


def _turned_groups(y: Tensor) -> Tensor:
    """[..., G, N, T] as [G T, N]."""
    return y.movedim(-3, 0).mT.reshape(-1, y.shape[-2])


def _without_bias(
    find: Find, input: Tensor, batch1: Tensor, batch2: Tensor, **scales: float
) -> Product | None:
    if scales.get("alpha", 1) != 1 and (find(batch1) or find(batch2)):
        raise NotRead(f"baddbmm with alpha {scales['alpha']}")
    return _matmul(find, batch1, batch2, exact=False)


def _inner(find: Find, input: Tensor, other: Tensor) -> Product | None:
    return _matmul(find, input, other.mT) if other.dim() == 2 else None


READERS: dict[Any, Reader] = {
    F.linear: _linear,
    torch.einsum: _einsum,
    torch.inner: _inner,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.Tensor.addmm_: _addmm_in_place,
    torch.baddbmm: _without_bias,
    torch.Tensor.baddbmm: _without_bias,
    **dict.fromkeys(
        (
            torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm,
            torch.bmm, torch.Tensor.bmm, torch.mv, torch.Tensor.mv,
        ),
        _matmul,
    ),
}  # fmt: skip
"""What multiplies, by the function that a mode is told."""
if hasattr(torch, "_grouped_mm"):
    READERS[torch._grouped_mm] = _grouped
OPERATORS: dict[str, Reader] = {"transformers::grouped_mm_fallback": _grouped}
"""The same by name, for operators that somebody else registers."""
