"""Frees that another stream delays: when they complete is the device's choice, and the bound holds whenever it is."""

from __future__ import annotations

import pytest

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.rules import MIB, segment_size
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.check import compare
from trainer_rank.tapes.compose import PlannedPass
from trainer_rank.tapes.limits import find_limits


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


def recorded(rows: int, *, late: bool, times: int = 1) -> Trace:
    """Free a block that stream 1 used, then ask for as much: the free completes before that, or only in the end."""
    run, size = _Recorded(), rows * MIB
    start = run.allocator.snapshot()
    run.malloc(512, stream=1)
    block, delayed = run.malloc(size), []
    for _ in range(times):
        run.free(block, size, completed=False)
        delayed.append(block)
        run.malloc(256)
        if not late:
            run.free(delayed.pop(), size, completed=True)
        block = run.malloc(size)
    for each in delayed:
        run.free(each, size, completed=True)
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


def test_limits_hold_when_every_free_completes_in_the_end() -> None:
    tape = fit([recorded(rows, late=False, times=6) for rows in (16, 32, 64)])
    unseen = recorded(48, late=True, times=6)
    limits = find_limits([PlannedPass(tape, {"packed_tokens": 48, "tokens": 48})])
    assert limits is not None and unseen.peak_reserved is not None
    assert 6 * 48 * MIB < unseen.peak_reserved <= limits.reserved
    assert compare(tape, unseen).bound_holds
