from __future__ import annotations

import pytest

from tests.trainer_rank.tapes.programs import Step, layered, record, rows
from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import Event, Trace
from trainer_rank.errors import InvalidInputError
from trainer_rank.tapes import Status, fit
from trainer_rank.tapes.compose import PlannedPass, Turn, retained, sequential
from trainer_rank.tapes.forecast import forecast_plan

SIZES = (rows(8192), rows(30000, 4096))
TAPE = fit([record(layered(3, SIZES, rows(4096)), {"packed_tokens": n}) for n in (300, 900, 2000)])


def renamed(number: int, tokens: int, phase: str | None = None) -> list[Step]:
    """The steps of one pass at ``tokens``, with names of its own, of one phase if given."""
    found: list[Step] = []
    current = ""
    for step in layered(3, SIZES, rows(4096)):
        if step.stage is not None:
            current = step.stage.partition("/")[0]
        elif phase in (None, current):
            birth = None if step.birth is None else f"{number} {step.birth}"
            death = None if step.death is None else f"{number} {step.death}"
            found.append(Step(birth, lambda _, size=step.size: size({"packed_tokens": tokens}), step.stream, death))
    return found


def planned(*tokens: int) -> list[PlannedPass]:
    return [PlannedPass(TAPE, {"packed_tokens": n}) for n in tokens]


def test_passes_one_after_the_other_are_what_they_are_together() -> None:
    observed = record([*renamed(0, 700), *renamed(1, 1900), *renamed(2, 350)], {"packed_tokens": 0})
    made = forecast_plan(planned(700, 1900, 350), sequential(3), Snapshot())
    assert made.expected is not None
    assert made.expected[:2] == (observed.peak_allocated, observed.peak_reserved)
    assert made.number == 1 and made.stage is not None and made.stage.startswith("backward/")
    assert [each.left for each in made.turns] == [0, 0, 0]


def test_retained_graphs_lie_beside_each_other() -> None:
    steps = [
        *renamed(0, 700, "forward"), *renamed(1, 1900, "forward"),
        *renamed(1, 1900, "backward"), *renamed(0, 700, "backward"),
    ]  # fmt: skip
    observed = record(steps, {"packed_tokens": 0})
    made = forecast_plan(planned(700, 1900), retained(2, ("forward", "backward")), Snapshot())
    assert made.expected is not None
    assert made.expected[:2] == (observed.peak_allocated, observed.peak_reserved)
    assert [each.turn for each in made.turns] == [
        Turn(0, "forward"), Turn(1, "forward"), Turn(1, "backward"), Turn(0, "backward")
    ]  # fmt: skip
    alone = forecast_plan(planned(1900), sequential(1), Snapshot())
    assert alone.expected is not None and made.expected.allocated > alone.expected.allocated


def test_any_order_of_turns_may_be_asked_for() -> None:
    order = [Turn(1, "forward"), Turn(0, "forward"), Turn(1, "backward"), Turn(0, "backward")]
    steps = [step for number, phase in order for step in renamed(number, (700, 1900)[number], phase)]
    made = forecast_plan(planned(700, 1900), order, Snapshot())
    assert made.expected is not None
    observed = record(steps, {"packed_tokens": 0})
    assert made.expected[:2] == (observed.peak_allocated, observed.peak_reserved)


def steady_pass(tokens: int, before: Snapshot) -> Trace:
    """One pass of a model that keeps a block from pass to pass: the block of the pass before dies in it."""
    allocator = CachingAllocator(ModelledDriver(1 << 40, snapshot=before), before)
    kept = next(iter(allocator.live().values()))[0]
    events: list[Event] = []

    def allocate(size: int) -> int:
        reserved = allocator.reserved
        handle = allocator.malloc(size)
        if allocator.reserved > reserved:
            events.append(Event("segment_alloc", allocator.address(handle), allocator.reserved - reserved, 0))
        events.append(Event("alloc", allocator.address(handle), size, 0))
        return handle

    def free(handle: int) -> None:
        address, size = allocator.address(handle), allocator.requested(handle)
        allocator.free(handle)
        events.extend(Event(action, address, size, 0) for action in ("free_requested", "free_completed"))

    work = allocate(50_000 * tokens)
    free(kept)
    allocate(4096 * tokens)
    free(work)
    return Trace(
        before, tuple(events), allocator.snapshot(), allocator.peak_allocated, allocator.peak_reserved,
        features={"packed_tokens": tokens},
    )  # fmt: skip


def steady(tokens: int) -> Snapshot:
    after = record([Step("kept", rows(4096))], {"packed_tokens": tokens}).after
    assert after is not None
    return after


def test_what_one_pass_leaves_behind_the_next_one_frees() -> None:
    tape = fit([steady_pass(tokens, steady(tokens)) for tokens in (1000, 2000)])
    made = forecast_plan([PlannedPass(tape, {"packed_tokens": 1500})] * 4, sequential(4), steady(1500))
    assert made.expected is not None
    assert {each.left for each in made.turns} == {steady(1500).allocated}
    assert made.expected.allocated == steady_pass(1500, steady(1500)).peak_allocated


def test_what_a_pass_of_another_tape_left_behind_stays() -> None:
    first, second = (
        fit([steady_pass(tokens, steady(tokens)) for tokens in sizes]) for sizes in ((1000, 2000), (900, 2100))
    )
    passes = [PlannedPass(first, {"packed_tokens": 1500}), PlannedPass(second, {"packed_tokens": 1500})]
    made = forecast_plan(passes, sequential(2), steady(1500))
    assert made.turns[1].left == 2 * steady(1500).allocated


def test_unknown_turns_are_refused_and_unknown_passes_named() -> None:
    with pytest.raises(InvalidInputError, match="names no pass of 1"):
        forecast_plan(planned(700), [Turn(1)], Snapshot())
    with pytest.raises(InvalidInputError, match="no phase 'optimizer', only forward, backward"):
        forecast_plan(planned(700), [Turn(0, "optimizer")], Snapshot())
    made = forecast_plan([*planned(700), PlannedPass(TAPE, {"packed_tokens": 700}, context=2)], [Turn(0)], Snapshot())
    assert made.status is Status.UNKNOWN
    assert made.uncovered == ("topology with 2 context ranks: record a probe of it",)
