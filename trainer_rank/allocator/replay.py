"""Replay a recording through the allocator model and name the first event that contradicts it."""

from __future__ import annotations

from itertools import islice
from time import perf_counter
from typing import NamedTuple

from trainer_rank.allocator.driver import DriverFigures
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import round_size, segment_size
from trainer_rank.allocator.snapshot import Snapshot, difference
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.errors import InvalidInputError


class Divergence(NamedTuple):
    """Where recording and model part: what the model expects against what the recording got.

    ``event`` is None when every event agrees but a recorded peak does not.
    """

    event: int | None
    expected: str
    got: str


class ReplayResult(NamedTuple):
    """What a replay showed. Peaks are bytes, and lower bounds when ``partial`` (the pass ended out of memory).

    ``seconds`` is the time of the event loop alone, over ``events`` rows; ``notes`` are findings that are no
    divergence; ``after`` is the model's state at the end.
    """

    exact: bool
    peak_allocated: int
    peak_reserved: int
    partial: bool
    divergence: Divergence | None
    events: int
    seconds: float
    notes: tuple[str, ...]
    after: Snapshot

    @property
    def events_per_second(self) -> float:
        """Rows of the recording that the loop handled per second; every row counts."""
        return self.events / self.seconds


def replay(trace: Trace) -> ReplayResult:
    """Replay every event of ``trace`` from its ``before`` snapshot; never raises for a recording that could be read."""
    run = _Replay(trace)
    start = perf_counter()
    divergence = run.run()
    seconds = perf_counter() - start
    after = run.model.snapshot()
    if divergence is None:
        divergence = _peak_difference(trace, run)
        if trace.after is not None and (differs := difference(after, trace.after)):
            run.notes.append(f"the snapshot after differs: {differs}")
    if trace.memory_info and (trace.peak_reserved or 0) > trace.memory_info[1]:
        run.notes.append(
            f"recorded peak reserved of {trace.peak_reserved} B exceeds the card's {trace.memory_info[1]} B: "
            "the driver lent host memory, or the figure is broken"
        )
    return ReplayResult(
        exact=divergence is None,
        peak_allocated=run.model.peak_allocated,
        peak_reserved=run.model.peak_reserved,
        partial=run.partial,
        divergence=divergence,
        events=run.index + 1,
        seconds=seconds,
        notes=tuple(run.notes),
        after=after,
    )


class _ContradictionError(Exception):
    """What the model expects against what the recording got, ``later`` rows after the present one."""

    def __init__(self, expected: str, got: str, later: int = 0) -> None:
        super().__init__(expected, got)
        self.expected = expected
        self.got = got
        self.later = later


class _RecordedDriver:
    """Hands out the segment that the recording took, and nothing else."""

    def __init__(self) -> None:
        self.offer: Event | None = None

    def take(self, size: int) -> int:
        offer = self.offer
        if offer is None:
            raise _ContradictionError(f"a new segment of {size} B, as no cached block serves", "no segment_alloc")
        if offer.size != size:
            raise _ContradictionError(f"a segment of {size} B", f"a segment of {offer.size} B")
        self.offer = None
        return offer.address

    def give_back(self, address: int, size: int) -> None:
        """Accept: the recording's own rows were compared before."""

    def figures(self) -> DriverFigures:
        raise AssertionError("the recorded driver never refuses")


