"""transformers.Trainer: its log hides a NaN loss and rescales it, the monitor sees the loss as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fp8_safeguard.hooks import Guard, attach
from fp8_safeguard.monitor.policy import PolicyConfig, PolicyState, decide, observe
from fp8_safeguard.monitor.wire import parse_sample

ACCUMULATION, STEPS, NAN_STEP = 4, 6, 3
WORDS = 32


class RawLoss(Trainer):
    """Keeps each micro-batch's loss as the model gave it; that of one micro-batch of one step is made NaN."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.raw: list[list[float]] = [[]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        inputs.pop("num_items_in_batch", None)
        loss = model(**inputs).loss
        if self.state.global_step == NAN_STEP and len(self.raw[-1]) == 2:
            # A constant: the loss is no number, its gradient is.
            loss = loss + math.nan
        self.raw[-1].append(float(loss.detach()))
        return loss


class Report(TrainerCallback):
    """What a user writes to tell the guard: the mean over the micro-batches, before the step ends."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.trainer = guard, None
        self.samples: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
        assert self.trainer is not None
        self.guard.log(loss=sum(self.trainer.raw[-1]) / ACCUMULATION)
        self.trainer.raw.append([])

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self.guard.step(state.global_step - 1)
        sample = self.guard.last_sample()
        assert sample is not None
        self.samples.append(sample)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[RawLoss, Report]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip
    guard = attach(model, run="hf", every=1, spool_dir="")
    report = Report(guard)
    ids = torch.randint(WORDS, (STEPS * ACCUMULATION * 2, 8), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        gradient_accumulation_steps=ACCUMULATION, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = RawLoss(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[report],
    )
    report.trainer = trainer
    trainer.train()
    guard.detach()
    return trainer, report


def test_b95_the_loss_is_non_finite_at_exactly_the_step_whose_log_hides_it(
    trained: tuple[RawLoss, Report],
) -> None:
    trainer, report = trained
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    assert all(math.isfinite(loss) for loss in logged), (
        "the trainer has come to log NaN: this test is then moot"
    )
    seen = [observe([parse_sample(sample)]) for sample in report.samples]
    losses = [step.run["loss"] for step in seen]
    assert [step.step for step in seen] == list(range(STEPS))
    assert [math.isnan(loss) for loss in losses] == [step == NAN_STEP for step in range(STEPS)]
    for loss, raw in zip(losses, trainer.raw, strict=False):
        assert loss == pytest.approx(sum(raw) / ACCUMULATION, nan_ok=True)
    # What decides acts on the raw loss.
    state, alerts = PolicyState(), []
    for step in seen:
        state, _ = decide(state, step, PolicyConfig(run="hf"))
        alerts.append(
            {alert.rule: alert.first_step for alert in state.alerts.values() if alert.layer is None}
        )
    assert alerts[NAN_STEP - 1] == {}
    assert alerts[NAN_STEP] == {"nonfinite-loss": NAN_STEP}
    assert state.trends.nonfinite_steps == 1
