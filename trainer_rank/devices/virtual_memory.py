"""The memory of a virtual card: the allocator model over a modelled driver, and what libraries take beside it.

Pure: nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from trainer_rank.allocator.driver import DriverFigures, ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.outofmemory import OutOfMemory, format_size
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import Event
from trainer_rank.devices.cards import PHASES, Card
from trainer_rank.errors import InvalidInputError, TrainerRankError


@dataclass(frozen=True)
class LibraryDemand:
    """Memory that a library takes outside PyTorch's allocator when ``phase`` is first reached. Bytes.

    ``library`` decides how its failure reads: ``cublas`` or ``nccl``.
    """

    name: str
    phase: str
    size: int
    library: str = "cublas"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidInputError(f"library demand {self.name} is {self.size} B; give a positive size")
        if self.library not in _FAILURES:
            raise InvalidInputError(
                f"library demand {self.name}: {self.library!r} is not known; choose of {', '.join(_FAILURES)}"
            )


_FAILURES = {
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "nccl": "NCCL error: unhandled cuda error. Last error: Failed to CUDA malloc {size} bytes",
}


class LibraryOutOfMemory(TrainerRankError):  # noqa: N818 - named as its allocator's sibling
    """A library's demand found no physical memory; the text is what that library's caller would read."""

    def __init__(self, demand: LibraryDemand) -> None:
        self.demand = demand
        super().__init__(_FAILURES[demand.library].format(size=demand.size))


class VirtualMemory:
    """One card's memory in one process. All figures in bytes.

    ``elsewhere`` is what other processes hold; ``cap`` bounds what PyTorch may reserve; ``snapshot`` is the allocator's
    state at the start, when the libraries hold nothing beyond the context. Raises InvalidInputError when
    the card cannot even hold the context.
    """

    def __init__(
        self,
        card: Card,
        *,
        elsewhere: int = 0,
        cap: int | None = None,
        demands: Iterable[LibraryDemand] = (),
        snapshot: Snapshot | None = None,
    ) -> None:
        if card.context + elsewhere > card.capacity:
            raise InvalidInputError(
                f"card {card.name} of {card.capacity} B cannot hold a context of {card.context} B beside "
                f"{elsewhere} B of other processes; give a larger capacity"
            )
        self.card = card
        self.events: list[Event] | None = None
        self.held: dict[str, LibraryDemand] = {}
        self.pending = [*_demands_of(card), *demands]
        self._raw = 0
        self.driver_allocations = self.allocations = 0
        segments = snapshot.segments if snapshot else ()
        self._streams = {segment.address: segment.stream for segment in segments}
        self._stream = 0
        self._driver = ModelledDriver(card.capacity, outside=card.context, elsewhere=elsewhere, snapshot=snapshot)
        self.allocator = CachingAllocator(self, snapshot, cap)

    @property
    def free(self) -> int:
        """Physically free bytes."""
        return self._driver.free

    def malloc(self, size: int, stream: int) -> int:
        """Allocate a block for a new storage and return its handle; raises OutOfMemory."""
        self._stream = stream
        try:
            handle = self.allocator.malloc(size, stream)
        except OutOfMemory as error:
            self._note("oom", error.free, size, stream)
            raise
        self.allocations += 1
        self._note("alloc", self.allocator.address(handle), size, stream)
        return handle

    def release(self, handle: int, size: int, stream: int) -> None:
        """Free the block of a storage that has died."""
        address = self.allocator.address(handle)
        self._note("free_requested", address, size, stream)
        self._note("free_completed", address, size, stream)
        self.allocator.free(handle)

    def empty_cache(self) -> int:
        """Return unused segments to the driver; bytes returned."""
        return self.allocator.empty_cache()

    def require(self, phase: str) -> None:
        """Let the libraries that first work in ``phase`` take their memory, once until it is given up again.

        Raises LibraryOutOfMemory when one finds less physical memory than it needs; it then holds none.
        """
        for demand in [demand for demand in self.pending if demand.phase == phase]:
            if demand.size > self.free:
                raise LibraryOutOfMemory(demand)
            self._driver.outside += demand.size
            self.held[demand.name] = demand
            self.pending.remove(demand)

    def give_up(self, phase: str) -> int:
        """Return the libraries' memory of ``phase`` (a communicator torn down); they will ask for it again. Bytes."""
        returned = [demand for demand in self.held.values() if demand.phase == phase]
        for demand in returned:
            del self.held[demand.name]
            self._driver.outside -= demand.size
            self.pending.append(demand)
        return sum(demand.size for demand in returned)

    def take_raw(self, size: int) -> None:
        """Take physical memory past PyTorch's allocator, as a raw ``cudaMalloc`` does; raises MemoryError."""
        if size > self.free:
            raise MemoryError(f"{format_size(size)} of raw device memory asked for, {format_size(self.free)} free")
        self._raw += size
        self._driver.outside += size

    def give_back_raw(self, size: int) -> None:
        """Return raw memory."""
        if size > self._raw:
            raise InvalidInputError(f"{size} B of raw memory given back, but only {self._raw} B were taken")
        self._raw -= size
        self._driver.outside -= size

    def set_elsewhere(self, size: int) -> None:
        """Let other processes hold ``size`` bytes from now on."""
        self._driver.elsewhere = size

    def take(self, size: int) -> int | None:
        """Driver: hand a new segment to the allocator, or refuse."""
        address = self._driver.take(size)
        if address is not None:
            self.driver_allocations += 1
            self._streams[address] = self._stream
            self._note("segment_alloc", address, size, self._stream)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Driver: take a segment back."""
        self._note("segment_free", address, size, self._streams.pop(address))
        self._driver.give_back(address, size)

    def figures(self) -> DriverFigures:
        """Driver: free, total and this process's bytes."""
        return self._driver.figures()

    def _note(self, action: str, address: int, size: int, stream: int) -> None:
        if self.events is not None:
            self.events.append(Event(action, address, size, stream))


def _demands_of(card: Card) -> list[LibraryDemand]:
    """The card's phases as demands: each takes what it holds beyond the phase before it."""
    demands = []
    for before, phase in pairwise(PHASES):
        growth = card.held_outside(phase) - card.held_outside(before)
        if growth:
            demands.append(LibraryDemand(f"{card.name} {phase}", phase, growth))
    return demands
