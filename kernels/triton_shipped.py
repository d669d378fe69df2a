"""Every kernel configuration that ships, ready to compile, with its promises."""

# Shapes: T tokens, N output features, K input features, E experts. Tensors are of torch's `meta` device: shapes only.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8_safeguard.kernels.codes import get_format
from fp8_safeguard.kernels.gemm import turned
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.triton_config import GemmConfig, candidates
from fp8_safeguard.kernels.triton_fused import Request, plan, plan_reblock
from fp8_safeguard.kernels.triton_launch import Launch
from fp8_safeguard.kernels.triton_mx import plan_mx
from fp8_safeguard.kernels.triton_products import plan_gemm, plan_grouped, plan_grouped_wgrad
from fp8_safeguard.kernels.triton_transpose import plan_transpose

TOKENS, FEATURES, INPUTS, EXPERTS = 8192, 7168, 2048, 8


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A launch and what its machine code must show."""

    launch: Launch
    tensor_core: bool = False
    """The FP8 tensor-core instruction of the architecture."""
    saturating: bool = False
    """The saturating conversion to FP8."""
    tma: bool = False
    """Loads by the tensor memory accelerator."""
    specialized: bool = False
    """Warps of their own for loads and products."""
    ieee_division: bool = False
    """Divisions rounded as IEEE 754 says."""
    resident: int = 1
    """Programs that a multiprocessor holds at least."""


def shipped(architecture: int) -> dict[str, Shipped]:
    """Every shipped kernel of an architecture by name."""
    # Imported here: it needs Shipped.
    from fp8_safeguard.kernels.moe.triton_shipped import shipped as shipped_moe

    return dict(_quantising()) | dict(_products(architecture)) | shipped_moe(architecture)


def _quantising() -> Iterator[tuple[str, Shipped]]:
    """The quantise family. Where numbers saturate, statistics are launches of their own."""
    x_TK = {name: _meta((TOKENS, INPUTS), dtype) for name, dtype in _SOURCES.items()}
    offsets = _meta((EXPERTS + 1,), torch.int32)
    for name, x in x_TK.items():
        yield f"quantize_row_{name}", _quantiser(plan(x, _request())[0][0])
        yield f"quantize_row_col_{name}", _quantiser(plan(x, _request(blocks="col"))[0][0])
        yield f"quantize_tile_{name}", _quantiser(plan(x, _request(row=False, blocks="tile"))[0][0])
    x = x_TK["bf16"]
    measured = plan(x, _request(blocks="col", stats=True, aligned=True), offsets)[0]
    yield "quantize_row_col_stats_experts_bf16", _quantiser(measured[0])
    ragged = plan(x, _request(blocks="col", stats=True, k_major=False), offsets)[0]
    yield "quantize_row_col_stats_ragged_bf16", _quantiser(ragged[0])
    yield "quantize_rare_row", _quantiser(measured[1], ieee_division=True)
    yield "quantize_rare_col", _quantiser(measured[2], ieee_division=True)
    yield "sum_column_tiles", Shipped(launch=measured[3])
    yield "sum_row_tiles", Shipped(launch=measured[4])
    wide = plan(x_TK["fp32"], _request(blocks="col", stats=True, fmt="e5m2"))[0]
    yield "quantize_row_col_stats_e5m2_fp32", _quantiser(wide[0])
    yield from _measuring(x, offsets)
    tiles = plan(x, _request(row=False, blocks="tile", stats=True))[0]
    yield "quantize_tile_stats_bf16", _quantiser(tiles[0])
    yield "quantize_rare_tile", _quantiser(tiles[1], ieee_division=True)
    pow2 = plan(x, _request(blocks="col", fmt="e5m2", scale="pow2"))[0]
    yield "quantize_row_col_pow2_e5m2_bf16", _quantiser(pow2[0])
    yield "reblock", _quantiser(plan_reblock(_quantised(TOKENS, INPUTS, "row"))[0][0])
    yield "quantize_mx_bf16", _quantiser(plan_mx(x, "e4m3")[0], ieee_division=True)
    yield "transpose_tiles", Shipped(launch=plan_transpose(_quantised(FEATURES, INPUTS, "tile"))[0])


def _measuring(x: Tensor, offsets: Tensor) -> Iterator[tuple[str, Shipped]]:
    """Statistics alone, layout by layout."""
    for layout in ({"blocks": ""}, {"row": False, "blocks": "col"}, {"row": False, "blocks": "tile"}):
        name = layout["blocks"] or "row"
        launch = plan(x, _request(**layout, stats=True, store=False))[0][0]
        yield f"stats_{name}_bf16", _quantiser(launch)
        request = _request(**layout, stats=True, store=False, multiplier=0.5)
        yield f"stats_{name}_saturating_experts_bf16", _quantiser(plan(x, request, offsets)[0][0])


_SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _products(architecture: int) -> Iterator[tuple[str, Shipped]]:
    """The GEMMs, dense and grouped, in every configuration of the table."""
    x, few = _quantised(TOKENS, INPUTS, "row"), _quantised(48, INPUTS, "row")
    bf16, fp32 = torch.bfloat16, torch.float32
    w = _quantised(FEATURES, INPUTS, "tile")
    for config in candidates(architecture, scales="tile", tma=True):
        yield f"gemm_nt_tma_{_size(config)}", _product(plan_gemm(x, w, bf16, None, config)[1], config)
    pointer, small = candidates(architecture, scales="tile", tma=False)
    yield "gemm_nt_pointer", _product(plan_gemm(x, w, bf16, None, pointer)[1], pointer)
    yield "gemm_nt_small", _product(plan_gemm(few, w, bf16, None, small)[1], small)
    dy, w_KN = _quantised(TOKENS, FEATURES, "row"), turned(w)
    yield "gemm_fused_transpose", _product(plan_gemm(dy, w_KN, bf16, None, pointer)[1], pointer)
    dy_NT, x_KT = _quantised(FEATURES, TOKENS, "row"), _quantised(INPUTS, TOKENS, "row")
    yield "gemm_wgrad_pointer", _product(plan_gemm(dy_NT, x_KT, fp32, None, pointer)[1], pointer)
    gradient = _meta((FEATURES, INPUTS), fp32)
    for config in candidates(architecture, scales="row", tma=True):
        for name, out in (("wgrad", None), ("wgrad_accumulate", gradient)):
            launch = plan_gemm(dy_NT, x_KT, fp32, out, config)[1]
            yield f"gemm_{name}_tma_{_size(config)}", _product(launch, config)
    yield from _grouped(architecture, x)
    yield from _grouped_wgrad(architecture)


def _grouped(architecture: int, x: QuantizedTensor) -> Iterator[tuple[str, Shipped]]:
    """Every expert's rows with its own weight."""
    offsets = _meta((EXPERTS + 1,), torch.int32)
    for layout in ("tile", "row"):
        w = _experts(layout)
        for config in candidates(architecture, scales=layout, tma=True, grouped=True):
            launch = plan_grouped(x, w, offsets, torch.bfloat16, config)[1]
            yield f"grouped_nt_{layout}_tma_{_size(config)}", _product(launch, config)
        pointer = candidates(architecture, scales=layout, tma=False, grouped=True)[0]
        launch = plan_grouped(x, w, offsets, torch.bfloat16, pointer)[1]
        yield f"grouped_nt_{layout}_pointer", _product(launch, pointer)


