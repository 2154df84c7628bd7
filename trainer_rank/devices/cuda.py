"""A real card through torch.cuda, whose own caching allocator keeps the figures and the history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer_rank.allocator.settings import require_supported
from trainer_rank.allocator.snapshot import Snapshot, from_torch
from trainer_rank.allocator.trace import Event
from trainer_rank.devices.cards import Card, card_names, load_card
from trainer_rank.devices.protocol import MemoryInfo, Sighting
from trainer_rank.devices.recorder import TraceRecording
from trainer_rank.errors import TraceError, UnsupportedError

_HISTORY_ENTRIES = 1_000_000
"""Events that a recording may hold; about 100 B each without stacks."""
_COUNTED = ("alloc", "free_requested")
"""Events that the allocator's own counters count too."""

_recorded: set[int] = set()
"""Devices being recorded: PyTorch has one switch for the history of all of them."""
_watches: list[tuple[int, Callable[[Sighting], None]]] = []
_attached: list[bool] = []


def _attach_observer() -> None:
    """Have PyTorch call us once per out of memory; it offers no way to detach, so one observer serves all watches."""
    if not _attached:
        torch._C._cuda_attach_out_of_memory_observer(_sighted)  # type: ignore[attr-defined]
        _attached.append(True)


def _sighted(index: int, asked: int, _: int, free: int) -> None:
    for watched, observer in list(_watches):
        if watched == index:
            held = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
            observer(Sighting(asked, None, free, *held))


