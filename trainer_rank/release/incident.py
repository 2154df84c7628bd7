"""The public report's backward that found no library memory, rebuilt as a declared construction on a virtual card.

Given were totals: 74.662 GB allocated, 147.394 GB reserved, 42.754638 GB returned by one release, 0.034734 GB free, and
from a later profile library allocations of 1,024, 131,072 and 67,108,864 B. The segment layout was not recorded, so
this one is chosen: whole unused segments that add up to what the release returned, and one kind of partly used segment
that holds all live blocks and the rest of the unused memory.
"""

from __future__ import annotations

from trainer_rank.allocator.driver import FIRST_ADDRESS
from trainer_rank.allocator.rules import SEGMENT_GRANULE
from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE, Block, Segment, Snapshot
from trainer_rank.devices.cards import load_card
from trainer_rank.devices.virtual_memory import LibraryDemand

CARD = "h200-incident"
ALLOCATED, RESERVED, RELEASABLE, FREE = 74_662_000_128, 147_394_134_016, 42_754_637_824, 34_734_080
"""Bytes: the report's decimals, on the nearest block or segment boundary."""
DEMANDS = tuple(
    LibraryDemand(f"cublas {size}", "backward under pressure", size) for size in (1_024, 131_072, 67_108_864)
)
_UNUSED_SEGMENTS, _USED_SEGMENTS = 40, 80


def snapshot() -> Snapshot:
    """Return the allocator's state at the first gradient admission."""
    unused = _sizes(RELEASABLE, _UNUSED_SEGMENTS, SEGMENT_GRANULE)
    used = _sizes(RESERVED - RELEASABLE, _USED_SEGMENTS, SEGMENT_GRANULE)
    live = _sizes(ALLOCATED, _USED_SEGMENTS, 512)
    address, segments = FIRST_ADDRESS - RESERVED, []
    for total, size in [*zip(used, live, strict=True), *((each, 0) for each in unused)]:
        blocks = [Block(address, size, size, ACTIVE)] if size else []
        blocks.append(Block(address + size, total - size, 0, INACTIVE))
        segments.append(Segment(address, total, "large", 0, tuple(blocks)))
        address += total
    return Snapshot(tuple(segments))


def elsewhere() -> int:
    """Return what must lie outside the allocator beside the card's context, so that exactly ``FREE`` bytes are free."""
    card = load_card(CARD)
    return card.capacity - card.context - RESERVED - FREE


def _sizes(total: int, count: int, granule: int) -> list[int]:
    """Cut ``total`` into ``count`` multiples of ``granule`` that differ by one at most."""
    each, rest = divmod(total // granule, count)
    return [(each + (index < rest)) * granule for index in range(count)]