def _grouped_wgrad(architecture: int) -> Iterator[tuple[str, Shipped]]:
    """Every expert's weight gradient, from codes stored transposed or, by pointers, by token."""
    offsets, fp32 = _meta((EXPERTS + 1,), torch.int32), torch.float32
    gradient = _meta((EXPERTS, FEATURES, INPUTS), fp32)
    dy_TN, x_TK = (_columns(TOKENS, width, offsets, True) for width in (FEATURES, INPUTS))
    for config in candidates(architecture, scales="col", tma=True, grouped=True):
        for name, out in (("wgrad", None), ("wgrad_accumulate", gradient)):
            launch = plan_grouped_wgrad(dy_TN, x_TK, offsets, fp32, out, True, config)[1]
            yield f"grouped_{name}_tma_{_size(config)}", _product(launch, config)
    pointer = candidates(architecture, scales="col", tma=False, grouped=True)[0]
    dy_TN, x_TK = (_columns(TOKENS, width, offsets, False) for width in (FEATURES, INPUTS))
    launch = plan_grouped_wgrad(dy_TN, x_TK, offsets, fp32, None, False, pointer)[1]
    yield "grouped_wgrad_pointer", _product(launch, pointer)


def _size(config: GemmConfig) -> str:
    return f"{config.block_m}x{config.block_n}"


def _experts(layout: str) -> QuantizedTensor:
    """Weights of all experts, as the quantiser stores them."""
    codes = _meta((EXPERTS, FEATURES, INPUTS), torch.float8_e4m3fn)
    scale = _meta((EXPERTS, FEATURES // 128, INPUTS // 128), torch.float32)
    if layout == "row":
        scale = _meta((INPUTS // 128, EXPERTS * FEATURES), torch.float32).t().view(EXPERTS, FEATURES, -1)
    return QuantizedTensor(codes, scale, layout, "e4m3")


def _quantiser(launch: Launch, **promises: bool) -> Shipped:
    return Shipped(launch=launch, saturating=True, **promises)


def _product(launch: Launch | None, config: GemmConfig) -> Shipped:
    assert launch is not None
    specialized = bool(launch.arguments.get("SPECIALIZE"))
    return Shipped(
        launch=launch, tensor_core=True, tma=config.tma, specialized=specialized, resident=config.resident
    )


def _request(**options: Any) -> Request:
    fmt = options.setdefault("fmt", "e4m3")
    return Request(code_format=get_format(fmt), **options)


def _quantised(rows: int, columns: int, layout: str) -> QuantizedTensor:
    """A matrix as the quantiser stores it: scales of rows next to each other."""
    blocks = -(-columns // 128)
    scale = _meta((blocks, rows), torch.float32).t()
    if layout == "tile":
        scale = _meta((-(-rows // 128), blocks), torch.float32)
    return QuantizedTensor(_meta((rows, columns), torch.float8_e4m3fn), scale, layout, "e4m3")


def _columns(rows: int, columns: int, offsets: Tensor, k_major: bool) -> QuantizedTensor:
    """A `col` matrix split by expert, stored transposed or not."""
    data = (
        _meta((columns, rows), torch.float8_e4m3fn).t()
        if k_major
        else _meta((rows, columns), torch.float8_e4m3fn)
    )
    scale = _meta((rows // 128 + EXPERTS + 1, columns), torch.float32)
    return QuantizedTensor(data, scale, "col", "e4m3", offsets)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
