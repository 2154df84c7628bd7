"""The environment of everything a run starts: by allow-list, with compile caches that are private to the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

ALLOWED = frozenset(
    {
        "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TERM",
        "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "CUDNN_PATH", "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_NVLS_ENABLE",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
    }
)  # fmt: skip
"""What passes from the caller; everything else stays behind, secrets first of all."""

CACHES = (
    "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TILELANG_CACHE_DIR", "CUDA_CACHE_PATH",
)  # fmt: skip
CACHE_FOLDER = "caches"


def cache_folder(folder: Path) -> Path:
    """Return where a run keeps its private compile caches."""
    return folder / CACHE_FOLDER


def child_environment(
    folder: Path,
    gpus: Iterable[str] = (),
    extra: Mapping[str, str] | None = None,
    source: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the environment for a run in ``folder`` and create its caches.

    Only the leased GPUs are visible, named by UUID; with none leased, none is.
    """
    environment = {name: value for name, value in source.items() if name in ALLOWED}
    visible = ",".join(gpus)
    environment |= {"CUDA_VISIBLE_DEVICES": visible, "NVIDIA_VISIBLE_DEVICES": visible or "none"}
    for variable in CACHES:
        cache = cache_folder(folder) / variable.removesuffix("_DIR").lower()
        cache.mkdir(parents=True, exist_ok=True)
        environment[variable] = str(cache)
    return environment | dict(extra or {})


def retire_caches(folder: Path) -> tuple[str, ...]:
    """Delete the run's private caches and return which there were. Raises OSError when one cannot be deleted."""
    root = cache_folder(folder)
    if not root.exists():
        return ()
    names = tuple(sorted(str(path) for path in root.iterdir()))
    shutil.rmtree(root)
    return names


def lock_files(folder: Path) -> tuple[str, ...]:
    """Return the lock files in the run's caches: what a silent first-use build usually waits on."""
    return tuple(
        sorted(
            str(path)
            for path in cache_folder(folder).rglob("*")
            if path.is_file() and (path.name == "lock" or path.suffix == ".lock")
        )
    )
