"""Other tools that watch training, each attached as its documentation says."""

# Shapes: R blocks, C elements of a block.

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from overhead.arms import Counters, Plain, Tally
from torch import Tensor, nn

INSTALL = "make peers"
PYTHON = ".venv-peers/bin/python"
BLOCK, LARGEST = 128, 448.0
"""Of E4M3 as it is trained with: elements with a scale of their own, and the largest number."""
SETTLE_SECONDS = 0.02
"""How long a peer's own threads get to finish what a cycle gave them."""


@dataclass
class Peer(Plain):
    """A tool that looks at every step."""

    folder: Path = field(default_factory=Path)
    """Where it may write."""
    tally: Tally | None = None
    """Where what it looks at is counted, in the step in which it is counted."""
    number: int = 0
    """Of the step in progress."""
    case: ClassVar[str] = ""
    package: ClassVar[str] = ""
    """What has to be importable."""
    observes: ClassVar[str] = ""
    activations: ClassVar[bool] = False
    """Whether activations are among what it looks at."""
    entry: ClassVar[tuple[str, str, int] | None] = None
    """A function of its own that takes one tensor at a time: where, its name, which argument. None: see `seen`."""

    def begin(self) -> None:
        """Build the model, and attach quietly."""
        super().begin()
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            self.attach()

    @property
    def turns(self) -> int:
        """All steps in one: its threads get their moment once."""
        return 1

    def turn(self, index: int) -> None:
        """That many steps, and a moment for its threads: whatever CPU time they take is the peer's."""
        for _ in range(self.steps):
            self.number += 1
            self.step()
        time.sleep(SETTLE_SECONDS)

    def end(self) -> None:
        """Detach quietly."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.detach()
        super().end()

    def attach(self) -> None:
        """Put it on the model."""

    def step(self) -> None:
        """One step with its calls."""
        self.trainer.step()

    def detach(self) -> None:
        """Take it off, as far as it can be."""

    def seen(self, tensor: Tensor) -> None:
        """It looks at this one."""
        if self.tally is not None:
            self.tally.add(tensor)

    def count(self) -> Tally:
        """What one step shows it."""
        self.tally = tally = Tally()
        self.number += 1
        with self._counting():
            self.step()
        self.tally = None
        return tally

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the calls of its entry."""
        if self.entry is None:
            yield
            return
        place, name, position = self.entry
        module, _, owner_name = place.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, owner_name) if owner_name else owner
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            given = arguments[position]
            for tensor in given.values() if isinstance(given, dict) else [given]:
                self.seen(tensor)
            return original(*arguments, **named)

        setattr(owner, name, counted)
        try:
            yield
        finally:
            setattr(owner, name, original)


class Wandb(Peer):
    """`wandb.watch(model, log="all", log_freq=1)`, offline."""

    case, package, observes = "wandb_watch", "wandb", "histograms of parameters and their gradients"
    entry = ("wandb.integration.torch.wandb_torch:TorchHistory", "log_tensor_stats", 1)

    def attach(self) -> None:
        """Start a run of its own: its files stay in the folder, its wandb-core is a child process."""
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(self.folder)}
        import wandb

        settings = wandb.Settings(x_disable_stats=True, console="off")
        self.run = wandb.init(project="overhead", dir=str(self.folder), settings=settings)
        self.run.watch(self.trainer.model, log="all", log_freq=1)

    def step(self) -> None:
        """A step and its log."""
        self.trainer.step()
        self.run.log({"step": self.number})

    def counters(self) -> Counters:
        """Its child packs and writes what was logged."""
        return Counters(elsewhere=children_seconds())

    def detach(self) -> None:
        """End the run."""
        self.run.unwatch(self.trainer.model)
        self.run.finish()


class HuggingFace(Peer):
    """`transformers.debug_utils.DebugUnderflowOverflow(model)`."""

    case, package = "hf_debug_underflow_overflow", "transformers"
    observes = "absolute minimum and maximum, NaN and Inf of weights, inputs and outputs of every module"
    activations = True
    entry = ("transformers.debug_utils", "get_abs_min_max", 0)

    def attach(self) -> None:
        """Hooks on every module."""
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(self.trainer.model)


class NvdlfwInspect(Peer):
    """nvdlfw-inspect's generic LogTensorStats on each linear layer, every step, to its log file."""

    case, package = "nvdlfw_inspect", "nvdlfw_inspect"
    observes = "min, max, mean, std, l1 and l2 norm of x, w and dy of every linear layer"
    activations = True

    def attach(self) -> None:
        """Its configuration, and the hooks that a trainer without Transformer Engine has to write."""
        import nvdlfw_inspect.api as api
        import yaml

        statistics = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]
        tensors = {
            "enabled": True,
            "tensors": ["activation", "weight", "gradient"],
            "stats": statistics,
            "freq": 1,
        }
        layers = {"layer_name_regex_pattern": ".*"}
        feature = {"all": {"enabled": True, "layers": layers, "LogTensorStats": tensors}}
        file = self.folder / "inspect.yaml"
        file.write_text(yaml.safe_dump(feature))
        self.api = api
        api.initialize(config_file=str(file), log_dir=str(self.folder / "logs"), default_logging_enabled=True)
        for name, module in self.trainer.model.named_modules():
            if isinstance(module, nn.Linear):
                self._hook(name, module)

    def _hook(self, name: str, module: nn.Linear) -> None:
        def forward(module: nn.Linear, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            self._log(name, arguments[0], "activation")
            self._log(name, module.weight, "weight")

        def backward(module: nn.Module, dx: object, dy: tuple[Tensor, ...]) -> None:
            self._log(name, dy[0], "gradient")

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)

    def _log(self, layer: str, tensor: Tensor, kind: str) -> None:
        self.seen(tensor)
        self.api.log_tensor_stats(layer, tensor=tensor.detach(), tensor_name=kind, skip_reduction=True)

    def step(self) -> None:
        """A step and its count."""
        self.trainer.step()
        self.api.step()

    def detach(self) -> None:
        """End it: it is one for the process."""
        self.api.end_debug()


