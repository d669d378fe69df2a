"""AdamW on the master weights: groups, warm-up, clipping, finiteness."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8_safeguard.trainer.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW in two groups: matrices with weight decay, gains without."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def learning_rate(config: TrainConfig, updates: int) -> float:
    """Rate of the update that follows `updates` applied ones: a linear rise over the warm-up, then constant."""
    return config.learning_rate * min(1.0, (updates + 1) / max(config.warmup_steps, 1))


def set_hyperparameters(optimizer: torch.optim.Optimizer, config: TrainConfig, updates: int) -> float:
    """Write the rate of the next update and the decay into the groups; returns the rate."""
    rate = learning_rate(config, updates)
    for group, decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    return rate


def clip_gradients(model: nn.Module, clip_norm: float) -> float:
    """Global gradient norm before clipping; if it is finite and above `clip_norm`, gradients are scaled to it.

    NaN or inf when any gradient element is: the sum of squares carries it, whatever the loss says.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if bool(torch.isfinite(norm)):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_norm, norm)
    return float(norm)


@torch.no_grad()
def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters with a NaN or inf in their gradient, in definition order."""
    return [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
