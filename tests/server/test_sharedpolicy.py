"""A policy file holds for every run, and a wrong one stops the start with its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fp8_safeguard.monitor.policyconfig import PolicyConfig
from fp8_safeguard.monitor.policyfile import PolicyFileError
from fp8_safeguard.monitor.thresholds import FLOOR
from fp8_safeguard.server.app import create_app
from fp8_safeguard.server.settings import Settings
from fp8_safeguard.server.sharedpolicy import OF_EACH_RUN, shared_policy
from fp8_safeguard.server.store import open_store, policy_of

LAYER = "blocks.0.mlp"


def written(folder: Path, text: str) -> str:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_setting_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_SAFEGUARD_POLICY_FILE", "/etc/policy.toml")
    assert Settings().policy_file == "/etc/policy.toml"


def test_a_file_sets_what_all_runs_have_in_common(tmp_path: Path) -> None:
    text = 'exclude = ["*.attention.*"]\nttl_steps = 500\ngradient_smoothing = true\ndwell_steps = 20\n'
    assert shared_policy(written(tmp_path, text)) == PolicyConfig(
        exclude=("*.attention.*",), ttl_steps=500, gradient_smoothing=True, dwell_steps=20, preset=FLOOR
    )
    assert shared_policy(None) == shared_policy("") == PolicyConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dwell_steps = ", "which is not TOML"),
        ("dwell = 3", "is no setting of a policy"),
        ("ttl_steps = 0", "ttl_steps is a number of steps from 1 upward"),
        *((f"{name} = 1", f"which sets {name}: each run has its own") for name in OF_EACH_RUN),
    ],
)
def test_a_wrong_file_stops_the_start_with_its_name(
    text: str, said: str, tmp_path: Path, settings: Settings
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PolicyFileError, match=said) as error:
        create_app(settings.model_copy(update={"policy_file": path}))
    assert str(error.value).startswith(f"FP8_SAFEGUARD_POLICY_FILE is {path!r}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="which cannot be read: No such file"):
        shared_policy(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("excluded", [False, True])
def test_runs_are_decided_on_by_it(
    excluded: bool,
    tmp_path: Path,
    make_client: Callable[..., TestClient],
    documents: Any,
) -> None:
    """A layer that the file excludes alerts as before, and nothing is decided about it."""
    text = f'exclude = ["{LAYER}"]\n' if excluded else "ttl_steps = 400\n"
    client = make_client(policy_file=written(tmp_path, text))
    slots = documents.slots(8)
    ill = [slot["layer"] == LAYER and slot.get("gemm") == "dgrad" for slot in slots]
    values = [
        documents.values(slot, **({"sum_sq_err": 1e6} if bad else {}))
        for slot, bad in zip(slots, ill, strict=True)
    ]
    sample = documents.sample(4, slots, values, mode="enforce")
    reply = client.post("/api/v1/runs/demo/samples", json=sample).json()
    assert [made["layer"] for made in reply["decisions"]] == ([] if excluded else [LAYER])
    assert [alert["layer"] for alert in reply["alerts"]] == [LAYER]
    if not excluded:
        assert reply["plan"]["entries"][0]["expires_step"] == 404


def test_what_happens_to_the_file_later_touches_no_running_server(
    tmp_path: Path, make_client: Callable[..., TestClient], documents: Any
) -> None:
    """Changed, broken, gone: samples are decided on by what was read at the start."""
    path = Path(written(tmp_path, f'exclude = ["{LAYER}"]\n'))
    client = make_client(policy_file=str(path))
    slots = documents.slots(8)
    ill = [slot["layer"] == LAYER and slot.get("gemm") == "dgrad" for slot in slots]
    values = [
        documents.values(slot, **({"sum_sq_err": 1e6} if bad else {}))
        for slot, bad in zip(slots, ill, strict=True)
    ]
    for step, change in enumerate(
        (lambda: path.write_text("exclude = []"), lambda: path.write_text("exclude = ["), path.unlink)
    ):
        change()
        sample = documents.sample(step, slots, values, mode="enforce")
        reply = client.post("/api/v1/runs/demo/samples", json=sample)
        assert (reply.status_code, reply.json()["decisions"]) == (200, [])


def test_a_store_without_one_has_the_defaults(settings: Settings) -> None:
    store = open_store(settings)
    with store.engine.connect() as conn:
        assert policy_of(conn) == PolicyConfig()
    store.close()
