"""Sampled and whole recomputed GEMMs: cost beside the layer, and what the sample says."""

# Shapes: T tokens, N output features, K input features, R sampled rows, V = 29 TensorStats entries.

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the safe path setting leaves it out
import harness
import torch
from torch import Tensor

from fp8_safeguard.hooks import recompute
from fp8_safeguard.hooks.recompute import RowSampler
from fp8_safeguard.kernels import LinearPrecision
from fp8_safeguard.monitor.stats import COLUMNS

SHAPES = ((1024, 512, 2048), (1024, 2048, 512), (4096, 1024, 1024))
"""T, N, K of the layers that are timed."""
QUICK_SHAPES = ((256, 256, 256),)
DRAWS, QUICK_DRAWS = 400, 20
BIAS_GOAL, ERROR_GOAL = 1.01, 1.10
"""The mean of samples, and their root mean square deviation, beside the whole GEMM's relative error."""
DATA = ("gaussian", "lognormal", "outlier_channels", "gradient_like")
SAMPLED = (2048, 256, 384)
"""T, N, K of the layers that are sampled."""
FP8 = LinearPrecision()
GEMMS = ("fprop", "dgrad", "wgrad")


class Layer:
    """A linear layer's operands, and its own forward and backward."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> None:
        tokens, features, inputs = shape
        generator = torch.Generator().manual_seed(seed)
        x_TK = torch.randn(tokens, inputs, generator=generator)
        w_NK = torch.randn(features, inputs, generator=generator) * inputs**-0.5
        dy_TN = torch.randn(tokens, features, generator=generator) * 1e-4
        self.x_TK, self.w_NK, self.dy_TN = x_TK.to(dtype), w_NK.to(dtype), dy_TN.to(dtype)
        self.y_TN = self.x_TK @ self.w_NK.mT
        self.weight = recompute.weigh(self.w_NK, FP8.w)[1]
        self.sampler = RowSampler()

    def train(self) -> None:
        """Forward and backward, as a trainer runs them."""
        x_TK, w_NK = self.x_TK.requires_grad_(), self.w_NK.requires_grad_()
        torch.autograd.grad(torch.nn.functional.linear(x_TK, w_NK), (x_TK, w_NK), self.dy_TN)

    def error(self, gemm: str, rows: Tensor | None = None) -> Tensor:
        """float64 [V]: the GEMM recomputed for those rows, for 64 drawn ones by default."""
        x_TK, w_NK, dy_TN = self.x_TK.detach(), self.w_NK.detach(), self.dy_TN
        if rows is None:
            rows = self.sampler.rows(self.height(gemm), x_TK.device)
        if gemm == "fprop":
            return recompute.fprop_error(x_TK, w_NK, self.y_TN, rows)
        if gemm == "dgrad":
            return recompute.dgrad_error(dy_TN, w_NK, None, rows, emulate=FP8, weight=self.weight)
        return recompute.wgrad_error(dy_TN, x_TK, None, rows, emulate=FP8)

    def height(self, gemm: str) -> int:
        """Rows of that GEMM's result."""
        return self.w_NK.shape[0] if gemm == "wgrad" else self.x_TK.shape[0]


def cases(quick: bool) -> Sequence[harness.Case]:
    """Each GEMM by rows and whole, in both dtypes, against the layer's own three GEMMs."""
    torch.set_num_threads(1)
    found = []
    for shape in QUICK_SHAPES if quick else SHAPES:
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            layer = Layer(shape, dtype)
            for gemm in GEMMS:
                label = f"{gemm}_{{}}_{name}_{'x'.join(map(str, shape))}_vs_layer"
                everything = torch.arange(layer.height(gemm))
                found.append(case(label.format("rows"), layer, gemm))
                found.append(case(label.format("whole"), layer, gemm, everything))
    return found


def case(name: str, layer: Layer, *which: Any) -> harness.Case:
    """One recomputed GEMM against the layer."""
    return harness.Case(name=name, ours=lambda: layer.error(*which), baseline=layer.train, most_pairs=20)


