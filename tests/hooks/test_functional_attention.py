"""torch's own attention: both of its projections are functions, and out_proj's forward is never called."""

# Shapes: B sequences, S positions, T tokens, N output features, K input features.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.monitor.stats import TensorStats, measure

Both = Callable[..., Guard]
Read = Callable[[Guard], Any]
Watch = Callable[..., Guard]

# float64 sums of the same numbers in another order.
SUM_TOLERANCE = 1e-10
WIDTH = 8


class Attention(nn.Module):
    """Self-attention, or a query over other keys and values, which may have a width of their own."""

    def __init__(self, sources: str, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.sources, self.need_weights = sources, need_weights
        sizes = {"kdim": 12, "vdim": 10} if sources == "widths" else {}
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        other = {
            "self": (x, x),
            "memory": (m := x.detach().sin(), m),
            "three": (x.detach().sin(), x.detach().cos()),
            "widths": (torch.cat([x, x], -1)[..., :12].detach(), torch.cat([x, x], -1)[..., :10].detach()),
        }[self.sources]
        y, weights = self.attention(x, *other, need_weights=self.need_weights)
        return y if weights is None else y + weights.sum()


def drive(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # two micro-batches
        model(torch.randn(5, 3, WIDTH, requires_grad=True)).square().sum().backward()
    optimizer.step()


def through_linear(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """x and dy of every F.linear of an unmonitored run, by the parameter whose memory the weight is in."""
    torch.manual_seed(0)
    model = build()
    owners = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    calls: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = real(x, w, b)
        y.retain_grad()
        calls[owners[w.untyped_storage().data_ptr()]].append((x.detach().clone(), y))
        return y

    real = F.linear
    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", linear)
        drive(model)
    return {name: [(x, y.grad) for x, y in listed] for name, listed in calls.items()}


def assert_same_uses(got: Any, expected: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    for name, listed in expected.items():
        layer = name.removesuffix(".weight")
        for at, operand in enumerate(("x", "dy")):
            for layout in ("row", "col"):
                parts = [use[at].reshape(-1, use[at].shape[-1]).numpy() for use in listed]
                stats = TensorStats.merge(measure(part, layout=layout) for part in parts)
                actual = got[f"{layer} {operand} {layout}"]
                np.testing.assert_allclose(
                    actual.to_vector(),
                    stats.to_vector(),
                    rtol=SUM_TOLERANCE,
                    atol=0,
                    err_msg=f"{name} {operand}",
                )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sources", ["self", "memory", "three", "widths"])
def test_b13_both_projections_of_attention_are_seen_once_each(
    both: Both,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    sources: str,
    batch_first: bool,
    need_weights: bool,
) -> None:
    """B13: out_proj's own forward is never called, and neither is any module with the fused input projection."""

    def build() -> Attention:
        return Attention(sources, batch_first, need_weights)

    guard = both(build, drive, recompute=8)
    got = read(guard)
    expected = through_linear(build, monkeypatch)
    packed = sources != "widths"
    assert len(expected) == (2 if packed else 4)
    assert_same_uses(got, expected)
    torch.manual_seed(0)
    for name, parameter in build().named_parameters():
        if parameter.dim() > 1:
            layer = name.removesuffix(".weight")
            whole = measure(parameter.detach().numpy(), layout="tile")
            np.testing.assert_allclose(
                got[f"{layer} w tile"].to_vector(), whole.to_vector(), rtol=SUM_TOLERANCE
            )
            assert {"fprop", "wgrad"} <= got.parts(layer)
    rows = {row["name"]: row for row in guard.coverage()}
    assert rows["attention.out_proj"]["status"] == "adapted"
    assert "without the module" in rows["attention.out_proj"]["reason"]
    assert {row["status"] for row in rows.values()} == {"observed", "adapted"}


def test_b13_attention_that_is_the_whole_model_is_seen_in_its_first_step(both: Both, read: Read) -> None:
    """The report's own: one training step of nn.MultiheadAttention(8, 2)."""

    def once(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(5, 3, WIDTH)
        model(x, x, x)[0].square().sum().backward()
        optimizer.step()

    guard = both(lambda: nn.MultiheadAttention(WIDTH, 2), once, recompute=8)
    got = read(guard)
    parts = {"x row", "x col", "w tile", "dy row", "dy col", "fprop", "wgrad"}
    assert got.parts("in_proj_weight") == parts
    assert got.parts("out_proj") == parts | {"dgrad"}
    for layer, outputs in (("in_proj_weight", 3 * WIDTH), ("out_proj", WIDTH)):
        assert got[f"{layer} x row"].count == 15 * WIDTH
        assert got[f"{layer} dy row"].count == 15 * outputs
        assert got[f"{layer} w tile"].count == outputs * WIDTH


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_b13_an_encoder_is_observed_in_training_and_left_alone_in_evaluation(
    both: Both, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = both(encoder, drive, recompute=8)
    got = read(guard)
    expected = through_linear(encoder, monkeypatch)
    assert len(expected) == 8  # in and out projection and two linear layers of either block
    assert_same_uses(got, expected)
    modes: list[int] = []
    model = guard._session.model()
    assert model is not None
    model.layers[0].norm1.register_forward_pre_hook(
        lambda module, args: modes.append(torch._C._len_torch_function_stack())
    )
    torch.manual_seed(0)
    plain = encoder()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 3, WIDTH)
    for net in (plain, model):
        net.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    assert modes == [0]


def test_attention_of_another_make_that_calls_its_output_projection_is_seen_once(
    both: Both, read: Read
) -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            return self.out_proj(F.scaled_dot_product_attention(q, k, v))

    guard = both(lambda: Own(WIDTH, 2), drive)
    got = read(guard)
    for layer in ("in_proj_weight", "out_proj"):
        assert got[f"{layer} x row"].count == 2 * 15 * WIDTH
    assert {row["status"] for row in guard.coverage()} == {"observed"}
