"""Frees that another stream delays: when they complete is the device's choice, and the bound holds whenever it is."""

from __future__ import annotations

import pytest

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import MIB, segment_size
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.check import compare


class _Recorded:
    """A pass on two streams, recorded on the allocator's model."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.allocator = CachingAllocator(ModelledDriver(1 << 40))

    def malloc(self, size: int, stream: int = 0) -> int:
        before = {each.address for each in self.allocator.snapshot().segments}
        handle = self.allocator.malloc(size, stream)
        for each in self.allocator.snapshot().segments:
            if each.address not in before:
                self.events.append(Event("segment_alloc", each.address, each.total, stream))
        self.events.append(Event("alloc", self.allocator.address(handle), size, stream))
        return handle

    def free(self, handle: int, size: int, *, completed: bool) -> None:
        address = self.allocator.address(handle)
        (self.allocator.complete_free if completed else self.allocator.request_free)(handle)
        self.events.append(Event("free_completed" if completed else "free_requested", address, size, 0))


def recorded(rows: int, *, late: bool) -> Trace:
    """Free a block that stream 1 used, then ask for as much: the free completes before that, or only after it."""
    run, size = _Recorded(), rows * MIB
    start = run.allocator.snapshot()
    block = run.malloc(size)
    run.malloc(512, stream=1)
    run.free(block, size, completed=False)
    run.malloc(256)
    if not late:
        run.free(block, size, completed=True)
    run.malloc(size)
    if late:
        run.free(block, size, completed=True)
    return Trace(
        before=start,
        events=tuple(run.events),
        after=run.allocator.snapshot(),
        peak_allocated=run.allocator.peak_allocated,
        peak_reserved=run.allocator.peak_reserved,
        features={"packed_tokens": rows, "tokens": rows},
        source=f"{rows} rows",
    )


@pytest.mark.parametrize("late", [False, True])
def test_the_bound_holds_whenever_a_free_completes(late: bool) -> None:
    tape = fit([recorded(rows, late=False) for rows in (16, 32, 64)])
    compared = compare(tape, recorded(48, late=late))
    assert compared.forecast.status is Status.COVERED
    assert compared.bound_holds
    expected, observed = compared.forecast.expected, compared.observed
    assert expected is not None
    assert observed.reserved - expected.reserved == (segment_size(48 * MIB) if late else 0)
