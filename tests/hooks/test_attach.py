"""attach() and detach(): what they refuse, what they leave behind, what copies of the model do."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from fp8_safeguard.hooks import AlreadyAttachedError, Guard, HookError, OptionError, attach
from fp8_safeguard.kernels import Fp8Linear
from fp8_safeguard.monitor.thresholds import UnknownPresetError

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


class Two(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours = nn.Linear(8, 8), Fp8Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ours(torch.relu(self.plain(x)))


def traces(model: nn.Module) -> list[object]:
    """Everything on a model that somebody may have put there."""
    found: list[object] = []
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            found += getattr(module, name).values()
        found += [module.observer] if getattr(module, "observer", None) is not None else []
        found += ["forward"] if "forward" in vars(module) else []
    return found


@pytest.mark.parametrize("server", [None, "http://127.0.0.1:9"])
def test_detach_removes_every_trace(server: str | None) -> None:
    model = Two()
    handler = signal.getsignal(signal.SIGTERM)
    threads, hooks = set(threading.enumerate()), len(torch_optimizer._global_optimizer_post_hooks)
    guard = attach(model, every=1, server=server)
    assert traces(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    guard.detach(timeout=0.1)
    guard.detach()
    assert traces(model) == []
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks
    assert signal.getsignal(signal.SIGTERM) == handler
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def test_b11_a_second_attach_is_refused_and_after_detach_it_works(
    watch: Watch, read: Read, train: Train
) -> None:
    model = Two()
    guard = attach(model, run="first")
    for part in (model, model.plain, model.ours, nn.Sequential(model)):
        with pytest.raises(AlreadyAttachedError, match=r"'first'.*detach\(\)"):
            attach(part)
    guard.detach()
    again = watch(model)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(again)["plain x row"].count == 4 * 8


def test_b11_a_failing_with_block_leaves_nothing(train: Train) -> None:
    model = Two()
    with pytest.raises(ZeroDivisionError), attach(model):
        raise ZeroDivisionError
    assert traces(model) == []


def test_b11_two_models_report_apart(watch: Watch, read: Read, train: Train) -> None:
    models = [Two(), Two()]
    guards = [watch(model, run=f"run-{i}") for i, model in enumerate(models)]
    train(models[0], torch.optim.SGD(models[0].parameters(), 0.1))
    assert read(guards[0])["plain x row"].count == 32
    assert guards[1].last_sample() is None


def test_copies_of_the_model_work_and_report_nothing(watch: Watch, read: Read, train: Train) -> None:
    model = Two()
    guard = watch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    x = torch.randn(64, 8)
    for other in copies:
        assert other.ours.observer is None
        with torch.no_grad():
            other.plain.weight.zero_()
        assert torch.equal(other.plain(x), other.plain.bias.expand(64, 8))
        other(x).sum().backward()
    for shallow in (copy.copy(model.plain), copy.copy(model.ours)):
        shallow(x).sum().backward()
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    got = read(guard)
    assert got["plain x row"].count == got["ours dy row"].count == 4 * 8


def test_a_model_that_is_dropped_takes_the_guard_with_it() -> None:
    model = Two()
    session = weakref.ref(attach(model, server="http://127.0.0.1:9")._session)
    handlers = len(torch_optimizer._global_optimizer_post_hooks)
    assert session() is not None
    del model
    gc.collect()
    assert session() is None
    attach(nn.Linear(2, 2)).detach()
    assert len(torch_optimizer._global_optimizer_post_hooks) == handlers - 1


def test_a_guard_that_was_dropped_without_detach_leaves_the_optimizers_alone(
    watch: Watch, read: Read, train: Train
) -> None:
    """A notebook's cell that is run again; torch iterates over its global hooks while it calls them."""
    for _ in range(2):
        model = Two()
        attach(model)
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    model = Two()
    guard = watch(model)
    gc.collect()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    assert read(guard).sample.step == 1


