"""The event of an allocation is found by its place and size, else by the nearest of its size, else by its place."""

from __future__ import annotations

from tests.trainer_rank.tapes.programs import record
from tests.trainer_rank.tapes.test_compose import planned, renamed
from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.tapes.compose import PlannedPass, retained
from trainer_rank.tapes.located import POSITION, POSITION_AND_SIZE, SIZE, TapeEvent, locate

PHASES = ("forward", "backward")
TURNS = retained(2, PHASES)
TOKENS = (700, 1900)


def _found(place: int, position: int, size: int) -> TapeEvent:
    event = locate(planned(*TOKENS), TURNS, Snapshot(), [place], position, lambda each: each == size)
    assert event is not None
    return event


def _sizes(number: int, phase: str) -> list[int]:
    """What a pass allocates in a phase, in order, as recorded."""
    trace = record(renamed(number, TOKENS[number]), {"packed_tokens": 0})
    whole = [event.size for event in trace.events if event.action == "alloc"]
    forward = sum(step.birth is not None for step in renamed(number, TOKENS[number], "forward"))
    return whole[:forward] if phase == "forward" else whole[forward:]


def test_every_allocation_of_a_plan_is_found_with_what_was_forecast_there() -> None:
    observed = record(
        [*renamed(0, 700, "forward"), *renamed(1, 1900, "forward"), *renamed(1, 1900, "backward"),
         *renamed(0, 700, "backward")],
        {"packed_tokens": 0},
    )  # fmt: skip
    allocator, handles, left = CachingAllocator(ModelledDriver(1 << 40)), dict[int, int](), []
    for event in observed.events:
        if event.action == "alloc":
            handles[event.address] = allocator.malloc(event.size)
            left.append((allocator.allocated, allocator.reserved))
        elif event.action == "free_requested":
            allocator.free(handles[event.address])
    seen = []
    for place, turn in enumerate(TURNS):
        sizes = _sizes(turn.number, turn.phase)
        for position, size in enumerate(sizes):
            event = _found(place, position, size)
            assert (event.matched, event.ordinal, event.count) == (POSITION_AND_SIZE, position, len(sizes))
            assert (event.size, event.grounds) == (size, "checked")
            assert "packed_tokens" in event.rule
            assert event.stage.partition("/")[0] == turn.phase
            seen.append((event.allocated, event.reserved))
    assert seen == left, "as the allocator was after each allocation of the same plan"


def test_an_allocation_out_of_place_is_found_by_its_size_and_an_unknown_one_by_its_place() -> None:
    sizes = _sizes(1, "forward")
    moved = _found(1, len(sizes) + 40, sizes[-1])
    assert (moved.matched, moved.ordinal) == (SIZE, len(sizes) - 1)
    strange = _found(1, 2, 7)
    assert (strange.matched, strange.ordinal, strange.size) == (POSITION, 2, sizes[2])
    beyond = _found(1, 1000, 7)
    assert (beyond.matched, beyond.ordinal) == (POSITION, len(sizes) - 1)


def test_what_no_tape_covers_has_no_event() -> None:
    unknown = [PlannedPass(each.tape, each.features, context=2) for each in planned(*TOKENS)]
    assert locate(unknown, TURNS, Snapshot(), [0], 0, bool) is None
    assert locate(planned(*TOKENS), TURNS, Snapshot(), [], 0, bool) is None
