"""Options of attach(): what is refused, and what comes from the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, HookError, OptionError, attach
from fp8_safeguard.monitor.thresholds import UnknownPresetError

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]


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
            ({"run": ""}, "run is ''.*letter or digit"),
            ({"run": 7}, "run is 7.*letter or digit"),
            ({"every": 2.0}, "every is 2.0.*whole number"),
            ({"every": np.bool_(True)}, "every is .*True.*whole number"),
            ({"optimizer": "adam"}, "optimizer is of type str.*torch.optim.Optimizer"),
            ({"filter": "mlp"}, "filter is 'mlp'.*function"),
            ({"server": 8787}, "server is 8787.*base URL"),
            ({"server": "http://"}, "server is 'http://'.*base URL"),
            ({"server": "http://host:port"}, "server is 'http://host:port'.*base URL"),
            ({"server": "http://host/?a=1"}, "base URL"),
            ({"server": "http://[::1"}, "base URL"),
            ({"spool_dir": 5}, "spool_dir is 5.*folder"),
            ({"overhead_budget": "2 %"}, "overhead_budget is '2 %'.*fraction"),
            ({"overhead_budget": float("nan")}, "overhead_budget is nan.*fraction"),
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
        assert not model._forward_hooks
        assert issubclass(OptionError, HookError)
        assert issubclass(HookError, ValueError)

    @pytest.mark.parametrize("model", [[1], None, nn.Linear, lambda x: x])
    def test_what_is_no_module_is_refused(self, model: Any) -> None:
        with pytest.raises(OptionError, match=r"model is .*give a torch\.nn\.Module"):
            attach(model)

    @pytest.mark.parametrize("token", ["two words", "line\nbreak", "sécret", 5])
    def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(self, token: Any) -> None:
        with pytest.raises(OptionError, match="printable ASCII") as caught:
            attach(nn.Linear(2, 2), token=token)
        assert str(token) not in str(caught.value)

    def test_b76_whole_numbers_may_be_numpys(self, watch: Watch, read: Read, train: Train) -> None:
        model = nn.Linear(8, 8)
        guard = watch(model, every=np.int64(2), recompute=np.int32(0), overhead_budget=np.float32(1.0))
        train(model, torch.optim.SGD(model.parameters(), 0.1), 4)
        assert read(guard).sample.step == 2

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
