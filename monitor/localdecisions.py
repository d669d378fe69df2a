"""Decisions that a client made alone, as they travel with its samples."""

import re
from collections.abc import Mapping
from typing import Any

from fp8_safeguard.monitor.document import Reader
from fp8_safeguard.monitor.plan import Decision, PlanError
from fp8_safeguard.monitor.slots import check_text, is_count

LOCAL_VERSION = "local_plan_version"
"""In a decision's evidence: the version of the client's own plan that took it up."""
MOST = 256
"""Decisions that one sample may bring."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,511}")


def read_local_decisions(reader: Reader) -> tuple[Decision, ...]:
    """The sample's `local_decisions`; each asks for an entry of the plan, for a client makes no others."""
    wire = reader.body.get("local_decisions")
    if wire is None:
        return ()
    if not isinstance(wire, (list, tuple)) or len(wire) > MOST:
        reader.fault("/local_decisions", f"local_decisions is a list of at most {MOST} decisions")
        return ()
    found: list[Decision] = []
    for place, item in enumerate(wire):
        try:
            found.append(_checked(Decision.from_wire(item)))
        except (TypeError, ValueError, OverflowError) as error:
            reader.fault(f"/local_decisions/{place}", str(error))
    return tuple(found)


def _checked(decision: Decision) -> Decision:
    """Raises ValueError where it is none that a plan can hold and a database keep."""
    texts: dict[str, Any] = {name: getattr(decision, name) for name in ("id", "run", "rule", "reason")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    counts = {"step": decision.step, "effective_step": decision.effective_step}
    wrong += [name for name, value in counts.items() if not (value is None or is_count(value))]
    counted = (LOCAL_VERSION, "ttl_steps")
    told = decision.evidence if isinstance(decision.evidence, Mapping) else {LOCAL_VERSION: None}
    wrong += [f"evidence.{name}" for name in counted if not is_count(told.get(name, 0))]
    if wrong or decision.step is None:
        raise PlanError(
            f"{', '.join(wrong) or 'step'}: texts, steps, and an object with whole numbers are wanted"
        )
    if not _ID.fullmatch(decision.id):
        raise PlanError("id has 1 to 512 letters, digits, '.', '_' or '-', the first a letter or digit")
    if not is_count(decision.step + told.get("ttl_steps", 0)):
        raise PlanError("evidence.ttl_steps reaches beyond step 2^63 - 1")
    check_text("layer", decision.layer)
    decision.entry()
    return decision
