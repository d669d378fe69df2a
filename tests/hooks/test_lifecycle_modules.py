"""Modules and tensors of every kind: observed once, left alone, or named with the reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fp8_safeguard.hooks import Guard
from fp8_safeguard.kernels import Fp8Linear

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]
Train = Callable[..., list[torch.Tensor]]
Both = Callable[..., Guard]

KINDS = pytest.mark.parametrize("kind", [nn.Linear, Fp8Linear])


def step(model: nn.Module, *batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(*batch).square().sum().backward()
    optimizer.step()


@dataclasses.dataclass
class Result:
    note: str
    hidden: torch.Tensor


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda y: (y, None), lambda out: out[0]),
    "second": (lambda y: (None, y), lambda out: out[1]),
    "dict": (lambda y: {"note": 1, "hidden": y}, lambda out: out["hidden"]),
    "dataclass": (lambda y: Result("", y), lambda out: out.hidden),
    "nested": (lambda y: [{"a": (torch.zeros(3), y)}], lambda out: out[0]["a"][1]),
}


@pytest.mark.parametrize("shape", OUTPUTS)
def test_the_output_is_found_whatever_holds_it(both: Both, read: Read, shape: str) -> None:
    wrap, unwrap = OUTPUTS[shape]

    class Float8Wrapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Float8Wrapped(8, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return unwrap(self.layer(x))

    got = read(both(Model, lambda model: step(model, torch.randn(4, 8))))
    assert [got[f"layer {part}"].rows for part in ("x row", "dy row")] == [4, 4]
    assert got["layer fprop"].relative_error < 1e-6


def test_an_input_given_by_name_is_found(both: Both, read: Read) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](input=x)

    got = read(both(lambda: Model(nn.Linear(8, 6)), lambda model: step(model, torch.randn(4, 8))))
    assert got["0 x row"].rows == got["0 dy row"].rows == 4


def test_a_subclass_with_a_forward_of_its_own_is_not_blamed_for_it(both: Both, read: Read) -> None:
    """Twice x w^T is no error of an FP8 GEMM: the output is not compared, and coverage says so."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    guard = both(lambda: nn.Sequential(Doubled(8, 6)), lambda model: step(model, torch.randn(4, 8)))
    got = read(guard)
    assert got["0 x row"].rows == got["0 dy row"].rows == 4
    assert "fprop" not in got.parts("0")
    (row,) = guard.coverage()
    assert (row["status"], "forward of its own" in row["reason"]) == ("observed", True)


@KINDS
@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_of_one_row_or_none(both: Both, read: Read, kind: Any, batch: int) -> None:
    def drive(model: nn.Module) -> None:
        for rows in (batch, 3):
            model(torch.randn(rows, 8)).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    got = read(both(lambda: nn.Sequential(kind(8, 6)), drive, recompute=1))
    for part in ("x row", "x col", "dy row", "dy col"):
        assert got[f"0 {part}"].count == (batch + 3) * (8 if part[0] == "x" else 6)
    assert got["0 fprop"].count == (batch + 3) * 6


@KINDS
def test_an_input_that_is_a_view_and_changes_later_was_measured_as_it_was(
    watch: Watch, read: Read, kind: Any
) -> None:
    model = kind(8, 6)
    guard = watch(model)
    memory = torch.ones(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is nn.Linear):
        y = model(memory[::2, 4:12].to(torch.bfloat16) if kind is nn.Linear else memory[::2, 4:12].clone())
    memory.fill_(100.0)
    y.float().sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    assert read(guard)[" x row"].amax == 1.0
    assert read(guard)[" x row"].count == 32


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(nn.Linear, torch.bfloat16), (nn.Linear, torch.float64), (Fp8Linear, torch.bfloat16)],
)
def test_a_model_that_changes_its_dtype_after_attach(
    watch: Watch, read: Read, kind: Any, dtype: torch.dtype
) -> None:
    model = nn.Sequential(kind(8, 6))
    guard = watch(model)
    step(model, torch.ones(2, 8))
    model.to(dtype)
    step(model, torch.ones(3, 8, dtype=dtype))
    assert [read(guard)[f"0 {part}"].rows for part in ("x row", "dy row", "w tile")] == [3, 3, 6]


