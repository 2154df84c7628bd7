"""Out of memory with the figures that PyTorch's own message gives."""

from __future__ import annotations

from trainer_rank.allocator.driver import DriverFigures
from trainer_rank.allocator.rules import GIB, KIB, MIB
from trainer_rank.errors import TrainerRankError


def format_size(size: int) -> str:
    """Spell ``size`` bytes as PyTorch does: two decimals of the largest binary unit that is exceeded."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


class OutOfMemory(TrainerRankError):  # noqa: N818 - PyTorch's own word for it
    """The driver refused after the cache was freed. Figures are bytes, taken after that release.

    ``asked`` is what the driver was asked for (the segment, not the request); ``allowed`` is the cap, if one is set.
    """

    def __init__(
        self, *, asked: int, requested: int, stream: int, driver: DriverFigures, allocated: int, reserved: int,
        allowed: int | None, device: int = 0,
    ) -> None:  # fmt: skip
        self.asked = asked
        self.requested = requested
        self.stream = stream
        self.total = driver.total
        self.free = driver.free
        self.process = driver.process
        self.allocated = allocated
        self.reserved = reserved
        self.unallocated = reserved - allocated
        self.allowed = allowed
        self.device = device
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """PyTorch's sentence, figure by figure."""
        allowed = "" if self.allowed is None else f"{format_size(self.allowed)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.asked)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.total)} "
            f"of which {format_size(self.free)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.process)} memory in use. {allowed}"
            f"Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, "
            f"and {format_size(self.unallocated)} is reserved by PyTorch but unallocated."
        )
