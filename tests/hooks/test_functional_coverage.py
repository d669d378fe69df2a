"""What coverage says of the matrices that a module multiplies by functions, or does something else with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]
Watch = Callable[..., Guard]

WIDTH = 8


class Nested(nn.Module):
    """A product with a parameter of its own, and a child that has one."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.raw = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.raw(x), self.w) if isinstance(self.raw, nn.Identity) else self.raw(x) @ self.w


def drive(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        for _ in range(2):
            model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


class Odd(nn.Module):
    """Weights used in ways that no product is recognised in; one row of coverage each."""

    def __init__(self) -> None:
        super().__init__()
        names = ("left", "right", "alpha", "scaled", "pair", "sum")
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.gathered = nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.as_one = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.deep = nn.Parameter(torch.randn(2, 2, WIDTH, WIDTH))
        self.row = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.idle = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.layers = nn.LayerNorm((4, WIDTH))
        self.image = nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, torch.cat([self.left, self.right]))
        y = y + torch.addmm(x.new_zeros(2 * WIDTH), x, torch.cat([self.alpha] * 2, 1))
        y = torch.addmm(y[:, :WIDTH], x, self.alpha, alpha=0.5)
        z = torch.bmm(self.gathered[torch.tensor([0, 2, 2, 1])], x.unsqueeze(-1)).squeeze(-1)
        y = y + z + F.linear(x, self.scaled * 2) + torch.einsum("td,df,fg->tg", x, self.pair, x.t() @ x)
        y = y + (x @ self.as_one.view(-1, WIDTH).t()).chunk(2, -1)[0] + self.sum.sum() + self.deep.sum()
        y = self.recurrent(y.unsqueeze(0) + self.row)[0][0]
        return self.image(self.layers(y.unsqueeze(0)))[0]


def test_what_is_not_recognised_is_named_with_the_way_it_went(both: Both, read: Read) -> None:
    guard = both(Odd, lambda model: drive(model, 2))
    rows = {row["name"]: row for row in guard.coverage()}
    assert set(rows) == {name for name, p in Odd().named_parameters() if p.dim() > 1}
    reasons = {
        "left": "used by cat", "right": "used by cat", "alpha": "addmm with alpha 0.5", "scaled": "used by mul",
        "pair": "einsum 'td,df,fg->tg'", "gathered": "used by indexing", "as_one": "its experts multiplied as one",
        "sum": "used by sum", "deep": "4 dimensions", "row": "vectors, no matrices", "idle": "raw parameter of Odd",
        "recurrent.weight_ih_l0": "GRU", "layers.weight": "LayerNorm", "image.weight": "convolution",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert rows[name]["status"] == "not observed", name
        assert reason in rows[name]["reason"], rows[name]


def test_parameters_of_containers_are_seen_in_the_forward_around_them(both: Both, read: Read) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict(
                {"held": nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])}
            )
            self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.inner["held"]
            return F.linear(F.linear(F.linear(x, first), second), self.named["a"])

    got = read(both(Listed, lambda model: drive(model, 1)))
    for layer in ("inner.held.0", "inner.held.1", "named.a"):
        assert got[f"{layer} x row"].count == got[f"{layer} dy row"].count == 2 * 4 * WIDTH


def test_a_filter_leaves_a_modules_own_matrices_out(watch: Watch, read: Read) -> None:
    model = Nested()
    guard = watch(model, filter=lambda module, name: name != "raw")
    drive(model, 1)
    assert read(guard).parts("raw.w") == set()
    rows = {row["name"]: row for row in guard.coverage()}
    assert (rows["raw.w"]["status"], rows["raw.w"]["reason"]) == ("not observed", "excluded by filter")
    assert rows["w"]["status"] == "adapted"


def test_rows_of_coverage_before_and_after_the_first_sample(watch: Watch) -> None:
    model = Nested()
    guard = watch(model)
    before = {row["name"]: row for row in guard.coverage()}
    assert before["w"]["status"] == before["raw.w"]["status"] == "not observed"
    assert "no product with it was seen yet" in before["w"]["reason"]
    drive(model, 1)
    guard.last_sample()
    after = {row["name"]: row for row in guard.coverage()}
    assert after["raw.w"]["status"] == "observed"
    assert after["raw.w"]["reason"] == "seen by function; dgrad and wgrad emulated"
    assert "weight stored as [in, out]" in after["w"]["reason"]