def test_one_input_of_several_layers_is_read_once(
    both: Both, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8_safeguard.hooks import operands, together

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) * self.k(x) + self.v(x.clone() if self.training else x)

    real, sizes = operands.layout_stats, []
    monkeypatch.setattr(operands, "layout_stats", lambda x, **how: (sizes.append(x.sum()), real(x, **how))[1])
    measure = together.native_use.measure

    def counted(x: torch.Tensor, *arguments: Any, wants: tuple[bool, bool], **how: Any) -> Any:
        sizes.extend([x.sum()] * wants[0])
        return measure(x, *arguments, wants=wants, **how)

    monkeypatch.setattr(together.native_use, "measure", counted)
    got = read(both(Attention, lambda model: step(model, torch.randn(4, 8))))
    assert got["q x row"] == got["k x row"] == got["v x row"]
    assert got["q x col"] == got["k x col"] == got["v x col"]
    # x, its clone, and three dy.
    assert len(sizes) == 5


@pytest.mark.parametrize("together_first", [True, False])
def test_an_input_is_known_whichever_way_it_was_measured(
    watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch, together_first: bool
) -> None:
    from fp8_safeguard.hooks import together

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    model, fits = Pair(), together.native_use.fits
    weight = (model.a if together_first else model.b).weight
    monkeypatch.setattr(
        together.native_use, "fits", lambda x, w, *formats: w.data_ptr() == weight.data_ptr() and fits(x, w, *formats)
    )  # fmt: skip
    guard = watch(model)
    step(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    got = read(guard)
    assert got["a x row"] == got["b x row"]
    assert got["a x col"] == got["b x col"]
    assert guard._session.recent.hits == 2  # x, and the dy of both, which is the same tensor


def test_an_input_that_changed_between_two_layers_is_read_again(watch: Watch, read: Read) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}).requires_grad_(False)
    guard = watch(model)
    x, learned = torch.ones(4, 8), nn.Parameter(torch.zeros(1))
    model.register_parameter("learned", learned)
    first = model["a"](x)
    second = model["b"](x.mul_(3))
    del x
    # Memory that the allocator gives out again is another tensor.
    third = model["b"](torch.full((4, 8), 5.0))
    ((first + second + third) * learned).sum().backward()
    torch.optim.SGD([learned], 0.1).step()
    assert [read(guard)[f"{name} x row"].amax for name in "ab"] == [1.0, 5.0]
    assert read(guard)["b x row"].sum_sq == 32 * (9 + 25)


