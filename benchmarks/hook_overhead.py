"""What the hooks cost a training step, in CPU time over whole sampling cycles."""

# Shapes: B sequences, T tokens of a sequence, D width, V vocabulary.

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fp8_safeguard.hooks import Guard, attach

WIDTH, LAYERS, HEADS, VOCABULARY, SEQUENCE, BATCH = 512, 2, 8, 1024, 256, 4


class Block(nn.Module):
    """Attention and MLP of four plain linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        qkv = self.qkv(self.norm1(x_BTD)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x_BTD + self.down(nn.functional.gelu(self.up(self.norm2(x_BTD))))


class Trainer:
    """A small GPT, its optimizer and one batch."""

    def __init__(self, dtype: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.tokens_BT = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1))
        self.bf16 = dtype == "bf16"

    def step(self) -> None:
        """Forward, backward, update."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            logits = self.model(self.tokens_BT[:, :-1])
        cross_entropy(logits.float().flatten(0, 1), self.tokens_BT[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Case:
    """One way to attach, against the same training without hooks."""

    name: str
    every: int
    cycle: int
    """Steps that are timed together: a whole number of sampling cycles."""
    goal: float | None


CASES = (
    Case("default", every=10, cycle=10, goal=1.10),
    Case("off", every=10**9, cycle=10, goal=1.02),
    Case("every_step", every=1, cycle=2, goal=None),
)


def cpu_seconds(trainer: Trainer, steps: int, guard: Guard | None) -> float:
    """CPU time of all threads for that many steps, the sender's work included."""
    start = time.process_time()
    for _ in range(steps):
        trainer.step()
    if guard is not None:
        guard.flush(60)
    return time.process_time() - start


def interleaved(ours: Callable[[], float], base: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """(ours, base) of each pair; who goes first takes turns, so that a drift of the machine cancels."""
    times = []
    for pair in range(pairs):
        first = ours() if pair % 2 else None
        reference = base()
        times.append((ours() if first is None else first, reference))
    return times


def run_case(case: Case, dtype: str, pairs: int, spool: Path) -> dict[str, Any]:
    """One row of the table."""
    observed, plain = Trainer(dtype), Trainer(dtype)
    for trainer in (observed, plain):
        trainer.step()
    guard = attach(observed.model, every=case.every, run=f"{case.name}-{dtype}", spool_dir=spool)
    if case.every < 10**9:
        cpu_seconds(observed, case.every, guard)  # compiles the kernels; ends on a whole cycle
    else:
        observed.step()  # step 0 is always due
    spent = guard.spent_seconds
    times = interleaved(
        lambda: cpu_seconds(observed, case.cycle, guard), lambda: cpu_seconds(plain, case.cycle, None), pairs
    )
    accounted = (guard.spent_seconds - spent) / (pairs * case.cycle)
    guard.detach()
    row = summary(f"{case.name}_{dtype}", times, case.cycle)
    return {**row, "goal": case.goal, "accounted_seconds": accounted}


def summary(name: str, times: list[tuple[float, float]], cycle: int) -> dict[str, Any]:
    """Median ratio of the pairs, with the lowest and highest."""
    ratios = sorted(ours / base for ours, base in times)
    value = median(ours for ours, _ in times) / cycle
    row = {"case": name, "value": value, "unit": "CPU s/step"}
    return {**row, "ratio": median(ratios), "low": ratios[0], "high": ratios[-1]}


def main() -> None:
    """Run every case, print the table, write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as spool:
        rows = [run_case(case, dtype, pairs, Path(spool)) for case in CASES for dtype in ("fp32", "bf16")]
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
