"""Permutation and combination against plain indexing."""

from __future__ import annotations

import pytest
import torch

from fp8_safeguard.kernels import OperandError, quantize, tensor_stats
from fp8_safeguard.kernels.moe import RoutingMap, Wanted, combine, permute, permute_quantize, routing_map
from fp8_safeguard.monitor.stats import COLUMNS


@pytest.fixture(params=[1, 16], ids=["bare", "aligned"])
def route(request: pytest.FixtureRequest) -> RoutingMap:
    """Nine tokens, three experts of which one has none, and copies that go nowhere."""
    ids = [[0, 2], [2, -1], [0, 2], [2, 0], [2, -1], [0, 2], [-1, -1], [2, 0], [0, -1]]
    return routing_map(torch.tensor(ids), 3, alignment=request.param)


def test_rows_are_copies_of_their_tokens_and_padding_is_zero(route: RoutingMap) -> None:
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    # Clamped to a row, the padding's -1 would copy the first token's.
    x[0] = torch.nan
    rows = permute(x, route)
    assert rows.dtype == torch.bfloat16
    for row, token in zip(rows, route.source_R.tolist(), strict=True):
        assert torch.equal(row.isnan(), x[token].isnan() if token >= 0 else torch.zeros(5, dtype=torch.bool))
        assert torch.equal(
            row.nan_to_num(), x[token].nan_to_num() if token >= 0 else torch.zeros(5).bfloat16()
        )


def test_combining_sums_each_tokens_copies_in_slot_order(route: RoutingMap) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(route.rows, 5, generator=generator).bfloat16()
    weight = torch.rand(9, 2, generator=generator)
    bare, weighted = combine(rows, route), combine(rows, route, weight)
    for token, places in enumerate(route.position_Tk.tolist()):
        sums = torch.zeros(2, 5)
        for slot, place in enumerate(places):
            if place >= 0:
                sums += torch.stack([rows[place].float(), rows[place].float() * weight[token, slot]])
        assert torch.equal(bare[token], sums[0].bfloat16())
        assert torch.equal(weighted[token], sums[1].bfloat16())


def test_gradients_of_permute_and_combine(route: RoutingMap) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randn(route.rows, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(9, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, route), (x,))
    assert torch.autograd.gradcheck(lambda y: combine(y, route), (y,))
    assert torch.autograd.gradcheck(lambda y, weight: combine(y, route, weight), (y, weight))


def test_the_permutation_is_lossless(route: RoutingMap) -> None:
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(3))
    copies = (route.position_Tk >= 0).sum(dim=1, keepdim=True)
    assert torch.equal(combine(permute(x, route), route), x * copies)


@pytest.mark.parametrize("options", [{}, {"fmt": "e5m2", "scale": "pow2", "multiplier": 0.5}])
def test_quantised_rows_equal_the_unfused_chain(route: RoutingMap, options: dict[str, object]) -> None:
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(4)).bfloat16()
    wanted = Wanted(values=False, row=True, blocks="col", stats=True, **options)  # type: ignore[arg-type]
    produced = permute_quantize(x, route, wanted)
    assert produced.values is None
    assert produced.row is not None
    assert produced.block is not None
    assert produced.stats is not None
    rows, end = permute(x, route), int(route.offsets[-1])
    expected = {
        "row": quantize(rows, **options),  # type: ignore[call-overload]
        "col": quantize(rows[:end], layout="col", offsets=route.offsets, **options),  # type: ignore[call-overload]
    }
    for got in (produced.row, produced.block):
        assert torch.equal(got.dequantize()[:end], expected[got.layout].dequantize()[:end])
        assert not got.data[end:].view(torch.uint8).any()
    # Padding left out, an expert's statistics are those of its own rows.
    for expert, (start, count) in enumerate(
        zip(route.offsets.tolist(), route.counts_E.tolist(), strict=False)
    ):
        own = rows[start : start + count]
        for slot, layout in enumerate(("row", "col")):
            expected_S = tensor_stats(own, layout=layout, **options)  # type: ignore[arg-type]
            assert torch.allclose(produced.stats[slot, expert], expected_S, rtol=1e-12, atol=0)
            assert produced.stats[slot, expert, COLUMNS.index("count")] == count * 200


def test_what_does_not_fit_the_map_is_refused(route: RoutingMap) -> None:
    with pytest.raises(OperandError, match="9 tokens"):
        permute(torch.zeros(8, 3), route)
    with pytest.raises(OperandError, match=f"{route.rows} rows"):
        combine(torch.zeros(route.rows + 1, 3), route)
    with pytest.raises(OperandError, match=r"\[9, 2\] copies"):
        combine(torch.zeros(route.rows, 3), route, torch.zeros(9, 3))
