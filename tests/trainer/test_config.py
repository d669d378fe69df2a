"""TrainConfig: what it refuses, and how it says so."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from fp8_safeguard.trainer import ConfigError, OutlierDrift, TrainConfig
from fp8_safeguard.trainer.config import FORK_FIELDS
from fp8_safeguard.trainer.faults import KINDS
from fp8_safeguard.trainer.presets import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"layers": True}, "layers is True; it must be of type int"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"learning_rate": "2e-3"}, "learning_rate is '2e-3'; it must be of type float"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must lie between 0 and 1"),
        ({"d_model": 250}, "d_model 250 is not a multiple of heads 4"),
        ({"d_model": 12}, "needs an even one"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"experts_per_token": 9}, "experts_per_token 9 is more than experts 8"),
        ({"micro_batches": 3}, "sequences_per_step 8 is not a multiple of micro_batches 3"),
        ({"precision": "int8"}, "precision is 'int8'; it must be one of fp8, bf16"),
        ({"mode": "force"}, "must be one of observe, advise, enforce"),
        ({"run": "a b"}, "run is 'a b'; it must match"),
        ({"server": 8000}, "server is 8000; it must be text or None"),
        ({"fault": "drift"}, "fault is 'drift'; it must be a Fault of trainer.faults or None"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"recover": True}, "recover is on, but checkpoint_dir is None: give it a folder"),
        ({"skip_limit": 0}, "skip_limit is 0; it must be at least 1"),
        ({"divergence_nats": 0.0}, "divergence_nats is 0.0; it must be above 0 and finite"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**changes)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(layers=0, threads=0, mode="x")
    assert str(caught.value).count(";") >= 5
    for name in ("layers", "threads", "mode"):
        assert name in str(caught.value)


def test_a_misspelt_field_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        TrainConfig.from_mapping({"learning_rte": 1e-3})


def test_the_config_is_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().layers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainConfig("run")  # type: ignore[misc]


@pytest.mark.parametrize("record", [TrainConfig, *KINDS.values()])
def test_every_field_has_a_docstring_below_it(record: type) -> None:
    # Fields of a base class are documented there; a new default alone needs no words.
    documented = {
        node.target.id
        for base in record.__mro__[:-1]
        for part in ast.walk(ast.parse(inspect.getsource(base)))
        if isinstance(part, ast.ClassDef)
        for node, below in itertools.pairwise(part.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    assert documented >= {f.name for f in fields(record)}


def test_plain_values_round_trip_without_the_token() -> None:
    config = TrainConfig(token="secret", fault=OutlierDrift(start_step=7), seed=3)
    plain = config.to_mapping()
    assert "secret" not in repr(plain)
    assert "secret" not in repr(config)
    assert TrainConfig.from_mapping(plain) == TrainConfig(fault=OutlierDrift(start_step=7), seed=3)


def test_fork_changes_the_numerics_and_refuses_the_model() -> None:
    config = TrainConfig()
    assert config.fork(run="arm", precision="bf16").precision == "bf16"
    with pytest.raises(ConfigError, match="d_model cannot change when a run starts from a checkpoint"):
        config.fork(d_model=128)
    with pytest.raises(ConfigError, match="seed cannot change"):
        config.fork(seed=1)


def test_fork_fields_exist() -> None:
    assert {f.name for f in fields(TrainConfig)} >= FORK_FIELDS


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_preset_is_valid_and_takes_changes(name: str) -> None:
    assert TrainConfig.preset(name, seed=5).seed == 5


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="demo, ling, seed, tiny"):
        TrainConfig.preset("large")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_each_shipped_file_loads(path: Path) -> None:
    assert isinstance(TrainConfig.from_file(path, run="other"), TrainConfig)


def test_a_file_starts_from_its_preset_and_changes_win(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "demo"\nlayers = 3\nseed = 1\n[fault]\nstart_step = 9\n')
    config = TrainConfig.from_file(path, seed=2)
    assert (config.layers, config.seed, config.fault) == (3, 2, OutlierDrift(start_step=9))
    assert config.sequences_per_step == TrainConfig.demo().sequences_per_step


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers = ", "not valid TOML"),
        ("[fault]\nsteps = 1", "fault.steps is unknown"),
        ("[fault]", "start_step is missing"),
    ],
)
def test_a_bad_file_is_a_config_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        TrainConfig.from_file(path)
    with pytest.raises(ConfigError, match="cannot read the config"):
        TrainConfig.from_file(tmp_path / "absent.toml")
