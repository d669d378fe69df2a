"""How a run is judged and what may be done about it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8_safeguard.monitor.baseline import Baseline
from fp8_safeguard.monitor.thresholds import Preset, get_preset
from fp8_safeguard.monitor.wire import MODES


class PolicyConfigError(ValueError):
    """A policy setting outside what is allowed."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How a run is judged and what may be done about it. Validated when made; raises PolicyConfigError."""

    run: str = "run"
    """The run's id: decisions are named after it, `{run}-1` first."""
    preset: str | Preset = "floor"
    """The threshold preset, or its name."""
    mode: str = "observe"
    """observe or advise: decisions are proposals. enforce: decisions change the plan."""
    hysteresis: int = 2
    """Consecutive samples in breach of a watch level that open an alert."""
    clear_samples: int = 3
    """Consecutive clear samples that resolve an alert."""
    nonfinite_samples: int = 2
    """Consecutive samples with NaN or Inf from one place that lead to a fallback there; a single one only alerts."""
    dwell_steps: int = 50
    """Steps that a spot rests after a change, in which it does not change again."""
    restore_samples: int = 5
    """Consecutive healthy samples that a gemm in fallback needs, after the dwell, to be restored."""
    budget_ratio: float = 0.15
    """Largest part of the linear layers' operations that may fall back to BF16."""
    pins: frozenset[str] = frozenset()
    """Layers that are left as they are."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of layers that are never touched, such as `*.attention.*`; they alert as all others."""
    ttl_steps: int | None = None
    """Steps after which an entry expires whose evidence has not come again; None: it stays until its probation is over."""
    gradient_smoothing: bool = False
    """Whether fluctuating gradients may be smoothed; otherwise that is advice."""
    baseline: Baseline | None = None
    """What healthy values look like here: moves the preset's levels, and stands in for medians from the first sample."""

    def __post_init__(self) -> None:
        get_preset(self.preset)
        if self.mode not in MODES:
            raise PolicyConfigError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        for name in ("hysteresis", "clear_samples", "nonfinite_samples", "restore_samples"):
            if getattr(self, name) < 1:
                raise PolicyConfigError(
                    f"{name} is a number of samples from 1 upward, not {getattr(self, name)}"
                )
        if self.dwell_steps < 0:
            raise PolicyConfigError(f"dwell_steps is a number of steps from 0 upward, not {self.dwell_steps}")
        if self.ttl_steps is not None and self.ttl_steps < 1:
            raise PolicyConfigError(
                f"ttl_steps is a number of steps from 1 upward or None, not {self.ttl_steps}"
            )
        if isinstance(self.exclude, str):
            raise PolicyConfigError(f"exclude is a list of patterns, not the text {self.exclude!r}")
        if not 0 <= self.budget_ratio <= 1:
            raise PolicyConfigError(f"budget_ratio is between 0 and 1, not {self.budget_ratio}")

    @property
    def thresholds(self) -> Preset:
        """The preset itself."""
        return get_preset(self.preset)

    def spares(self, layer: str) -> bool:
        """Whether a layer is left as it is: pinned or excluded."""
        return layer in self.pins or any(fnmatchcase(layer, pattern) for pattern in self.exclude)
