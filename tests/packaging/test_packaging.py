"""The wheel lists every folder that holds Python code, and installs one top-level name."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_EVERY_LIGHT_PACKAGE = (
    "import fp8_safeguard.monitor.stats, fp8_safeguard.monitor.policy, importlib.metadata as m;"
    "import fp8_safeguard.monitor as p; print(p.__file__); print(m.version('fp8-safeguard'))"
)


def listed_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(project["tool"]["setuptools"]["packages"])


def test_every_code_folder_is_a_listed_package() -> None:
    listed = listed_packages()
    tops = {name.split(".")[1] for name in listed}
    found = {
        "fp8_safeguard." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in tops
        for path in (ROOT / top).rglob("*.py")
    }
    assert found == listed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_installs_one_top_level_name(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"fp8_safeguard"}


def test_wheel_carries_the_page_and_the_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    static = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dashboards").rglob("*.*")
        if path.suffix in {".js", ".css", ".html", ".svg"}
    }
    assert static
    assert {f"fp8_safeguard/{path}" for path in static} <= names
    assert {f"fp8_safeguard/{package.split('.')[1]}/py.typed" for package in listed_packages()} <= names
    assert "fp8_safeguard/migrations/script.py.mako" in names


def test_wheel_carries_the_native_kernels_built_and_not_their_sources(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [
        name for name in names if name.startswith("fp8_safeguard/kernels/_native") and name.endswith(".so")
    ]
    assert not [name for name in names if name.endswith((".cpp", ".h", ".inc"))]


def test_installed_wheel_imports_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    program = f"import sys; sys.path.insert(0, {str(site)!r}); {IMPORT_EVERY_LIGHT_PACKAGE}"
    # -S keeps the editable install of this environment away; numpy is found through its own folder.
    import numpy

    program = f"import sys; sys.path.append({str(Path(numpy.__file__).parents[1])!r}); " + program
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    path, version = done.stdout.split()
    assert path == str(site / "fp8_safeguard" / "monitor" / "__init__.py")
    assert version == "0.1.0"


def test_editable_install_reads_the_checkout(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERY_LIGHT_PACKAGE],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.split()[0] == str(ROOT / "monitor" / "__init__.py")
