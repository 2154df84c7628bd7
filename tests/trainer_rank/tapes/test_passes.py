from __future__ import annotations

import pytest

from trainer_rank.allocator.snapshot import from_trace
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.errors import TapeError
from trainer_rank.tapes.passes import Action, read_pass

HEAP = 0x7F0000000000
BEFORE = from_trace(
    [{"a": HEAP, "t": 20 << 20, "k": "large", "st": 0, "b": [[HEAP, 20 << 20, 19 << 20, "active_allocated"]]}]
)


def trace(*events: tuple[str, int, int, int], marks: tuple[tuple[int, str], ...] = ()) -> Trace:
    return Trace(BEFORE, tuple(Event(*each) for each in events), features={"tokens": 8, "context": 2}, marks=marks)


def test_frees_belong_to_allocations_by_life_not_by_address() -> None:
    found = read_pass(
        trace(
            ("alloc", 1, 100, 0), ("free_requested", 1, 100, 0), ("free_completed", 1, 100, 0),
            ("alloc", 1, 200, 7), ("free_requested", HEAP, 19 << 20, 0), ("free_completed", HEAP, 19 << 20, 0),
            marks=((0, "forward"), (4, "backward")),
        )
    )  # fmt: skip
    assert found.operations == (
        (Action.ALLOCATE, 0, 0), (Action.FREE, 0, 0), (Action.ALLOCATE, 1, 1), (Action.FREE, ~0, 0)
    )  # fmt: skip
    assert found.sizes == (100, 200)
    assert found.ancestors == (19 << 20,)
    assert found.stages == ("forward", "forward", "forward", "backward")
    assert found.features == {"tokens": 8, "packed_tokens": 4}


def test_a_free_that_completes_later_keeps_both_moments() -> None:
    found = read_pass(
        trace(("alloc", 1, 100, 0), ("free_requested", 1, 100, 0), ("alloc", 2, 5, 0), ("free_completed", 1, 100, 0))
    )
    assert [each.action for each in found.operations] == [
        Action.ALLOCATE, Action.REQUEST_FREE, Action.ALLOCATE, Action.COMPLETE_FREE
    ]  # fmt: skip


def test_segments_and_zero_bytes_leave_no_operation_and_a_release_is_one() -> None:
    found = read_pass(
        trace(
            ("segment_alloc", 5, 2 << 20, 0), ("alloc", 5, 1, 0), ("alloc", 0, 0, 0), ("free_requested", 0, 0, 0),
            ("segment_free", 9, 2 << 20, 0), ("segment_free", 10, 2 << 20, 0),
        )
    )  # fmt: skip
    assert [each.action for each in found.operations] == [Action.ALLOCATE, Action.RELEASE]


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([("free_requested", 3, 8, 0)], "event 0 frees 0x3, which nobody allocated"),
        ([("alloc", 1, 8, 0), ("alloc", 1, 8, 0)], "event 1 allocates 0x1, which is still live"),
        ([("alloc", HEAP, 8, 0)], "event 0 allocates"),
        ([("alloc", 1, 8, 0), ("free_completed", 1, 8, 0)], "event 1 completes a free"),
        ([("segment_map", 1, 8, 0)], "segment_map"),
        ([("alloc", 1, 1 << 61, 0)], "1 EiB"),
        ([("alloc", 1, 0, 0)], "nothing was allocated"),
    ],
)
def test_a_history_that_contradicts_itself_is_refused_at_its_event(
    events: list[tuple[str, int, int, int]], text: str
) -> None:
    with pytest.raises(TapeError, match=text):
        read_pass(trace(*events))
