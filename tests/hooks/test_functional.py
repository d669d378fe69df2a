"""Products that a module computes by functions: x, w and dy of each, once per use, and gradients as without a guard."""

# Shapes: B sequences, S positions, T tokens, N output features, K input features, E experts.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_safeguard.hooks import Guard, scoped
from fp8_safeguard.monitor.stats import TensorStats, measure
from fp8_safeguard.monitor.wire import columns_for

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
WIDTH = 16
EXPERTS = 4


class Case(nn.Module):
    """Keeps, where asked to, what its own forward hands to each product and the outputs, whose gradients stay."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[str, int | None, Tensor, Tensor, Callable[[Tensor], Tensor]]] | None = None

    def note(
        self,
        layer: str,
        x: Tensor,
        y: Tensor,
        expert: int | None = None,
        part: Callable[[Tensor], Tensor] = lambda dy: dy,
    ) -> Tensor:
        """x [..., K] was multiplied; its dy [..., N] is that part of the gradient of y."""
        if self.uses is not None:
            y.retain_grad()
            self.uses.append((layer, expert, x.detach().clone(), y, part))
        return y

    def weight(self, name: str) -> Tensor:
        """[N, K] or [E, N, K], however it is stored."""
        weight = self.get_parameter(name).detach()
        return weight.mT if name.endswith("_KN") else weight


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


class FusedQKV(Case):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias, self.out = matrix(3 * WIDTH, WIDTH), matrix(3 * WIDTH), matrix(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.note("qkv", x, F.linear(x, self.qkv, self.bias))
        q, k, v = y.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.note("out", mixed, mixed @ self.out.t())


class ByOperators(Case):
    """One weight for each way to write a product."""

    def __init__(self) -> None:
        super().__init__()
        names = ("at_KN", "t", "T", "mT", "mm_KN", "method_KN", "inner", "mv", "left")
        for name in names:
            self.register_parameter(name, matrix(WIDTH, WIDTH))
        self.addmm_KN, self.fancy_KN, self.b = matrix(WIDTH, 8), matrix(WIDTH, 8), matrix(8)
        self.bmm_KN, self.badd_KN = matrix(WIDTH, WIDTH), matrix(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        parts = [
            self.note("at_KN", x, x @ self.at_KN),
            self.note("t", x, x @ self.t.t()),
            self.note("T", flat, torch.matmul(flat, self.T.T)),
            self.note("mT", x, x.matmul(self.mT.mT)),
            self.note("mm_KN", flat, torch.mm(flat, self.mm_KN)),
            self.note("method_KN", flat, flat.mm(self.method_KN)),
            self.note("inner", x, torch.inner(x, self.inner)),
            self.note("mv", flat[:1], torch.mv(self.mv, flat[0])),
            self.note("addmm_KN", flat, torch.addmm(self.b, flat, self.addmm_KN)),
            self.note("fancy_KN", flat, torch.addmm(flat[:, :8], flat, self.fancy_KN, beta=0.5)),
            self.note("bmm_KN", x, torch.bmm(x, self.bmm_KN.expand(x.shape[0], -1, -1))),
            self.note("badd_KN", x, torch.baddbmm(x, x, self.badd_KN.unsqueeze(0).expand(len(x), -1, -1))),
        ]
        parts.append(self.note("left", x, self.left @ x.mT, part=lambda dy: dy.mT))
        return sum(part.square().sum() for part in parts)


class Einsums(Case):
    def __init__(self) -> None:
        super().__init__()
        self.plain_KN, self.dots, self.implicit_KN = matrix(WIDTH, 8), matrix(8, WIDTH), matrix(WIDTH, 8)
        self.split = matrix(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            self.note("plain_KN", x, torch.einsum("bsd,dn->bsn", x, self.plain_KN)),
            self.note("dots", x, torch.einsum("...d,nd->...n", x, self.dots)),
            self.note(
                "implicit_KN", x.flatten(0, 1), torch.einsum("ij,jk", x.flatten(0, 1), self.implicit_KN)
            ),
            self.note("split", x, torch.einsum("nd, bsd -> bsn", [self.split, x])),
        ]
        return sum(part.square().sum() for part in parts)


class Casts(Case):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.turned, self.low = matrix(8, WIDTH), matrix(8, WIDTH), matrix(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        low, wide = x.bfloat16(), x.double()
        parts = [
            self.note("router", wide, F.linear(wide, self.router.double())),
            self.note("turned", wide, wide @ self.turned.t().to(torch.float64)),
            self.note("low", low, F.linear(low, self.low.to(torch.bfloat16))),
        ]
        return sum(part.double().square().sum() for part in parts)

    def weight(self, name: str) -> Tensor:
        weight = super().weight(name)
        return weight.bfloat16() if name == "low" else weight


def rows_of(x_TK: Tensor) -> list[Tensor]:
    """Rows of each expert; the third gets none."""
    total = len(x_TK)
    choice = torch.tensor([0, 1, 3, 3, 0])[torch.arange(total) % 5]
    return [torch.nonzero(choice == expert).flatten() for expert in range(EXPERTS)]


class OneStorage(Case):
    """Parameters in one flat memory, as sharding keeps them: the place in it tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * 8 * WIDTH) / 4
        self.first = nn.Parameter(flat[: 8 * WIDTH].view(8, WIDTH))
        self.second = nn.Parameter(flat[8 * WIDTH :].view(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.linear(x, self.first), F.linear(x.sin(), self.second)
        return (self.note("first", x, first) * self.note("second", x.sin(), second)).sum()


class EagerExperts(Case):
    """An expert's slice at a time, in both orientations; with a router, and a cast of one slice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down_KN = matrix(EXPERTS, 2 * 8, WIDTH), matrix(EXPERTS, 8, WIDTH)
        self.router, self.cast = matrix(EXPERTS, WIDTH), matrix(EXPERTS, 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x_TK = x.reshape(-1, WIDTH)
        share_TE = torch.softmax(self.note("router", x_TK, F.linear(x_TK, self.router)), -1)
        out_TK = torch.zeros_like(x_TK)
        loss = x_TK.new_zeros(())
        for expert, rows in enumerate(rows_of(x_TK)):
            if not len(rows):
                continue
            mine = x_TK[rows]
            gate, up = self.note("up", mine, F.linear(mine, self.up[expert]), expert).chunk(2, dim=-1)
            inner = F.silu(gate) * up
            y = self.note("down_KN", inner, inner @ self.down_KN[expert], expert)
            out_TK = out_TK.index_add(0, rows, y * share_TE[rows, expert, None])
            wide = mine.double()
            loss = (
                loss
                + self.note("cast", wide, F.linear(wide, self.cast[expert].double()), expert).sum().float()
            )
        return out_TK.square().sum() + loss


class GroupedExperts(Case):
    """torch's grouped product, in both orientations; the last rows belong to no expert; some experts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down_KN = matrix(EXPERTS, 8, WIDTH), matrix(EXPERTS, 8, WIDTH)
        self.part = matrix(EXPERTS, 8, WIDTH)

    def each(self, layer: str, x_TK: Tensor, y_TN: Tensor, ends: list[int], first: int = 0) -> Tensor:
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False), first):
            self.note(layer, x_TK[start:end], y_TN, expert, lambda dy, a=start, b=end: dy[a:b])
        return y_TN

    def forward(self, x: Tensor) -> Tensor:
        x_TK = x.reshape(-1, WIDTH)
        spans = rows_of(x_TK[:-2])
        x_TK = torch.cat([x_TK[torch.cat(spans)], x_TK[-2:]])
        ends = [int(n) for n in torch.tensor([len(span) for span in spans]).cumsum(0)]
        offs = torch.tensor(ends, dtype=torch.int32)
        y_TN = self.each("up", x_TK, F.grouped_mm(x_TK, self.up.transpose(-2, -1), offs=offs), ends)
        inner = F.silu(y_TN[: ends[-1]])
        y_TK = self.each("down_KN", inner, F.grouped_mm(inner, self.down_KN, offs=offs), ends)
        few = x_TK[: ends[1]]
        y = self.each("part", few, F.grouped_mm(few, self.part[1:3].mT, offs=offs[:2]), ends[:2], first=1)
        return y_TK.square().sum() + y.square().sum()


