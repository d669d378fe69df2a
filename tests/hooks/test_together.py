"""A use of a dense weight in one native call: what is kept from one sample to the next, and from one use to the next."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8_safeguard.hooks import Guard
from fp8_safeguard.hooks.layers import ObservedLayer
from fp8_safeguard.hooks.recent import Recent
from fp8_safeguard.hooks.recompute import QuantisedWeight, weigh
from fp8_safeguard.kernels import LinearPrecision, native_use

Watch = Callable[..., Guard]

PRECISION = LinearPrecision()
needs_tiles = pytest.mark.skipif(
    not native_use.fits(torch.zeros(2, 3), torch.zeros(4, 3), PRECISION.x, PRECISION.w),
    reason="needs the native kernels and matrix tiles",
)


def step(guard: Guard, model: nn.Module) -> None:
    model(torch.randn(6, 8)).square().sum().backward()
    guard.step()


def layer_of(guard: Guard) -> ObservedLayer:
    (layer,) = guard._session.layers
    return layer


def room_of(guard: Guard) -> QuantisedWeight:
    room: QuantisedWeight = layer_of(guard).kept["codes"]
    return room


@needs_tiles
class TestTheRoomForCodes:
    def test_every_sample_writes_its_codes_to_the_same_place(self, watch: Watch) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        guard = watch(model)
        places = set()
        for _ in range(3):
            with torch.no_grad():
                model[0].weight.normal_()
            step(guard, model)
            room = room_of(guard)
            places.add(room.codes.data.data_ptr())
            _, expected = weigh(model[0].weight.detach(), PRECISION.w)
            assert expected is not None
            assert torch.equal(room.codes.data.view(torch.uint8), expected.codes.data.view(torch.uint8))
            assert torch.equal(room.codes.scale, expected.codes.scale)
        assert len(places) == 1
        assert layer_of(guard).step.codes is None  # nothing but the memory waits for the next sample

    def test_a_weight_of_another_shape_gets_another_one(self, watch: Watch) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        guard = watch(model)
        step(guard, model)
        model[0].weight = nn.Parameter(torch.randn(5, 8))
        model[0].bias = nn.Parameter(torch.randn(5))
        step(guard, model)
        assert room_of(guard).codes.shape == (5, 8)

    def test_it_goes_with_the_model_though_the_guard_stays(self, watch: Watch) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        guard = watch(model)
        step(guard, model)
        layer, codes = layer_of(guard), weakref.ref(room_of(guard).codes)
        del model
        gc.collect()
        assert layer.module() is None
        assert codes() is None

    def test_it_goes_with_the_hooks(self, watch: Watch) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        guard = watch(model)
        step(guard, model)
        layer = layer_of(guard)
        assert layer.kept
        guard.detach(timeout=0.2)
        assert not layer.kept

    def test_a_backward_that_comes_too_late_reads_nothing_there(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        guard = watch(model)
        late = model(torch.randn(6, 8)).sum()
        guard.step()
        step(guard, model)
        model(torch.randn(6, 8))  # the frame of a step in progress
        read: list[bool] = []
        measure = native_use.measure
        monkeypatch.setattr(native_use, "measure", lambda *a, **k: (read.append(True), measure(*a, **k))[1])
        late.backward()
        assert not read


class TestRecent:
    def test_the_same_memory_is_known_by_every_tensor_that_lies_there(self) -> None:
        recent, x = Recent(), torch.randn(4, 6)
        recent.keep(recent.key(x, "row"), "found")
        assert recent.find(recent.key(x.view(4, 6), "row")) == "found"
        assert recent.find(recent.key(x.detach(), "row")) == "found"
        for other in (x[1:], x.T, x.view(6, 4), x.clone(), x.view(torch.int32)):
            assert recent.find(recent.key(other, "row")) is None
        assert recent.find(recent.key(x, "col")) is None
        x.add_(1)
        assert recent.find(recent.key(x, "row")) is None

    def test_another_tensor_in_the_same_place_is_not_known(self) -> None:
        recent, lain = Recent(), set()
        for _ in range(500):
            x = torch.randn(64)
            lain.add(x.untyped_storage()._cdata)
            key = recent.key(x, "row")
            assert recent.find(key) is None
            recent.keep(key, "found")
            del x
        assert len(lain) < 500  # memory is given out again

    def test_it_keeps_no_memory(self) -> None:
        recent, x = Recent(), torch.randn(64)
        recent.keep(recent.key(x, "row"), "found")
        storage = weakref.ref(x.untyped_storage())
        del x
        assert storage() is None

    def test_a_tensor_without_a_version_is_never_known(self) -> None:
        recent = Recent()
        with torch.inference_mode():
            x: Tensor = torch.randn(4)
        assert recent.key(x, "row") is None
        recent.keep(None, "found")
        assert recent.find(None) is None
