"""Fused kernels of expert rows: activation, permutation, combination."""

from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import OperandError
from fp8_safeguard.kernels.moe import RoutingMap, Wanted, eager, triton_ops
from fp8_safeguard.monitor.stats import COLUMNS

from .moe_checks import BOTH, HIDDEN, assert_quantised, assert_rounded, same_bits

OFFSETS = torch.tensor([0, 48, 48, 176], dtype=torch.int32)
"""An empty expert, one of more than a block, and 24 rows behind the last one."""
ROWS = 200
FEW = torch.tensor([0, 16, 16, 48], dtype=torch.int32)
"""The same in little, for 56 rows."""
DTYPES = [torch.bfloat16, torch.float32]


def activation(
    dtype: torch.dtype, width: int, generator: torch.Generator, rows: int = ROWS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate_up, dh and probability."""
    gate_up = (2 * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
    dh = torch.randn(rows, width, generator=generator).to(dtype)
    return gate_up, dh, torch.rand(rows, generator=generator)


def some_map(generator: torch.Generator, alignment: int = 16, tokens: int = 40) -> RoutingMap:
    """Three experts, one of them empty, a copy that goes nowhere."""
    expert_Tk = torch.randint(0, 2, (tokens, 2), generator=generator, dtype=torch.int32) * 2
    if tokens > 3:
        expert_Tk[3, 1] = -1
    return eager.routing(expert_Tk, 3, alignment)


def values_of(got: Any) -> torch.Tensor:
    assert got.values is not None
    values: torch.Tensor = got.values
    return values


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 200)])
def test_swiglu(dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    gate_up, _, probability = activation(dtype, width, generator)
    got = triton_ops.swiglu(gate_up, probability, BOTH, OFFSETS)
    values = values_of(got)
    exact = eager.swiglu(gate_up.double(), probability, Wanted(), OFFSETS)
    assert_rounded(values, values_of(exact))
    assert_quantised(got, values, BOTH, OFFSETS)
    assert_quantised(triton_ops.swiglu(gate_up, probability, HIDDEN, OFFSETS), values, HIDDEN, OFFSETS)


def test_swiglu_is_exact_at_its_ends(generator: torch.Generator) -> None:
    """No overflow on the way: e^-x of a large gate and e^x of a small one."""
    gates = torch.tensor([0.0, -0.0, 90.0, 1e30, -90.0, -1e30, torch.nan, torch.inf, -torch.inf, 1e-40])
    gate_up = torch.cat([gates, torch.ones(10)])[None]
    values = values_of(triton_ops.swiglu(gate_up, None, Wanted(), None))
    expected = values_of(eager.swiglu(gate_up, None, Wanted(), None))
    assert torch.allclose(values, expected, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 200)])
def test_swiglu_backward(dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    gate_up, dh, probability = activation(dtype, width, generator)
    got, dprobability = triton_ops.swiglu_backward(dh, gate_up, probability, BOTH, OFFSETS)
    values = values_of(got)
    exact, dexact = eager.swiglu_backward(
        dh.double(), gate_up.double(), probability.double(), Wanted(), OFFSETS
    )
    assert dprobability is not None
    assert dexact is not None
    assert_rounded(values, values_of(exact))
    assert_rounded(dprobability, dexact)
    assert_quantised(got, values, BOTH, OFFSETS)
    hidden, again = triton_ops.swiglu_backward(dh, gate_up, probability, HIDDEN, OFFSETS)
    assert_quantised(hidden, values, HIDDEN, OFFSETS)
    assert again is not None
    assert same_bits(again, dprobability)


def test_swiglu_backward_is_the_gradient(generator: torch.Generator) -> None:
    """Against torch's autograd of the plain formula, in float64."""
    gate_up, dh, probability = activation(torch.float32, 72, generator, rows=40)
    leaf, weight = gate_up.double().requires_grad_(), probability.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    (gate / (1 + (-gate).exp()) * up * weight[:, None]).backward(dh.double())
    got, dprobability = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), None)
    assert leaf.grad is not None
    assert weight.grad is not None
    assert dprobability is not None
    assert_rounded(values_of(got), leaf.grad)
    assert_rounded(dprobability, weight.grad)
    unweighted, nothing = triton_ops.swiglu_backward(dh, gate_up, None, Wanted(), None)
    assert nothing is None
    ones, _ = triton_ops.swiglu_backward(dh, gate_up, torch.ones(40), Wanted(), None)
    assert same_bits(values_of(unweighted), values_of(ones))


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": "col", "fmt": "e5m2", "scale": "pow2", "stats": True},
        {"row": True, "blocks": "col", "multiplier": 0.25, "stats": True},
        {"row": True, "stats": True},
    ],
    ids=str,
)
def test_any_wanted(options: dict[str, Any], generator: torch.Generator) -> None:
    gate_up, dh, probability = activation(torch.bfloat16, 70, generator, rows=56)
    wanted = Wanted(values=False, **options)
    values = values_of(triton_ops.swiglu(gate_up, probability, Wanted(), FEW))
    assert_quantised(triton_ops.swiglu(gate_up, probability, wanted, FEW), values, wanted, FEW)
    plain, _ = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), FEW)
    got, _ = triton_ops.swiglu_backward(dh, gate_up, probability, wanted, FEW)
    assert_quantised(got, values_of(plain), wanted, FEW)


