"""The alert list in words: states, groups, filters, counts."""

from typing import Any

import pytest

from fp8_safeguard.dashboards.alerts import CHIPS, alert_chips, alert_rows, chips_of


def alert(**changes: Any) -> dict[str, Any]:
    return {
        "id": 1, "layer": "a", "rule": "underflow", "severity": "watch", "state": "open",
        "metric": "underflow_ratio", "slot": {"layer": "a", "operand": "x", "layout": "row"},
        "value": 0.009, "threshold": 0.005, "first_step": 207, "last_step": 215, "occurrences": 1,
    } | changes  # fmt: skip


def gemm(name: str, **changes: Any) -> dict[str, Any]:
    return alert(metric="relative_error", slot={"layer": "a", "gemm": name}, threshold=0.05, **changes)


def test_an_alert_opens_on_a_window_around_its_first_bad_step() -> None:
    (row,) = alert_rows([alert()])
    assert (row.title, row.detail, row.when) == ("underflow x row", "0.9 % (limit ≤ 0.5 %)", "since step 207")
    assert (row.from_step, row.to_step, row.metric, row.slot) == (167, 287, "underflow_ratio", "x row")


@pytest.mark.parametrize(
    ("first", "last_step", "window"),
    [(3, 500, (0, 83)), (207, 230, (167, 230)), (207, None, (167, 287)), (207, 100, (167, 207))],
)
def test_the_window_stays_inside_the_run(first: int, last_step: int | None, window: tuple[int, int]) -> None:
    (row,) = alert_rows([alert(first_step=first)], last_step=last_step)
    assert (row.from_step, row.to_step) == window


def test_a_slot_that_is_clear_again_speaks_for_no_alert_that_others_hold_open() -> None:
    parts = [gemm("fprop", value=0.9, over=True), gemm("wgrad", value=0.2, first_step=209, over=False)]
    (row,) = alert_rows([gemm("fprop", slots=parts)])
    assert (row.title, row.detail, row.also) == ("GEMM error wgrad", "20 % (limit ≤ 5 %)", ("fprop",))
    assert (row.first_step, row.slot) == (209, "wgrad")


def test_an_alert_that_waits_says_so_and_comes_after_those_in_breach() -> None:
    since = {"decision": "r-7", "step": 1230}
    waits = gemm("wgrad", layer="b", severity="act", waits_since=since)
    rows = alert_rows([waits, alert(), gemm("wgrad", layer="b", severity="act")])
    assert [(row.layer, row.standing, row.tone) for row in rows] == [
        ("b", "act", "unstable"),
        ("a", "watch", "watch"),
        ("b", "waits", "watch"),
    ]
    assert rows[-1].remarks == (
        "waits for its next measurement: no breach since decision r-7 took effect at step 1,230",
    )
    (held,) = alert_rows([waits | {"state": "held"}])
    assert (held.standing, held.remarks) == ("held", ())


@pytest.mark.parametrize(
    ("clean", "remarks"),
    [(197, ("began after step 197, the last clean sample",)), (206, ()), (None, ())],
)
def test_what_began_between_two_samples_says_so(clean: int | None, remarks: tuple[str, ...]) -> None:
    (row,) = alert_rows([alert(rule="non-finite", clean_step=clean)])
    assert row.remarks == remarks


def test_what_needs_somebody_comes_first_and_what_is_over_last() -> None:
    rows = alert_rows(
        [
            alert(layer="over", state="resolved"),
            alert(layer="held", state="held", severity="act"),
            alert(layer="seen", severity="act", acknowledged="2026-01-01T00:00:00Z", acknowledged_by="ana"),
            alert(layer="watch"),
            alert(layer="act", severity="act", first_step=300),
        ]
    )
    assert [(row.layer, row.state) for row in rows] == [
        ("act", "open"), ("watch", "open"), ("seen", "open"), ("held", "held"), ("over", "resolved"),
    ]  # fmt: skip
    assert rows[-1].when == "steps 207 to 215"


def test_an_answer_that_does_not_know_held_is_read_with_the_plan() -> None:
    item = alert()
    del item["occurrences"]
    assert [row.state for row in alert_rows([item], held={"a"})] == ["held"]
    # An answer that knows it is believed.
    assert [row.state for row in alert_rows([alert()], held={"a"})] == ["open"]


