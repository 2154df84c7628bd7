"""Replay operations of a tape, at given sizes, on the allocator model from a live snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.features import LARGEST
from trainer_rank.tapes.passes import Action


class Peak(NamedTuple):
    """Highest bytes and the operation that reached them first; -1 when the start was the highest."""

    size: int
    operation: int


class Peaks(NamedTuple):
    """What a replay reached."""

    allocated: Peak
    reserved: Peak


def unlimited(snapshot: Snapshot) -> CachingAllocator:
    """Return the allocator in the state of ``snapshot`` on a driver that never refuses: a forecast asks how much."""
    return CachingAllocator(ModelledDriver(LARGEST * 8, snapshot=snapshot), snapshot)


def copied(allocator: CachingAllocator) -> CachingAllocator:
    """Return an independent allocator in the same state, on a copy of its modelled driver."""
    driver = allocator.driver
    assert isinstance(driver, ModelledDriver)
    return allocator.copy(driver.copy())


def streams_of(snapshot: Snapshot) -> dict[int, int]:
    """Map stream numbers of a tape to the snapshot's: the default stream first, others in order of address."""
    raw = dict.fromkeys(segment.stream for segment in snapshot.segments if segment.stream)
    return dict(enumerate((0, *raw)))


def simulate(
    allocator: CachingAllocator,
    operations: Iterable[tuple[Action, int, int]],
    sizes: Sequence[int],
    handles: dict[int, int],
    streams: Mapping[int, int],
) -> Peaks:
    """Apply ``operations``; allocation k takes ``sizes[k]`` bytes. Changes ``allocator`` and ``handles``.

    ``handles`` maps a subject to the block that serves it and holds the ancestors at the start; an ancestor without
    a block is skipped. ``streams`` maps the tape's stream numbers to the allocator's. Peaks restart here.
    """
    allocator.reset_peaks()
    allocated, reserved = Peak(allocator.allocated, -1), Peak(allocator.reserved, -1)
    high, top = allocated.size, reserved.size
    malloc, release = allocator.malloc, allocator.free
    request, complete = allocator.request_free, allocator.complete_free
    allocate, free, request_only, complete_only = (
        Action.ALLOCATE, Action.FREE, Action.REQUEST_FREE, Action.COMPLETE_FREE
    )  # fmt: skip
    for index, (action, subject, stream) in enumerate(operations):
        if action is allocate:
            handles[subject] = malloc(sizes[subject], streams.get(stream, stream))
            if allocator.allocated > high:
                high = allocator.allocated
                allocated = Peak(high, index)
            if allocator.reserved > top:
                top = allocator.reserved
                reserved = Peak(top, index)
        elif action is free:
            if subject in handles:
                release(handles.pop(subject))
        elif action is request_only:
            if subject in handles:
                request(handles[subject])
        elif action is complete_only:
            if subject in handles:
                complete(handles.pop(subject))
        else:
            allocator.empty_cache()
    return Peaks(allocated, reserved)
