"""Named configurations of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# 4.5 M parameters, 512 tokens a step: the least that learns the text well enough in 200 steps for the loss of the last
# layer to show (8 to 11 % over three seeds). Four layers, so that its three linears fit the 15 % fallback budget.
_DEMO: Mapping[str, Any] = {
    "run": "demo",
    "layers": 4,
    "d_model": 256,
    "sequence_length": 128,
    "sequences_per_step": 4,
    "learning_rate": 2e-3,
    "warmup_steps": 50,
    "lockstep": True,
}

_TINY: Mapping[str, Any] = {
    "run": "tiny",
    "layers": 2,
    "d_model": 64,
    "heads": 4,
    "kv_heads": 2,
    "experts": 4,
    "expert_hidden": 32,
    "shared_hidden": 32,
    "sequence_length": 16,
    "sequences_per_step": 4,
    "warmup_steps": 5,
}

# The evidence: BF16's own hyper-parameters, unchanged, and scales of blocks (Ling 2.0, section 5).
_LING: Mapping[str, Any] = {
    "run": "ling",
    "clip_norm": 1.0,
    "weight_decay": 0.1,
    "warmup_steps": 2000,
    "scaling": "block",
}

# The retold recipe: learning rate 1.5 times BF16's, clip 0.8, warm-up 2000, accumulation 8; delayed scaling from a scale
# of 1.0, with the amax of 1024 steps.
_SEED: Mapping[str, Any] = {
    "run": "seed",
    "scaling": "delayed",
    "amax_history": 1024,
    "initial_scale": 1.0,
    "learning_rate": 3e-3,
    "clip_norm": 0.8,
    "warmup_steps": 2000,
    "sequences_per_step": 32,
    "micro_batches": 8,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {"demo": _DEMO, "ling": _LING, "seed": _SEED, "tiny": _TINY}
"""Values that differ from TrainConfig's defaults, by name of the preset."""
