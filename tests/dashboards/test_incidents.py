"""One incident, not fifteen alerts: what follows from a cause is folded under it, and nothing else is."""

from typing import Any

from fp8_safeguard.dashboards.alerts import alert_rows
from fp8_safeguard.dashboards.incidents import fold, incident

LAYERS = [f"blocks.{number}.{part}" for number in range(3) for part in ("qkv", "mlp")]


def alert(number: int, layer: str | None, first_step: int, **changes: Any) -> dict[str, Any]:
    slot = changes.pop("slot", {"operand": "x", "layout": "row"})
    return {
        "id": number, "layer": layer, "rule": "underflow", "severity": "watch", "state": "open", "metric": "underflow_ratio",
        "value": 0.02, "threshold": 0.005, "first_step": first_step, "last_step": first_step + 1, "step": first_step,
        "slot": slot, "slots": [], "occurrences": 1,
    } | changes  # fmt: skip


def cause(layer: str | None, first_step: int, kind: str = "fp8", **slot: str) -> dict[str, Any]:
    place = {"layer": layer, **(slot or {"operand": "x", "layout": "row"})} if layer else None
    return {"name": "outlier-channels", "kind": kind, "layer": layer, "slot": place, "summary": "8 channels",
            "first_step": first_step, "step": first_step, "decisions": ["r-1"]}  # fmt: skip


def ids(groups: list[list[Any]]) -> list[list[int]]:
    return [[item["id"] for item in group] for group in groups]


DGRAD = {"gemm": "dgrad"}


def test_what_follows_a_forward_fault_is_later_layers_and_gradients_anywhere() -> None:
    items = [
        alert(1, "blocks.1.qkv", 100),
        alert(2, "blocks.1.mlp", 101),
        alert(3, "blocks.2.mlp", 102, severity="act", slot={"gemm": "fprop"}),
        alert(4, "blocks.0.qkv", 101),
        alert(5, "blocks.0.qkv", 101, slot=DGRAD),
        alert(6, "blocks.2.qkv", 99),
        alert(7, "blocks.2.qkv", 120, state="resolved"),
        alert(8, None, 101, rule="loss-jump"),
    ]
    assert ids(fold([cause("blocks.1.qkv", 100)], items, LAYERS)) == [[1, 2, 3, 5]]


def test_a_fault_in_gradients_flows_back_and_a_wgrad_is_a_leaf() -> None:
    items = [
        alert(1, "blocks.1.mlp", 100, slot={"operand": "dy", "layout": "row"}),
        alert(2, "blocks.0.mlp", 100, slot=DGRAD),
        alert(3, "blocks.2.mlp", 100, slot=DGRAD),
        alert(4, "blocks.0.mlp", 100),
    ]
    assert ids(fold([cause("blocks.1.mlp", 100, operand="dy", layout="row")], items, LAYERS)) == [[1, 2]]
    assert ids(fold([cause("blocks.1.mlp", 100, gemm="wgrad")], items, LAYERS)) == [[1]]


def test_a_cause_that_is_not_fp8s_never_hides_an_alert_that_blames_fp8() -> None:
    items = [
        alert(1, "blocks.1.mlp", 100),
        alert(2, "blocks.1.mlp", 100, severity="act", slot={"gemm": "fprop"}),
        alert(3, None, 100, rule="loss-jump"),
    ]
    norm, run = cause("blocks.1.norm", 100, "not-fp8"), cause(None, 100, "not-fp8")
    assert ids(fold([norm], items, LAYERS)) == [[1]]
    assert ids(fold([run], items, LAYERS)) == [[1, 3]]
    assert ids(fold([cause(None, 100, "hardware")], items, LAYERS)) == [[1, 2, 3]]


def test_an_alert_belongs_to_the_cause_in_its_own_layer_and_to_one_only() -> None:
    items = [alert(1, "blocks.0.mlp", 98), alert(2, "blocks.1.mlp", 99), alert(3, "blocks.2.mlp", 99)]
    found = fold([cause("blocks.0.mlp", 100), cause("blocks.1.mlp", 100)], items, LAYERS)
    # The alert of its own layer says that the cause began before it was named.
    assert ids(found) == [[1, 3], [2]]


def test_an_incident_shows_its_own_layer_and_folds_the_others() -> None:
    items = [alert(number, layer, 100) for number, layer in enumerate(LAYERS[2:])]
    items.append(alert(9, "blocks.2.mlp", 101, rule="sqnr"))
    found = incident(cause("blocks.1.qkv", 1100), alert_rows(items))
    assert [row.layer for row in found.own] == ["blocks.1.qkv"]
    assert (found.folded, found.since, len(found.rows)) == ("4 alerts in 3 layers", "since step 1,100", 4)
    assert (found.cause.title, found.cause.kind_words) == ("outlier channels", "FP8")
    # A cause that was named long after its first alert was not known at the start.
    late = cause("blocks.1.qkv", 1100) | {"found_step": 1130}
    assert incident(late, alert_rows(items)).since == "since step 1,100, found at step 1,130"
    assert incident(late | {"found_step": 1100}, alert_rows(items)).since == "since step 1,100"
    alone = incident(cause(None, 5), alert_rows(items[:1]))
    assert ([row.ids for row in alone.own], alone.folded) == ([(0,)], "")
    assert incident(cause(None, 5), ()).own == ()