def test_an_observer_of_the_users_own_is_paused_and_comes_back(
    watch: Watch, read: Read, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    class Mine:
        wants = False

    mine, later = Mine(), Mine()
    model = nn.Sequential(Fp8Linear(8, 8), Fp8Linear(8, 8), Fp8Linear(8, 8))
    model[0].observer = model[1].observer = mine
    guard = watch(model)
    assert sum("observer of its own" in r.message for r in caplog.records) == 1
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert read(guard)["0 x row"].count == 4 * 8
    model[2].observer = later
    guard.detach()
    assert [layer.observer for layer in model] == [mine, mine, later]


def test_a_guard_that_nobody_keeps_goes_on_with_its_model(endpoint: Any, train: Train) -> None:
    model = Two()
    attach(model, every=1, server=endpoint.url)
    gc.collect()
    train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    session = model.ours.observer.session
    session.finish(5)
    session.close()
    assert [s["step"] for s in endpoint.samples] == [0, 1]


def test_coverage_names_every_layer_and_parameter(watch: Watch, train: Train) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 8)
            self.body = Two()
            self.head = nn.Linear(8, 5)
            self.raw = nn.Parameter(torch.zeros(3, 8, 8))
            self.conv = nn.Conv1d(8, 8, 1)
            self.idle = nn.Linear(8, 8)
            self.lazy = nn.LazyLinear(3)
            self.norm = nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    model = Model()
    guard = watch(model, filter=lambda module, name: name != "head")
    before = {row["name"]: row for row in guard.coverage()}
    assert {name: row["status"] for name, row in before.items()} == {
        "body.plain": "observed", "body.ours": "observed", "idle": "observed",
        "head": "not observed", "embed.weight": "not observed", "raw": "not observed",
        "conv.weight": "not observed", "lazy": "not observed",
    }  # fmt: skip
    assert before["raw"]["shape"] == [3, 8, 8]
    assert "filter" in before["head"]["reason"]
    assert all(row["reason"] for row in before.values() if row["status"] == "not observed")
    train(model, torch.optim.SGD(model.body.parameters(), 0.1))
    guard.last_sample()
    after = {row["name"]: row for row in guard.coverage()}
    assert after["idle"]["status"] == "not observed"
    assert "no forward call in 1 samples" in after["idle"]["reason"]
    assert after["body.plain"]["status"] == "observed"


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"every": 0}, "every is 0.*at least 1"),
            ({"every": True}, "every is True"),
            ({"recompute": -1}, "recompute is -1.*at least 0"),
            ({"groups": 0}, "groups is 0"),
            ({"mode": "watch"}, "mode is 'watch'.*observe, advise, enforce"),
            ({"run": "a b"}, "run is 'a b'.*letter or digit"),
            ({"server": "localhost:1"}, "server is 'localhost:1'.*http://"),
            ({"overhead_budget": 2.0}, "overhead_budget is 2.0.*fraction"),
            ({"group": 0}, "group is 0.*text"),
            ({"group": ""}, "group is ''"),
            ({"attempt": ""}, "attempt is ''"),
            ({"attempt": 1}, "attempt is 1.*text"),
        ],
    )
    def test_mistakes_are_refused_in_words(self, options: Any, said: str) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(OptionError, match=said):
            attach(model, **options)
        assert traces(model) == []
        assert issubclass(OptionError, HookError)
        assert issubclass(HookError, ValueError)

    def test_an_unknown_preset_is_refused(self) -> None:
        with pytest.raises(UnknownPresetError):
            attach(nn.Linear(2, 2), thresholds="strict")

    @pytest.mark.parametrize(
        ("environment", "run", "attempt"),
        [
            ({"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}, "job7", "2"),
            ({"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}, "4711", "1"),
            ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711"}, "4711", "0"),
            ({"FP8_SAFEGUARD_RUN": "mine", "SLURM_JOB_ID": "4711"}, "mine", "0"),
        ],
    )
    def test_names_come_from_the_launcher(
        self,
        watch: Watch,
        read: Read,
        train: Train,
        monkeypatch: pytest.MonkeyPatch,
        environment: dict[str, str],
        run: str,
        attempt: str,
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        model = nn.Linear(8, 8)
        guard = watch(model)
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        assert guard.run == run
        assert read(guard).sample.attempt.id == attempt

    def test_without_a_launcher_every_run_has_a_name_of_its_own(self, watch: Watch) -> None:
        names = {watch(nn.Linear(2, 2)).run for _ in range(3)}
        assert len(names) == 3

    def test_server_and_token_come_from_the_environment(
        self, watch: Watch, endpoint: Any, train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FP8_SAFEGUARD_SERVER", endpoint.url + "/")
        monkeypatch.setenv("FP8_SAFEGUARD_TOKEN", "secret")
        model = nn.Linear(8, 8)
        guard = watch(model, run="r")
        train(model, torch.optim.SGD(model.parameters(), 0.1))
        assert guard.flush(10)
        assert endpoint.paths == ["/api/v1/runs/r/samples"]
        assert endpoint.headers[0]["authorization"] == "Bearer secret"

    def test_without_a_server_it_says_so_once(
        self, watch: Watch, train: Train, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(8, 8)
        watch(model)
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3)
        assert sum("no server" in r.message for r in caplog.records) == 1


def test_state_survives_a_restart(watch: Watch, read: Read, train: Train) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    guard = watch(model, run="r", attempt="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 4)
    buffer = io.BytesIO()
    torch.save(guard.state_dict(), buffer)
    guard.detach()
    buffer.seek(0)
    resumed = watch(model, run="r", attempt="1")
    resumed.load_state_dict(torch.load(buffer))
    train(model, optimizer)
    got = read(resumed)
    assert got.sample.step == 4
    assert (got.sample.attempt.parent, got.sample.attempt.from_step) == ("0", 4)
    assert "wgrad" in got.parts("1")


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ((None, None), 5),  # as the state says
        ((5, 6), 5),
        ((7, 8), 7),  # the trainer's checkpoint is newer than the state that it carries
        ((3, 4), 3),  # the trainer goes back further than the state
    ],
)
def test_from_step_is_the_first_step_of_the_attempt_itself_sampled_or_not(
    watch: Watch, endpoint: Any, train: Train, numbers: tuple[Any, ...], wanted: int
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = watch(model, run="r", attempt="0")
    train(model, optimizer, 5)
    state = guard.state_dict()
    guard.detach()
    resumed = watch(model, run="r", attempt="1", every=2, server=endpoint.url)
    resumed.load_state_dict(state)
    for n in numbers:
        train(model, optimizer)
        resumed.step(n)
    assert resumed.flush(10)
    assert [s["attempt"] for s in endpoint.samples] == [{"id": "1", "parent": "0", "from_step": wanted}]


def test_a_step_that_the_trainer_names_before_its_first_forward_is_the_parents(
    watch: Watch, read: Read, train: Train
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    resumed = watch(model, run="r", attempt="1")
    resumed.load_state_dict({"step": 5, "plan": {"version": 0, "entries": []}, "attempt": "0"})
    resumed.step(8)
    train(model, optimizer)
    resumed.step(9)
    assert (read(resumed).sample.step, read(resumed).sample.attempt.from_step) == (9, 9)


def test_an_attempt_that_goes_on_keeps_its_parent(watch: Watch, read: Read, train: Train) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state: dict[str, Any] = {"step": 5, "plan": {"version": 0, "entries": []}, "attempt": "0"}
    for step in (5, 6):
        guard = watch(model, run="r", attempt="1")
        guard.load_state_dict(state)
        train(model, optimizer)
        got = read(guard).sample
        assert (got.step, got.attempt.parent, got.attempt.from_step) == (step, "0", 5)
        state = guard.state_dict()
        guard.detach()


def test_a_state_of_something_else_is_refused(watch: Watch) -> None:
    with pytest.raises(OptionError, match="state_dict"):
        watch(nn.Linear(2, 2)).load_state_dict({"param_groups": []})


def test_importing_the_package_loads_neither_numba_nor_the_http_client() -> None:
    code = (
        "import sys, threading, fp8_safeguard.hooks; "
        "loaded = {'numba', 'httpx2', 'msgpack'} & set(sys.modules); "
        "assert not loaded, loaded; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
