"""One arm: a training process and the file it leaves."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.catalogue import CASES

if TYPE_CHECKING:
    from fp8_safeguard.cli.api import Api
    from fp8_safeguard.trainer import StepReport, Trainer

SAFEGUARD, NONE, TWIN, SEED, AUTOSWITCH = "safeguard", "none", "twin", "seed", "autoswitch"
WATCHED: Mapping[str, str] = {SAFEGUARD: "floor", SEED: "seed", AUTOSWITCH: "autoswitch"}
"""Threshold preset of each arm that a server decides for."""
VALIDATION_SEQUENCES = 64


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One training run of the suite."""

    case: str
    """Name of the case, or of what several cases share."""
    seed: int
    name: str
    """Which way of training: safeguard, none, twin, seed, autoswitch."""
    fault: Mapping[str, Any] | None
    """What is broken, as a config has it."""
    until: int
    """Steps, those of the checkpoint included."""
    fork: int
    """Steps of the checkpoint that it starts from; 0 starts a new run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the demo's configuration."""
    ranks: int = 1
    """Processes that train together, data-parallel."""

    @property
    def key(self) -> str:
        """Name of its file: another fault, another length or another model is another arm."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.case}-{self.seed}-{self.name}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where arms are run."""

    folder: Path
    """Checkpoints, results, spool."""
    server: str
    stamp: str
    """Of this invocation: an arm that is run again is another run on the server."""

    def result(self, arm: Arm) -> Path:
        """Its file."""
        return self.folder / "arms" / f"{arm.key}.json"

    def checkpoint(self, arm: Arm) -> Path:
        """The state that it starts from."""
        digest = hashlib.sha256(json.dumps(_model(arm), sort_keys=True).encode()).hexdigest()[:8]
        return self.folder / f"checkpoint-{arm.seed}-{arm.fork}-{digest}.pt"


def _model(arm: Arm) -> dict[str, Any]:
    """What of the configuration a checkpoint belongs to: micro-batches are the fork's own."""
    return {name: value for name, value in arm.config.items() if name != "micro_batches"}


def make_checkpoint(arm: Arm, place: Place) -> None:
    """Train that far in FP8, with nothing wrong and nobody watching."""
    from fp8_safeguard.trainer import TrainConfig, Trainer

    _quiet(place)
    trainer = Trainer(TrainConfig.demo(run=f"start-{arm.seed}", seed=arm.seed, **_model(arm)))
    trainer.run(arm.fork)
    trainer.save(place.checkpoint(arm))


def run_arm(arm: Arm, place: Place) -> None:
    """Train one arm to its end and write its file; further ranks in processes of their own."""
    from fp8_safeguard.cli.server_process import free_port

    port, spawn = free_port(), multiprocessing.get_context("spawn")
    peers = [spawn.Process(target=_train, args=(arm, place, rank, port)) for rank in range(1, arm.ranks)]
    for peer in peers:
        peer.start()
    try:
        _train(arm, place, 0, port)
    finally:
        for peer in peers:
            peer.join(60)
            peer.kill()


def _train(arm: Arm, place: Place, rank: int, port: int) -> None:
    from fp8_safeguard.cli.api import Api

    _quiet(place)
    if arm.ranks > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(arm.ranks), **address}
    started, run = time.time(), f"{arm.case}-{arm.seed}-{arm.name}-{place.stamp}"
    trainer = _trainer(arm, place, run)
    record = _Record(Api(place.server), run) if arm.name in WATCHED and rank == 0 else None
    reports = trainer.run(arm.until, on_step=record)
    trainer.close()
    if rank:
        return
    found: dict[str, Any] = {
        "arm": asdict(arm),
        "run": run,
        "losses": {str(r.step): r.loss for r in reports},
        "gradient_norms": {str(r.step): r.gradient_norm for r in reports},
        "skipped_steps": sum(r.skipped for r in reports),
        "step_seconds": sorted(r.seconds for r in reports)[len(reports) // 2],
        "validation": _validation(trainer),
        "alerts": record.alerts if record else [],
        "decisions": record.decisions() if record else [],
        "ranges": record.ranges() if record and CASES[arm.case].kind == "healthy" else {},
        "seconds": round(time.time() - started, 1),
    }
    _write(place.result(arm), found)


def _trainer(arm: Arm, place: Place, run: str) -> Trainer:
    from fp8_safeguard.trainer import TrainConfig, Trainer
    from fp8_safeguard.trainer.faults import fault_from_mapping

    changes: dict[str, Any] = {"run": run, "precision": "bf16" if arm.name == TWIN else "fp8"}
    if arm.fault is not None:
        changes["fault"] = fault_from_mapping(arm.fault)
    if arm.name in WATCHED:
        # A reply that is waited for for long enough: the run repeats exactly whatever else the machine does.
        changes |= {"server": place.server, "mode": "enforce", "thresholds": WATCHED[arm.name]}
        changes |= {"lockstep": True, "lockstep_seconds": 60.0}
    if arm.fork == 0:
        return Trainer(TrainConfig.demo(seed=arm.seed, **changes, **arm.config))
    forked = {name: value for name, value in arm.config.items() if name not in _model(arm)}
    return Trainer.load(place.checkpoint(arm), **changes, **forked)


class _Record:
    """What the server says after each step: alerts as they open and worsen."""

    def __init__(self, api: Api, run: str) -> None:
        self._api, self._run = api, run
        self._known: set[tuple[Any, str]] = set()
        self.alerts: list[dict[str, Any]] = []
        """Each alert once at watch and once at act, with the step at which it was so."""

    def __call__(self, report: StepReport) -> None:
        for item in reversed(self._api.items(f"/runs/{self._run}/alerts")):
            if (item["id"], item["severity"]) not in self._known:
                self._known.add((item["id"], item["severity"]))
                names = ("rule", "layer", "severity", "slot", "metric", "value", "threshold")
                self.alerts.append({"step": report.step, **{name: item.get(name) for name in names}})

    def decisions(self) -> list[dict[str, Any]]:
        """All decisions, the oldest first, with their outcome."""
        names = (
            "id", "step", "layer", "target", "action", "value", "rule", "reason", "state", "effective_step", "outcome",
        )  # fmt: skip
        found = []
        for item in reversed(self._api.items(f"/runs/{self._run}/decisions")):
            evidence = item.get("evidence") or {}
            found.append(
                {name: item.get(name) for name in names}
                | {"cause": evidence.get("cause"), "what_if": evidence.get("what_if")}
            )
        return found

    def ranges(self) -> dict[str, float]:
        """How far the run went, as healthy_ranges has it."""
        from faults.ranges import healthy_ranges

        from fp8_safeguard.cli.source import ServerSource

        return healthy_ranges(ServerSource(self._api).observations(self._run))


def _validation(trainer: Trainer) -> float:
    """Loss of the weights as they are now, in BF16: what the fault and the plan did to them."""
    from fp8_safeguard.trainer.model import linear_precision

    for module in trainer.model.linears().values():
        module.precision = linear_precision("bf16")
    return trainer.evaluate(VALIDATION_SEQUENCES)


def _quiet(place: Place) -> None:
    os.environ["FP8_SAFEGUARD_SPOOL_DIR"] = str(place.folder / "spool")
    logging.getLogger("fp8_safeguard").setLevel(logging.ERROR)


def _write(file: Path, found: Mapping[str, Any]) -> None:
    """Whole or not at all: what is there counts as finished."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(_plain(found), allow_nan=False))
    unfinished.replace(file)


def _plain(value: Any) -> Any:
    """Numbers that JSON has not as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
