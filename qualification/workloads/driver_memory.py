"""Memory of a real card past PyTorch's allocator: a ballast that narrows it, and what libraries take and give back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from qualification.errors import ConfigurationError

_ALLOC_FAILED = 3
"""``CUBLAS_STATUS_ALLOC_FAILED``."""


class DriverMemory:
    """The CUDA runtime and cuBLAS of this process, called directly, on the device that is current at each call."""

    def __init__(self) -> None:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # loads both libraries, and PyTorch's handle
        self._runtime = ctypes.CDLL(_loaded("libcudart.so"))
        self._cublas = ctypes.CDLL(_loaded("libcublas.so"))

    def take(self, size: int, refused: str) -> int:
        """Take ``size`` bytes by ``cudaMalloc`` and return the address; RuntimeError(``refused``) without them."""
        address = ctypes.c_void_p()
        status = self._runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
        if status or not address.value:
            self._runtime.cudaGetLastError()  # or PyTorch would raise it at its next launch
            raise RuntimeError(refused)
        return address.value

    def give_back(self, address: int) -> None:
        """Return what :meth:`take` took."""
        self._runtime.cudaFree(ctypes.c_void_p(address))

    def handle(self) -> int:
        """Build a cuBLAS handle; RuntimeError in PyTorch's words when that fails."""
        handle = ctypes.c_void_p()
        status = self._cublas.cublasCreate_v2(ctypes.byref(handle))
        if status or not handle.value:
            self._runtime.cudaGetLastError()
            name = "CUBLAS_STATUS_ALLOC_FAILED" if status == _ALLOC_FAILED else f"status {status}"
            raise RuntimeError(f"CUDA error: {name} when calling `cublasCreate(handle)`")
        return handle.value

    def destroy(self, handle: int) -> None:
        """Destroy what :meth:`handle` built."""
        self._cublas.cublasDestroy_v2(ctypes.c_void_p(handle))


def _loaded(name: str) -> str:
    """Return the path of the shared library of this name that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(name):
            return str(path)
    raise ConfigurationError(f"{name} is not loaded in this process; install PyTorch for CUDA")