class CudaDevice:
    """One real card of this process; implements :class:`trainer_rank.devices.protocol.Device`.

    ``card`` is a name or a card; by default the shipped card of the same capacity, else one that states the capacity
    alone. ``history_entries`` bounds a recording. Raises UnsupportedError under allocator settings that the model does
    not cover, named.
    """

    def __init__(
        self, index: int = 0, *, card: Card | str | None = None, history_entries: int = _HISTORY_ENTRIES
    ) -> None:
        require_supported(os.environ)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UnsupportedError(f"cuda:{index} is not there: PyTorch sees {torch.cuda.device_count()} devices")
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise UnsupportedError(f"allocator backend {backend} is not modelled; use the native one")
        self._index = index
        self._history_entries = history_entries
        self._recording: TraceRecording | None = None
        self._stage: str | None = None
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._card = _card_of(index) if card is None else load_card(card) if isinstance(card, str) else card

    @property
    def name(self) -> str:
        """``cuda:N``."""
        return f"cuda:{self._index}"

    @property
    def card(self) -> Card:
        """The card's figures."""
        return self._card

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device are created."""
        return torch.device("cuda", self._index)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the calling thread's current device; restores the caller's on exit."""
        with torch.cuda.device(self._index):
            yield

    def memory_info(self) -> MemoryInfo:
        """Physically free and total bytes now, for every process together."""
        return MemoryInfo(*torch.cuda.mem_get_info(self._index))

    def allocated(self) -> int:
        """Bytes in live blocks."""
        return self._bytes("allocated_bytes", "current")

    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._bytes("reserved_bytes", "current")

    def peak_allocated(self) -> int:
        """Highest ``allocated()`` since ``reset_peaks()``."""
        return self._bytes("allocated_bytes", "peak")

    def peak_reserved(self) -> int:
        """Highest ``reserved()`` since ``reset_peaks()``."""
        return self._bytes("reserved_bytes", "peak")

    def reset_peaks(self) -> None:
        """Start new peaks from the present values."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def allocator_retries(self) -> int:
        """How often the cache was freed because the driver refused."""
        return int(self._statistics()["num_alloc_retries"])

    def allocations(self) -> int:
        """How many blocks were handed out."""
        return int(self._statistics()["allocation"]["all"]["allocated"])

    def out_of_memory_count(self) -> int:
        """How often out of memory was raised."""
        return int(self._statistics()["num_ooms"])

    @contextmanager
    def watch_out_of_memory(self, observer: Callable[[Sighting], None]) -> Iterator[None]:
        """Tell ``observer`` of every out of memory inside the context, before it is raised."""
        _attach_observer()
        watch = (self._index, observer)
        _watches.append(watch)
        try:
            yield
        finally:
            _watches.remove(watch)

    def snapshot(self) -> Snapshot:
        """The allocator's segments and blocks now."""
        return from_torch(torch.cuda.memory_snapshot(include_traces=False), self._index)  # type: ignore[no-untyped-call]

    @contextmanager
    def record(self) -> Iterator[TraceRecording]:
        """Record allocator events inside the context and start new peaks; one recording at a time on a device.

        Keeps no stacks. ``trace()`` raises TraceError when the buffer wrapped; the next recording has a larger one.
        """
        if self._index in _recorded:
            raise UnsupportedError(f"{self.name} is being recorded already; one recording at a time")
        self.synchronize()
        self.reset_peaks()
        start = self._count()
        recording = TraceRecording(lambda: self._count() - start, self.snapshot(), self._outside)
        self._recording = recording
        if not _recorded:
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=self._history_entries, clear_history=True
            )
        earlier = len(self._history()) if _recorded else 0
        _recorded.add(self._index)
        try:
            yield recording
        finally:
            self._recording = None
            self.synchronize()
            counted = self._count() - start
            rows = self._history()[earlier:]
            _recorded.remove(self._index)
            if not _recorded:
                torch.cuda.memory._record_memory_history(None)
            self._finish(recording, [_event(row) for row in rows], counted)

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
        with self.activate():
            self.synchronize()
            before = self.reserved()
            torch.cuda.empty_cache()
            return before - self.reserved()

    @property
    def current_stream(self) -> int:
        """Handle of the calling thread's stream on this device; 0 is the default stream."""
        return int(torch.cuda.current_stream(self._index).cuda_stream)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Serve what is born inside from another stream's pools, one of PyTorch's 32 in turn."""
        with torch.cuda.stream(torch.cuda.Stream(self._index)):  # type: ignore[no-untyped-call]
            yield

    def process_reserved(self) -> dict[str, int]:
        """Bytes that the allocator holds on every device of this process, by name."""
        return {f"cuda:{index}": torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())}

    def driver_allocations(self) -> int:
        """How many segments the allocator has taken from the driver, as it counts them itself."""
        return int(self._statistics()["num_device_alloc"])

    def cap(self) -> int | None:
        """Bytes that the allocator may hold at most; None when only the card limits it."""
        fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        return None if fraction >= 1 else int(fraction * self.memory_info().total)

    def set_cap(self, cap: int | None) -> None:
        """Limit what the allocator may hold from now on; PyTorch takes it as a fraction of the card."""
        fraction = 1.0 if cap is None else min(1.0, cap / self.memory_info().total)
        torch.cuda.set_per_process_memory_fraction(fraction, self._index)

    def drop_workspaces(self) -> None:
        """Free cuBLAS's workspaces, which every handle that ran a product keeps in PyTorch's allocator."""
        torch._C._cuda_clearCublasWorkspaces()

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        torch.cuda.synchronize(self._index)

    def _statistics(self) -> dict[str, Any]:
        return torch.cuda.memory_stats_as_nested_dict(self._index)

    def _bytes(self, kind: str, value: str) -> int:
        """One figure of the allocator's: ``torch.cuda.memory_reserved`` would sort all hundred first, at every look."""
        return int(self._statistics()[kind]["all"][value])

    def _count(self) -> int:
        """Allocations and frees since the process began, as the allocator counts them; never waits for the device."""
        counts = self._statistics()["allocation"]["all"]
        return int(counts["allocated"]) + int(counts["freed"])

    def _history(self) -> list[dict[str, Any]]:
        """This device's events since the history of the process began."""
        rows = torch.cuda.memory._snapshot(self._index)["device_traces"][self._index]
        return [row for row in rows if row["action"] != "snapshot"]

    def _outside(self) -> int:
        free, total = self.memory_info()
        return total - free - self.reserved()

    def _finish(self, recording: TraceRecording, events: list[Event], counted: int) -> None:
        seen = sum(event.action in _COUNTED for event in events)
        if seen != counted:
            held, self._history_entries = self._history_entries, 4 * counted
            recording.fail(
                TraceError(
                    f"the history holds {seen} of {counted} allocations and frees: the buffer of "
                    f"{held} entries wrapped; record again, it has been enlarged"
                )
            )
            return
        recording.finish(
            events,
            self.snapshot(),
            self.peak_allocated(),
            self.peak_reserved(),
            self.memory_info(),
            positions=_positions(events),
        )


def _event(row: dict[str, Any]) -> Event:
    address = row["device_free"] if row["action"] == "oom" else row["addr"]
    return Event(row["action"], address, row["size"], row["stream"])


def _positions(events: list[Event]) -> list[int]:
    """Return, for each count of allocations and frees, the event index at which what follows begins."""
    positions = [0]
    for index, event in enumerate(events):
        if event.action in _COUNTED:
            positions.append(index + 1)
        elif event.action == "free_completed":
            positions[-1] = index + 1
    return positions


def _card_of(index: int) -> Card:
    _, total = torch.cuda.mem_get_info(index)
    for name in card_names():
        card = load_card(name)
        if card.capacity == total:
            return card
    title = torch.cuda.get_device_name(index)
    return Card(title.lower().replace(" ", "-"), title, total, f"torch.cuda.mem_get_info({index}) of this machine", ())
