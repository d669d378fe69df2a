"""FSDP2 and DDP on two ranks: each rank counts its own operands, and trains as it would without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("sharded_worker.py")
ROWS = 3 + 4
"""Of the two micro-batches of a step, on each rank."""
LAYERS = {
    "first.up": (16, 32),
    "first.down": (32, 16),
    "second.up": (16, 32),
    "second.down": (32, 16),
    "raw.w_NK": (16, 16),
    "head": (16, 8),
}
"""Input and output features."""
EXPERTS = "raw.experts_ENK"
"""Two of them, [2, 16, 16]; each row goes to one."""
MIXED = ["mixed_after", "mixed_before"]
"""In bfloat16, which is what the weight is read in."""
CHECKPOINTED = ["checkpointed_after", "checkpointed_before"]
SHARDED = [
    "blocks_after", "blocks_before", "layers_after", "layers_before", "kept_after", *MIXED, *CHECKPOINTED,
]  # fmt: skip
REPLICATED = ["ddp", "ddp_static", "ddp_unused", "ddp_no_sync"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw, by the way in which the model was wrapped."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = []
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def counts(sample: dict[str, Any]) -> dict[str, int]:
    """Elements of each slot."""
    names = [
        f"{slot['layer']} {slot.get('gemm') or slot['operand'] + ' ' + slot['layout']}"
        for slot in sample["slots"]
    ]
    pairs = zip(names, sample["slots"], sample["columns"]["count"], strict=True)
    return {name: count for name, slot, count in pairs if slot.get("expert") is None}


@pytest.mark.parametrize("way", [*SHARDED, *REPLICATED])
def test_each_rank_counts_each_use_once_and_trains_bit_for_bit(way: str, ranks: list[dict[str, Any]]) -> None:
    for rank in (rank[way] for rank in ranks):
        assert rank["equal"]
        assert rank["freed"] == 0
        assert rank["said"] == {}
        assert len(rank["samples"]) == 2
        for sample in rank["samples"]:
            seen = counts(sample)
            for layer, (inputs, outputs) in LAYERS.items():
                assert seen[f"{layer} x row"] == seen[f"{layer} x col"] == ROWS * inputs
                assert seen[f"{layer} dy row"] == seen[f"{layer} dy col"] == ROWS * outputs
                assert seen[f"{layer} w tile"] == inputs * outputs
                assert seen[f"{layer} wgrad"] > 0
                assert (f"{layer} dgrad" in seen) == (layer != "first.up")
            for operand in ("x row", "x col", "dy row", "dy col"):
                assert seen[f"{EXPERTS} {operand}"] == ROWS * 16
            assert seen[f"{EXPERTS} w tile"] == 2 * 16 * 16
        _whole_weights(rank, 0.005 if way in MIXED else 1e-12)
        status = {row["name"]: row["status"] for row in rank["coverage"]}
        assert {status[layer] for layer in (*LAYERS, EXPERTS)} == {"observed"}
        assert status.get("second.unused", "not observed") == "not observed"


@pytest.mark.parametrize("way", ["split_after", "split_before"])
def test_b22_a_weight_of_which_a_rank_has_only_a_part_is_named_and_not_read(
    way: str, ranks: list[dict[str, Any]]
) -> None:
    for rank in (rank[way] for rank in ranks):
        assert rank["equal"]
        # Two layers in two micro-batches of two steps; each is told once, and nothing else is wrong.
        assert rank["said"].pop("partitioned: not readable here") == 2 * 2 * 2
        assert all("partitioned" in kind for kind in rank["said"])
        for sample in rank["samples"]:
            whole = {"second.up", "second.down", "raw.w_NK", EXPERTS, "head"}
            assert {slot["layer"] for slot in sample["slots"]} == whole
        reasons = {row["name"]: row["reason"] for row in rank["coverage"] if row["status"] == "not observed"}
        assert reasons == dict.fromkeys(("first.up", "first.down"), "partitioned: not readable here")


def _whole_weights(rank: dict[str, Any], tolerance: float) -> None:
    """w is the whole weight as the GEMM reads it, and no rank's part."""
    sample = rank["samples"][0]
    for slot, sum_sq in zip(sample["slots"], sample["columns"]["sum_sq"], strict=True):
        if slot.get("operand") == "w" and slot.get("expert") is None:
            assert sum_sq == pytest.approx(rank["weights"][slot["layer"]], rel=tolerance)
