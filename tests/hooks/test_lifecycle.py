"""Training loops of every kind: each use counts once, and training is bit for bit what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, uses
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Both = Callable[..., Guard]

KINDS = pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])


def two(kind: type[nn.Module] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(kind(8, 8), nn.Tanh(), kind(8, 8))


def rows(reading: Any, layer: str) -> list[int]:
    """How many rows of eight were counted of x row, x col, dy row and dy col; 0 where nothing was."""
    labels = [f"{layer} {operand} {layout}" for operand in ("x", "dy") for layout in ("row", "col")]
    return [reading[label].count // 8 if label in reading.stats else 0 for label in labels]


@KINDS
def test_accumulated_micro_batches_add_up(both: Both, read: Read, kind: Any) -> None:
    def drive(model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for batch in range(6):
            (model(torch.randn(4, 8)).square().mean() / 3).backward()
            if batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    got = read(both(lambda: two(kind), drive, recompute=2))
    assert got.sample.step == 1
    assert rows(got, "0") == rows(got, "2") == [12, 12, 12, 12]
    assert got["0 w tile"].count == 64


class TestAmp:
    @staticmethod
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=1000)

    @KINDS
    def test_unscaling_and_clipping_see_the_gradients_that_they_saw_before(
        self, both: Both, read: Read, kind: Any
    ) -> None:
        norms: list[torch.Tensor] = []

        def drive(model: nn.Module) -> None:
            optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), self.scaler()
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.randn(4, 8)).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=False)

        got = read(both(lambda: two(kind), drive))
        assert norms[:2] == norms[2:]
        assert rows(got, "2") == [4, 4, 4, 4]
        assert got.sample.run["loss_scale"] == 65536.0
        assert 0 < got["2 dy row"].amax < 1

    @pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])
    def test_a_skipped_iteration_is_counted_at_the_scale_that_it_had(
        self, watch: Watch, read: Read, kind: Any
    ) -> None:
        """The scaler halves its scale when it skips: 0.25 measured at 65536 and 0.5 at 32768 are 0.25 and 0.5."""
        model, plain = kind(4, 4), kind(4, 4)
        plain.load_state_dict(model.state_dict())
        guard = watch(model, recompute=1)
        for net in (plain, model):
            optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), self.scaler()
            for values in ([0.5], [0.25, torch.inf, 0.125]):
                for value in values:
                    dy = torch.full((2, 4), value)
                    if value == torch.inf:
                        dy[1] = 0.5
                    scaler.scale((net(torch.ones(2, 4)) * dy).sum()).backward()
                    if value == 0.25:  # of this micro-batch only the next one makes an iteration
                        continue
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
        got = read(guard)
        assert (got.sample.step, got.sample.run["loss_scale"]) == (1, 32768.0)
        assert (got[" dy row"].inf, got[" dy row"].rows) == (4, 6)
        assert got[" dy row"].amax == 0.5
        assert got[" dy row"].sum_sq == 8 * 0.25**2 + 4 * 0.5**2 + 8 * 0.125**2
        assert got[" dy row"].sum_4th == 8 * 0.25**4 + 4 * 0.5**4 + 8 * 0.125**4
        assert got[" x row"].amax == 1.0


class TestOptimizers:
    def test_generator_and_discriminator_take_turns(self, both: Both, read: Read) -> None:
        """Each step of either is a step; the generator's goes through the discriminator as well."""

        def drive(model: nn.ModuleDict) -> None:
            make, judge = model["g"], model["d"]
            optimizers = {name: torch.optim.Adam(model[name].parameters(), 0.1) for name in "dg"}
            for _ in range(2):
                judge(make(torch.randn(4, 8)).detach()).mean().backward()
                optimizers["d"].step()
                model.zero_grad()
                judge(make(torch.randn(4, 8))).mean().neg().backward()
                optimizers["g"].step()
                model.zero_grad()

        def build() -> nn.ModuleDict:
            return nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 8)})

        guard = both(build, drive)
        got = read(guard)
        assert got.sample.step == 3
        assert rows(got, "g") == rows(got, "d") == [4, 4, 4, 4]

    def test_an_optimizer_that_is_not_torchs_needs_step_and_is_asked_for_it_once(
        self, both: Both, read: Read, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(uses, "ENDLESS", 3)

        def drive(model: nn.Module) -> None:
            for _ in range(5):
                model(torch.randn(4, 8)).square().mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
                        p.grad = None

        guard = both(two, drive)
        assert guard.last_sample() is None
        assert sum("call step()" in r.message for r in caplog.records) == 1
        guard.step(0)
        assert read(guard)["0 x row"].rows == 20

    def test_a_closure_that_is_called_several_times_is_one_step(self, both: Both, read: Read) -> None:
        calls: list[int] = []

        def drive(model: nn.Module) -> None:
            optimizer, x = torch.optim.LBFGS(model.parameters(), max_iter=4), torch.randn(4, 8)

            def closure() -> torch.Tensor:
                calls.append(4)
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        got = read(both(two, drive))
        assert rows(got, "0") == [sum(calls) // 2] * 4

    def test_optimizers_inside_the_backward(self, both: Both, read: Read) -> None:
        def drive(model: nn.Module) -> None:
            optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

            def step(p: torch.Tensor) -> None:
                optimizers[p].step()
                optimizers[p].zero_grad()

            handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
            for _ in range(3):
                model(torch.randn(4, 8)).square().mean().backward()
            for handle in handles:
                handle.remove()

        got = read(both(two, drive))
        assert got.sample.step == 2
        assert rows(got, "0") == rows(got, "2") == [4, 4, 4, 4]
        assert got.parts("2") >= {"dgrad"}  # the weight changes only behind its own dgrad


class TestBackwards:
    """dy counts once a use: in the first backward that reaches the weight."""

    def finish(self, model: nn.Module) -> None:
        torch.optim.SGD(model.parameters(), 0.1).step()

    @KINDS
    def test_a_second_backward_through_a_retained_graph_adds_nothing(
        self, both: Both, read: Read, kind: Any
    ) -> None:
        def drive(model: nn.Module) -> None:
            y = model(torch.randn(4, 8)).square()
            y.sum().backward(retain_graph=True)
            (y.sum() * 7).backward()
            self.finish(model)

        got = read(both(lambda: two(kind), drive, recompute=2))
        assert rows(got, "0") == rows(got, "2") == [4, 4, 4, 4]
        assert got["2 wgrad"].count == 64

    def test_a_penalty_on_the_same_forward_leaves_dy_to_the_loss(self, both: Both, read: Read) -> None:
        """The penalty's own backward asks for the inputs' gradient alone, with ones for dy."""
        seen: list[torch.Tensor] = []

        def drive(model: nn.Module) -> None:
            x = torch.randn(4, 8, requires_grad=True)
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = 0.01 * y.square().sum() + slope.square().sum()
            seen.append(0.02 * y.detach())
            loss.backward()
            self.finish(model)

        got = read(both(two, drive))
        assert rows(got, "2") == rows(got, "0") == [4, 4, 4, 4]
        assert got["2 dy row"].amax == pytest.approx(float(seen[1].abs().max()), rel=1e-6)

    def test_a_penalty_on_a_forward_of_its_own(self, both: Both, read: Read) -> None:
        """The second derivative reaches the first layer's output, through tanh; the last one's is linear in it."""

        def drive(model: nn.Module) -> None:
            model(torch.randn(4, 8)).square().sum().backward()
            x = torch.randn(4, 8, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
            self.finish(model)

        got = read(both(two, drive))
        assert rows(got, "0") == [8, 8, 8, 8]
        assert rows(got, "2") == [8, 8, 4, 4]

    @KINDS
    @pytest.mark.parametrize("inputs", [False, True])
    def test_autograd_grad_counts_where_it_asks_for_a_weight(
        self, both: Both, read: Read, kind: Any, inputs: bool
    ) -> None:
        def drive(model: nn.Module) -> None:
            x = torch.randn(4, 8, requires_grad=True)
            wanted = [x] if inputs else list(model.parameters())
            torch.autograd.grad(model(x).square().sum(), wanted)
            self.finish(model)

        got = read(both(lambda: two(kind), drive))
        gradient = 0 if inputs else 4
        assert rows(got, "0")[::2] == rows(got, "2")[::2] == [4, gradient]

    @KINDS
    def test_a_forward_without_backward_counts_its_operands_and_the_sample_says_so(
        self, both: Both, read: Read, kind: Any
    ) -> None:
        def drive(model: nn.Module) -> None:
            model(torch.randn(4, 8))
            model(torch.randn(4, 8)).square().sum().backward()
            self.finish(model)

        got = read(both(lambda: two(kind), drive))
        assert rows(got, "0")[::2] == rows(got, "2")[::2] == [8, 4]
        each = [(scalar["layer"], scalar["name"], scalar["value"]) for scalar in got.sample.scalars]
        assert each == [("0", "unfinished_calls", 1.0), ("2", "unfinished_calls", 1.0)]

    def test_a_backward_that_comes_steps_later_belongs_to_no_sample(self, both: Both, read: Read) -> None:
        """By then the buffers of its step serve another one."""

        def drive(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            late = model(torch.randn(6, 8))
            for step in range(4):
                y = late if step == 0 else model(torch.randn(4, 8)).square()
                if step == 3:
                    late.sum().backward()
                if step:
                    y.sum().backward()
                optimizer.step()

        got = read(both(lambda: nn.Sequential(nn.Linear(8, 8)), drive))
        assert got.sample.step == 3
        assert rows(got, "0") == [4, 4, 4, 4]

    def test_an_evaluation_between_forward_and_backward_is_not_counted(self, both: Both, read: Read) -> None:
        def drive(model: nn.Module) -> None:
            y = model(torch.randn(4, 8))
            for mode in (torch.no_grad(), torch.inference_mode()):
                with mode:
                    model(torch.randn(4, 8))
            y.square().sum().backward()
            self.finish(model)

        assert rows(read(both(two, drive)), "0") == [4, 4, 4, 4]


class TestShared:
    def test_two_layers_with_one_weight_report_their_own_operands(self, both: Both, read: Read) -> None:
        def build() -> nn.Sequential:
            model = two()
            model[2].weight = model[0].weight
            return model

        def drive(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()

        got = read(both(build, drive))
        assert rows(got, "0") == rows(got, "2") == [4, 4, 4, 4]
        assert got["0 w tile"] == got["2 w tile"]
        assert got["0 dy row"] != got["2 dy row"]

    def test_a_head_tied_to_the_embedding_is_one_matrix(self, both: Both, read: Read) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.head(self.embed(tokens))

        def drive(model: nn.Module) -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.tensor([1, 2, 1, 7])).square().sum().backward()
            optimizer.step()

        guard = both(Tied, drive)
        assert rows(read(guard), "head") == [4, 4, 4, 4]
        coverage = {row["name"]: (row["status"], row["reason"]) for row in guard.coverage()}
        assert coverage.keys() == {"head", "embed.weight"}
        assert coverage["embed.weight"] == ("observed", "the weight of head: observed there")


def test_b10_a_layer_that_is_frozen_and_unfrozen_has_gradients_at_the_steps_in_between(
    watch: Watch, read: Read, endpoint: Any, train: Train
) -> None:
    model, plain = two(), two()
    plain.load_state_dict(model.state_dict())
    guard = watch(model, server=endpoint.url, run="frozen", recompute=2)
    parts = []
    for net in (plain, model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(6):
            net[0].requires_grad_(step in (2, 3))
            train(net, optimizer)
            if net is model:
                parts.append(read(guard).parts("0"))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    frozen = {"x row", "w tile", "fprop"}
    # Nothing before the layer learns, so it has no dgrad at any step.
    assert parts == [frozen] * 2 + [{*frozen, "x col", "dy row", "dy col", "wgrad"}] * 2 + [frozen] * 2
    assert guard.flush(10)
    assert [sample["step"] for sample in endpoint.samples] == list(range(6))
