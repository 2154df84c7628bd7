"""What the planner may ask of a device. It cannot tell which implementation it has.

Two implementations: :mod:`trainer_rank.devices.cuda` (a real card through torch.cuda) and
:mod:`trainer_rank.devices.virtual` (a modelled card over CPU tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from trainer_rank.allocator.snapshot import Snapshot
    from trainer_rank.allocator.trace import Trace
    from trainer_rank.devices.cards import Card


class MemoryInfo(NamedTuple):
    """Physical memory of the card in bytes, as the driver reports it for every process together."""

    free: int
    total: int


class Sighting(NamedTuple):
    """An out of memory as the allocator met it, before anything was unwound; bytes.

    ``asked`` is what the driver was asked for: the request in whole segments. ``requested`` is the request itself, None
    on a real card, which does not say.
    """

    asked: int
    requested: int | None
    free: int
    allocated: int
    reserved: int


class Recording(Protocol):
    """An allocation recording in progress; ``trace()`` is available once its context has closed."""

    def mark(self, stage: str) -> None:
        """Attribute the events that follow to ``stage`` (slash-separated, for example ``forward/layer/3``)."""

    @property
    def outside(self) -> tuple[tuple[str, int], ...]:
        """Bytes outside PyTorch's allocator (physical minus reserved) at the start and at the end of each phase."""

    def trace(self) -> Trace:
        """Return the recorded events with the snapshots before and after, and the marks."""


class Device(Protocol):
    """One accelerator of this process."""

    @property
    def name(self) -> str:
        """``cuda:0`` or ``virtual:0``."""

    @property
    def card(self) -> Card:
        """The named card's figures (capacity, context bytes, and so on)."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device are created."""

    def activate(self) -> AbstractContextManager[None]:
        """Make this the current device for the calling thread; restores the caller's device on exit."""

    def memory_info(self) -> MemoryInfo:
        """Physically free and total bytes now."""

    def allocated(self) -> int:
        """Bytes in live blocks of PyTorch's allocator."""

    def reserved(self) -> int:
        """Bytes that PyTorch's allocator has taken from the driver."""

    def peak_allocated(self) -> int:
        """Highest ``allocated()`` since ``reset_peaks()``."""

    def peak_reserved(self) -> int:
        """Highest ``reserved()`` since ``reset_peaks()``."""

    def reset_peaks(self) -> None:
        """Start new peaks from the present values."""

    def allocator_retries(self) -> int:
        """How often the allocator freed its cache because the driver refused, since the process began."""

    def allocations(self) -> int:
        """How many blocks the allocator has handed out since the process began."""

    def out_of_memory_count(self) -> int:
        """How often the allocator raised out of memory, since the process began."""

    def watch_out_of_memory(self, observer: Callable[[Sighting], None]) -> AbstractContextManager[None]:
        """Tell ``observer`` of every out of memory inside the context, before it is raised; it must not allocate."""

    def snapshot(self) -> Snapshot:
        """The allocator's segments and blocks now."""

    def record(self) -> AbstractContextManager[Recording]:
        """Record allocator events inside the context; one recording at a time per device."""

    def mark(self, stage: str) -> None:
        """Begin a stage: it is remembered, and marked in the recording that runs, see :meth:`Recording.mark`."""

    @property
    def stage(self) -> str | None:
        """The stage that began last, of whichever thread; None before the first."""

    def empty_cache(self) -> int:
        """Return unused cached segments to the driver; the number of bytes returned."""

    def drop_workspaces(self) -> None:
        """Free what libraries keep in PyTorch's allocator between calls (cuBLAS); they take it again when used."""

    def synchronize(self) -> None:
        """Wait until the device has finished its work. Never called on the hot path."""

    @property
    def current_stream(self) -> int:
        """Identifier of the calling thread's stream on this device; 0 is the default stream."""

    def side_stream(self) -> AbstractContextManager[None]:
        """Serve what is born inside from another stream's pools, one of several in turn; restores the caller's."""

    def process_reserved(self) -> dict[str, int]:
        """Bytes that the allocator holds on every device of this process, by name."""

    def driver_allocations(self) -> int:
        """How many segments the allocator has taken from the driver since the process began."""

    def cap(self) -> int | None:
        """Bytes that the allocator may hold at most; None when only the card limits it."""

    def set_cap(self, cap: int | None) -> None:
        """Limit what the allocator may hold from now on; what it holds already stays."""