class BatchedExperts(Case):
    """As many tokens for each expert; then every token for each, as attention heads have it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down_KN, self.einsum_KN = (matrix(EXPERTS, WIDTH, WIDTH) for _ in range(3))
        self.all_KN, self.heads_KN = matrix(EXPERTS, WIDTH, 8), matrix(EXPERTS, WIDTH, 8)
        self.join_KN = matrix(EXPERTS, 8, WIDTH)

    def each(self, layer: str, x: Callable[[int], Tensor], y: Tensor, part: Callable[..., Tensor]) -> Tensor:
        for expert in range(EXPERTS):
            self.note(layer, x(expert), y, expert, lambda dy, e=expert: part(dy, e))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x_ETK = x.reshape(EXPERTS, -1, WIDTH)
        h = self.each("up", x_ETK.__getitem__, torch.bmm(x_ETK, self.up.mT), Tensor.__getitem__)
        h2 = self.each("down_KN", h.__getitem__, torch.matmul(h, self.down_KN), Tensor.__getitem__)
        equation = "ecd,edf->ecf"
        h3 = self.each(
            "einsum_KN", h2.__getitem__, torch.einsum(equation, h2, self.einsum_KN), Tensor.__getitem__
        )
        every = self.each("all_KN", lambda e: x[0], x[0] @ self.all_KN, Tensor.__getitem__)
        z = torch.einsum("bsd,hdk->bshk", x, self.heads_KN)
        z = self.each("heads_KN", lambda e: x, z, lambda dy, e: dy[:, :, e])
        y = torch.einsum("bshk,hkd->bsd", z, self.join_KN)
        y = self.each("join_KN", lambda e: z[:, :, e], y, lambda dy, e: dy)
        return sum(part.square().sum() for part in (h3, every, y))


CASES = [FusedQKV, ByOperators, Einsums, Casts, OneStorage, EagerExperts, GroupedExperts, BatchedExperts]


def array(x: Tensor) -> Any:
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.to(torch.float32).numpy()


def drive(case: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD(case.parameters(), 1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        case(inputs()).sum().backward()
        optimizer.step()


def inputs() -> Tensor:
    return torch.randn(EXPERTS, 5, WIDTH, requires_grad=True)


def caught(build: Callable[[], Case], drive: Callable[[Case], None]) -> Case:
    """The same training without a guard, by a forward that keeps what it multiplies."""
    torch.manual_seed(0)
    case = build()
    case.uses = []
    torch.manual_seed(1)
    drive(case)
    return case


def wanted(case: Case, before: dict[str, Tensor]) -> Iterator[tuple[str, int | None, TensorStats]]:
    """Label and TensorStats of every operand, whole and by expert."""
    parts: dict[tuple[str, int | None], list[TensorStats]] = defaultdict(list)
    assert case.uses is not None
    for layer, expert, x, y, part in case.uses:
        dy = part(y.grad)
        for operand, value in (("x", x.reshape(-1, x.shape[-1])), ("dy", dy.reshape(-1, dy.shape[-1]))):
            for layout in ("row", "col"):
                stats = measure(array(value), layout=layout)
                parts[f"{layer} {operand} {layout}", None].append(stats)
                if expert is not None:
                    parts[f"{layer} {operand} {layout}", expert].append(stats)
    for layer, w in before.items():
        for expert, w_NK in enumerate(w if w.dim() == 3 else [w]):
            stats = measure(array(w_NK), layout="tile")
            parts[f"{layer} w tile", None].append(stats)
            if w.dim() == 3:
                parts[f"{layer} w tile", expert].append(stats)
    for (label, expert), listed in parts.items():
        yield label, expert, TensorStats.merge(listed)


@pytest.mark.parametrize("build", CASES)
def test_every_use_is_observed_once_and_training_is_bit_equal(
    both: Both, read: Read, build: type[Case]
) -> None:
    guard = both(build, drive, recompute=100, shadow=True)
    got = read(guard)
    assert not [trouble for trouble in guard._session.once.counts if "Error" in trouble]
    torch.manual_seed(0)
    fresh = build()
    names = [name for name, p in fresh.named_parameters() if p.dim() > 1]
    expected = list(wanted(caught(build, drive), {name: fresh.weight(name) for name in names}))
    worst = {
        (f"{slot.layer} {slot.operand} {slot.layout}", slot.expert): index
        for index, slot in enumerate(got.sample.slots)
        if slot.gemm is None and slot.variant is None
    }
    compared = 0
    for label, expert, stats in expected:
        if (label, expert) in worst:
            actual = columns_for(got.sample, worst[label, expert])
            np.testing.assert_allclose(actual.to_vector(), stats.to_vector(), rtol=SUM_TOLERANCE, atol=0)
            compared += 1
    assert compared == len(worst)
    model = guard._session.model()
    assert model is not None
    for name in names:
        assert got.parts(name) >= {"x row", "x col", "w tile", "dy row", "dy col", "dgrad", "wgrad"}
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        # Of these few rows none is left out: dy^T x of the operands as they were paired is the weight's gradient.
        square = float(gradient.double().square().sum())
        assert got[f"{name} wgrad"].sum_sq == pytest.approx(square, rel=0.02 if name == "low" else 1e-5)
        if f"{name} fprop" in got.stats:
            error = got[f"{name} fprop"].relative_error
            assert error < (0.005 if name == "low" else 1e-6), name
    compared = {name for name in names if f"{name} fprop" in got.stats}
    more = {"fancy_KN", "badd_KN", "join_KN"}  # more is in their outputs than the product
    assert compared == set(names) - more


class Reads(TorchDispatchMode):
    """Counts how often a number leaves its tensor, or a tensor its device: on a GPU each of them waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", CASES)
