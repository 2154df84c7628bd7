"""An allocator snapshot as a report holds it: totals, the largest free blocks, and the layout of as much as fits.

Segments come in the order of their addresses, blocks in theirs; the addresses themselves stay behind. What matters
where memory ran out is what is free in pieces, so segments with the most free memory are laid out first.
"""

from __future__ import annotations

import json
from typing import Any

from trainer_rank.allocator.snapshot import INACTIVE, PENDING, Segment, Snapshot

LAYOUT_BYTES = 12 << 10
"""Bytes of JSON that the layout of one snapshot may have."""
LARGEST_FREE = 16
"""How many of the largest free blocks are named."""


def summarised(snapshot: Snapshot, limit: int = LAYOUT_BYTES) -> dict[str, Any]:
    """Return a snapshot within about ``limit`` bytes of JSON. Bytes throughout.

    ``layout`` rows are [total, pool, stream, blocks]; a block is [size] when free, [size, requested] when live, and
    [size, requested, "pending"] when freed but still used by another stream. ``left_out`` sums what is not laid out.
    """
    order = sorted(range(len(snapshot.segments)), key=lambda place: (-_free(snapshot.segments[place]), place))
    kept: dict[int, list[Any]] = {}
    taken = 0
    for place in order:
        row = _row(snapshot.segments[place])
        taken += len(json.dumps(row, separators=(",", ":"))) + 1
        if taken > limit:
            break
        kept[place] = row
    left = [segment for place, segment in enumerate(snapshot.segments) if place not in kept]
    free = [
        (block.size, segment.pool, segment.stream)
        for segment in snapshot.segments
        for block in segment.blocks
        if block.state == INACTIVE
    ]
    return {
        "allocated": snapshot.allocated,
        "reserved": snapshot.reserved,
        "segments": len(snapshot.segments),
        "blocks": sum(len(segment.blocks) for segment in snapshot.segments),
        "free_blocks": len(free),
        "largest_free": [list(row) for row in sorted(free, key=lambda row: -row[0])[:LARGEST_FREE]],
        "layout": [row for _, row in sorted(kept.items())],
        "left_out": {
            "segments": len(left),
            "reserved": sum(segment.total for segment in left),
            "free": sum(_free(segment) for segment in left),
        },
    }


def without_layout(summary: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a summary of totals alone, with everything counted as left out."""
    if summary is None:
        return None
    free = summary["left_out"]["free"] + sum(_free_of(row) for row in summary["layout"])
    left = {"segments": summary["segments"], "reserved": summary["reserved"], "free": free}
    return summary | {"layout": [], "left_out": left}


def _row(segment: Segment) -> list[Any]:
    blocks: list[list[Any]] = []
    for block in segment.blocks:
        if block.state == INACTIVE:
            blocks.append([block.size])
        else:
            blocks.append([block.size, block.requested, *(["pending"] if block.state == PENDING else [])])
    return [segment.total, segment.pool, segment.stream, blocks]


def _free(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state == INACTIVE)


def _free_of(row: list[Any]) -> int:
    return sum(block[0] for block in row[3] if len(block) == 1)
