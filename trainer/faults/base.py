"""What every fault has: kind, start, plain values, a way back."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from torch import nn

from fp8_safeguard.trainer.data import Batch
from fp8_safeguard.trainer.errors import ConfigError

Harm = Literal["fp8", "both", "neither"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong in training, from a step on.

    `apply` is called before the forward of every step and puts the model into the state that belongs to that step,
    whatever came before: a run resumed in the middle of a fault goes on with it. `restore` takes it off again.
    """

    kind: ClassVar[str] = ""
    """Its name in a config."""
    harms: ClassVar[Harm] = "fp8"
    """fp8: BF16 keeps every bit. both: BF16 is hurt alike, no precision helps. neither: a healthy thing."""

    start_step: int
    """First step with the fault (the step that this number of completed steps precedes)."""

    def __post_init__(self) -> None:
        wrong = next(iter(self.problems()), None)
        if wrong is not None:
            raise ConfigError(wrong)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_mapping; ConfigError names an unknown or missing key. `kind` may be left out."""
        chosen = {name: value for name, value in values.items() if name != "kind"}
        if values.get("kind", cls.kind) != cls.kind:
            raise ConfigError(f"fault.kind is {values['kind']!r}, but these are the values of a {cls.kind!r}")
        known = [f.name for f in fields(cls)]
        for name in chosen:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                takes = f"a {cls.kind} takes {', '.join(known)}"
                raise ConfigError(f"fault.{name} is unknown{hint}; {takes}")
        if "start_step" not in chosen:
            raise ConfigError("fault.start_step is missing: it says when the fault begins")
        return cls(**chosen)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for a config file or a checkpoint."""
        return {"kind": self.kind, **asdict(self)}

    def problems(self) -> Iterator[str]:
        """What is wrong with the values; a fault with ranges of its own adds to it."""
        allowed = {"int": (int,), "float": (int, float), "str": (str,)}
        for f in fields(self):
            value, (name, *optional) = getattr(self, f.name), str(f.type).split(" | ")
            right = isinstance(value, allowed[name]) and not isinstance(value, bool)
            if not right and not (optional and value is None):
                yield f"fault.{f.name} is {value!r}; it must be of type {f.type}"
                return
        if self.start_step < 0:
            yield f"fault.start_step is {self.start_step}; it must be at least 0"

    def active(self, step: int) -> bool:
        """Whether the fault is there at `step`."""
        return step >= self.start_step

    def apply(self, model: nn.Module, layers: int, step: int) -> None:
        """Put the model of so many blocks into its state at `step`; called before each forward."""
        if self.active(step):
            self.inject(model, layers, step)
        else:
            self.restore(model)

    def inject(self, model: nn.Module, layers: int, step: int) -> None:
        """Bring the fault about; called at every step at which it is there."""

    def restore(self, model: nn.Module) -> None:
        """Take the fault off; nothing happens where it is not."""

    def batch(self, batch: Batch, step: int) -> Batch:
        """What the step trains on; most faults leave it as it is."""
        return batch


@dataclass(frozen=True, kw_only=True)
class LinearFault(Fault):
    """A fault of some linears: every one of a kind, or those of one block."""

    layer: int | None = None
    """Index of the block, negative from the last; None: every block."""

    endings: ClassVar[tuple[str, ...]] = ("",)
    """Ends of the names of the linears concerned."""

    def linears(self, model: nn.Module, layers: int) -> Iterator[Any]:
        """The linears concerned, in the order of their definition."""
        prefix = "blocks." if self.layer is None else block_prefix(self.layer, layers)
        for name, module in model.named_modules():
            if name.startswith(prefix) and name.endswith(self.endings) and hasattr(module, "precision"):
                yield module


def block_prefix(layer: int, layers: int) -> str:
    """`blocks.3.`; ConfigError where the model has no such block."""
    if not -layers <= layer < layers:
        raise ConfigError(f"fault.layer is {layer}; the model has blocks 0 to {layers - 1}")
    return f"blocks.{layer % layers}."


def fp8_linears(model: nn.Module) -> Iterator[Any]:
    """Every linear with a precision."""
    return (module for module in model.modules() if hasattr(module, "precision"))
