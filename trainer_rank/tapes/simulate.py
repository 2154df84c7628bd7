"""Replay operations of a tape, at given sizes, on the allocator model from a live snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.snapshot import ACTIVE, Segment, Snapshot
from trainer_rank.features import LARGEST
from trainer_rank.tapes.passes import Action

NOBODY = -1
"""In place of a block's handle: no block serves this subject."""


class Peak(NamedTuple):
    """Highest bytes and the operation that reached them first; -1 when the start was the highest."""

    size: int
    operation: int


class Peaks(NamedTuple):
    """What a replay reached."""

    allocated: Peak
    reserved: Peak


def unlimited(snapshot: Snapshot) -> tuple[CachingAllocator, dict[int, Segment]]:
    """Return the allocator in the state of ``snapshot`` on a driver that never refuses: a forecast asks how much.

    Segments full of live blocks, by address, are only counted: most hold parameters and never change.
    """
    full = {each.address: each for each in snapshot.segments if all(block.state == ACTIVE for block in each.blocks)}
    changing = Snapshot(tuple(each for each in snapshot.segments if each.address not in full))
    allocator = CachingAllocator(ModelledDriver(LARGEST * 8, snapshot=snapshot), changing)
    for segment in full.values():
        allocator.count(segment)
    return allocator, full


def copied(allocator: CachingAllocator, *, upward: bool = False) -> CachingAllocator:
    """Return an independent allocator in the same state, on a copy of its modelled driver.

    ``upward``: new segments lie above all others instead of below: blocks of one size are then taken in another order.
    """
    driver = allocator.driver
    assert isinstance(driver, ModelledDriver)
    return allocator.copy(driver.copy(upward=upward))


def streams_of(snapshot: Snapshot) -> dict[int, int]:
    """Map stream numbers of a tape to the snapshot's: the default stream first, others in order of address."""
    raw = dict.fromkeys(segment.stream for segment in snapshot.segments if segment.stream)
    return dict(enumerate((0, *raw)))


def simulate(
    allocator: CachingAllocator,
    operations: Iterable[tuple[Action, int, int]],
    sizes: Sequence[int],
    handles: list[int],
    streams: Mapping[int, int],
) -> Peaks:
    """Apply ``operations``; allocation k takes ``sizes[k]`` bytes. Changes ``allocator`` and ``handles``.

    ``handles[subject]`` is the block that serves a subject, ``NOBODY`` when there is none: then nothing is freed.
    Ancestors ``~k`` are negative, so they lie at the list's end. ``streams`` maps the tape's stream numbers to the
    allocator's. Peaks restart here.
    """
    allocator.reset_peaks()
    high, top = allocator.allocated, allocator.reserved
    highest = topmost = -1
    malloc, free = allocator.malloc, allocator.free
    allocate, free_at_once = Action.ALLOCATE, Action.FREE
    for index, (action, subject, stream) in enumerate(operations):
        if action is allocate:
            handles[subject] = malloc(sizes[subject], stream and streams.get(stream, stream))
            if allocator.allocated > high:
                high, highest = allocator.allocated, index
            if allocator.reserved > top:
                top, topmost = allocator.reserved, index
        elif action is free_at_once:
            handle = handles[subject]
            if handle >= 0:
                free(handle)
        else:
            _rarer(allocator, action, handles[subject])
    return Peaks(Peak(high, highest), Peak(top, topmost))


def _rarer(allocator: CachingAllocator, action: Action, handle: int) -> None:
    if action is Action.RELEASE:
        allocator.empty_cache()
    elif handle >= 0 and action is Action.REQUEST_FREE:
        allocator.request_free(handle)
    elif handle >= 0:
        allocator.complete_free(handle)
