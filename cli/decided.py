"""Says beside a readiness report what the run itself decided meanwhile, and why."""

from collections.abc import Iterator

from fp8_safeguard.cli.output import Item, printable

MOST_NAMES = 3
"""Decisions that a line names."""


def named_causes(found: Item) -> dict[str, str]:
    """By layer the cause that the run's newest decision on it names: `outlier channels (FP8)`, as `status` tells it."""
    from fp8_safeguard.dashboards.causes import cause_words

    told = found.get("decided") or ()
    return {item["layer"]: cause_words(item["cause"]) for item in told if item.get("cause")}


def decided_lines(found: Item) -> Iterator[str]:
    """What was in force at the steps of the report, a line for each cause: the verdicts are of plain FP8, before it, too."""
    from fp8_safeguard.dashboards.causes import cause_words
    from fp8_safeguard.dashboards.decisions import deviates

    groups: dict[str, list[Item]] = {}
    for item in found.get("decided") or ():
        if item["action"] not in ("advice", "restore"):
            groups.setdefault(cause_words(item["cause"]) if item.get("cause") else "", []).append(item)
    for cause, items in groups.items():
        since = max(int(item["since_step"]) for item in items)
        layers = len({item["layer"] for item in items})
        who = f"{printable(str(items[0]['layer']))!r}" if layers == 1 else f"{layers} layers"
        ids = ", ".join(printable(str(item["id"])) for item in items[:MOST_NAMES])
        more = f" and {len(items) - MOST_NAMES} more" if len(items) > MOST_NAMES else ""
        why = f", because of {cause}" if cause else ""
        yield (
            f"decided meanwhile{why}: {who} {deviates(item['action'] for item in items)} from step {since} on ({ids}{more}); the "
            f"verdicts count the steps before that, too, and --from-step {since} leaves those out"
        )