class MsProbe(Peer):
    """msProbe's monitor V2: gradients of weights, inputs and outputs of the linear layers, both ways."""

    case, package = "msprobe_v2", "msprobe"
    observes = (
        "min, max, mean, norm and NaNs of weight gradients and of inputs, outputs and their gradients of "
        "linear layers"
    )
    activations = True
    entry = ("msprobe.pytorch.monitor.module_metric", "get_metrics", 1)

    def attach(self) -> None:
        """Its configuration; it wraps `optimizer.step`."""
        from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

        shared = {"enabled": True, "ops": ["min", "max", "mean", "norm", "nans"], "eps": 1e-8}
        # Parts of names: it takes every module that has one of them in its name.
        linear = [n for n, module in self.trainer.model.named_modules() if isinstance(module, nn.Linear)]
        monitors = {"weight_grad": {**shared, "monitor_mbs_grad": False}}
        monitors |= {"module": {**shared, "targets": linear}}
        written = {"output_dir": str(self.folder), "format": "csv", "step_count_per_record": 1000}
        when = {"start_step": 0, "step_interval": 1, "collect_times": 10**6}
        file = self.folder / "monitor.json"
        file.write_text(
            json.dumps({"framework": "pytorch", "rank": [0], **written, **when, "monitors": monitors})
        )
        self.monitor = TrainerMonitorV2(str(file), fr="pytorch")
        self.monitor.start(model=self.trainer.model, optimizer=self.trainer.optimizer, grad_acc_steps=1)

    def detach(self) -> None:
        """Stop it."""
        self.monitor.stop()


class TorchModuleMonitor(Peer):
    """torch-module-monitor with one metric a kind."""

    case, package = "torch_module_monitor", "torch_module_monitor"
    observes = (
        "largest magnitude a token of every module's output, norms of parameters and of their gradients"
    )
    activations = True

    def attach(self) -> None:
        """The metrics, and a hook on every module."""
        from torch_module_monitor import ModuleMonitor

        self.monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(self.trainer.model)
        self.monitor.add_activation_metric("absmax", self._largest)
        self.monitor.add_parameter_metric("norm", self._norm)
        self.monitor.add_gradient_metric("norm", self._norm)

    def _largest(self, tensor: Tensor) -> Tensor:
        self.seen(tensor)
        return tensor.abs().amax(dim=-1)

    def _norm(self, tensor: Tensor) -> Tensor:
        self.seen(tensor)
        return tensor.norm()

    def step(self) -> None:
        """A step with its calls."""
        self.monitor.begin_step(self.number)
        self.trainer.gradients()
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()
        self.trainer.update()
        self.monitor.end_step()
        self.monitor.get_step_metrics()


class TorchModuleMonitorFp8(TorchModuleMonitor):
    """The same, given one of the metrics that ours has, in plain torch: what its user would have to write."""

    case = "torch_module_monitor_fp8"
    observes = (
        "share of elements that E4M3 in blocks of 128 flushes, of every module's output, parameters and their "
        "gradients"
    )

    def _largest(self, tensor: Tensor) -> Tensor:
        return self._underflow(tensor)

    def _norm(self, tensor: Tensor) -> Tensor:
        return self._underflow(tensor)

    def _underflow(self, tensor: Tensor) -> Tensor:
        self.seen(tensor)
        x_RC = tensor.detach().float().reshape(-1, BLOCK)
        scale_R1 = x_RC.abs().amax(dim=1, keepdim=True) / LARGEST
        q_RC = (x_RC / scale_R1).to(torch.float8_e4m3fn).float()
        return ((q_RC == 0) & (x_RC != 0)).float().mean()


class TensorBoard(Peer):
    """TensorBoard's `add_histogram` for every parameter and its gradient."""

    case, package, observes = (
        "tensorboard_histograms",
        "tensorboard",
        "histograms of parameters and their gradients",
    )

    def attach(self) -> None:
        """A writer."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder))

    def step(self) -> None:
        """A step and its histograms."""
        self.trainer.gradients()
        for name, parameter in self.trainer.model.named_parameters():
            for kind, tensor in (("parameters", parameter.detach()), ("gradients", parameter.grad)):
                self.seen(tensor)
                self.writer.add_histogram(f"{kind}/{name}", tensor, self.number)
        self.trainer.update()

    def detach(self) -> None:
        """Close its file."""
        self.writer.close()


PEERS: tuple[type[Peer], ...] = (
    Wandb,
    HuggingFace,
    NvdlfwInspect,
    MsProbe,
    TorchModuleMonitor,
    TorchModuleMonitorFp8,
    TensorBoard,
)


def missing() -> list[str]:
    """Packages of peers that are not installed here."""
    return [peer.package for peer in PEERS if importlib.util.find_spec(peer.package) is None]


def children_seconds() -> float:
    """CPU time of the processes that this one has started and that live: wandb's core is one."""
    tick, seconds = os.sysconf("SC_CLK_TCK"), 0.0
    for listed in Path("/proc/self/task").glob("*/children"):
        for child in listed.read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += (int(fields[11]) + int(fields[12])) / tick
    return seconds
