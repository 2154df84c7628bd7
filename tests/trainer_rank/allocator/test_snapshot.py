from __future__ import annotations

import pytest

from trainer_rank.allocator.snapshot import (
    ACTIVE,
    INACTIVE,
    PENDING,
    Block,
    Segment,
    Snapshot,
    difference,
    from_torch,
    from_trace,
)
from trainer_rank.errors import TraceError

SNAPSHOT = Snapshot(
    (
        Segment(4096, 2048, "small", 0, (Block(4096, 512, 500, ACTIVE), Block(4608, 1536, 0, INACTIVE))),
        Segment(8192, 1024, "large", 7, (Block(8192, 1024, 1000, PENDING),)),
    )
)


def test_the_trace_form_is_read_back() -> None:
    assert from_trace(SNAPSHOT.to_trace()) == SNAPSHOT
    assert (SNAPSHOT.reserved, SNAPSHOT.allocated) == (3072, 512)


def test_segments_are_put_in_order_of_address() -> None:
    assert from_trace(SNAPSHOT.to_trace()[::-1]) == SNAPSHOT


def test_pytorchs_snapshot_is_read_for_one_device() -> None:
    blocks = [{"size": 512, "requested_size": 500, "state": "active_allocated"}, {"size": 1536, "state": "inactive"}]
    other = {"device": 1, "address": 0, "total_size": 1, "segment_type": "small", "stream": 0, "blocks": []}
    first = {"device": 0, "address": 4096, "total_size": 2048, "segment_type": "small", "stream": 0, "blocks": blocks}
    waiting = [{"size": 1024, "requested_size": 1000, "state": "active_awaiting_free"}]
    second = first | {"address": 8192, "total_size": 1024, "segment_type": "large", "stream": 7, "blocks": waiting}
    assert from_torch([second, other, first]) == SNAPSHOT
    with pytest.raises(TraceError, match="expandable"):
        from_torch([first | {"is_expandable": True}])


def test_the_first_difference_is_described() -> None:
    assert difference(SNAPSHOT, SNAPSHOT) is None
    assert difference(SNAPSHOT, Snapshot()) == "2 segments against 0"
    first, second = SNAPSHOT.segments
    assert "segment (4096, 2048, 'small', 0) against (4096, 2048, 'small', 3)" in str(
        difference(SNAPSHOT, Snapshot((first._replace(stream=3), second)))
    )
    shorter = first._replace(blocks=first.blocks[:1])
    assert "against none" in str(difference(SNAPSHOT, Snapshot((shorter, second))))
