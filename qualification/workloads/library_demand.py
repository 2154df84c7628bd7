"""Libraries that want memory outside PyTorch's allocator when the workload says so, on a virtual and on a real card.

On a virtual card its own model of libraries does so. On a real card the backward's library is a cuBLAS handle with a
workspace by ``cudaMalloc`` beside it, and a reduction's is the buffer that a communicator takes at its first call; they
are destroyed to be built anew, which PyTorch's own handles are not. A ballast by ``cudaMalloc`` narrows the card.
"""

from __future__ import annotations

from typing import Any, Protocol

from qualification.errors import ConfigurationError
from qualification.execution.worker import Context
from qualification.records import Ground
from qualification.workloads.driver_memory import DriverMemory

BACKWARD, REDUCTION = "first_backward", "reduction"


class Libraries(Protocol):
    """What the workloads ask of either."""

    def meet(self, phase: str) -> None:
        """Reach a phase: its library takes its memory unless it holds it; raises what the library would."""

    def tear_down(self, phase: str) -> int:
        """Destroy what the phase's library holds; the bytes that came back."""

    def close(self) -> None:
        """Give back everything, the ballast too."""


def libraries(context: Context, subject: Any) -> Libraries:  # noqa: ANN401 - the subject's types are its own
    """Return the libraries of the job's ground, each with the job's ``demand``; a real card is narrowed first."""
    if context.job.ground is Ground.REHEARSAL:
        return _Modelled(context, subject)
    return _Real(subject.device, context.parameter("capacity"), context.parameter("demand"))


class _Modelled:
    def __init__(self, context: Context, subject: object) -> None:
        self._contract, self._subject = context.contract, subject

    def meet(self, phase: str) -> None:
        if phase != BACKWARD:  # its first matrix product on the backward's thread reaches that
            self._contract.meet(self._subject, phase)

    def tear_down(self, phase: str) -> int:
        size: int = self._contract.tear_down(self._subject, phase)
        return size

    def close(self) -> None:
        """Nothing: the card closes with its subject."""


class _Real:
    def __init__(self, device: Any, capacity: int, demand: int) -> None:  # noqa: ANN401
        self._device, self._demand = device, demand
        self._driver = DriverMemory()
        self._held: dict[str, tuple[int | None, int]] = {}
        self._ballast = self._narrow(capacity)

    def _narrow(self, capacity: int) -> int:
        """Take so much that this process sees a card of ``capacity`` bytes."""
        free, total = self._device.memory_info()
        ballast = total - capacity
        if not 0 < ballast < free:
            raise ConfigurationError(
                f"{self._device.name} has {free} of {total} B free; it cannot be narrowed to {capacity} B: "
                "give another capacity, or free the card"
            )
        return self._driver.take(ballast, f"{self._device.name} refused a ballast of {ballast} B")

    def meet(self, phase: str) -> None:
        if phase in self._held:
            return
        with self._device.activate():
            if phase != BACKWARD:
                words = f"NCCL error: unhandled cuda error: Failed to CUDA malloc {self._demand} bytes"
                self._held[phase] = None, self._driver.take(self._demand, words)
                return
            handle = self._driver.handle()
            words = f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED: no {self._demand} B for the handle's workspace"
            try:
                self._held[phase] = handle, self._driver.take(self._demand, words)
            except RuntimeError:
                self._driver.destroy(handle)
                raise

    def tear_down(self, phase: str) -> int:
        self._device.synchronize()
        before = self._device.memory_info().free
        handle, address = self._held.pop(phase, (None, None))
        if address is not None:
            self._driver.give_back(address)
        if handle is not None:
            self._driver.destroy(handle)
        freed: int = self._device.memory_info().free - before
        return freed

    def close(self) -> None:
        for phase in list(self._held):
            self.tear_down(phase)
        self._driver.give_back(self._ballast)
