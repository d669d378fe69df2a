"""Every shipped GEMM configuration gives the same bits, and the table picks the fastest."""

from itertools import pairwise

import pytest
import torch

from fp8_safeguard.kernels import KernelError, quantize
from fp8_safeguard.kernels.triton_config import (
    BLACKWELL,
    HOPPER,
    GemmConfig,
    candidates,
    gemm_config,
    predict,
)
from fp8_safeguard.kernels.triton_products import fp8_gemm_nt, grouped_gemm_nt, grouped_gemm_wgrad

from .product_checks import assert_close, columns, offsets_of, operands

ALIGNED = [144, 0, 48]


@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("layout", ["row", "tile"])
def test_every_configuration_gives_the_same_bits(
    architecture: int, layout: str, generator: torch.Generator
) -> None:
    """192 columns hold one and a half blocks of scales: products of 128 and 64 columns, in turns."""
    a, b = operands(140, 464, 256, generator)
    qa, qb = quantize(a), quantize(b, layout=layout)
    wanted = fp8_gemm_nt(qa, qb, config=GemmConfig(block_m=128, warps=4, stages=2, tma=False))
    assert_close(wanted, qa.dequantize(torch.float64), qb.dequantize(torch.float64))
    for config in candidates(architecture, scales=layout, tma=True):
        assert torch.equal(fp8_gemm_nt(qa, qb, config=config), wanted), config
    held = torch.randn(140, 464, generator=generator)
    added = fp8_gemm_nt(qa, qb, out=held.clone(), config=candidates(architecture, scales=layout, tma=True)[0])
    assert torch.equal(added, held + wanted)


@pytest.mark.parametrize("architecture", [HOPPER, BLACKWELL])
def test_every_grouped_configuration_gives_the_same_bits(
    architecture: int, generator: torch.Generator
) -> None:
    offsets = offsets_of(ALIGNED)
    a = quantize(torch.randn(192, 256, generator=generator))
    dy, x = (torch.randn(192, width, generator=generator) for width in (208, 272))
    slow = GemmConfig(block_m=128, warps=4, stages=2, tma=False)
    for layout in ("tile", "row"):
        b = quantize(torch.randn(len(ALIGNED), 208, 256, generator=generator), layout=layout)
        wanted = grouped_gemm_nt(a, b, offsets, config=slow)
        for config in candidates(architecture, scales=layout, tma=True, grouped=True):
            assert torch.equal(grouped_gemm_nt(a, b, offsets, config=config), wanted), config
    qdy, qx = columns(dy, offsets), columns(x, offsets)
    for config in candidates(architecture, scales="col", tma=True, grouped=True):
        got = grouped_gemm_wgrad(qdy, qx, offsets, aligned=True, config=config)
        for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
            assert_close(got[expert], *(q.dequantize(torch.float64)[start:end].t() for q in (qdy, qx)))


@pytest.mark.parametrize(
    ("m", "n", "wide"), [(8192, 7168, True), (4096, 2112, True), (4096, 4096, True), (64, 7168, False)]
)
def test_the_table_takes_what_is_predicted_fastest(m: int, n: int, wide: bool) -> None:
    config = gemm_config(HOPPER, m, n, scales="tile", tma=True)
    assert (config.block_n == 192) == wide
    found = [predict(HOPPER, other, m, n).clocks for other in candidates(HOPPER, scales="tile", tma=True)]
    assert predict(HOPPER, config, m, n).clocks == min(found)


def test_a_prediction_counts_waves_and_edges() -> None:
    """2112 columns are 11 blocks of 192: 704 blocks on 132 multiprocessors are five waves and a third."""
    config = candidates(HOPPER, scales="tile", tma=True)[0]
    found = predict(HOPPER, config, 8192, 2112, 132)
    assert (found.blocks, found.bound) == (704, "L2 cache")
    assert found.waves == pytest.approx(16 / 3)
    assert found.busy == pytest.approx(16 / 18)
    with pytest.raises(KernelError, match="use precision bf16"):
        gemm_config(80, 8192, scales="tile", tma=True)
