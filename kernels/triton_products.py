"""Triton: what a GEMM call launches, dense and grouped."""

# mypy: disable-error-code="import-untyped"
# Shapes: M x N the result, K the summed dimension, T tokens, E experts.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8_safeguard.kernels.codes import BLOCK
from fp8_safeguard.kernels.errors import OffsetsError, OperandError
from fp8_safeguard.kernels.gemm import require_operand, require_same, turned
from fp8_safeguard.kernels.quantized import QuantizedTensor
from fp8_safeguard.kernels.triton_config import GemmConfig, architecture_of, gemm_config, processors_of
from fp8_safeguard.kernels.triton_gemm import gemm_kernel, gemm_tma_kernel
from fp8_safeguard.kernels.triton_grouped import (
    grouped_kernel,
    grouped_wgrad_kernel,
    grouped_wgrad_tma_kernel,
)
from fp8_safeguard.kernels.triton_launch import Launch, next_power_of_two

TMA_BYTES = 16
"""Addresses and strides of what the tensor memory accelerator reads are multiples of it."""
SCALE_ROWS = {"row": 1, "col": 1, "tile": BLOCK}


def fp8_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """a [M,K] (row or tile) times b [N,K] (row or tile) transposed: [M,N] in out_dtype.

    With `out` the product is added to it, in its dtype. Codes need not be K-major: a transposed view is turned on
    the way to the tensor core. Products of two scales below 2^-126 lose bits, as any float32 does there.
    """
    require_operand("a", a, 2, ("row", "tile"))
    require_operand("b", b, 2, ("row", "tile"))
    require_same("K", "a", a.shape[1], "b", b.shape[1])
    result, launch = plan_gemm(a, b, out_dtype, out, config)
    if launch is not None:
        launch.run()
    return result


def fp8_gemm_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """dy [T,N] (col) transposed times x [T,K] (col): [N,K] in out_dtype, or added to `out`."""
    require_operand("dy", dy, 2, ("col",))
    require_operand("x", x, 2, ("col",))
    require_same("T", "dy", dy.shape[0], "x", x.shape[0])
    result, launch = plan_gemm(turned(dy), turned(x), out_dtype, out, config)
    if launch is not None:
        launch.run()
    return result


