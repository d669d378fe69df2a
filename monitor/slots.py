"""Slots: what one TensorStats describes, and how it is named.

A slot is an operand in a layout, or the recomputed result of a GEMM, of one layer; optionally of one expert (global id) or
of a variant (a what-if). The three GEMMs of a linear layer, and the FP8 operands each of them reads:

    fprop   y = x w^T     x in rows, w in tiles
    dgrad   dx = dy w     dy in rows, w in tiles
    wgrad   dw = dy^T x   dy and x in columns (blocks run along the token dimension, which this GEMM sums over)
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

from fp8_safeguard.monitor.quoting import quoted

OPERANDS = ("x", "w", "dy")
LAYOUTS = ("row", "col", "tile")
GEMMS = ("fprop", "dgrad", "wgrad")

GEMM_OPERANDS: dict[str, tuple[tuple[str, str], ...]] = {
    "fprop": (("x", "row"), ("w", "tile")),
    "dgrad": (("dy", "row"), ("w", "tile")),
    "wgrad": (("dy", "col"), ("x", "col")),
}

INT64_MAX = 2**63 - 1


class SlotError(ValueError):
    """A slot that names nothing measurable, with the field at fault in `.field`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Slot:
    """(layer, operand, layout) or (layer, gemm). Validated when made; raises SlotError."""

    layer: str
    """Fully qualified module name: any characters that UTF-8 and a database can hold."""
    operand: str | None = None
    layout: str | None = None
    gemm: str | None = None
    expert: int | None = None
    """Global id of one expert; None for the whole layer."""
    variant: str | None = None
    """Name of a what-if; None for what the layer really does."""
    emulated: bool = False
    """Whether the FP8 side was emulated, because the layer's own result cannot be read."""
    fmt: str | None = None
    """Format if not E4M3 (for a GEMM: the coarser of its operands'); thresholds follow it."""

    def __post_init__(self) -> None:
        check_text("layer", self.layer)
        if self.gemm is None:
            _check_choice("operand", self.operand, OPERANDS)
            _check_choice("layout", self.layout, LAYOUTS)
        else:
            _check_choice("gemm", self.gemm, GEMMS)
            if self.operand is not None or self.layout is not None:
                raise SlotError("gemm", "a slot names either a gemm or an operand with its layout, not both")
        if self.expert is not None and not is_count(self.expert):
            raise SlotError(
                "expert", f"expert is a global id, an integer from 0 upward, not {quoted(self.expert)}"
            )
        if self.variant is not None:
            check_text("variant", self.variant)
        if not isinstance(self.emulated, bool):
            raise SlotError("emulated", f"emulated is true or false, not {quoted(self.emulated)}")
        if self.fmt is not None:
            _check_choice("fmt", self.fmt, ("e4m3", "e5m2"))

    @cached_property
    def key(self) -> str:
        """Text that identifies the slot within a run: two slots with one key are the same slot."""
        return json.dumps([self.layer, self.operand, self.layout, self.gemm, self.expert, self.variant])

    @cached_property
    def family(self) -> str:
        """`key`, with any expert as one: the worst expert of a layer changes from sample to sample."""
        expert = None if self.expert is None else "*"
        return json.dumps([self.layer, self.operand, self.layout, self.gemm, expert, self.variant])

    @cached_property
    def label(self) -> str:
        """How people read it: `blocks.3.mlp.down x row`, `blocks.3.mlp.down wgrad, expert 7`."""
        return f"{self.layer} {self._part}"

    @cached_property
    def canonical(self) -> str:
        """`to_wire` as canonical JSON (RFC 8785): keys sorted, no spaces."""
        return json.dumps(self.to_wire(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @property
    def phrase(self) -> str:
        """`label` in a sentence, the layer in quotes: a name like 0 reads as a number there."""
        return f"{self.layer!r} {self._part}"

    @property
    def _part(self) -> str:
        what = self.gemm or f"{self.operand} {self.layout}"
        expert = "" if self.expert is None else f", expert {self.expert}"
        variant = "" if self.variant is None else f", {self.variant}"
        return f"{what}{expert}{variant}"

    def to_wire(self) -> dict[str, Any]:
        """JSON object with the fields that are set; the position in a sample's list is added there."""
        fields = {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) is not None}
        return {"layer": self.layer, **fields, **({"emulated": True} if self.emulated else {})}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """From a JSON object. Unknown fields are left alone: a newer client may send more. Raises SlotError."""
        if "layer" not in wire:
            raise SlotError("layer", "a slot names its layer")
        emulated = wire.get("emulated")
        return cls(
            layer=wire["layer"],
            emulated=False if emulated is None else emulated,
            **{name: wire.get(name) for name in _OPTIONAL},
        )


_OPTIONAL = ("operand", "layout", "gemm", "expert", "variant", "fmt")


@lru_cache(maxsize=4096)
def gemm_slot(layer: str, gemm: str) -> Slot:
    """The slot of a layer's recomputed GEMM; the same object each time, so its key is made once."""
    return Slot(layer, gemm=gemm)


def reads(gemm: str, operand: str, layout: str | None) -> bool:
    """Whether a gemm reads that operand in that layout (or in any, where no gemm reads that layout)."""
    users = [name for name in GEMMS if (operand, layout) in GEMM_OPERANDS[name]]
    if users:
        return gemm in users
    return any(operand == name for name, _ in GEMM_OPERANDS[gemm])


def gemms_of(slot: Slot) -> tuple[str, ...]:
    """The gemms that a slot speaks of: its own, or those that read the operand."""
    return (slot.gemm,) if slot.gemm is not None else _readers(slot.operand or "", slot.layout)


@lru_cache(maxsize=16)
def _readers(operand: str, layout: str | None) -> tuple[str, ...]:
    return tuple(gemm for gemm in GEMMS if reads(gemm, operand, layout))


def slots_id(slots: Iterable[Slot]) -> str:
    """sha256, in hex, of the slot list as canonical JSON (RFC 8785) in UTF-8, `index` left out."""
    text = ",".join([slot.canonical for slot in slots])
    return hashlib.sha256(f"[{text}]".encode()).hexdigest()


def check_text(field: str, value: Any) -> str:
    """The value, if it is text that UTF-8, JSON and a database can hold; SlotError otherwise."""
    if not isinstance(value, str):
        raise SlotError(field, f"{field} is text, not {quoted(value)}")
    if "\x00" in value:
        raise SlotError(
            field, f"{field} {quoted(value)} holds a NUL character, which PostgreSQL cannot store; remove it"
        )
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise SlotError(
            field,
            f"{field} {quoted(value)} holds a lone surrogate, which UTF-8 cannot carry; send the whole character",
        )
    return value


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to 2^63 - 1; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT64_MAX


def _check_choice(field: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is None:
        raise SlotError(field, f"a slot names an operand with its layout, or a gemm: {field} is missing")
    if not isinstance(value, str) or value not in choices:
        raise SlotError(field, f"{field} {quoted(value)} is not one of {', '.join(choices)}")
