"""The language model: shapes, causality, gradients, what runs in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear
from fp8_safeguard.trainer import TrainConfig
from fp8_safeguard.trainer.model import LanguageModel


@pytest.fixture(params=["fp8", "bf16"])
def model(make_config: Callable[..., TrainConfig], request: pytest.FixtureRequest) -> LanguageModel:
    return LanguageModel(make_config(precision=request.param))


def test_logits_have_one_row_per_byte_and_one_column_per_next_byte(model: LanguageModel) -> None:
    logits = model(torch.randint(0, 256, (3, 16)))
    assert logits.shape == (3, 16, 256)
    assert logits.dtype == torch.float32


def test_a_shorter_sequence_than_configured_works(model: LanguageModel) -> None:
    assert model(torch.randint(0, 256, (2, 5))).shape == (2, 5, 256)


def test_a_later_byte_changes_no_earlier_logit(model: LanguageModel) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    # Not bit for bit: the changed token moves rows between experts, and a GEMM's sum may depend on its shape.
    torch.testing.assert_close(after[0, :10], before[0, :10], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(after[0, 10:], before[0, 10:], rtol=1e-2, atol=1e-2)


def test_training_starts_at_the_loss_of_a_uniform_guess(model: LanguageModel) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 256, (4, 16))
    assert float(model.loss(tokens, tokens.roll(-1, 1)).detach()) == pytest.approx(math.log(256), abs=0.1)


def test_gradients_reach_every_parameter_and_every_expert(model: LanguageModel) -> None:
    torch.manual_seed(2)
    tokens = torch.randint(0, 256, (16, 16))
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        per_expert = parameter.grad if ".experts." in name else parameter.grad[None]
        assert all(bool(part.any()) for part in per_expert), name


def test_six_linears_a_block_run_in_fp8_and_nothing_else_is_a_linear(
    make_config: Callable[..., TrainConfig],
) -> None:
    model = LanguageModel(make_config(precision="fp8"))
    per_block = [
        "attention.qkv",
        "attention.out",
        "mlp.shared.gate_up",
        "mlp.shared.down",
        "mlp.experts.gate_up",
        "mlp.experts.down",
    ]
    assert list(model.linears()) == [f"blocks.{i}.{name}" for i in range(2) for name in per_block]
    for module in model.linears().values():
        assert (module.precision.fprop, module.precision.dgrad, module.precision.wgrad) == ("fp8",) * 3
    others = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert others == []
    assert list(model.routers()) == ["blocks.0.mlp.router", "blocks.1.mlp.router"]


def test_bf16_precision_switches_every_gemm(make_config: Callable[..., TrainConfig]) -> None:
    model = LanguageModel(make_config(precision="bf16"))
    for module in model.linears().values():
        assert (module.precision.fprop, module.precision.dgrad, module.precision.wgrad) == ("bf16",) * 3


def test_parameters_are_float32_masters_and_depend_on_the_seed_alone(
    make_config: Callable[..., TrainConfig],
) -> None:
    torch.manual_seed(5)
    first = LanguageModel(make_config(seed=3)).state_dict()
    torch.manual_seed(6)
    again, other = (
        LanguageModel(make_config(seed=3)).state_dict(),
        LanguageModel(make_config(seed=4)).state_dict(),
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head"], other["head"])
    assert {value.dtype for value in first.values()} == {torch.float32}


def test_kinds_of_layers(make_config: Callable[..., TrainConfig]) -> None:
    linears = LanguageModel(make_config()).linears()
    assert isinstance(linears["blocks.0.mlp.experts.down"], Fp8GroupedLinear)
    assert isinstance(linears["blocks.0.attention.out"], Fp8Linear)