def plan_gemm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype,
    out: Tensor | None,
    config: GemmConfig | None,
) -> tuple[Tensor, Launch | None]:
    """The result and the kernel that fills it; no kernel where nothing is summed."""
    a, b = _readable(a), _readable(b)
    (m, k), n = a.shape, b.shape[0]
    accumulate = out is not None
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    elif out.shape != (m, n) or not out.is_contiguous():
        raise OperandError(
            f"out has shape {list(out.shape)}, the product is [{m}, {n}]: pass a contiguous tensor of that shape"
        )
    if 0 in (m, n, k):
        return (out if accumulate else out.zero_()), None
    tma = _fits_tma(a.data) and _fits_tma(b.data) and _fits_tma(out)
    processors = processors_of(a.device)
    config = config or gemm_config(
        architecture_of(a.device), m, n, scales=b.layout, tma=tma, processors=processors
    )
    shared = {
        "a_scale_ptr": a.scale,
        "b_scale_ptr": b.scale,
        "m": m,
        "n": n,
        "k": k,
        **_strides("a_scale", a.scale, "m", "k"),
        **_strides("b_scale", b.scale, "n", "k"),
        "BLOCK_M": config.block_m,
        "GROUP_M": config.group_m,
        "A_ROWS": SCALE_ROWS[a.layout],
        "B_ROWS": SCALE_ROWS[b.layout],
        "ACCUMULATE": accumulate,
    }
    tiles_m = -(-m // config.block_m)
    if config.tma:
        arguments = {
            "a_desc": _descriptor(a.data, config.block_m),
            "b_desc": _descriptor(b.data, config.first_n),
            "b_second_desc": _descriptor(b.data, config.second_n or config.first_n),
            "out_desc": TensorDescriptor.from_tensor(out, [config.block_m, config.first_n]),
            "out_second_desc": TensorDescriptor.from_tensor(
                out, [config.block_m, config.second_n or config.first_n]
            ),
            **_parts(config),
            "SPECIALIZE": config.specialize,
        }
        programs = min(processors * config.resident, tiles_m * -(-n // config.block_n))
        return out, _launch(gemm_tma_kernel, programs, shared | arguments, config)
    arguments = {
        "a_ptr": a.data,
        "b_ptr": b.data,
        "out_ptr": out,
        **_strides("a", a.data, "m", "k"),
        **_strides("b", b.data, "n", "k"),
        "out_stride": out.stride(0),
        "BLOCK_N": BLOCK,
        "A_K_MAJOR": _k_major(a.data),
        "B_K_MAJOR": _k_major(b.data),
        "EVEN": k % BLOCK == 0,
    }
    return out, _launch(gemm_kernel, tiles_m * -(-n // BLOCK), shared | arguments, config)


def grouped_gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """a [T,K] (row) times each expert's b [E,N,K] (row or tile) transposed: [T,N] in out_dtype.

    Rows offsets[e] to offsets[e+1] belong to expert e; rows behind the last offset give zeros. The offsets stay on
    the device and are not checked.
    """
    require_operand("a", a, 2, ("row",))
    require_operand("b", b, 3, ("row", "tile"))
    require_same("K", "a", a.shape[1], "b", b.shape[2])
    _require_offsets(offsets, b.shape[0])
    result, launch = plan_grouped(a, b, offsets, out_dtype, config)
    if launch is not None:
        launch.run()
    return result


def plan_grouped(
    a: QuantizedTensor, b: QuantizedTensor, offsets: Tensor, out_dtype: torch.dtype, config: GemmConfig | None
) -> tuple[Tensor, Launch | None]:
    """The result and the kernel that fills it."""
    a, b = _readable(a), _readable(b)
    (tokens, k), (experts, n, _) = a.shape, b.shape
    out = torch.empty((tokens, n), dtype=out_dtype, device=a.device)
    if 0 in (tokens, n, k, experts):
        return out.zero_(), None
    all_experts = b.data.reshape(experts * n, k) if b.data.is_contiguous() else b.data[0]
    tma = b.data.is_contiguous() and _fits_tma(a.data) and _fits_tma(all_experts)
    config = config or gemm_config(
        architecture_of(a.device), -(-tokens // experts), n, scales=b.layout, tma=tma, grouped=True
    )
    parts = (
        {"FIRST": config.first_n, "SECOND": config.second_n} if config.tma else {"FIRST": BLOCK, "SECOND": 0}
    )
    arguments = {
        "a": _descriptor(a.data, config.block_m) if config.tma else a.data,
        "b": _descriptor(all_experts, config.first_n) if config.tma else b.data,
        "b_second": _descriptor(all_experts, config.second_n or config.first_n) if config.tma else b.data,
        "out_ptr": out,
        "a_scale_ptr": a.scale,
        "b_scale_ptr": b.scale,
        "offsets_ptr": offsets,
        "tokens": tokens,
        "n": n,
        "k": k,
        "experts": experts,
        **_strides("a", a.data, "m", "k"),
        **_strides("b", b.data, "e", "n", "k"),
        "out_stride": out.stride(0),
        **_strides("a_scale", a.scale, "m", "k"),
        **_strides("b_scale", b.scale, "e", "n", "k"),
        "BLOCK_M": config.block_m,
        "GROUP_M": config.group_m,
        **parts,
        "A_ROWS": 1,
        "B_ROWS": SCALE_ROWS[b.layout],
        "A_K_MAJOR": _k_major(a.data),
        "B_K_MAJOR": _k_major(b.data[0]),
        "EVEN": k % BLOCK == 0,
        "SLOTS": next_power_of_two(experts + 1),
        "TMA": config.tma,
    }
    tiles = (tokens // config.block_m + experts + 1) * -(-n // (parts["FIRST"] + parts["SECOND"]))
    programs = min(processors_of(a.device) * config.resident, tiles)
    return out, _launch(grouped_kernel, programs, arguments, config)


def grouped_gemm_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
    aligned: bool = False,
    config: GemmConfig | None = None,
) -> Tensor:
    """dy [T,N] (col) transposed times x [T,K] (col), expert by expert: [E,N,K] in out_dtype, or added to `out`.

    An expert without rows gives exact zeros. Both operands are split by these offsets, or neither is. `aligned` says
    that every offset is a multiple of 16, as the padding routing map makes them: the tensor memory accelerator begins
    at multiples of 16 bytes only. Other experts are read by pointers, 16 bytes at a time from codes stored by token.
    """
    require_operand("dy", dy, 2, ("col",))
    require_operand("x", x, 2, ("col",))
    require_same("T", "dy", dy.shape[0], "x", x.shape[0])
    _require_offsets(offsets, offsets.numel() - 1)
    if (dy.offsets is None) != (x.offsets is None):
        raise OperandError("dy and x differ in their blocks: quantise both with offsets, or both without")
    result, launch = plan_grouped_wgrad(dy, x, offsets, out_dtype, out, aligned, config)
    if launch is not None:
        launch.run()
    return result


def plan_grouped_wgrad(
    dy: QuantizedTensor,
    x: QuantizedTensor,
    offsets: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None,
    aligned: bool,
    config: GemmConfig | None,
) -> tuple[Tensor, Launch | None]:
    """The result and the kernel that fills it."""
    dy, x = _readable(dy), _readable(x)
    (tokens, n), k, experts = dy.shape, x.shape[1], offsets.numel() - 1
    accumulate = out is not None
    if out is None:
        out = torch.empty((experts, n, k), dtype=out_dtype, device=x.device)
    elif out.shape != (experts, n, k) or not out.is_contiguous():
        raise OperandError(
            f"out has shape {list(out.shape)}, the gradient is [{experts}, {n}, {k}]: pass a contiguous tensor of "
            "that shape"
        )
    if 0 in (tokens, n, k, experts):
        return (out if accumulate else out.zero_()), None
    split = dy.offsets is not None
    dy_NT, x_KT = dy.data.t(), x.data.t()
    tma = aligned and split and _fits_tma(dy_NT) and _fits_tma(x_KT)
    config = config or gemm_config(architecture_of(x.device), n, k, scales="col", tma=tma, grouped=True)
    arguments = {
        "out_ptr": out,
        "dy_scale_ptr": dy.scale,
        "x_scale_ptr": x.scale,
        "offsets_ptr": offsets,
        "tokens": tokens,
        "n": n,
        "k": k,
        "experts": experts,
        "out_stride_e": out.stride(0),
        "out_stride_n": out.stride(1),
        "dy_scale_stride": dy.scale.stride(0),
        "x_scale_stride": x.scale.stride(0),
        "BLOCK_M": config.block_m,
        "GROUP_M": config.group_m,
        "ACCUMULATE": accumulate,
        "SLOTS": next_power_of_two(experts + 1),
    }
    tiles = experts * -(-n // config.block_m) * -(-k // BLOCK)
    programs = min(processors_of(x.device) * config.resident, tiles)
    if config.tma:
        arguments |= {
            "dy": _descriptor(dy_NT, config.block_m),
            "x": _descriptor(x_KT, config.first_n),
            "x_second": _descriptor(x_KT, config.second_n or config.first_n),
            **_parts(config),
        }
        return out, _launch(grouped_wgrad_tma_kernel, programs, arguments, config)
    arguments |= {
        "dy_ptr": dy_NT,
        "x_ptr": x_KT,
        **_strides("dy", dy_NT, "n", "t"),
        **_strides("x", x_KT, "k", "t"),
        "BLOCK_N": BLOCK,
        "DY_K_MAJOR": _k_major(dy_NT),
        "X_K_MAJOR": _k_major(x_KT),
        "SPLIT": split,
    }
    return out, _launch(grouped_wgrad_kernel, programs, arguments, config)


def _launch(kernel: Any, programs: int, arguments: dict[str, Any], config: GemmConfig) -> Launch:
    return Launch(
        kernel=kernel, grid=(programs,), arguments=arguments, warps=config.warps, stages=config.stages
    )


def _parts(config: GemmConfig) -> dict[str, int]:
    return {"FIRST": config.first_n, "SECOND": config.second_n}


def _strides(name: str, tensor: Tensor, *axes: str) -> dict[str, int]:
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes, tensor.stride(), strict=True)}


def _readable(operand: QuantizedTensor) -> QuantizedTensor:
    """The operand, its codes copied unless they are contiguous along rows or columns: kernels read along one of them."""
    if 1 in operand.data.stride()[-2:]:
        return operand
    return replace(operand, data=operand.data.clone(memory_format=torch.contiguous_format))


def _k_major(codes: Tensor) -> bool:
    """Whether the summed dimension, the last one, is the contiguous one."""
    return codes.stride(-1) == 1


def _fits_tma(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator can address a matrix."""
    pitch = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and pitch % TMA_BYTES == 0 and matrix.data_ptr() % TMA_BYTES == 0


def _descriptor(codes: Tensor, rows: int) -> TensorDescriptor:
    """Blocks of `rows` rows, 128 deep."""
    return TensorDescriptor.from_tensor(codes, [rows, BLOCK])


def _require_offsets(offsets: Tensor, experts: int) -> None:
    """Shape and dtype only: the values stay on the device."""
    if (
        offsets.dim() != 1
        or offsets.dtype not in (torch.int32, torch.int64)
        or offsets.numel() != experts + 1
    ):
        raise OffsetsError(
            f"offsets are {offsets.dtype} {list(offsets.shape)}, {experts} experts need int32 [{experts + 1}]: build "
            "them for example with torch.cat([zero, counts.cumsum(0)]).int()"
        )
