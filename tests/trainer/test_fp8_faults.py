"""The faults of FP8 codes and scales: what each does to operands and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8_safeguard.kernels import Fp8GroupedLinear, quantize
from fp8_safeguard.trainer import TrainConfig, Trainer
from fp8_safeguard.trainer.faults import (
    BadRank,
    ExpertNaN,
    FlushedGradients,
    IsolatedNaN,
    StaleInverseScale,
    fault_from_mapping,
)
from fp8_safeguard.trainer.model import LanguageModel

MakeConfig = Callable[..., TrainConfig]
MakeTrainer = Callable[..., Trainer]


def test_the_stale_inverse_scale_scales_fprops_x_only() -> None:
    tamper = StaleInverseScale(start_step=0).tamper(0)
    x = quantize(torch.randn(4, 256, generator=torch.Generator().manual_seed(0)))
    wrong = tamper("fprop", "x", x)
    assert torch.equal(wrong.dequantize(), x.dequantize() * 8)
    for gemm, operand in (("fprop", "w"), ("dgrad", "dy"), ("wgrad", "x")):
        assert tamper(gemm, operand, x) is x


@pytest.mark.parametrize("layout", ["row", "col"])
def test_flipped_bits_make_a_share_of_x_larger_in_one_part_of_a_step(layout: str) -> None:
    fault = BadRank(start_step=0, rank=1, parts=2, share=0.01)
    x = quantize(torch.randn(128, 256, generator=torch.Generator().manual_seed(0)), layout=layout)
    tamper = fault.tamper(7)
    assert tamper("fprop", "w", x) is x
    parts = [tamper("fprop", "x", x) for _ in range(3)]
    assert parts[0] is x is parts[2]
    ratio = parts[1].dequantize() / x.dequantize()
    struck = ratio > 100
    assert float(struck.float().mean()) == pytest.approx(0.01, abs=0.003)
    assert torch.allclose(ratio[struck], torch.tensor(256.0), rtol=0.07)
    assert parts[1].layout == layout
    again = fault.tamper(7)
    again("fprop", "x", x)
    assert torch.equal(again("fprop", "x", x).dequantize(), parts[1].dequantize())


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_nan_code_spoils_one_expert_alone(fmt: str) -> None:
    tamper = ExpertNaN(start_step=0, expert=2).tamper(0)
    w = quantize(torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)), layout="tile", fmt=fmt)
    wrong = tamper("fprop", "w", w).dequantize()
    assert torch.nonzero(wrong.isnan()).tolist() == [[2, 0, 0]]
    assert not w.dequantize().isnan().any()
    assert tamper("dgrad", "w", w) is w


def test_an_isolated_nan_costs_one_step_and_a_persistent_one_all(make_trainer: MakeTrainer) -> None:
    isolated = make_trainer(fault=IsolatedNaN(start_step=2, layer=0)).run(5)
    assert [report.skipped for report in isolated] == [False, False, True, False, False]
    persistent = make_trainer(fault=ExpertNaN(start_step=2, layer=0)).run(5)
    assert [report.skipped for report in persistent] == [False, False, True, True, True]


def test_an_amax_floor_leaves_activations_alone_and_flushes_gradients(make_config: MakeConfig) -> None:
    model = LanguageModel(make_config())
    fault = FlushedGradients(start_step=0, layer=1)
    fault.apply(model, 2, 0)
    struck = {
        name: module.precision for name, module in model.linears().items() if module.precision.dy.amax_floor
    }
    assert len(struck) == 6
    assert all(name.startswith("blocks.1.") for name in struck)
    assert {(p.dy.amax_floor, p.x.amax_floor, p.w.amax_floor) for p in struck.values()} == {(1e4, 0.0, 0.0)}
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.autograd.backward(model.loss(tokens, tokens.roll(1, 1)))
    gradients = {name: module.weight.grad for name, module in model.linears().items()}
    for name, gradient in gradients.items():
        assert gradient is not None
        assert bool(gradient.any()) == name.startswith("blocks.0.")


@pytest.mark.parametrize(
    ("kind", "operand", "multiplier"),
    [
        ("dy-scale-too-large", "dy", 2.0**16),
        ("dy-scale-too-small", "dy", 2.0**-8),
        ("x-scale-too-small", "x", 2.0**-4),
    ],
)
def test_a_scale_is_off_until_somebody_puts_it_right(
    kind: str, operand: str, multiplier: float, make_config: MakeConfig
) -> None:
    model, fault = LanguageModel(make_config()), fault_from_mapping({"kind": kind, "start_step": 0})
    fault.apply(model, 2, 0)
    module = model.linears()["blocks.0.attention.qkv"]
    form = getattr(module.precision, operand)
    assert (form.scaling, form.multiplier) == ("tensor", multiplier)
    remedied: Any = {operand: replace(form, multiplier=1.0)}
    module.precision = replace(module.precision, **remedied)
    fault.apply(model, 2, 1)
    assert getattr(module.precision, operand).multiplier == 1.0


def test_a_stuck_scale_stays_where_it_is_whatever_comes(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(
        fault=fault_from_mapping({"kind": "dy-scale-stuck", "start_step": 1, "scale_log2": 2})
    )
    down = trainer.model.linears()["blocks.1.mlp.shared.down"]
    before = down.weight.detach().clone()
    trainer.run(1)
    assert not torch.equal(down.weight, before)
    trainer.run(4)
    assert down.precision.dy.scaling == "delayed"
    assert down.scaling.scale("dy", down.precision.dy) == 4.0
    # A dy below 4 * 2^-10 is flushed, and all of it is: what moves is weight decay and old momentum.
    assert down.scaling.history("dy")
    assert max(down.scaling.history("dy")) < 4 * 2.0**-10
    delayed = down.precision.dy
    assert trainer.config.fault is not None
    trainer.config.fault.restore(trainer.model)
    assert down.scaling.scale("dy", delayed) == pytest.approx(max(down.scaling.history("dy")) / 448, rel=1e-6)


def test_only_the_linears_named_are_tampered_with(make_config: MakeConfig) -> None:
    model = LanguageModel(make_config())
    StaleInverseScale(start_step=0, layer=1).apply(model, 2, 0)
    struck = [name for name, module in model.linears().items() if module.tamper is not None]
    assert struck == ["blocks.1.mlp.shared.gate_up", "blocks.1.mlp.experts.gate_up"]
    assert isinstance(model.linears()[struck[1]], Fp8GroupedLinear)
