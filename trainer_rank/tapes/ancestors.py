"""Find, in a live snapshot, the blocks that a pass will free although it did not allocate them.

A recording knows such ancestors by size and order of death, never by an address that holds elsewhere. In a snapshot
they are the live blocks of that requested size in segments with free space: parameters were packed without any at
the start and never die. Among equals, the recordings are met by taking the highest address first.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer_rank.allocator.snapshot import ACTIVE, Segment, Snapshot


def find_ancestors(snapshot: Snapshot, sizes: Sequence[int | None], *, lowest: bool = False) -> list[int | None]:
    """Return the address of a block for each requested size, in order of death; None where no block has it.

    ``lowest`` takes equals in the opposite order, which shows how much the choice matters.
    """
    wanted = {size: sizes.count(size) for size in set(sizes) if size is not None}
    found: dict[int, list[tuple[bool, int, int]]] = {size: [] for size in wanted}
    for segment in snapshot.segments:
        hits = [block for block in segment.blocks if block.state == ACTIVE and block.requested in found]
        if hits:
            full = _is_full(segment)
            crowd = [block.requested for block in hits]
            for block in hits:
                found[block.requested].append((full, crowd.count(block.requested), block.address))
    queues = {
        size: sorted((address for _, _, address in sorted(blocks)[: wanted[size]]), reverse=lowest)
        for size, blocks in found.items()
    }
    return [queues[size].pop() if size is not None and queues[size] else None for size in sizes]


def _is_full(segment: Segment) -> bool:
    free = segment.total - sum(block.size for block in segment.blocks if block.state == ACTIVE)
    return free * 20 < segment.total
