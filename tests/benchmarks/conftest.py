"""A checkout with nothing installed but torch, Triton and numpy."""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def floors(suite: Callable[[str], ModuleType]) -> ModuleType:
    """benchmarks/gpu/floors.py."""
    return suite("gpu.floors")


@pytest.fixture
def moe_calls(suite: Callable[[str], ModuleType]) -> ModuleType:
    """benchmarks/gpu/moe_calls.py."""
    return suite("gpu.moe_calls")


@dataclass(frozen=True)
class Checkout:
    """A copy of this checkout and the folder of the packages that it may import."""

    folder: Path
    packages: Path

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """gpu_check.py without this environment's packages, variables or settings."""
        # On what is left of PATH there is no git: a machine lent for minutes may have none.
        environment = {
            "PYTHONPATH": str(self.packages),
            "PATH": str(self.packages),
            "HOME": str(self.packages),
        }
        environment |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(self.packages.parent / "triton")}
        script = str(self.folder / "benchmarks" / "gpu_check.py")
        return subprocess.Popen(
            [sys.executable, "-S", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=self.packages.parent, env=environment,
        )  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The files that a clone has, as they are now."""
    folder = tmp_path_factory.mktemp("bare")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / "checkout" / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    packages = folder / "packages"
    packages.mkdir()
    link_packages(("torch", "triton", "numpy"), packages)
    return Checkout(folder / "checkout", packages)


def link_packages(names: tuple[str, ...], folder: Path) -> None:
    """Links to those distributions and to all that they declare they need."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # needed on another platform or Python only
        link(found, folder)
        waiting += [NAME.match(need)[0] for need in found.requires or () if "extra ==" not in need]


def link(found: Distribution, folder: Path) -> None:
    """Link the top-level files and folders of a distribution."""
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = folder / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))))
