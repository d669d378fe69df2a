"""Whole GEMMs and what-ifs of flagged layers: what they say, how many there are, and where it ends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from fp8_safeguard.hooks import Guard, flags, judge, recompute, scaling, whatif
from fp8_safeguard.hooks.buffer import Frame
from fp8_safeguard.hooks.layers import Part, rows_of
from fp8_safeguard.kernels import Fp8GroupedLinear, Fp8Linear, LinearPrecision, OperandFormat
from fp8_safeguard.monitor import stats
from fp8_safeguard.monitor.stats import TensorStats, compare

Watch = Callable[..., Guard]
Read = Callable[[Guard], Any]

# float32 products against float64, as a fraction of the error's square.
TOLERANCE = 1e-4
NULLS = set(stats.ALL_COLUMNS) - set(recompute.GEMM_COLUMNS)
TOKENS = 300


def flag(guard: Guard, *layers: str) -> None:
    """As the server's answer would."""
    alerts = [{"layer": layer, "severity": "act"} for layer in layers]
    guard._session.builder.flags.hear({"alerts": alerts})


def step(model: nn.Module, tokens: int = TOKENS, seed: int = 1, parts: int = 1, scale: float = 1.0) -> Any:
    """One step, in so many micro-batches; x, dy, y and dx of each."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    generator = torch.Generator().manual_seed(seed)
    weights = [module.weight for module in model.modules() if hasattr(module, "weight")]
    seen = []
    for _ in range(parts):
        x = torch.randn(tokens, weights[0].shape[1], generator=generator).requires_grad_()
        y = model(x)
        dy = torch.randn(y.shape, generator=generator) * scale
        y.backward(dy)
        seen.append((x.detach(), dy, y.detach(), x.grad))
    optimizer.step()
    return seen


def real_slots(reading: Any) -> Iterator[Any]:
    return (slot for slot in reading.sample.slots if slot.gemm and slot.variant is None)


def whole_layers(reading: Any) -> set[str]:
    """Layers of whose forward all rows were compared."""
    rows = {slot.layer: reading[slot.label].count for slot in real_slots(reading) if slot.gemm == "fprop"}
    return {layer for layer, count in rows.items() if count > 64 * 8}


def variants(reading: Any) -> dict[str, TensorStats]:
    return {slot.label: reading[slot.label] for slot in reading.sample.slots if slot.variant}


def assert_same(actual: TensorStats, wanted: TensorStats, tolerance: float = TOLERANCE) -> None:
    assert actual.nulls == wanted.nulls
    np.testing.assert_allclose(actual.to_vector(), wanted.to_vector(), rtol=tolerance, atol=0)


def in_blocks(x: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """E4M3 and back, with numpy and ml_dtypes alone."""
    values = x.numpy()
    result = np.empty(values.shape, dtype=np.float64)
    for i, j in itertools.product(range(0, values.shape[0], block[0]), range(0, values.shape[1], block[1])):
        part = values[i : i + block[0], j : j + block[1]]
        scale = np.abs(part).max() / np.float32(448)
        codes = np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        result[i : i + block[0], j : j + block[1]] = codes.astype(np.float64) * np.float64(scale)
    return result


def small_layers(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(number)))


class TestWhole:
    @pytest.mark.parametrize("chunk", [2**22, 64])
    def test_every_row_of_all_three_gemms_is_compared(
        self, watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch, chunk: int
    ) -> None:
        monkeypatch.setattr(judge, "CHUNK_ELEMENTS", chunk)
        model = Fp8Linear(160, 130)
        guard = watch(model, recompute=0)
        flag(guard, "")
        [(x, dy, y, dx)] = step(model)
        got = read(guard)
        w, x64, dy64 = model.weight.detach().double(), x.double(), dy.double()
        pairs = {
            "fprop": (x64 @ w.T, y),
            "dgrad": (dy64 @ w, dx),
            "wgrad": (dy64.T @ x64, model.weight.grad),
        }
        for gemm, (exact, real) in pairs.items():
            assert got[f" {gemm}"].count == exact.numel()
            assert_same(got[f" {gemm}"], compare(exact.numpy(), real.double().numpy()))

    def test_emulated_gradients_too(self, watch: Watch, read: Read) -> None:
        model = nn.Linear(160, 130, bias=False)
        guard = watch(model, recompute=0)
        flag(guard, "")
        step(model)
        whole = read(guard)
        assert [whole[f" {gemm}"].count for gemm in ("fprop", "dgrad", "wgrad")] == [
            300 * 130,
            300 * 160,
            130 * 160,
        ]
        assert 0.03 < whole[" wgrad"].relative_error < 0.04

    def test_a_healthy_layer_has_its_sampled_rows_and_nothing_else(self, watch: Watch, read: Read) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        guard = watch(model, recompute=0)
        for seed in range(3):
            step(model, seed=seed)
        got = read(guard)
        assert {got[slot.label].count for slot in real_slots(got)} == {64 * 64}
        assert not variants(got)
        assert guard._session.builder.flags.layers == ()

    def test_by_expert(self, watch: Watch, read: Read) -> None:
        model = Fp8GroupedLinear(3, 160, 130)
        guard = watch(model, recompute=0)
        flag(guard, "")
        bounds = [0, 170, 170, 300]
        x = torch.randn(310, 160, generator=torch.Generator().manual_seed(1)).requires_grad_()
        dy = torch.randn(310, 130, generator=torch.Generator().manual_seed(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        y = model(x, torch.tensor(bounds, dtype=torch.int32))
        y.backward(dy)
        optimizer.step()
        got = read(guard)
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        w, x64, dy64 = model.weight.detach().double(), x.detach().double(), dy.double()
        pairs = {
            "fprop": (torch.cat([x64[s] @ w[e].T for e, s in enumerate(spans)]), y[:300].detach()),
            "dgrad": (torch.cat([dy64[s] @ w[e] for e, s in enumerate(spans)]), x.grad[:300]),
            "wgrad": (torch.stack([dy64[s].T @ x64[s] for s in spans]), model.weight.grad),
        }
        for gemm, (exact, real) in pairs.items():
            assert_same(got[f" {gemm}"], compare(exact.numpy(), real.double().numpy()))
        # The alternatives are measured on 64 rows, which fall on experts by their share of the tokens.
        assert got[" dgrad, e5m2"].count == 64 * 160
        assert 0.03 < got[" dgrad, fp8"].relative_error < 0.04 < got[" dgrad, e5m2"].relative_error
        assert [slot.label for slot in got.sample.slots if slot.expert is not None and slot.variant == "e5m2"]


def test_codes_of_a_weight_that_has_changed_since_are_not_used(watch: Watch, read: Read) -> None:
    """A closure runs several forwards in a step, and steps of the optimizer's own lie between them."""
    model = nn.Linear(160, 130, bias=False)
    guard = watch(model, recompute=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for factor in (1.0, -3.0):
        with torch.no_grad():
            model.weight.mul_(factor)
        x = torch.randn(TOKENS, 160, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model(x).square().sum().backward()
    assert guard._session.layers[0].step.codes is not None
    optimizer.step()
    assert read(guard)[" dgrad"].count == 2 * 64 * 160
    assert 0.02 < read(guard)[" dgrad"].relative_error < 0.045
    assert guard._session.layers[0].step.codes is None


class TestBounds:
    def test_two_layers_a_sample_in_turn_and_the_worst_first(self, watch: Watch, read: Read) -> None:
        model = small_layers(6)
        guard = watch(model, recompute=0)
        flag(guard, "1", "3", "5")
        guard._session.builder.flags.hear({"alerts": [{"layer": "2", "severity": "watch"}]})
        turns = []
        for seed in range(2):
            step(model, seed=seed)
            turns.append(whole_layers(read(guard)))
        assert turns[0] < {"1", "3", "5"}
        assert turns[0] | turns[1] == {"1", "2", "3", "5"}
        assert [len(turn) for turn in turns] == [flags.CLOSE_LAYERS] * 2

    def test_a_flag_is_over_after_three_samples_without_a_breach(self, watch: Watch, read: Read) -> None:
        model = small_layers(2)
        guard = watch(model, recompute=0)
        flag(guard, "1")
        seen = []
        for seed in range(5):
            step(model, seed=seed)
            seen.append(whole_layers(read(guard)))
        assert seen == [{"1"}] * flags.FLAG_SAMPLES + [set()] * 2

    def test_a_sample_that_is_there_has_led_to_its_flags(
        self, watch: Watch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sender and the trainer may build it at once: the second must not go on with flags that are a sample old."""
        model = small_layers(1)
        guard = watch(model, recompute=0)
        step(model)
        assert guard.last_sample() is not None
        session, seen = guard._session, []
        assert session.last is not None
        record = dataclasses.replace(session.last, sample=None)
        monkeypatch.setattr(session.builder.flags, "look", lambda sample: seen.append(record.sample))
        built = session.builder.build(record)
        assert seen == [None]
        assert record.sample is built

    def test_what_begins_in_the_middle_of_a_step_waits_for_the_next(self, watch: Watch, read: Read) -> None:
        """All micro-batches of a step are measured alike, and x is there for the wgrad that is asked for."""
        model = nn.Linear(32, 32)
        guard = watch(model, recompute=0)
        model(torch.randn(4, 32)).sum().backward()
        flag(guard, "")
        step(model)
        got = read(guard)
        assert got[" fprop"].count == (4 + 64) * 32
        assert " wgrad" not in got.stats
        step(model)
        assert read(guard)[" fprop"].count == TOKENS * 32

    def test_a_layer_in_breach_flags_itself(self, watch: Watch, read: Read) -> None:
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 64))
        outliers = torch.ones(256)
        outliers[::16] = 2.0**19
        with torch.no_grad():
            model[0].weight /= outliers
        guard = watch(model, recompute=0)
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), 0.0)
            x = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(3)) * outliers
            model(x).sum().backward()
            optimizer.step()
            got = read(guard)
        assert guard._session.builder.flags.layers == ("0",)
        assert got["0 fprop"].count == TOKENS * 64
        # x and w underflow, the layer itself is no FP8 layer: the alternatives say what it would take.
        assert got["0 fprop"].relative_error < 1e-5
        assert got["0 fprop, fp8"].relative_error > 0.5
        assert got["0 fprop, e5m2"].relative_error < 0.08
        assert got["0 fprop, pow2"].relative_error > got["0 fprop, fp8"].relative_error

    def test_so_does_one_that_the_server_names(
        self, watch: Watch, endpoint: Any, accept: Callable[..., Any]
    ) -> None:
        alerts = [{"id": 1, "layer": "1", "severity": "watch", "rule": "gemm-error"}]
        endpoint.answer = lambda body: (200, accept(body, alerts=alerts))
        model = small_layers(3)
        guard = watch(model, server=endpoint.url, run="told")
        step(model)
        assert guard.flush(10)
        assert guard._session.builder.flags.layers == ("1",)


class TestWhatIfSlots:
    def test_they_stand_behind_all_others_with_their_slots_index(self, watch: Watch, read: Read) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        guard = watch(model, recompute=0)
        flag(guard, "0")
        step(model)
        sample = read(guard).sample
        kinds = [slot.variant is not None for slot in sample.slots]
        assert kinds == sorted(kinds)
        own = {
            (s.layer, s.gemm): i for s, i in zip(sample.slots, sample.indices, strict=True) if not s.variant
        }
        named: dict[str, list[str]] = {gemm: [] for gemm in ("fprop", "dgrad", "wgrad")}
        for slot, index in zip(sample.slots, sample.indices, strict=True):
            if slot.variant:
                assert slot.layer == "0"
                assert slot.emulated
                assert index == own[slot.layer, slot.gemm]
                assert (slot.fmt == "e5m2") is ("e5m2" in slot.variant)
                named[str(slot.gemm)].append(slot.variant)
        assert named == {gemm: list(whatif.alternatives(gemm, LinearPrecision())) for gemm in named}

    def test_the_configured_precision_is_where_they_start(self, watch: Watch, read: Read) -> None:
        precision = LinearPrecision(dgrad="bf16", dy=OperandFormat(multiplier=2.0**30))
        model = Fp8Linear(160, 130, precision=precision)
        guard = watch(model, recompute=0)
        flag(guard, "")
        step(model)
        got = read(guard)
        assert got[" dgrad, fp8"].relative_error == got[" dgrad"].relative_error == 1.0
        assert got[" dgrad, multiplier_2^0"].relative_error < 0.04
        assert 0.001 < got[" dgrad, bf16"].relative_error < 0.004

    def test_an_expert_that_is_called_by_itself_has_its_own_rows(self, watch: Watch) -> None:
        model = Fp8GroupedLinear(3, 96, 40)
        guard = watch(model, recompute=0)
        flag(guard, "")
        session, [layer] = guard._session, guard._session.layers
        session.touch()
        x, w = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)), model.weight.detach()
        with layer.narrowed(session.frame, 1):
            judge.fprop(session, layer, x, w[1], x @ w[1].T, judge.Judgement())
        [vectors, *_] = session.frame.variants_of({layer.rows[Part.FPROP]})
        assert vectors[:, 0].tolist() == [0.0, 50 * 40, 0.0]
        session.frame = None

    def test_micro_batches_add_up(self, watch: Watch, read: Read) -> None:
        model = nn.Linear(96, 40, bias=False)
        guard = watch(model, recompute=0)
        flag(guard, "")
        seen = step(model, tokens=50, parts=2)
        got = read(guard)
        w = model.weight.detach()
        parts = [whatif.fprop(x, w, torch.arange(50), whatif.alternatives("fprop", LinearPrecision())) for x, *_ in seen]  # fmt: skip
        for name in parts[0]:
            wanted = TensorStats.merge(TensorStats.from_vector(part[name].numpy(), NULLS) for part in parts)
            assert_same(got[f" fprop, {name}"], wanted, 1e-12)

    def test_gradients_are_divided_by_the_loss_scale(self, watch: Watch, read: Read) -> None:
        found = []
        for scale in (1.0, 2.0**12):
            torch.manual_seed(0)
            model = nn.Linear(96, 40, bias=False)
            guard = watch(model, recompute=0)
            flag(guard, "")
            guard.log(loss_scale=scale)
            step(model, tokens=50, scale=scale)
            guard.log(loss_scale=scale)
            found.append(variants(read(guard)))
            guard.detach(timeout=0.2)
        assert found[0] == found[1]
        assert len(found[0]) > 30

    def test_a_scale_that_changes_within_the_step_brings_them_along(self, watch: Watch) -> None:
        """An iteration that GradScaler skips stays part of the step, measured under another scale."""
        layers = watch(nn.Linear(8, 8))._session.layers
        frame = Frame(rows_of(layers), torch.device("cpu"))
        rows = {part: layers[0].row(part) for part in (Part.FPROP, Part.DGRAD)}
        for row in rows.values():
            frame.add_variant(row, "pow2", "e4m3", torch.ones(1, stats.VECTOR_LENGTH, dtype=torch.float64))
        scaling._rescale(frame, layers, torch.tensor(4.0))
        [dgrad] = frame.variants_of({rows[Part.DGRAD]})
        [fprop] = frame.variants_of({rows[Part.FPROP]})
        at = stats.COLUMNS.index
        assert (dgrad[0, at("count")], dgrad[0, at("amax")], dgrad[0, at("sum_sq_err")]) == (1.0, 4.0, 16.0)
        assert (fprop == 1.0).all()

    def test_one_that_fails_costs_nothing_else(
        self, watch: Watch, read: Read, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*arguments: Any) -> Any:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(whatif, "dgrad", fails)
        model = nn.Linear(64, 64)
        guard = watch(model, recompute=1)
        flag(guard, "")
        step(model)
        got = read(guard)
        assert {slot.gemm for slot in real_slots(got)} == {"fprop", "dgrad", "wgrad"}
        assert {slot.gemm for slot in got.sample.slots if slot.variant} == {"fprop", "wgrad"}
        assert guard._session.once.counts["a what-if: RuntimeError"] == 1

    def test_the_logs_line_is_about_what_happened(
        self, watch: Watch, read: Read, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", logger="fp8_safeguard")
        model = nn.Linear(64, 64)
        guard = watch(model, recompute=0, run="logged")
        flag(guard, "")
        step(model)
        got = read(guard)
        assert min(values.cosine for values in variants(got).values()) < 0.9
        assert guard.flush(5)
        [line] = [record.message for record in caplog.records if "logged step 0" in record.message]
        assert "worst cosine 0.99" in line
        real = sum(slot.variant is None for slot in got.sample.slots)
        assert f"{real} slots" in line


class TestShadow:
    def test_a_layer_in_high_precision_says_what_fp8_would_do_to_its_forward(
        self, watch: Watch, read: Read
    ) -> None:
        model = nn.Sequential(nn.Linear(160, 130), nn.Linear(130, 8))
        guard = watch(model, recompute=0, shadow=True)
        [(x, *_)] = step(model, tokens=60)
        got = read(guard)
        w = model[0].weight.detach()
        exact = x.double() @ w.double().T
        wanted = compare(exact.numpy(), in_blocks(x, (1, 128)) @ in_blocks(w, (128, 128)).T)
        assert_same(got["0 fprop, fp8"], wanted)
        assert 0.03 < got["0 fprop, fp8"].relative_error < 0.04
        assert got["0 fprop"].relative_error < 1e-6
        assert set(variants(got)) == {"0 fprop, fp8", "1 fprop, fp8"}

    def test_only_where_it_is_asked_for(self, watch: Watch, read: Read) -> None:
        model = nn.Linear(16, 16)
        guard = watch(model, recompute=0)
        step(model)
        assert not variants(read(guard))

    @pytest.mark.parametrize("fprop", ["fp8", "bf16"])
    def test_our_own_layers_say_it_themselves(self, watch: Watch, read: Read, fprop: Any) -> None:
        model = Fp8Linear(64, 64, precision=LinearPrecision(fprop=fprop))
        guard = watch(model, recompute=0, shadow=True)
        step(model)
        got = read(guard)
        assert not variants(got)
        assert 0.03 < got[" fprop"].relative_error < 0.045
