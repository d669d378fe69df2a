"""Ordinary models of every shape: x, w and dy of each use equal what torch itself computed with, once."""

# Shapes: T tokens, N output features, K input features.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.monitor.stats import TensorStats, measure

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
WIDTH = 8


class Model(nn.Module):
    """Two layers and a vector that learns; how they are called is the case's."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], frozen: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.square, self.prompt = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.call = call
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def plain(m: Model, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)))


def by_keyword(m: Model, x: Tensor) -> Tensor:
    return m.b(input=torch.tanh(m.a(input=x)))


def unbound(m: Model, x: Tensor) -> Tensor:
    """The output in parts that are views of it, as of a projection to q, k and v; one part is not used."""
    q, k, _ = m.a(x).unflatten(-1, (3, WIDTH)).unbind(-2)
    return m.square((q * k)[::2])


def of_views(m: Model, x: Tensor) -> Tensor:
    """Inputs that are transposed, strided and expanded."""
    return (
        m.square(x.transpose(0, 1)).sum(0)
        + m.square(x[:, ::2]).sum(1)[:1]
        + m.square(x[:1, :1].expand(2, 3, -1))[0, 0]
    )


def twice(m: Model, x: Tensor) -> Tensor:
    return m.b(m.a(m.square(torch.tanh(m.square(x)))))


def side_by_side(m: Model, x: Tensor) -> Tensor:
    return m.square(x) * m.square(x.cos()) + m.square(x)


def unused(m: Model, x: Tensor) -> Tensor:
    m.a(x)
    return m.square(x)


def partly_unused(m: Model, x: Tensor) -> Tensor:
    m.square(x.cos())
    return m.square(x)


def prompted(m: Model, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x + m.prompt)))


def under_autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.b(F.gelu(m.a(x))).float()


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Model(plain),
    "inputs by name": lambda: Model(by_keyword),
    "output in views": lambda: Model(unbound),
    "inputs that are views": lambda: Model(of_views),
    "a layer on its own output": lambda: Model(twice),
    "a layer three times side by side": lambda: Model(side_by_side),
    "an output that is not used": lambda: Model(unused),
    "one of two outputs is not used": lambda: Model(partly_unused),
    "first layer frozen": lambda: Model(plain, ("a",)),
    "last layer frozen": lambda: Model(plain, ("b",)),
    "all layers frozen, the input learns": lambda: Model(prompted, ("a", "b", "square")),
    "bfloat16 autocast": lambda: Model(under_autocast),
    "bfloat16 weights": lambda: Model(plain).bfloat16(),
}  # fmt: skip


def drive(model: nn.Module) -> None:
    """One step of two micro-batches."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        model(torch.randn(5, 4, WIDTH).to(dtype)).square().sum().backward()
    optimizer.step()


class Use:
    """x, w and dy of one product as torch is given them: autocast has casts of x and w behind that."""

    def __init__(self, x: Tensor, w: Tensor, y: Tensor) -> None:
        self.x_TK, self.w_NK = x.detach().reshape(-1, x.shape[-1]).clone(), w.detach().clone()
        self.dy: list[Tensor] = []
        self.learns = w.requires_grad
        if y.requires_grad:
            y.register_hook(lambda dy: self.dy.append(dy.detach().reshape(-1, dy.shape[-1]).clone()))


def through_linear(build: Callable[[], nn.Module], patch: pytest.MonkeyPatch) -> dict[str, list[Use]]:
    """Every F.linear of the same training without a guard, by the layer whose weight it is."""
    torch.manual_seed(0)
    model = build()
    owners = {p.data_ptr(): name.removesuffix(".weight") for name, p in model.named_parameters()}
    uses: dict[str, list[Use]] = defaultdict(list)
    real = F.linear

    def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        y = real(x, w, bias)
        uses[owners[w.data_ptr()]].append(Use(x, w, y))
        return y

    torch.manual_seed(1)
    with patch.context() as context:
        context.setattr(F, "linear", linear)
        drive(model)
    return uses


def merged(parts: list[Tensor], layout: str) -> TensorStats:
    arrays = [
        p.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if p.dtype == torch.bfloat16 else p.numpy()
        for p in parts
    ]
    return TensorStats.merge(measure(array, layout=layout) for array in arrays)


def wanted(listed: list[Use]) -> dict[str, TensorStats]:
    """What is to be reported of one layer's operands: w once a step, each x and dy once a use."""
    stats = {"x row": merged([use.x_TK for use in listed], "row"), "w tile": merged([listed[0].w_NK], "tile")}
    dy = [dy for use in listed for dy in use.dy]
    if dy:
        stats["dy row"] = merged(dy, "row")
    if listed[0].learns:
        stats["x col"] = merged([use.x_TK for use in listed], "col")
    if dy and listed[0].learns:
        stats["dy col"] = merged(dy, "col")
    return stats


@pytest.mark.parametrize("case", CASES)
def test_operands_are_those_that_torch_multiplied_and_training_is_bit_equal(
    both: Both, read: Read, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    got = read(both(CASES[case], drive))
    uses = through_linear(CASES[case], monkeypatch)
    assert uses
    for layer in ("a", "b", "square"):
        # Of a layer that nothing calls the weight alone is there to be told of.
        expected = wanted(uses[layer]) if layer in uses else {"w tile": got[f"{layer} w tile"]}
        assert got.parts(layer) - {"fprop", "dgrad", "wgrad"} == expected.keys()
        for part, stats in expected.items():
            actual = got[f"{layer} {part}"].to_vector()
            np.testing.assert_allclose(
                actual, stats.to_vector(), rtol=SUM_TOLERANCE, atol=0, err_msg=f"{layer} {part}"
            )
