"""Routing maps against a sort in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_safeguard.kernels import OperandError, quantize
from fp8_safeguard.kernels.moe import RoutingMap, Wanted, permute, permute_quantize, routing_map, spread
from fp8_safeguard.kernels.operands import offsets_list
from fp8_safeguard.monitor.stats import COLUMNS


def brute_force(
    ids: list[list[int]], experts: int, alignment: int
) -> tuple[list[int], dict[tuple[int, int], int], list[int]]:
    """(source of each used row, row of each copy, offsets), expert by expert, copy by copy."""
    source: list[int] = []
    place: dict[tuple[int, int], int] = {}
    offsets = [0]
    for expert in range(experts):
        for token, row in enumerate(ids):
            for slot, chosen in enumerate(row):
                if chosen == expert:
                    place[token, slot] = len(source)
                    source.append(token)
        while len(source) % alignment:
            source.append(-1)
        offsets.append(len(source))
    return source, place, offsets


def check(made: RoutingMap, ids: list[list[int]], experts: int, alignment: int) -> None:
    source, place, offsets = brute_force(ids, experts, alignment)
    copies = sum(map(len, ids))
    capacity = copies if alignment == 1 else -(-copies // alignment) * alignment + experts * alignment
    assert made.source_R.tolist() == source + [-1] * (capacity - len(source))
    assert made.offsets.tolist() == offsets
    flat = [chosen for row in ids for chosen in row]
    assert made.counts_E.tolist() == [flat.count(expert) for expert in range(experts)]
    expected = [[place.get((token, slot), -1) for slot in range(len(row))] for token, row in enumerate(ids)]
    assert made.position_Tk.tolist() == expected
    assert (made.rows, made.experts, made.alignment) == (capacity, experts, alignment)
    dtypes = {made.source_R.dtype, made.position_Tk.dtype, made.offsets.dtype, made.counts_E.dtype}
    assert dtypes == {torch.int32}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_maps_are_the_sort_by_expert_token_and_slot(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, 3))
    alignment = data.draw(st.sampled_from([1, 4, 16]))
    ids = data.draw(
        st.lists(
            st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k), min_size=1, max_size=25
        )
    )
    for dtype in (torch.int32, torch.int64):
        check(
            routing_map(torch.tensor(ids, dtype=dtype), experts, alignment=alignment), ids, experts, alignment
        )


def test_b41_counts_are_assignments_and_never_the_aligned_sizes() -> None:
    made = routing_map(torch.tensor([[0, 2], [2, -1], [0, 2], [2, 0], [2, -1]]), 3, alignment=4)
    assert made.counts_E.tolist() == [3, 0, 5]
    assert int(made.counts_E.sum()) == 8
    assert made.offsets.diff().tolist() == [4, 0, 8]


@pytest.mark.parametrize("unit", [16, 32, 128])
def test_b37_every_expert_is_aligned_by_itself(unit: int) -> None:
    sizes = [0, 1, 31, 32, 33, 4092]
    ids = torch.arange(6).repeat_interleave(torch.tensor(sizes)).view(-1, 1)
    made = routing_map(ids, 6, alignment=unit)
    aligned = made.offsets.diff().tolist()
    assert aligned == [-(-size // unit) * unit for size in sizes]
    assert aligned == {16: [0, 16, 32, 32, 48, 4096], 32: [0, 32, 32, 32, 64, 4096]}.get(
        unit, [0, *[128] * 4, 4096]
    )
    assert made.rows % unit == 0
    x = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(permute(x, made)[made.position_Tk[:, 0]], x)


def test_b37_alignment_after_the_split_holds_on_every_shard() -> None:
    # 31,936 rows over four ranks: a quarter is 7,984, no multiple of 32, though the total is one.
    ids = torch.zeros(31_936, 1, dtype=torch.int32)
    shards = [routing_map(part, 1, alignment=32).offsets[-1].item() for part in ids.chunk(4)]
    assert shards == [8000] * 4


def test_b42_rows_behind_the_last_expert_are_zero_whatever_was_in_memory() -> None:
    made = routing_map(torch.tensor([[0], [0], [0], [0], [0]]), 1, alignment=16)
    x = torch.full((5, 128), 2.0)
    x[1:, 1:] = 0.5
    produced = permute_quantize(x, made, Wanted(row=True, blocks="col", stats=True))
    assert produced.values is not None
    assert produced.row is not None
    assert produced.stats is not None
    assert not produced.values[5:].any()
    alone = quantize(x)
    assert torch.equal(produced.row.data[:5].view(torch.uint8), alone.data.view(torch.uint8))
    assert torch.equal(produced.row.scale[:5], alone.scale)
    for slot in range(2):
        measured = dict(zip(COLUMNS, produced.stats[slot, 0].tolist(), strict=False))
        assert (measured["count"], measured["amax"], measured["rows"]) == (5 * 128, 2.0, 5)
        assert measured["saturated"] == measured["nan"] == measured["inf"] == measured["zeros"] == 0


def test_spread_puts_each_weight_on_its_row_and_zero_elsewhere() -> None:
    made = routing_map(torch.tensor([[1, 0], [-1, 1], [0, -1]]), 2, alignment=4)
    weight = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=torch.float64, requires_grad=True)
    rows = spread(weight, made)
    assert rows.tolist() == [0.2, 0.5, 0, 0, 0.1, 0.4, *[0.0] * (made.rows - 6)]
    (gradient,) = torch.autograd.grad(rows, weight, torch.arange(1.0, made.rows + 1, dtype=torch.float64))
    assert gradient.tolist() == [[5, 1], [0, 6], [2, 0]]


@pytest.mark.parametrize(
    ("ids", "experts", "alignment", "said"),
    [
        (torch.tensor([[0, 4]]), 4, 16, "id 4"),
        (torch.tensor([0, 1]), 4, 16, r"\[tokens, experts of a token\]"),
        (torch.tensor([[0.0]]), 4, 16, "float32"),
        (torch.tensor([[0]]), 0, 16, "experts=0"),
        (torch.tensor([[0]]), 1, 0, "alignment=0"),
    ],
)
def test_what_is_no_routing_is_refused_with_the_value(
    ids: torch.Tensor, experts: int, alignment: int, said: str
) -> None:
    with pytest.raises(OperandError, match=said):
        routing_map(ids, experts, alignment=alignment)


def test_statistics_of_no_layout_are_refused() -> None:
    with pytest.raises(OperandError, match="row=True"):
        Wanted(stats=True)


@pytest.mark.parametrize("sizes", [[64, 64, 64, 64], [192, 192], [384, 64, 64]])
def test_b36_shards_smaller_than_a_block_share_no_scale(sizes: list[int]) -> None:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).view(-1, 1)
    made = routing_map(ids, len(sizes))
    x = torch.randn(len(ids), 8, generator=torch.Generator().manual_seed(1))
    # Each shard's magnitudes are its own: a scale shared with a neighbour would show.
    x *= 4.0**ids
    produced = permute_quantize(x, made, Wanted(blocks="col"))
    assert produced.block is not None
    bounds = offsets_list(made.offsets, made.rows)
    first = 0
    for start, end, shard in zip(bounds[:-1], bounds[1:], x.split(sizes), strict=True):
        alone = quantize(shard, layout="col")
        blocks = alone.scale.shape[0]
        assert torch.equal(produced.block.scale[first : first + blocks], alone.scale)
        got = produced.block.data[start : start + len(shard)]
        assert torch.equal(got.view(torch.uint8), alone.data.view(torch.uint8))
        assert end - start == len(shard)
        first += blocks
