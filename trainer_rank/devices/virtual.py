"""A modelled card over CPU tensors: real numbers, and every storage charged to the allocator model of a named card.

To PyTorch the device is ``lazy:N``: that device type exists in every build, takes part in autograd on the calling
thread, needs no driver, and nothing else uses it. Streams are identifiers only: they decide which pool serves a
storage, while the work itself runs in program order. Random numbers come from the host's generator.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import cycle

import torch

from trainer_rank.allocator.outofmemory import OutOfMemory
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import Event
from trainer_rank.devices import virtual_tensor
from trainer_rank.devices.cards import Card, load_card
from trainer_rank.devices.protocol import MemoryInfo, Sighting
from trainer_rank.devices.recorder import TraceRecording
from trainer_rank.devices.virtual_memory import LibraryDemand, LibraryOutOfMemory, VirtualMemory
from trainer_rank.errors import InvalidInputError, UnsupportedError

_FIRST_SIDE_STREAM = 1 << 16
_open: dict[int, VirtualDevice] = {}


class _Life(weakref.ref[torch.UntypedStorage]):
    """A weak reference on a charged storage; its death frees the block ``handle`` of ``size`` bytes on ``stream``."""

    __slots__ = ("handle", "key", "size", "stream")
    handle: int
    key: int
    size: int
    stream: int


class VirtualDevice:
    """One modelled card of this process; implements :class:`trainer_rank.devices.protocol.Device`.

    ``card`` is a name or a card; ``capacity`` replaces its capacity; ``elsewhere`` is what other processes hold;
    ``memory_fraction`` caps what PyTorch may reserve as a share of the capacity; ``demands`` are library claims beyond
    the card's own; ``snapshot`` is a state to start from, whose live blocks live on. Bytes. ``magnification``: every
    storage is charged so many times its size, so that a small model meets the segments of a card in the proportions of
    a large one. Close it to let the index be opened anew.
    """

    def __init__(
        self,
        card: Card | str,
        index: int = 0,
        *,
        capacity: int | None = None,
        elsewhere: int = 0,
        memory_fraction: float | None = None,
        demands: Iterable[LibraryDemand] = (),
        snapshot: Snapshot | None = None,
        magnification: int = 1,
    ) -> None:
        named = load_card(card) if isinstance(card, str) else card
        if capacity is not None:
            named = replace(named, capacity=capacity)
        if memory_fraction is not None and not 0 < memory_fraction <= 1:
            raise InvalidInputError(f"memory fraction is {memory_fraction}; give a share above 0 and up to 1")
        cap = None if memory_fraction is None else int(named.capacity * memory_fraction)
        self._memory = VirtualMemory(named, elsewhere=elsewhere, cap=cap, demands=demands, snapshot=snapshot)
        if magnification < 1:
            raise InvalidInputError(f"magnification is {magnification}; give 1 or more")
        self._index = index
        self._magnification = magnification
        self._lives: dict[int, _Life] = {}
        self._dead: deque[_Life] = deque()
        self._lock = threading.Lock()
        self._recording: TraceRecording | None = None
        self._stage: str | None = None
        self._streams = threading.local()
        self._sides = cycle(range(_FIRST_SIDE_STREAM, _FIRST_SIDE_STREAM + 32))
        self._observers: list[Callable[[Sighting], None]] = []
        virtual_tensor.attach(index, self)
        _open[index] = self

    @property
    def name(self) -> str:
        """``virtual:N``."""
        return f"virtual:{self._index}"

    @property
    def card(self) -> Card:
        """The modelled card."""
        return self._memory.card

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device are created."""
        return torch.device(virtual_tensor.DEVICE_TYPE, self._index)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the calling thread's current device; restores the caller's on exit."""
        before = virtual_tensor.current_device()
        virtual_tensor.set_current_device(self._index)
        try:
            yield
        finally:
            virtual_tensor.set_current_device(before)

    @property
    def current_stream(self) -> int:
        """Identifier of the calling thread's stream on this device; 0 is the default stream."""
        return getattr(self._streams, "current", 0)

    @contextmanager
    def stream(self, identifier: int) -> Iterator[None]:
        """Serve the storages born inside from the pools of stream ``identifier``."""
        before = self.current_stream
        self._streams.current = identifier
        try:
            yield
        finally:
            self._streams.current = before

    def side_stream(self) -> AbstractContextManager[None]:
        """Serve what is born inside from another stream's pools, one of several in turn."""
        return self.stream(next(self._sides))

    def memory_info(self) -> MemoryInfo:
        """Physically free and total bytes now."""
        self._settle()
        return MemoryInfo(self._memory.free, self.card.capacity)

    def allocated(self) -> int:
        """Bytes in live blocks."""
        self._settle()
        return self._memory.allocator.allocated

    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._memory.allocator.reserved

    def peak_allocated(self) -> int:
        """Highest ``allocated()`` since ``reset_peaks()``."""
        return self._memory.allocator.peak_allocated

    def peak_reserved(self) -> int:
        """Highest ``reserved()`` since ``reset_peaks()``."""
        return self._memory.allocator.peak_reserved

    def reset_peaks(self) -> None:
        """Start new peaks from the present values."""
        self._settle()
        self._memory.allocator.reset_peaks()

    def allocator_retries(self) -> int:
        """How often the cache was freed because the driver refused."""
        return self._memory.allocator.num_alloc_retries

    def allocations(self) -> int:
        """How many blocks were handed out."""
        return self._memory.allocations

    def out_of_memory_count(self) -> int:
        """How often out of memory was raised."""
        return self._memory.allocator.num_ooms

    @contextmanager
    def watch_out_of_memory(self, observer: Callable[[Sighting], None]) -> Iterator[None]:
        """Tell ``observer`` of every out of memory inside the context, before it is raised."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def snapshot(self) -> Snapshot:
        """The allocator's segments and blocks now."""
        self._settle()
        return self._memory.allocator.snapshot()

    @contextmanager
    def record(self) -> Iterator[TraceRecording]:
        """Record allocator events inside the context and start new peaks; one recording at a time."""
        if self._recording is not None:
            raise UnsupportedError(f"{self.name} is being recorded already; one recording at a time")
        self.reset_peaks()
        events: list[Event] = []
        self._memory.events = events
        self._recording = recording = TraceRecording(lambda: len(events), self.snapshot(), self._outside)
        try:
            yield recording
        finally:
            after = self.snapshot()
            self._memory.events = self._recording = None
            recording.finish(events, after, self.peak_allocated(), self.peak_reserved(), self.memory_info())

    def mark(self, stage: str) -> None:
        """Begin a stage, and mark it in the recording that runs."""
        self._stage = stage
        if self._recording is not None:
            self._recording.mark(stage)

    @property
    def stage(self) -> str | None:
        """The stage that began last."""
        return self._stage

    def empty_cache(self) -> int:
        """Return unused segments of **every** device of the process, as PyTorch does; bytes returned on this one."""
        returned = 0
        for device in list(_open.values()):
            device._settle()
            with device._lock:
                freed = device._memory.empty_cache()
            returned += freed if device is self else 0
        return returned

    def drop_workspaces(self) -> None:
        """Nothing to free: modelled libraries take their memory outside PyTorch's allocator."""

    def process_reserved(self) -> dict[str, int]:
        """Bytes that the allocator holds on every virtual device of this process, by name."""
        return {device.name: device.reserved() for _, device in sorted(_open.items())}

    def driver_allocations(self) -> int:
        """How many segments the allocator has taken from the driver."""
        return self._memory.driver_allocations

    def cap(self) -> int | None:
        """Bytes that the allocator may hold at most; None when only the card limits it."""
        return self._memory.allocator.cap

    def set_cap(self, cap: int | None) -> None:
        """Limit what the allocator may hold from now on; what it holds already stays."""
        self._memory.allocator.cap = cap

    def synchronize(self) -> None:
        """Nothing to wait for: every operator has finished when it returns."""

    def require(self, phase: str) -> None:
        """Reach ``phase``: the libraries that wait for it take their memory, or fail as they fail on a card."""
        try:
            self._memory.require(phase)
        except LibraryOutOfMemory as error:
            failure = torch.distributed.DistBackendError if error.demand.library == "nccl" else RuntimeError
            raise failure(str(error)) from None

    def give_up(self, phase: str) -> int:
        """Return the libraries' memory of ``phase``, as when a communicator is torn down; bytes returned."""
        return self._memory.give_up(phase)

    def library_bytes(self) -> dict[str, int]:
        """Bytes that each library claim holds now, by name."""
        return {name: demand.size for name, demand in self._memory.held.items()}

    def take_raw(self, size: int) -> None:
        """Take ``size`` bytes past PyTorch's allocator; raises torch.OutOfMemoryError when they are not there."""
        try:
            self._memory.take_raw(size)
        except MemoryError as error:
            raise torch.OutOfMemoryError(f"CUDA error: out of memory: {error}") from None

    def give_back_raw(self, size: int) -> None:
        """Return raw memory taken with :meth:`take_raw`."""
        self._memory.give_back_raw(size)

    def set_elsewhere(self, size: int) -> None:
        """Let other processes hold ``size`` bytes from now on."""
        self._memory.set_elsewhere(size)

    def close(self) -> None:
        """Let the index be opened anew. Tensors that still live stay charged here until they die."""
        virtual_tensor.detach(self._index)
        _open.pop(self._index, None)

    def _outside(self) -> int:
        free, total = self.memory_info()
        return total - free - self.reserved()

    @property
    def watching(self) -> bool:
        """Whether library demand still waits for an operator that triggers it."""
        return bool(self._memory.pending)

    def operator(self, matrix_product: bool) -> None:
        """Reach the phases that a matrix product begins: libraries build their handles there, per thread of work."""
        if not matrix_product:
            return
        self.require("first_matrix_product")
        self.require("first_forward")
        if torch._C._current_graph_task_id() != -1:
            self.require("first_backward")

    def birth(self, storage: torch.UntypedStorage) -> None:
        """Charge a storage that is new here; raises torch.OutOfMemoryError when the card has no room for it."""
        key = storage._cdata
        if key in self._lives:
            return
        size = storage.nbytes() * self._magnification
        if size == 0:
            return
        life = _Life(storage, self._death)
        life.key, life.size, life.stream = key, size, self.current_stream
        with self._lock:
            self._bury()
            life.handle = self._malloc(size, life.stream)
        self._lives[key] = life
        self._settle()

    def refused_by_host(self, size: int) -> None:
        """Raise out of memory when the card has no room for ``size`` bytes, else name the host as what lacks them."""
        size *= self._magnification
        with self._lock:
            self._bury()
            self._memory.release(self._malloc(size, self.current_stream), size, self.current_stream)
        raise UnsupportedError(
            f"{self.name} has room for {size} B, but the host that stands in for it has not; use a smaller model"
        )

    def _malloc(self, size: int, stream: int) -> int:
        """Allocate a block; the caller holds the lock. Raises torch.OutOfMemoryError."""
        try:
            return self._memory.malloc(size, stream)
        except OutOfMemory as error:
            error.device = self._index
            for observer in self._observers:
                observer(Sighting(error.asked, size, error.free, error.allocated, error.reserved))
            raise torch.OutOfMemoryError(error.message) from None

    def _death(self, life: weakref.ref[torch.UntypedStorage]) -> None:
        """Note a storage's death. May be called in the middle of anything, so the block is freed when it is safe."""
        assert isinstance(life, _Life)
        if self._lives.get(life.key) is life:
            del self._lives[life.key]
            self._dead.append(life)
            self._settle()

    def _settle(self) -> None:
        """Free the blocks of dead storages, unless someone is at work on the allocator and will do it."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            life = self._dead.popleft()
            self._memory.release(life.handle, life.size, life.stream)
