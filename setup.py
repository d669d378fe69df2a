"""Builds the optional native kernels; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("kernels/cpp")

setup(
    ext_modules=[
        # A plain shared library that kernels/native.py loads: no Python headers are needed to build it.
        Extension(
            "fp8_safeguard.kernels._native",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.[hi]*"))],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
            # Without a compiler, or on another processor, numba runs the kernels.
            optional=True,
        )
    ]
)
