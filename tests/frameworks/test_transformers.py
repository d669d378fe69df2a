"""transformers: real models of tiny size, each product of each weight seen once or named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations import moe

Trial = Callable[..., Any]
WORDS = 64
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral(experts: str) -> nn.Module:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = experts
    return MixtralForCausalLM(config)


def qwen() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    )


def train(model: nn.Module) -> None:
    """One step of two micro-batches: its sample is the last one, its products are those counted."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        ids = torch.randint(WORDS, (2, 9), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


MODELS = {
    "gpt2": gpt2, "llama": llama, "qwen3-moe": qwen,
    "mixtral-eager": lambda: mixtral("eager"), "mixtral-grouped": lambda: mixtral("grouped_mm"),
}  # fmt: skip


@pytest.mark.parametrize("checkpoint", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_each_product_of_each_weight_is_seen_once(trial: Trial, name: str, checkpoint: bool | None) -> None:
    def build() -> nn.Module:
        model = MODELS[name]()
        if checkpoint is not None:
            model.activation_checkpointing_enable({"use_reentrant": checkpoint})
        return model

    done = trial(build, train, recompute=100)
    done.assert_every_use_is_seen_or_named()
    weights = [name for name, p in done.model.named_parameters() if p.dim() > 1]
    # Everything but look-ups is multiplied with.
    assert {n for n in weights if n not in done.products.uses} <= {
        "model.embed_tokens.weight", "transformer.wpe.weight"
    }  # fmt: skip


def test_experts_gathered_by_index_are_named_and_the_router_is_seen(trial: Trial) -> None:
    done = trial(lambda: mixtral("batched_mm"), train)
    done.assert_every_use_is_seen_or_named()
    for layer in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        row = done.row(layer)
        assert row["status"] == "not observed"
        assert "used by indexing" in row["reason"]
        assert done.reading.count(layer, "w tile") == done.model.get_parameter(layer).numel()
        assert done.reading.count(layer, "x row") == 0
    assert done.row("model.layers.0.mlp.gate.weight")["status"] == "observed"


def test_the_operator_that_stands_in_for_the_grouped_product_is_seen(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *operands: False)
    fallback = trial(lambda: mixtral("grouped_mm"), train).reading
    monkeypatch.undo()
    done = trial(lambda: mixtral("grouped_mm"), train)
    for layer in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        for part in ("x row", "x col", "w tile", "dy row", "dy col"):
            assert fallback.count(layer, part) == done.reading.count(layer, part) > 0


def test_the_aggregate_of_experts_does_not_depend_on_how_they_are_computed(trial: Trial) -> None:
    eager, grouped = (trial(lambda how=how: mixtral(how), train).reading for how in ("eager", "grouped_mm"))
    for layer in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        for part in ("x row", "x col", "w tile", "dy row", "dy col"):
            one, other = eager.stats[layer, part], grouped.stats[layer, part]
            assert (one.count, one.rows) == (other.count, other.rows)
            # The two round differently on their way here.
            assert one.sum_sq == pytest.approx(other.sum_sq, rel=1e-5)


def test_a_model_that_multiplies_with_its_own_heads_weight_is_seen_from_the_second_sample(
    trial: Trial,
) -> None:
    """As fused losses do it inside the model's forward: the head's own forward is never called."""

    class Fused(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = nn.functional.linear(hidden, self.lm_head.weight)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return type("Output", (), {"loss": loss})

    done = trial(lambda: Fused(LlamaConfig(**SIZES)), train)
    assert done.row("lm_head.weight")["status"] == "not observed"
    assert "never called" in done.row("lm_head.weight")["reason"]
    assert done.reading.count("lm_head", "w tile") == 16 * WORDS
    train(done.model)
    again = type(done.reading)(done.guard)
    assert again.coverage["lm_head"]["status"] == "adapted"
    assert again.count("lm_head", "x row") == done.products.x["lm_head.weight"]
