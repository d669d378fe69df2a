"""Formulas of bytes and FLOPs, against real tensors and the page."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp8_safeguard.kernels import QuantizedTensor, quantize

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS, FEATURES, EXPERTS = 300, 520, 130, 3


def size(*tensors: torch.Tensor | QuantizedTensor) -> int:
    """Bytes of tensors, codes and scales together."""
    return sum(
        tensor.data.nbytes + tensor.scale.nbytes if isinstance(tensor, QuantizedTensor) else tensor.nbytes
        for tensor in tensors
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", ["row", "col", "tile"])
def test_quantising_writes_what_quantize_returns(layout: str, x: torch.Tensor, floors: ModuleType) -> None:
    work = floors.KERNELS[f"quantize_{layout}"].work(R=ROWS, C=COLUMNS)
    assert (work.reads, work.writes) == (x.nbytes, size(quantize(x, layout=layout)))


def test_both_layouts_from_one_read(x: torch.Tensor, floors: ModuleType) -> None:
    work = floors.KERNELS["quantize_row_col"].work(R=ROWS, C=COLUMNS)
    assert (work.reads, work.writes) == (x.nbytes, size(quantize(x), quantize(x, layout="col")))


def test_moving_codes(x: torch.Tensor, floors: ModuleType) -> None:
    tile = quantize(x, layout="tile")
    work = floors.KERNELS["transpose_tiles"].work(N=ROWS, K=COLUMNS)
    assert (work.reads, work.writes) == (size(tile), size(tile.transpose()))
    work = floors.KERNELS["reblock"].work(R=ROWS, C=COLUMNS)
    assert (work.reads, work.writes) == (size(quantize(x)), size(quantize(x, layout="col")))


def test_products_read_operands_and_write_results(x: torch.Tensor, floors: ModuleType) -> None:
    shape = {"M": ROWS, "N": FEATURES, "K": COLUMNS}
    w = torch.ones(FEATURES, COLUMNS, dtype=torch.bfloat16)
    dy = torch.ones(ROWS, FEATURES, dtype=torch.bfloat16)
    fprop, dgrad, wgrad = (floors.KERNELS[name].work(**shape) for name in ("fprop", "dgrad", "wgrad"))
    tile, y = quantize(w, layout="tile"), x @ w.t()
    assert (fprop.reads, fprop.writes) == (size(quantize(x), tile), size(y))
    assert (dgrad.reads, dgrad.writes) == (size(quantize(dy), tile), size(x))
    columns = [quantize(source, layout="col") for source in (dy, x)]
    assert (wgrad.reads, wgrad.writes) == (size(*columns), size(w.float()))
    assert fprop.tensor == dgrad.tensor == wgrad.tensor == 2 * y.numel() * COLUMNS


def test_grouped_products(x: torch.Tensor, floors: ModuleType) -> None:
    shape = {"M": ROWS, "N": FEATURES, "K": COLUMNS, "E": EXPERTS}
    w = torch.ones(EXPERTS, FEATURES, COLUMNS, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    work = floors.KERNELS["grouped_fprop"].work(**shape)
    assert work.reads == size(quantize(x), quantize(w, layout="tile"), offsets)
    work = floors.KERNELS["grouped_wgrad"].work(**shape)
    dy = torch.ones(ROWS, FEATURES, dtype=torch.bfloat16)
    # Each of the experts may end in the middle of a block.
    most = size(*(quantize(source, layout="col", offsets=offsets) for source in (dy, x)), offsets)
    assert most <= work.reads <= most + 4 * EXPERTS * (FEATURES + COLUMNS)
    assert work.writes == size(w.float())


def test_the_floor_is_the_slowest_resource(floors: ModuleType) -> None:
    gpu = floors.Ceilings(name="toy", bandwidth=10.0, fp8=100.0, bf16=50.0, fp32=5.0)
    work = floors.Work(reads=20, writes=10, tensor=400, vector=10)
    assert (work.seconds(gpu), work.bound(gpu)) == (4.0, "tensor cores")
    bf16 = floors.Work(reads=20, writes=10, tensor=400, vector=10, unit="bf16")
    assert bf16.seconds(gpu) == 8.0
    assert floors.Work(reads=20, writes=30).bound(gpu) == "memory"
    assert floors.Work(reads=1, writes=1, vector=50).bound(gpu) == "FP32 units"


def test_the_page_has_the_tables(floors: ModuleType) -> None:
    page = (ROOT / "docs" / "gemms.md").read_text()
    assert page == floors.written(page), "docs/gemms.md is not current: run `python benchmarks/gpu/floors.py`"
    missing = [name for name in floors.KERNELS if f"| `{name}` |" not in page]
    assert not missing
    number = f"{1e6 * floors.KERNELS['fprop'].work().seconds(floors.H200):.0f}"
    assert number in page.split("| `fprop` |")[1].splitlines()[0]


def test_every_fused_operation_has_a_floor(floors: ModuleType, moe_calls: ModuleType) -> None:
    assert set(moe_calls.OPERATIONS) == set(floors.FUSED)


def test_the_formulas_need_no_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import gpu.floors; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT / "benchmarks")])
    assert done.returncode == 0
