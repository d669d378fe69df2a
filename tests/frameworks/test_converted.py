"""peft's adapters and torchao's Float8Linear in place of linear layers, and a step of transformers' Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they say of each other while they are imported
    from peft import LoraConfig, get_peft_model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

Trial = Callable[..., Any]
WORDS = 64


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip


def train(model: nn.Module) -> None:
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
    ids = torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_b09_lora_adapters_are_seen_and_the_frozen_weights_have_no_weight_gradient(
    trial: Trial, checkpoint: bool
) -> None:
    def build() -> nn.Module:
        model = llama()
        if checkpoint:
            model.activation_checkpointing_enable({"use_reentrant": False})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what that has renamed
            return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))

    done = trial(build, train, recompute=100)
    done.assert_every_use_is_seen_or_named()
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    parts = {part for name, part in done.reading.stats if name == f"{layer}.base_layer"}
    assert parts == {"x row", "w tile", "dy row", "fprop", "dgrad"}
    for adapter in ("lora_A.default", "lora_B.default"):
        parts = {part for name, part in done.reading.stats if name == f"{layer}.{adapter}"}
        assert {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"} == parts


def only_blocks(module: nn.Module, name: str) -> bool:
    return "lm_head" not in name


def float8(model: nn.Module) -> nn.Module:
    return convert_to_float8_training(
        model, module_filter_fn=only_blocks, config=Float8LinearConfig(emulate=True)
    )


def test_float8_linear_layers_are_seen_with_their_high_precision_operands(trial: Trial) -> None:
    done = trial(lambda: float8(llama()), train, recompute=100)
    converted = [name for name, module in done.model.named_modules() if isinstance(module, Float8Linear)]
    assert len(converted) == 14
    tokens = 2 * 16
    for name in converted:
        weight = done.model.get_submodule(name).weight
        assert done.row(f"{name}.weight")["status"] == "observed"
        assert done.reading.count(name, "x row") == tokens * weight.shape[1]
        assert (
            done.reading.count(name, "dy row")
            == done.reading.count(name, "dy col")
            == tokens * weight.shape[0]
        )
        assert done.reading.count(name, "w tile") == weight.numel()
        # Its real output is compared: what it lost to its own FP8 shows.
        error = done.reading.stats[name, "fprop"].metric("relative_error")
        assert 0.005 < error < 0.2


def test_a_conversion_after_attach_is_named_layer_by_layer(trial: Trial) -> None:
    def late(model: nn.Module) -> None:
        train(float8(model))

    done = trial(llama, late)
    rows = done.guard.coverage()
    replaced = {row["name"] for row in rows if "attach again" in row["reason"]}
    assert replaced == {
        name for name, module in done.model.named_modules() if isinstance(module, Float8Linear)
    }
    assert {row["status"] for row in rows if row["name"] in replaced} == {"not observed"}
    assert done.row("lm_head.weight")["status"] == "observed"


def test_a_step_of_the_trainer_is_one_sample(trial: Trial, tmp_path: Path) -> None:
    ids = torch.randint(WORDS, (16, 8), generator=torch.Generator().manual_seed(1))

    def steps(model: nn.Module) -> None:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(model=model, args=arguments, train_dataset=rows).train()

    done = trial(llama, steps)
    sample = done.guard.last_sample()
    assert sample["step"] == 1
    for name, parameter in done.model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            layer = name.removesuffix(".weight")
            assert done.reading.count(layer, "x row") == done.products.x[name] // 2, name
            assert done.reading.count(layer, "dy row") == done.products.y[name] // 2, name
