"""What the hooks cost a training step, in CPU time over whole sampling cycles."""

# Shapes: B sequences, T tokens of a sequence, D width, V vocabulary.

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
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


class Plain:
    """That many steps without hooks."""

    def __init__(self, dtype: str, steps: int) -> None:
        self.dtype, self.steps = dtype, steps
        self.trainer: Trainer | None = None

    def __call__(self) -> None:
        if self.trainer is None:
            self.trainer = self.begin()
        for _ in range(self.steps):
            self.trainer.step()

    def begin(self) -> Trainer:
        """The trainer, built when it is needed."""
        return Trainer(self.dtype)


class Observed(Plain):
    """The same with hooks: a whole number of sampling cycles, the sender's work included."""

    def __init__(self, dtype: str, steps: int, every: int, spool: str) -> None:
        super().__init__(dtype, steps)
        self.every, self.spool = every, spool
        self.guard: Guard | None = None

    def begin(self) -> Trainer:
        """The trainer with a guard on its model."""
        trainer = Trainer(self.dtype)
        self.guard = attach(
            trainer.model, every=self.every, run=f"every-{self.every}-{self.dtype}", spool_dir=self.spool
        )
        return trainer

    def __call__(self) -> None:
        super().__call__()
        if self.guard is not None:
            self.guard.flush(60)

    def accounted_seconds(self) -> float:
        """Time inside our own code on the training thread, in CPU seconds of a step.

        It is counted by the wall clock: its share of the wall time, times the CPU time, is the same on a busy
        machine and on an idle one.
        """
        assert self.guard is not None
        spent, wall, cpu = self.guard.spent_seconds, time.perf_counter(), time.process_time()
        self()
        share = (self.guard.spent_seconds - spent) / (time.perf_counter() - wall)
        return share * (time.process_time() - cpu) / self.steps

    def end(self) -> None:
        """Take the guard off."""
        if self.guard is not None:
            self.guard.detach()


KINDS = (("default", 10, 10, 1.10), ("off", 10**9, 10, 1.02), ("every_step", 1, 2, None))
"""Name, `every`, steps timed together, goal. `off` is attached and never samples (after step 0)."""


def cases(spool: str) -> Sequence[harness.Case]:
    """Each kind of attachment in float32 and bfloat16 autocast, against the same training without hooks."""
    return [
        harness.Case(
            name=f"{kind}_{dtype}",
            ours=Observed(dtype, steps, every, spool),
            baseline=Plain(dtype, steps),
            goal=goal,
        )
        for kind, every, steps, goal in KINDS
        for dtype in ("fp32", "bf16")
    ]


def main() -> None:
    """Run every case, print the table, write it as JSON if asked to. Values are milliseconds of one timing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    options = parser.parse_args()
    harness.require_writable(parser, options.json)
    torch.set_num_threads(1)
    logging.getLogger("fp8_safeguard").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as spool:
        listed = cases(spool)
        report = harness.run("hook_overhead", listed, pairs=3 if options.quick else 12)
        for case, row in zip(listed, report["rows"], strict=True):
            assert isinstance(case.ours, Observed)
            row["accounted_ms_per_step"] = 1e3 * case.ours.accounted_seconds()
            case.ours.end()
    harness.print_table(report)
    for row in report["rows"]:
        print(f"  {row['case']:<48} {row['accounted_ms_per_step']:9.3f} ms a step inside our code")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