@pytest.mark.filterwarnings("ignore::UserWarning")
@KINDS
def test_replicas_of_data_parallel_are_inert(
    watch: Watch, read: Read, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """replicate() copies each module's dictionary, hooks and all."""
    model = nn.Sequential(kind(8, 8))
    guard = watch(model)
    replica = model[0]._replicate_for_data_parallel()
    replica.weight = model[0].weight
    if kind is nn.Linear:
        replica.bias = model[0].bias
    replica(torch.ones(5, 8)).sum().backward()
    step(model, torch.ones(2, 8))
    assert read(guard)["0 x row"].rows == 2


class TestTransforms:
    @pytest.fixture
    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    @pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "vjp", "jacrev"])
    def test_functions_of_torch_func_give_what_they_gave(
        self, model: nn.Sequential, watch: Watch, read: Read, transform: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        x = torch.randn(4, 8)
        scalar = lambda x: model(x).sum()  # noqa: E731
        run: dict[str, Callable[[], Any]] = {
            "grad": lambda: torch.func.grad(scalar)(x),
            "vmap": lambda: torch.func.vmap(model)(x),
            "jvp": lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
            "vjp": lambda: torch.func.vjp(model, x)[1](torch.ones(4, 1))[0],
            "jacrev": lambda: torch.func.jacrev(model)(x[0]),
        }
        plain = run[transform]()
        guard = watch(model)
        assert torch.equal(run[transform](), plain)
        assert torch.equal(run[transform](), plain)
        said = [r.message for r in caplog.records if "not measured" in r.message or "failed" in r.message]
        assert len(said) == 1
        assert "torch.func" in said[0]
        step(model, x)
        assert read(guard)["0 x row"].rows == 4

    def test_functional_call_is_measured_with_the_weights_that_it_is_given(
        self, model: nn.Sequential, watch: Watch, read: Read
    ) -> None:
        guard = watch(model)
        weights = {name: torch.ones_like(p).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, weights, torch.randn(4, 8)).sum().backward()
        guard.step(0)
        assert read(guard)["0 w tile"].sum_sq == 64.0
        assert read(guard)["0 dy row"].rows == 4

    def test_fx_traces_the_model_that_it_traced(self, watch: Watch, read: Read) -> None:
        class Mine(nn.Linear):
            """Not of torch.nn: fx looks inside, and calls the hooks with its proxies."""

        model = nn.Sequential(Mine(8, 8), nn.ReLU(), nn.Linear(8, 8))
        plain = torch.fx.symbolic_trace(model).code
        guard = watch(model)
        traced = torch.fx.symbolic_trace(model)
        assert traced.code == plain
        step(model, torch.randn(4, 8))
        assert read(guard)["0 x row"].rows == 4

    def test_fake_and_meta_tensors_have_no_numbers(self, watch: Watch, read: Read) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        guard = watch(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.randn(4, 8)).shape == (4, 8)
        meta = nn.Sequential(nn.Linear(8, 8, device="meta"))
        other = watch(meta, run="meta")
        assert meta(torch.randn(4, 8, device="meta")).shape == (4, 8)
        other.step(0)
        assert other.last_sample() is None
        assert other.coverage()[0]["reason"] == "meta tensor: it has no values"
        step(model, torch.randn(4, 8))
        assert read(guard)["0 x row"].rows == 4

    def test_a_dispatch_mode_of_the_users_sees_the_models_operators_only(
        self, model: nn.Sequential, watch: Watch, read: Read
    ) -> None:
        class Names(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

        def run() -> tuple[list[str], int]:
            x = torch.ones(4, 8)
            model.zero_grad()
            with FlopCounterMode(display=False) as flops, Names() as mode:
                model(x).sum().backward()
            return mode.names, flops.get_total_flops()

        plain = run()
        guard = watch(model, recompute=2)
        assert run() == plain
        guard.step(0)
        assert read(guard)["0 x row"].rows == read(guard)["0 dy row"].rows == 4

    def test_a_function_mode_of_the_users_sees_the_models_functions_only(
        self, model: nn.Sequential, watch: Watch, read: Read
    ) -> None:
        class Names(TorchFunctionMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.names.append(getattr(func, "__name__", str(func)))
                return func(*args, **(kwargs or {}))

        def run() -> list[str]:
            x = torch.ones(4, 8)
            model.zero_grad()
            with Names() as mode:
                model(x).sum().backward()
            return mode.names

        plain = run()
        guard = watch(model, recompute=2)
        assert run() == plain
        guard.step(0)
        assert read(guard)["0 dy row"].rows == 4

    def test_a_default_device_of_the_users_is_not_ours(
        self, model: nn.Sequential, watch: Watch, read: Read
    ) -> None:
        guard = watch(model, recompute=2)
        x = torch.randn(4, 8)
        with torch.device("meta"):
            model(x).sum().backward()
        guard.step(0)
        assert read(guard).parts("2") == {
            "x row", "x col", "w tile", "dy row", "dy col", "fprop", "dgrad", "wgrad"
        }  # fmt: skip


def test_b22_a_partitioned_weight_is_named_and_never_zero(watch: Watch, read: Read) -> None:
    """What DeepSpeed's ZeRO-3 leaves in the place of a weight between its uses."""

    class Partitioned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.__dict__["whole"])

    layer = Partitioned(8, 8, bias=False)
    layer.__dict__["whole"] = layer.weight.detach().clone().requires_grad_()
    layer.weight = nn.Parameter(torch.empty(0))
    layer.weight.ds_shape, layer.weight.ds_numel = torch.Size([8, 8]), 64
    model = nn.Sequential(layer, nn.Linear(8, 8))
    guard = watch(model)
    step(model, torch.randn(4, 8))
    assert read(guard).parts("0") == set()
    rows = {row["name"]: row for row in guard.coverage()}
    assert rows["0"] == {
        "name": "0", "shape": [8, 8], "status": "not observed", "reason": "partitioned: not readable here"
    }  # fmt: skip
    assert rows["1"]["status"] == "observed"
