"""A snapshot in a report adds up, stays within its bytes, and lays out first what has the most free memory."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE, PENDING, Block, Segment, Snapshot
from trainer_rank.reports.memory import LARGEST_FREE, summarised, without_layout


def _segment(address: int, rows: list[tuple[int, str]]) -> Segment:
    blocks, at = [], address
    for size, state in rows:
        blocks.append(Block(at, size, 0 if state == INACTIVE else size - 1, state))
        at += size
    return Segment(address, at - address, "large", 0, tuple(blocks))


states = st.sampled_from([ACTIVE, INACTIVE, PENDING])
segments = st.lists(st.lists(st.tuples(st.integers(512, 1 << 30), states), min_size=1, max_size=40), max_size=60)


def _snapshot(rows: list[list[tuple[int, str]]]) -> Snapshot:
    return Snapshot(tuple(_segment(place << 40, each) for place, each in enumerate(rows)))


@given(segments, st.integers(100, 20_000))
def test_totals_are_those_of_the_snapshot_and_the_layout_stays_within_its_bytes(
    rows: list[list[tuple[int, str]]], limit: int
) -> None:
    snapshot = _snapshot(rows)
    found = json.loads(json.dumps(summarised(snapshot, limit)))
    laid: list[Any] = found["layout"]
    assert len(json.dumps(laid, separators=(",", ":"))) <= limit + 2
    assert (found["allocated"], found["reserved"]) == (snapshot.allocated, snapshot.reserved)
    assert len(laid) + found["left_out"]["segments"] == found["segments"] == len(snapshot.segments)
    assert sum(row[0] for row in laid) + found["left_out"]["reserved"] == snapshot.reserved
    assert all(row[0] == sum(block[0] for block in row[3]) for row in laid)
    assert len(found["largest_free"]) == min(LARGEST_FREE, found["free_blocks"])
    bare = without_layout(found)
    assert bare is not None
    free = sum(block.size for each in snapshot.segments for block in each.blocks if block.state == INACTIVE)
    assert bare["left_out"] == {"segments": len(snapshot.segments), "reserved": snapshot.reserved, "free": free}


def test_what_has_the_most_free_memory_is_laid_out_first() -> None:
    full, torn = [(1 << 20, ACTIVE)], [(1 << 20, ACTIVE), (1 << 20, INACTIVE), (1 << 19, PENDING)]
    found = summarised(_snapshot([full, torn, full]), 90)
    assert found["layout"] == [
        [5 << 19, "large", 0, [[1 << 20, (1 << 20) - 1], [1 << 20], [1 << 19, (1 << 19) - 1, "pending"]]]
    ]
    assert found["left_out"] == {"segments": 2, "reserved": 2 << 20, "free": 0}
    assert without_layout(None) is None
