"""A card without a GPU: the driver's memory and cuBLAS handles over a virtual card's raw memory."""

from __future__ import annotations

from qualification.workloads.driver_memory import DriverMemory
from trainer_rank.devices.virtual import VirtualDevice

HANDLE = 41_943_040


class Driver(DriverMemory):
    """Takes a virtual card's raw memory."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}

    def take(self, size: int, refused: str) -> int:
        if size > self._device.memory_info().free:
            raise RuntimeError(refused)
        self._device.take_raw(size)
        address = max(self._sizes, default=0) + 1
        self._sizes[address] = size
        return address

    def give_back(self, address: int) -> None:
        self._device.give_back_raw(self._sizes.pop(address))

    def handle(self) -> int:
        return self.take(HANDLE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def destroy(self, handle: int) -> None:
        self.give_back(handle)
