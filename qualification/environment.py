"""What a run executed on, by an allow-list: nothing outside it is read, so no secret can be recorded.

Versions come from package metadata; the trusted side imports neither torch nor trainer_rank for them.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from qualification.locked import LockedPackages

PACKAGES = (
    *("trainer-rank-qualification", "torch", "triton", "safetensors", "numpy"),
    *("megatron-core", "transformer-engine", "flash-attn", "flash-linear-attention"),
    *("prefect", "sqlalchemy", "alembic", "msgspec", "rfc8785", "securesystemslib", "docker", "nvidia-ml-py"),
)
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN"),
    *("NCCL_NVLS_ENABLE", "NCCL_ALGO", "NCCL_PROTO", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED"),
)
"""Settings that change what is allocated, computed or scheduled; none of them holds a secret."""

_DRIVER = Path("/proc/driver/nvidia/version")


def environment_manifest(locked: LockedPackages | None = None) -> dict[str, object]:
    """Return interpreter, kernel, machine, package versions and settings as one document of strings and integers.

    ``locked`` are the packages of the subject's own lock, which go before the installed ones in its worker.
    """
    return {
        "schema": 1,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "driver": _first_line(_DRIVER),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
        "lock": {"sha256": locked.lock_sha256, "packages": locked.versions} if locked else None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, or None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
