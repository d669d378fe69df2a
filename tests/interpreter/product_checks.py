"""Operands of product tests, and their bound."""

import torch

from fp8_safeguard.kernels import QuantizedTensor
from fp8_safeguard.kernels.triton_fused import quantize_layouts

TOLERANCE = 1e-6
"""Of sum |a||b|, float32 output: a few float32 roundings (6e-8) in chains of 128 products."""


def assert_close(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """got is a @ b.T within TOLERANCE x sum |a||b|, operands float64."""
    bound = TOLERANCE * (a.abs() @ b.abs().mT)
    assert ((got.double() - a @ b.mT).abs() <= bound).all()


def operands(m: int, n: int, k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Wide-range operands: every block has its own magnitude."""
    a = torch.randn(m, k, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))
    b = torch.randn(n, k, generator=generator) * torch.exp(torch.randn(1, k, generator=generator))
    return a, b


def columns(x: torch.Tensor, offsets: torch.Tensor | None = None, k_major: bool = True) -> QuantizedTensor:
    """`col` codes, stored transposed if wanted (quantize_layouts itself does so for aligned experts only)."""
    block = quantize_layouts(x, row=False, blocks="col", offsets=offsets, k_major=k_major).block
    assert block is not None
    if not k_major or x.shape[0] == 0:
        return block
    store = torch.zeros(x.shape[1], -(-x.shape[0] // 16) * 16, dtype=torch.uint8)
    store[:, : x.shape[0]] = block.data.view(torch.uint8).t()
    turned_data = store[:, : x.shape[0]].t().view(block.data.dtype)
    return QuantizedTensor(turned_data, block.scale, "col", block.fmt, block.offsets)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
