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
    with pytest.raises(TraceError, match="segment at 0x1000 holds 2049 B but its blocks sum to 2048 B"):
        from_torch([first | {"total_size": 2049}])


def test_a_segment_that_changed_is_read_anew_and_another_is_not() -> None:
    def read(state: str) -> Snapshot:
        blocks = [{"size": 512, "requested_size": 500, "state": "active_allocated"}]
        last = [{"size": 512, "requested_size": 500, "state": state}]
        first = {"device": 0, "address": 4096, "total_size": 512, "segment_type": "small", "stream": 0}
        return from_torch([first | {"blocks": blocks}, first | {"address": 8192, "blocks": last}])

    before, again, after = read("active_allocated"), read("active_allocated"), read("inactive")
    assert before == again and before.segments[0] is again.segments[0] is after.segments[0]
    assert after.segments[1] == Segment(8192, 512, "small", 0, (Block(8192, 512, 0, INACTIVE),))


def test_the_first_difference_is_described() -> None:
    assert difference(SNAPSHOT, SNAPSHOT) is None
    assert difference(SNAPSHOT, Snapshot()) == "2 segments against 0"
    first, second = SNAPSHOT.segments
    assert "segment (4096, 2048, 'small', 0) against (4096, 2048, 'small', 3)" in str(
        difference(SNAPSHOT, Snapshot((first._replace(stream=3), second)))
    )
    shorter = first._replace(blocks=first.blocks[:1])
    assert "against none" in str(difference(SNAPSHOT, Snapshot((shorter, second))))