def test_aligned_columns_are_stored_transposed(generator: torch.Generator) -> None:
    gate_up, dh, probability = activation(torch.bfloat16, 128, generator, rows=208)
    values = values_of(triton_ops.swiglu(gate_up, probability, Wanted(), OFFSETS))
    got = triton_ops.swiglu(gate_up, probability, HIDDEN, OFFSETS, aligned=True)
    assert_quantised(got, values, HIDDEN, OFFSETS)
    assert got.block is not None
    assert got.block.data.stride() == (1, 208)
    plain, _ = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), OFFSETS)
    turned, _ = triton_ops.swiglu_backward(dh, gate_up, probability, HIDDEN, OFFSETS, aligned=True)
    assert_quantised(turned, values_of(plain), HIDDEN, OFFSETS)


def test_b42_stale_padding_rows_are_neither_read_nor_measured(generator: torch.Generator) -> None:
    gate_up, dh, probability = activation(torch.bfloat16, 64, generator, rows=56)
    wanted = Wanted(row=True, blocks="col", stats=True)
    clean = triton_ops.swiglu(gate_up, probability, wanted, FEW)
    _, dclean = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), FEW)
    for stale in (gate_up, dh, probability):
        stale[48:] = torch.nan
    gate_up[50:] = 1e30
    got = triton_ops.swiglu(gate_up, probability, wanted, FEW)
    assert (values_of(got)[48:] == 0).all()
    assert_quantised(got, values_of(clean), wanted, FEW)
    _, dgot = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), FEW)
    assert dgot is not None
    assert dclean is not None
    assert same_bits(dgot, dclean)


def test_b33_strided_input(generator: torch.Generator) -> None:
    gate_up, _, probability = activation(torch.float32, 64, generator, rows=40)
    expected = values_of(triton_ops.swiglu(gate_up, probability, Wanted(), None))
    wide = torch.zeros(40, 200)
    wide[:, 8:136] = gate_up
    for source in (wide[:, 8:136], gate_up.t().contiguous().t()):
        assert same_bits(values_of(triton_ops.swiglu(source, probability, Wanted(), None)), expected)


@pytest.mark.parametrize("turned", [False, True])
def test_b33_strided_tokens_rows_and_weights(turned: bool, generator: torch.Generator) -> None:
    """Every second one and a window of the columns, or a transposed matrix: the bits of a copy."""
    made = some_map(generator)
    operands = [torch.rand(2, 40, generator=generator).t()]
    for rows in (40, made.rows):
        whole = torch.randn(2 * rows, 80, generator=generator)
        operands.append(whole.reshape(80, -1).t()[:rows, :72] if turned else whole[::2, 8:])
    results = []
    for copied in (False, True):
        weight, dy, y = (
            operand.clone(memory_format=torch.contiguous_format) if copied else operand
            for operand in operands
        )
        assert dy.is_contiguous() == y.is_contiguous() == weight.is_contiguous() == copied
        drows, dweight = triton_ops.combine_backward(dy, y, weight, made, Wanted())
        sums = triton_ops.sum_copies(y, made, weight)
        results.append([values_of(drows), dweight, sums, values_of(triton_ops.gather(dy, made, Wanted()))])
    assert all(same_bits(got, wanted) for got, wanted in zip(*results, strict=True))


def test_float64_is_refused() -> None:
    with pytest.raises(OperandError, match="bfloat16"):
        triton_ops.swiglu(torch.zeros(2, 4, dtype=torch.float64), None, Wanted(), None)


def hard(x: torch.Tensor) -> torch.Tensor:
    """x with everything that makes a tile not plain, each in its own rows."""
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    x[4] = 0
    x[6] *= 1e-37
    x[7, ::2] *= 1e-30
    x[8] *= 1e30
    x[9] *= 1e-44
    return x


@pytest.mark.parametrize(("dtype", "alignment"), [(torch.bfloat16, 1), (torch.float32, 16)])
def test_gather(dtype: torch.dtype, alignment: int, generator: torch.Generator) -> None:
    x = hard(torch.randn(30, 140, generator=generator).to(dtype))
    made = some_map(generator, alignment, tokens=30)
    values = values_of(eager.gather(x, made, Wanted()))
    for wanted in (BOTH, Wanted(values=False, row=True, blocks="col", stats=True)):
        assert_quantised(triton_ops.gather(x, made, wanted), values, wanted, made.offsets)


def test_b26_b44_zero_rows_and_subnormals(generator: torch.Generator) -> None:
    x = torch.zeros(40, 128)
    x[5], x[6] = 2.0**-149, -(2.0**-130)
    made = some_map(generator)
    values = values_of(eager.gather(x, made, Wanted()))
    assert_quantised(triton_ops.gather(x, made, HIDDEN), values, HIDDEN, made.offsets)


