"""What delayed scaling remembers: saved, restored, copied, held, and merged over ranks."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8_safeguard.kernels import (
    DelayedScaling,
    Fp8Linear,
    KernelError,
    OperandFormat,
    QuantizedTensor,
    ScaledFormat,
    merge_amax,
    quantize,
)

from .delayed_inputs import delayed, with_amax

pytestmark = pytest.mark.usefixtures("same_weights")


def train(layer: Fp8Linear, *amax: float) -> None:
    """Steps of an optimizer that changes nothing: x and dy of each have that amax."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for each in amax:
        layer(with_amax(16, 64, each).requires_grad_()).backward(with_amax(16, 32, each))
        optimizer.zero_grad()
        optimizer.step()


def five_steps(length: int = 4) -> Fp8Linear:
    """A layer that has seen x of amax 1, 2, 3, 4, 5."""
    layer = Fp8Linear(64, 32, precision=delayed(amax_history=length))
    train(layer, 1.0, 2.0, 3.0, 4.0, 5.0)
    return layer


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    ("length", "kept"), [(4, (2.0, 3.0, 4.0, 5.0)), (2, (4.0, 5.0)), (8, (2.0, 3.0, 4.0, 5.0))]
)
def test_b99_a_restored_history_is_the_newest_part_of_the_saved_one(
    length: int, kept: tuple[float, ...]
) -> None:
    layer = five_steps()
    restored = Fp8Linear(64, 32, precision=delayed(amax_history=length))
    missing = restored.load_state_dict(through_a_file(layer.state_dict()))
    assert missing == ([], [])
    for name in ("x", "dy"):
        assert restored.scaling.history(name) == kept
    if length == 4:
        for name in ("x", "w", "dy"):
            operand = layer.precision.x
            assert restored.scaling.scale(name, operand) == layer.scaling.scale(name, operand)
    x, dy = with_amax(16, 64, 3.5, 9), with_amax(16, 32, 3.5, 9)
    results = []
    for each in (layer, restored):
        leaf = x.clone().requires_grad_()
        each(leaf).backward(dy)
        results.append((leaf.grad, each.weight.grad))
    # 5 is the largest of any of these lengths: the next step is the same, bit for bit.
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_b99_a_longer_history_goes_on_without_zeros_that_count() -> None:
    """Most recent of nothing is nothing: with zeros in the new places the minimum, or an average, would be theirs."""
    restored = Fp8Linear(64, 32, precision=delayed(amax_history=8))
    restored.load_state_dict(five_steps().state_dict())
    train(restored, 0.5)
    assert restored.scaling.history("x") == (2.0, 3.0, 4.0, 5.0, 0.5)
    assert restored.scaling.steps("x") == 5


def test_b99_codes_times_their_scale_are_the_value_that_the_scale_stands_for() -> None:
    """There is one scale, no inverse beside it that could be another step's."""
    layer = five_steps()
    scale = layer.scaling.scale("x", layer.precision.x)
    assert scale is not None
    quantized = quantize(torch.full((1, 128), 448 * scale), tensor_scale=scale)
    assert (quantized.data.float() == 448).all()
    assert (quantized.dequantize() == np.float32(448 * scale)).all()


def test_b99_states_that_only_one_side_has_are_reported_and_not_fatal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = five_steps().state_dict()
    without = {name: value for name, value in saved.items() if name != "_extra_state"}
    layer, block = five_steps(), Fp8Linear(64, 32)
    assert not any(layer.load_state_dict(without))
    assert layer.scaling.scale("x", layer.precision.x) is None
    assert not any(block.load_state_dict(saved))
    model = nn.ModuleDict({"first": five_steps(), "new": Fp8Linear(64, 32, precision=delayed())})
    old = {f"first.{name}": value for name, value in saved.items()}
    found = model.load_state_dict(old, strict=False)
    assert found.missing_keys == ["new.weight"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records if "amax" in record.message] == [
        "amax histories of the layer", "amax histories of the layer", "amax histories of new",
    ]  # fmt: skip


def test_a_state_of_another_kind_is_refused() -> None:
    layer = Fp8Linear(64, 32, precision=delayed())
    state = layer.state_dict()
    for wrong in (torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 900.0]), "text"):
        with pytest.raises(RuntimeError, match="_extra_state"):
            layer.load_state_dict({**state, "_extra_state": wrong})