def data(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Operand [rows, columns] of that kind, float32."""
    x = torch.randn(shape, generator=generator)
    if kind == "lognormal":
        x = x.sign() * (1.5 * torch.randn(shape, generator=generator)).exp()
    if kind == "outlier_channels":
        x[:, torch.randperm(shape[1], generator=generator)[:8]] *= 300
    if kind == "gradient_like":
        # Tokens differ in scale by decades, and many elements are zero.
        x *= (1.5 * torch.randn(shape[0], 1, generator=generator)).exp() * 1e-6
        x *= torch.rand(shape, generator=generator) > 0.3
    return x


def sampled_rows(quick: bool) -> list[dict[str, Any]]:
    """Two rows a GEMM and kind of data: the bias of its sampled relative error, and the error of one sample."""
    rows = []
    for kind in DATA:
        layer = Layer(SAMPLED, torch.float32)
        generator = torch.Generator().manual_seed(1)
        layer.x_TK = data(kind, (SAMPLED[0], SAMPLED[2]), generator)
        layer.dy_TN = data(kind, (SAMPLED[0], SAMPLED[1]), generator)
        for gemm, error in ((gemm, judged_by_fp8(layer, gemm)) for gemm in GEMMS):
            whole = relative_error(error(torch.arange(layer.height(gemm))))
            draws = range(QUICK_DRAWS if quick else DRAWS)
            sampled = (layer.sampler.rows(layer.height(gemm), torch.device("cpu")) for _ in draws)
            rows += described(f"{gemm}_{kind}", [relative_error(error(each)) / whole for each in sampled])
    return rows


def judged_by_fp8(layer: Layer, gemm: str) -> Callable[[Tensor], Tensor]:
    """The GEMM's error against emulated FP8: the real output of a float32 layer has none to speak of."""
    if gemm == "fprop":
        layer.y_TN = layer.x_TK @ layer.w_NK.mT
        return lambda rows: recompute.fprop_error(layer.x_TK, layer.w_NK, layer.y_TN, rows, emulate=FP8)
    return lambda rows: layer.error(gemm, rows)


def relative_error(vector_V: Tensor) -> float:
    """sqrt(sum (x - xq)^2 / sum x^2)."""
    part, whole = (float(vector_V[COLUMNS.index(name)]) for name in ("sum_sq_err", "sum_sq"))
    return math.sqrt(part / whole)


def described(name: str, ratios: list[float]) -> list[dict[str, Any]]:
    """Mean and spread of sampled over whole, in per cent; `ratio` is what the goal bounds."""
    mean, error = statistics.fmean(ratios), statistics.fmean((ratio - 1) ** 2 for ratio in ratios) ** 0.5
    spread = statistics.pstdev(ratios) / len(ratios) ** 0.5
    ordered = sorted(ratios)
    bias = {"case": f"{name}_sample_bias", "value": 100 * (mean - 1), "unit": "%", "ratio": 1 + abs(mean - 1)}
    one = {"case": f"{name}_sample_error", "value": 100 * error, "unit": "%", "ratio": 1 + error}
    return [
        bias | {"low": mean - 1.96 * spread, "high": mean + 1.96 * spread, "goal": BIAS_GOAL},
        one
        | {"low": ordered[len(ordered) // 40], "high": ordered[-1 - len(ordered) // 40], "goal": ERROR_GOAL},
    ]


def print_sampled(rows: Sequence[dict[str, Any]]) -> None:
    """The rows in per cent of the whole GEMM's relative error, with the interval of sampled over whole."""
    for row in rows:
        goal = f"goal {100 * (row['goal'] - 1):.0f} %"
        spread = f"({row['low']:.3f} to {row['high']:.3f})"
        print(f"  {row['case']:<48} {row['value']:9.3f} %   {spread}  {goal}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case, sample every kind of data, print the table, write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="fewer pairs and draws, small layers")
    options = parser.parse_args(arguments)
    harness.require_writable(parser, options.json)
    report = harness.run("recompute_cost", cases(options.quick), pairs=3 if options.quick else 20)
    harness.print_table(report)
    sampled = sampled_rows(options.quick)
    print_sampled(sampled)
    report["rows"] += sampled
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