def one_expert(rows: int) -> RoutingMap:
    """Every token to the only expert, in its place."""
    return eager.routing(torch.zeros(rows, 1, dtype=torch.int32), 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b29_b32_a_nan_or_inf_at_any_place_leaves_the_scales_of_its_blocks(dtype: torch.dtype) -> None:
    """One of them in each row and column of ones, at every place of a block in turn."""
    x = torch.ones(128, 128, dtype=dtype)
    x.fill_diagonal_(torch.nan)
    x[7, 7], x[8, 8] = torch.inf, -torch.inf
    wanted = Wanted(values=False, row=True, blocks="col", stats=True)
    got = triton_ops.gather(x, one_expert(128), wanted)
    for quantised in (got.row, got.block):
        assert quantised is not None
        wide = quantised.dequantize()
        assert torch.equal(torch.isnan(wide), torch.eye(128, dtype=torch.bool))
        one = torch.tensor(1.0) / 448
        assert (quantised.scale[:128].flatten()[:128] == one).all()
        assert (wide[~torch.eye(128, dtype=torch.bool)] == 448 * one).all()
    assert got.stats is not None
    for name, number in (("nan", 126), ("inf", 2), ("amax", 1.0), ("saturated", 0)):
        assert (got.stats[:, 0, COLUMNS.index(name)] == number).all(), name


def test_b28_gradients_near_1e_9_keep_their_digits() -> None:
    dy = (torch.arange(1, 9) / 8 * 1e-9).repeat(16)[None].expand(128, 128)
    got = triton_ops.gather(dy, one_expert(128), HIDDEN)
    for quantised in (got.row, got.block):
        assert quantised is not None
        wide = quantised.dequantize()
        assert (wide > 0).all()
        assert ((wide - dy).abs() <= 0.0625 * dy).all()


@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_copies(dtype: torch.dtype, alignment: int, generator: torch.Generator) -> None:
    """In slot order, rounded once: every bit."""
    made = some_map(generator, alignment)
    y = torch.randn(made.rows, 520, generator=generator).to(dtype)
    y[made.source_R < 0] = torch.nan
    y[::7] = -0.0
    weight = torch.rand(40, 2, generator=generator)
    for given in (weight, None):
        assert same_bits(triton_ops.sum_copies(y, made, given), eager.sum_copies(y, made, given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_backward(dtype: torch.dtype, generator: torch.Generator) -> None:
    made = some_map(generator)
    dy = torch.randn(40, 200, generator=generator).to(dtype)
    y = torch.randn(made.rows, 200, generator=generator).to(dtype)
    y[made.source_R < 0] = torch.nan
    weight = torch.rand(40, 2, generator=generator)
    expected, _ = eager.combine_backward(dy, y, weight, made, Wanted())
    _, exact = eager.combine_backward(dy.double(), y.double(), weight.double(), made, Wanted())
    for wanted in (BOTH, HIDDEN):
        got, dweight = triton_ops.combine_backward(dy, y, weight, made, wanted)
        assert_quantised(got, values_of(expected), wanted, made.offsets)
        assert_rounded(dweight, exact)
        assert dweight[3, 1] == 0


def test_padding_changes_nothing(generator: torch.Generator) -> None:
    """Rows, their sum and the probability's gradient are the same bits with and without padding."""
    seed = generator.get_state()
    results = []
    for alignment in (16, 1):
        generator.set_state(seed)
        made = some_map(generator, alignment)
        weight = torch.rand(40, 2, generator=generator)
        gate_up_T = torch.randn(40, 256, generator=generator)
        dh_T = torch.randn(40, 128, generator=generator)
        gate_up, dh = (values_of(triton_ops.gather(x, made, Wanted())) for x in (gate_up_T, dh_T))
        probability = eager.spread(weight, made)
        h = values_of(triton_ops.swiglu(gate_up, probability, Wanted(), made.offsets))
        dgate_up, dprobability = triton_ops.swiglu_backward(dh, gate_up, probability, Wanted(), made.offsets)
        assert dprobability is not None
        sums = [triton_ops.sum_copies(part, made, None) for part in (h, values_of(dgate_up))]
        results.append([*sums, dprobability[made.position_Tk.clamp_min(0).long()]])
    for padded, bare in zip(*results, strict=True):
        assert same_bits(padded, bare)


def test_b39_no_tokens_at_all() -> None:
    made = eager.routing(torch.zeros(0, 2, dtype=torch.int32), 3, 16)
    x = torch.zeros(0, 130, dtype=torch.bfloat16)
    got = triton_ops.gather(x, made, Wanted(row=True, blocks="col", stats=True))
    assert values_of(got).shape == (48, 130)
    assert not values_of(got).any()
    assert got.stats is not None
    assert not got.stats[..., 0].any()
    y = triton_ops.sum_copies(values_of(got), made, None)
    assert y.shape == (0, 130)
    produced, dweight = triton_ops.combine_backward(x, values_of(got), torch.zeros(0, 2), made, BOTH)
    assert dweight.shape == (0, 2)
    assert not values_of(produced).any()