def test_b100_what_is_saved_is_as_large_after_1000_steps_as_after_10() -> None:
    sizes = []
    for steps in (10, 1000):
        scaling, precision = DelayedScaling(), delayed(amax_history=8)
        weight = torch.zeros(4, 4)
        for _ in range(steps):
            weight.zero_()
            scaling.enter(weight, precision, training=True)
            for name in ("x", "w", "dy"):
                scaling.record(name, 1.0)
        file = io.BytesIO()
        torch.save(scaling.state(), file)
        sizes.append(file.tell())
        assert len(pickle.dumps(scaling)) < 2000
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_b103_a_history_handed_out_is_a_copy() -> None:
    layer = five_steps()
    history = layer.scaling.history("x")
    before = list(history)
    train(layer, 8.0, 9.0)
    assert list(history) == before
    assert not hasattr(history, "append")
    state = layer.scaling.state()
    state.zero_()
    assert layer.scaling.history("x") == (4.0, 5.0, 8.0, 9.0)


def test_b104_a_configured_initial_scale_is_used_and_not_presented_as_measured() -> None:
    """The seed's recipe: codes are the values themselves at the first step, and follow the amax from the second on."""
    layer = Fp8Linear(64, 32, precision=delayed(initial_scale=1.0))
    scales: list[float] = []

    def tamper(gemm: str, operand: str, codes: QuantizedTensor) -> QuantizedTensor:
        scales.append(float(codes.scale.flatten()[0]))
        return codes

    layer.tamper = tamper
    train(layer, 3.0)
    assert scales == [1.0] * 6
    assert layer.scaling.scalars() == {}
    scales.clear()
    train(layer, 3.0)
    assert 1.0 not in scales


def test_copies_and_pickles_go_on_by_themselves() -> None:
    layer = five_steps()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.scaling.history("x") == layer.scaling.history("x")
        train(copied, 7.0)
        assert copied.scaling.history("x") == (3.0, 4.0, 5.0, 7.0)
    assert layer.scaling.history("x") == (2.0, 3.0, 4.0, 5.0)


def test_a_held_scale_stays_while_its_history_goes_on() -> None:
    """E: the update is missed; the multiplier still applies, a margin is part of the rule and does not."""
    layer = five_steps()
    layer.scaling.hold("dy", 1.0)
    leaf = with_amax(16, 64, 1e-3).requires_grad_()
    layer(leaf).backward(with_amax(16, 32, 1e-5))
    assert not leaf.grad.any()
    assert not layer.weight.grad.any()
    assert layer.scaling.history("dy") == (3.0, 4.0, 5.0, np.float32(1e-5))
    assert layer.scaling.scale("dy", layer.precision.dy) == 1.0
    smaller = OperandFormat(scaling="delayed", multiplier=2.0**-20, margin=3)
    assert layer.scaling.scale("dy", smaller) == 2.0**-20
    layer.scaling.hold("dy", None)
    assert layer.scaling.scale("dy", layer.precision.dy) == float(np.float32(5) / np.float32(448))
    with pytest.raises(KernelError, match="no scale"):
        layer.scaling.hold("dy", 0.0)
    with pytest.raises(KernelError, match="operand"):
        layer.scaling.hold("y", 1.0)


def test_a_change_of_format_makes_another_scale_of_the_same_history() -> None:
    layer = five_steps()
    wider = OperandFormat(scaling="delayed", fmt="e5m2")
    assert layer.scaling.scale("x", wider) == float(np.float32(5) / np.float32(57344))
    assert ScaledFormat.of(wider, amax=5.0).tensor_scale == layer.scaling.scale("x", wider)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ranks_merge_what_they_have_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The maximum over ranks of each operand: a rank that has seen nothing takes the others'."""
    first, second = DelayedScaling(), DelayedScaling()
    first.record("x", 3.0)
    second.record("dy", 0.5)
    others = torch.tensor([[2.0, 1.0, 4.0], [0.0, 0.0, 0.25]], dtype=torch.float64)
    reduced: list[Any] = []

    def all_reduce(tensor: Tensor, op: Any, group: Any = None) -> None:
        reduced.append((op, group))
        tensor.copy_(torch.maximum(tensor, others))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    merge_amax([first, second])
    assert [first.history(name) for name in ("x", "w", "dy")] == [(3.0,), (1.0,), (4.0,)]
    assert [second.history(name) for name in ("x", "w", "dy")] == [(), (), (0.5,)]
    assert reduced == [(torch.distributed.ReduceOp.MAX, None)]
    monkeypatch.undo()
    merge_amax([first])
    assert first.history("x") == (3.0,)