def test_to_recognise_a_product_reads_no_number(
    watch: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch, build: type[Case]
) -> None:
    observed: list[Any] = []
    monkeypatch.setattr(scoped, "guarded", lambda *seen: observed.append(seen))
    counts = []
    for monitored in (False, True):
        case = build()
        if monitored:
            watch(case)
        with Reads() as reads:
            case(inputs())
        counts.append(reads.count)
    assert observed
    assert counts[0] == counts[1]


def test_an_expert_without_a_token_has_no_trace_of_an_earlier_step(both: Both, read: Read) -> None:
    """Frames take turns: what an expert left in one must not come back when another is the only one in use."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.turn = matrix(EXPERTS, 8, WIDTH), 0

        def forward(self, x: Tensor) -> Tensor:
            used = (0, 1, 2, 3) if self.turn < 4 else (2,)
            self.turn += 1
            return torch.stack([F.linear(x, self.w[expert]) for expert in used]).sum()

    got = read(both(Turns, lambda model: drive(model, 6), recompute=1))
    rows = EXPERTS * 5
    assert got.sample.step == 5
    sample = got.sample
    counts = {
        (slot.operand, slot.layout, slot.expert): columns_for(sample, at).count
        for at, slot in enumerate(sample.slots)
        if slot.gemm is None
    }
    for layout in ("row", "col"):
        assert counts["x", layout, None] == counts["x", layout, 2] == rows * WIDTH
        assert counts["dy", layout, None] == counts["dy", layout, 2] == rows * 8
    assert counts["w", "tile", None] == EXPERTS * 8 * WIDTH
