"""torch.compile leaves layers with delayed scaling out of its graphs: same values, same histories."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8_safeguard.kernels import Fp8Linear, LinearPrecision, OperandFormat

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def with_amax(rows: int, columns: int, amax: float) -> Tensor:
    """Random values within half of amax, and one that is amax."""
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) * amax / 2
    values[rows // 2, columns // 3] = -amax
    return values


@pytest.fixture
def twins() -> list[nn.Module]:
    operand = OperandFormat(scaling="delayed")
    precision = LinearPrecision(x=operand, w=operand, dy=operand)
    made = [Fp8Linear(64, 32, precision=precision), nn.ReLU(), Fp8Linear(32, 16, precision=precision)]
    model = nn.Sequential(*made)
    return [model, copy.deepcopy(model)]


def test_steps_are_the_same(twins: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    found = []
    with caplog.at_level("INFO", "fp8_safeguard"):
        for model, call in ((twins[0], twins[0]), (twins[1], torch.compile(twins[1], backend="eager"))):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for amax in (1.0, 4.0, 2.0):
                call(with_amax(16, 64, amax).requires_grad_()).backward(with_amax(16, 16, amax))
                optimizer.zero_grad()
                optimizer.step()
            leaf = with_amax(16, 64, 8.0).requires_grad_()
            call(leaf).backward(with_amax(16, 16, 1.0))
            histories = [model[index].scaling.history(name) for index in (0, 2) for name in ("x", "w", "dy")]
            found.append((leaf.grad, model[0].weight.grad, histories))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    said = [record.getMessage() for record in caplog.records if "in eager Python" in record.getMessage()]
    assert len(said) == 1


def test_a_graph_that_may_not_break_says_so(twins: list[Any]) -> None:
    compiled = torch.compile(twins[0], backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(with_amax(16, 64, 1.0))
