"""The demo's figures, each read back from the server's REST interface."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fp8_safeguard.cli.api import Api

MEAN_STEPS = 20
"""One step of this size has a loss deviation of about 1 %; the mean of the last 20 is what is compared."""


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The contract's keys; losses are means over the last MEAN_STEPS steps, in nats per byte."""

    steps: int
    fault_step: int
    detected_step: int | None
    decided_step: int | None
    effective_step: int | None
    detected_by: str | None
    decision_id: str | None
    layer: str | None
    run_ids: Mapping[str, str]
    loss_healthy: float
    loss_protected: float
    loss_unprotected: float
    loss_bf16_with_fault: float
    alerts_in_healthy_run: int

    def to_json(self) -> dict[str, Any]:
        """The mapping that --json writes."""
        return asdict(self)


def read_report(api: Api, runs: Mapping[str, str], *, steps: int, fault_step: int) -> DemoReport:
    """Ask the server for everything; nothing is remembered from the training."""
    protected = runs["protected"]
    alert = first(api.items(f"/runs/{protected}/alerts"), "step", fault_step)
    decision = first(api.items(f"/runs/{protected}/decisions"), "step", fault_step)
    losses = {arm: tail_loss(api, run, steps) for arm, run in runs.items()}
    return DemoReport(
        steps=steps,
        fault_step=fault_step,
        detected_step=alert.get("step"),
        decided_step=decision.get("step"),
        effective_step=decision.get("effective_step"),
        detected_by=alert.get("rule"),
        decision_id=decision.get("id"),
        layer=decision.get("layer"),
        run_ids=dict(runs),
        loss_healthy=losses["healthy"],
        loss_protected=losses["protected"],
        loss_unprotected=losses["unprotected"],
        loss_bf16_with_fault=losses["bf16_with_fault"],
        alerts_in_healthy_run=len(api.items(f"/runs/{runs['healthy']}/alerts")),
    )


def first(items: Sequence[Mapping[str, Any]], key: str, from_step: int) -> Mapping[str, Any]:
    """The earliest item at or after a step, or an empty mapping. `items` are newest first, as the server lists them."""
    later = [item for item in reversed(items) if item[key] >= from_step]
    return min(later, key=lambda item: item[key]) if later else {}


def tail_loss(api: Api, run: str, steps: int) -> float:
    """Mean training loss over the last MEAN_STEPS steps of a run."""
    series = api.get(f"/runs/{run}/series", metric="loss", from_step=steps - MEAN_STEPS, to_step=steps - 1)
    values = [float(value) for value in series["values"] if value is not None]
    return sum(values) / len(values)


def summary_lines(report: DemoReport, server: str) -> list[str]:
    """What happened, in sentences."""
    gap = {
        name: 100 * (loss / report.loss_healthy - 1)
        for name, loss in (
            ("protected", report.loss_protected),
            ("unprotected", report.loss_unprotected),
            ("bf16", report.loss_bf16_with_fault),
        )
    }
    return [
        "",
        f"At step {report.fault_step} some channels of the last layer began to grow, 25 % a step, as a norm gain gone astray does.",
        *story(report),
        "",
        f"Mean loss of the last {MEAN_STEPS} steps (nats per byte):",
        f"  FP8, no fault               {report.loss_healthy:.4f}",
        f"  FP8, fault, safeguard on    {report.loss_protected:.4f}  ({gap['protected']:+.2f} %)",
        f"  FP8, fault, safeguard off   {report.loss_unprotected:.4f}  ({gap['unprotected']:+.2f} %)",
        f"  BF16, fault                 {report.loss_bf16_with_fault:.4f}  ({gap['bf16']:+.2f} %)",
        f"Alerts in the healthy run: {report.alerts_in_healthy_run}.",
        f"All of this was read from {server}/api/v1/runs/{report.run_ids['protected']} and its three neighbours.",
    ]


def story(report: DemoReport) -> list[str]:
    """Detection, decision and effect, as far as they came."""
    if report.detected_step is None:
        return ["No alert was raised: the safeguard missed the fault."]
    told = [
        f"Step {report.detected_step} (+{report.detected_step - report.fault_step}): first alert, {report.detected_by}."
    ]
    if report.decided_step is None:
        return [*told, "No decision followed."]
    told.append(
        f"Step {report.decided_step} (+{report.decided_step - report.fault_step}): decision {report.decision_id} on {report.layer}."
    )
    if report.effective_step is None:
        return [*told, "The trainer never applied it."]
    return [
        *told,
        f"Step {report.effective_step} (+{report.effective_step - report.fault_step}): the trainer ran with it, without a restart.",
    ]