class _Replay:
    """The state of one replay."""

    def __init__(self, trace: Trace) -> None:
        self.events = trace.events
        self.driver = _RecordedDriver()
        self.model = CachingAllocator(self.driver, trace.before)
        self.releasing: set[tuple[int, int]] = set()
        self.notes: list[str] = []
        self.partial = False
        self.index = -1

    def run(self) -> Divergence | None:
        """Handle the rows up to the end of the pass or the first contradiction."""
        try:
            self._run()
            self._finish()
        except _ContradictionError as error:
            return Divergence(self.index + error.later, error.expected, error.got)
        except InvalidInputError as error:
            return Divergence(self.index, f"{self.events[self.index].action} that can be followed", str(error))
        return None

    def _run(self) -> None:
        model, driver, live = self.model, self.driver, self.model.live()
        malloc, request_free, complete_free, address_of = (
            model.malloc, model.request_free, model.complete_free, model.address,
        )  # fmt: skip
        index = -1
        try:
            for index, (action, address, size, stream) in enumerate(self.events):
                if not size:
                    continue
                if action == "alloc":
                    handle = malloc(size, stream)
                    if address_of(handle) != address or driver.offer:
                        raise _misplaced(address_of(handle), address, driver.offer)
                    live[address] = (handle, size, stream)
                elif action == "free_requested":
                    block = live.get(address)
                    if block is None or block[1] != size or block[2] != stream:
                        raise _unknown("a live", action, address, size, stream)
                    request_free(block[0])
                elif action == "free_completed":
                    block = live.pop(address, None)
                    if block is None or block[1] != size or block[2] != stream:
                        raise _unknown("a pending", action, address, size, stream)
                    complete_free(block[0])
                elif self._rare(index):
                    break
        finally:
            self.index = index

    def _rare(self, index: int) -> bool:
        """Handle a row that is no allocation or free; True when it ends the pass."""
        event = self.events[index]
        if event.action == "segment_alloc":
            self._offer(index, event)
        elif event.action == "segment_free":
            self._release(index, event)
        elif event.action == "oom":
            self._out_of_memory(event)
            self.partial = True
        elif event.action != "snapshot":
            raise _ContradictionError(
                "an action of the native allocator with fixed segments",
                f"{event.action[:40]}: recorded under expandable segments or another allocator, which is not modelled",
            )
        return self.partial

    def _following(self, index: int) -> Event | None:
        return next((event for event in islice(self.events, index + 1, None) if event.size), None)

    def _offer(self, index: int, event: Event) -> None:
        following = self._following(index)
        if following is not None and (following.action != "alloc" or following.stream != event.stream):
            raise _ContradictionError(
                f"an allocation on stream {event.stream} that needs the segment of {event.size} B",
                f"{following.action[:40]} on stream {following.stream}",
                later=1,
            )
        self.driver.offer = event

    def _release(self, index: int, event: Event) -> None:
        if not self.releasing:
            self.releasing = set(self.model.cached_segments())
        if (event.address, event.size) not in self.releasing:
            raise _ContradictionError(
                "a release of wholly free segments", f"a release of {event.size} B at {event.address:#x}, which are not"
            )
        self.releasing.remove((event.address, event.size))
        if not self.releasing:
            self.model.release_cached()
            return
        following = self._following(index)
        if following is not None and following.action != "segment_free":
            address, size = min(self.releasing)
            raise _ContradictionError(
                f"the free segment of {size} B at {address:#x} released too, as a release empties the whole cache",
                f"{following.action[:40]}: released under a garbage collection threshold or another allocator",
                later=1,
            )

    def _out_of_memory(self, event: Event) -> None:
        address = self.model.best_fit(event.size, event.stream)
        if address is not None:
            raise _ContradictionError(f"cached block {address:#x} reused for {event.size} B", "out of memory")
        needed = segment_size(round_size(event.size))
        if event.address >= needed:
            self.notes.append(f"out of memory with {event.address} B free for a segment of {needed} B: a cap was set")
        cached = sum(size for _, size in self.model.cached_segments())
        if cached:
            self.notes.append(f"out of memory while {cached} B of wholly free segments were still cached")

    def _finish(self) -> None:
        """Account for a history that was cut between two rows that belong together."""
        if self.driver.offer is not None:
            self.model.peak_reserved = max(self.model.peak_reserved, self.model.reserved + self.driver.offer.size)
            self.notes.append("the recording ends between a segment and the allocation that needed it")
        if self.releasing:
            self.notes.append("the recording ends within a release of the cache")


def _misplaced(expected: int, got: int, offer: Event | None) -> _ContradictionError:
    if offer is not None:
        return _ContradictionError(f"cached block {expected:#x} reused", f"a new segment of {offer.size} B taken")
    return _ContradictionError(f"block {expected:#x}", f"block {got:#x}")


def _unknown(kind: str, action: str, address: int, size: int, stream: int) -> _ContradictionError:
    return _ContradictionError(
        f"{kind} block at {address:#x}", f"{action} of an unknown or wrong block: {size} B on stream {stream}"
    )


def _peak_difference(trace: Trace, run: _Replay) -> Divergence | None:
    """Compare the recorded peaks; those of an interrupted pass may only be too high, never too low."""
    peaks = (
        ("allocated", trace.peak_allocated, run.model.peak_allocated),
        ("reserved", trace.peak_reserved, run.model.peak_reserved),
    )
    for name, recorded, modelled in peaks:
        if recorded is None or recorded == modelled or (run.partial and recorded > modelled):
            continue
        return Divergence(None, f"peak {name} {modelled} B", f"peak {name} {recorded} B")
    return None
