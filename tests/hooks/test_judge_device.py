"""GEMMs on a device are recomputed without reading a number back, the same as with all at hand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_safeguard.hooks import Guard, judge, recompute, whatif
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import Part, rows_of
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision

Watch = Callable[..., Guard]

# float32 products against others of the same operands in another order, as a fraction of the error's square.
TOLERANCE = 1e-4


class NoHostRead(TorchDispatchMode):
    """Fails where a number is read back from a tensor: on a device that would stall the training."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


class OnDevice(torch.Tensor):
    """Offsets that are as far away as those of a GPU."""

    @property
    def is_cpu(self) -> bool:
        return False

    def tolist(self) -> Any:
        raise AssertionError("the device was waited for")


class TestExpertsThatOnlyTheDeviceKnows:
    """The same numbers as with the experts' bounds at hand, and no number is read back."""

    BOUNDS = (0, 170, 170, 180, 300)
    ROWS = 310

    def operands(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        tensors = {"x": normal(self.ROWS, 160), "w": normal(4, 130, 160), "dy": normal(self.ROWS, 130)}
        tensors |= {"y": normal(self.ROWS, 130), "dx": normal(self.ROWS, 160), "dw": normal(4, 130, 160)}
        tensors["x"][5, 7], tensors["dy"][200, 3] = math.inf, math.nan
        return tensors

    def session(self, watch: Watch, *, closely: bool) -> tuple[Any, Any]:
        guard = watch(Fp8GroupedLinear(4, 160, 130), recompute=1)
        session = guard._session
        if closely:
            session.builder.flags.hear({"alerts": [{"layer": "", "severity": "act"}]})
        session.touch()
        return session, session.layers[0]

    def measured(self, watch: Watch, offsets: torch.Tensor, how: judge.Judgement, *, closely: bool) -> Any:
        session, layer = self.session(watch, closely=closely)
        t = self.operands()
        # Rows behind the last expert are nobody's: both ways have to draw the same ones.
        draws = {160: torch.arange(0, 130, 3), 310: torch.arange(0, 310, 5), 300: torch.arange(0, 300, 5)}
        session.sampler.rows = lambda total, device: draws[160 if total == 130 else total]
        judge.fprop(session, layer, t["x"], t["w"], t["y"], how, offsets=offsets)
        judge.dgrad(session, layer, t["dy"], t["w"], t["dx"], how, offsets=offsets)
        judge.wgrad(session, layer, t["dy"], t["x"], t["dw"], how, offsets=offsets)
        snapshot = session.frame.snapshot()
        values = torch.from_numpy(snapshot.numpy()).clone()
        gemms = {part.name: values[layer.row(part) :][:4] for part in (Part.FPROP, Part.DGRAD, Part.WGRAD)}
        named = {(v.slot_row, v.name): values[v.first_row :][: v.experts] for v in snapshot.variants}
        session.frame = None
        return gemms, named

    @pytest.mark.parametrize("closely", [False, True], ids=["rows", "whole"])
    @pytest.mark.parametrize("emulated", [False, True], ids=["real", "emulated"])
    def test_they_agree(self, watch: Watch, closely: bool, emulated: bool) -> None:
        gain = torch.linspace(0.5, 2.0, 160)
        how = judge.Judgement(emulate=LinearPrecision() if emulated else None, gain_K=gain)
        offsets = torch.tensor(self.BOUNDS, dtype=torch.int32)
        wanted, wanted_variants = self.measured(watch, offsets, how, closely=closely)
        with NoHostRead():
            got, got_variants = self.measured(watch, offsets.as_subclass(OnDevice), how, closely=closely)
        assert wanted["FPROP"][:, 0].tolist() == [
            n * 130 for n in ((170, 0, 10, 120) if closely else (34, 0, 2, 24))
        ]
        for part in wanted:
            np.testing.assert_allclose(got[part], wanted[part], rtol=TOLERANCE, err_msg=part)
        assert got_variants.keys() == wanted_variants.keys()
        assert bool(got_variants) is closely
        for name, vectors in wanted_variants.items():
            np.testing.assert_allclose(got_variants[name], vectors, rtol=2e-3, err_msg=str(name))


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "grouped"])
@pytest.mark.parametrize(
    ("closely", "emulated"), [(False, False), (False, True), (True, False)], ids=["rows", "emulated", "whole"]
)
def test_on_a_device_no_number_is_read_back(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, experts: int, closely: bool, emulated: bool
) -> None:
    """The meta device has shapes and no numbers: reading one fails. (It knows no autocast either.)"""
    monkeypatch.setattr(recompute, "_without_autocast", lambda device_type: contextlib.nullcontext())
    device = torch.device("meta")
    model = Fp8GroupedLinear(experts, 160, 130) if experts else Fp8Linear(160, 130)
    session = watch(model, recompute=1)._session
    session.touch()
    layer, frame = session.layers[0], Frame(rows_of(session.layers), device)
    session.frame, frame.closely = frame, frozenset({""} if closely else ())
    x, dy = torch.empty(300, 160, device=device), torch.empty(300, 130, device=device)
    w, gain = torch.empty(*model.weight.shape, device=device), torch.empty(160, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device) if experts else None
    how = judge.Judgement(emulate=LinearPrecision() if emulated else None, gain_K=gain)
    judge.fprop(session, layer, x, w, torch.empty(300, 130, device=device), how, offsets=offsets)
    judge.dgrad(session, layer, dy, w, torch.empty(300, 160, device=device), how, offsets=offsets)
    judge.wgrad(session, layer, dy, x, w, how, offsets=offsets)
    session.frame = None
    gemms = {layer.row(part): part.name.lower() for part in (Part.FPROP, Part.DGRAD, Part.WGRAD)}
    assert frame.filled == gemms.keys()
    variants = sum(len(whatif.alternatives(gemm, LinearPrecision())) for gemm in gemms.values())
    assert len(frame.variants_of(set(gemms))) == (variants if closely else 0)
    assert not session.once.counts
