"""Runs the compile suite with another release of Triton."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


def main(version: str) -> int:
    """Install that release into an environment of its own, in front of this one's packages, and test with it.

    `python tests/compile/other_triton.py 3.6.0`. Nothing is left behind. Recorded resources belong to one release: of another they are not compared.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"triton=={version}"],
            check=True,
        )
        own = sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder})
        packages = sysconfig.get_path("purelib")
        (Path(own) / "behind.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        environment = os.environ | {"FP8_SAFEGUARD_COMPILE": "1", "TRITON_CACHE_DIR": f"{folder}/cache"}
        suite = [python, "-m", "pytest", "-q", str(Path(__file__).parent)]
        return subprocess.run(suite, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "3.6.0"))