def test_alerts_of_one_layer_and_rule_are_one_entry_that_opens_at_the_first_of_them() -> None:
    gemms = [
        gemm("fprop", id=4, value=0.07, first_step=210),
        gemm("dgrad", id=7, value=0.09, first_step=208, occurrences=3),
    ]
    (row,) = alert_rows(gemms)
    assert (row.title, row.detail, row.also, row.when) == (
        "GEMM error dgrad",
        "9 % (limit ≤ 5 %)",
        ("fprop",),
        "since step 208",
    )
    assert (row.slot, row.first_step, row.ids, row.count) == ("dgrad", 208, (4, 7), 4)


def test_an_alert_of_several_slots_opens_what_its_words_and_numbers_speak_of() -> None:
    slots = [
        gemm("fprop", value=0.3, first_step=210, last_step=230),
        gemm("dgrad", value=0.09, first_step=208, last_step=220),
    ]
    (row,) = alert_rows([alert(rule="gemm-error", first_step=208, step=211, slots=slots)])
    # The value is the named slot's own; the others are only named.
    assert (row.title, row.detail, row.also) == ("GEMM error fprop", "30 % (limit ≤ 5 %)", ("dgrad",))
    assert (row.slot, row.metric, row.first_step) == ("fprop", "relative_error", 210)
    # Since the first breach of any of them; it was raised later than that.
    assert (row.when, row.opened, row.from_step) == ("since step 208", "opened at step 211", 168)


def test_what_a_person_said_keeps_entries_apart_and_is_told() -> None:
    rows = alert_rows(
        [
            alert(id=1, acknowledged="2026-01-01T00:00:00Z", acknowledged_by="ana"),
            alert(id=2, silenced=True, silenced_until="2026-01-01T01:00:00Z"),
            alert(id=3),
        ]
    )
    assert [(row.ids, row.remarks) for row in rows] == [
        ((3,), ()),
        ((1,), ("acknowledged by ana",)),
        ((2,), ("silenced until 2026-01-01 01:00 UTC",)),
    ]


@pytest.mark.parametrize(("by", "words"), [(None, "over by itself"), ("ana", "resolved by ana")])
def test_how_an_alert_ended_is_told(by: str | None, words: str) -> None:
    (row,) = alert_rows([alert(state="resolved", resolved_by=by, acknowledged="x")])
    assert (row.remarks, row.acknowledged) == ((words,), False)


def test_an_alert_of_the_whole_run_names_its_rule() -> None:
    (row,) = alert_rows(
        [
            alert(
                layer=None,
                rule="non-finite-loss",
                scope="run",
                metric=None,
                slot=None,
                value=None,
                threshold=None,
            )
        ]
    )
    assert (row.layer, row.title, row.detail, row.metric, row.slot) == ("", "non finite loss", "", "", "")


LIST = [
    alert(id=1),
    alert(id=2, acknowledged="x"),
    alert(id=3, state="held", silenced=True),
    alert(id=4, state="resolved", acknowledged="x", silenced=True),
    alert(id=5, silenced=True),
]


def test_the_counts_add_up_to_all_alerts() -> None:
    counts = {chip.name: chip.count for chip in alert_chips(LIST, ())}
    assert counts == {"open": 2, "held": 1, "acknowledged": 1, "silenced": 1, "resolved": 1}
    assert sum(counts.values()) - counts["acknowledged"] == len(LIST)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_filter_shows_as_many_alerts_as_it_counts(chip: str) -> None:
    shown = sum(len(row.ids) for row in alert_rows(LIST, chips=(chip,)))
    assert shown == next(each.count for each in alert_chips(LIST, ()) if each.name == chip)


@pytest.mark.parametrize(
    ("text", "chips", "unknown"),
    [
        ("", ("open", "held"), []),
        ("none", (), []),
        ("resolved,open", ("open", "resolved"), []),
        ("open,zzz", ("open",), ["zzz"]),
        ("zzz", ("open", "held"), ["zzz"]),
    ],
)
def test_filters_of_an_address(text: str, chips: tuple[str, ...], unknown: list[str]) -> None:
    assert chips_of(text) == (chips, unknown)
