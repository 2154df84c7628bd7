"""The bound adds nothing to a replay where recordings settle every size, and a margin where they leave one open."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.native.accuracy import pairs
from bench.native.report import RECORDINGS as STEPS
from bench.native.report import lines_of
from tests.trainer_rank.tapes.programs import Step, layered, mixed, record, rows, run_scattered, used_before
from trainer_rank.allocator.rules import LARGE_SEGMENT, MIB, SMALL_SEGMENT
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.allocator.trace import load_trace
from trainer_rank.tapes import Status, Tape, fit
from trainer_rank.tapes.check import compare
from trainer_rank.tapes.compose import PlannedPass, sequential
from trainer_rank.tapes.forecast import Forecast, forecast_plan
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes

SHAPES = (100, 200, 300)
EMPTY = Snapshot()
EMPTY_HANDED: Mapping[int, int] = {}


def tape_of(steps: list[Step]) -> Tape:
    return fit([record(steps, {"packed_tokens": tokens}) for tokens in SHAPES])


def planned(tape: Tape, tokens: int, before: Snapshot = EMPTY, held: Mapping[int, int] = EMPTY_HANDED) -> Forecast:
    return forecast_plan([PlannedPass(tape, {"packed_tokens": tokens})], sequential(1), before, held=held)


def margin(made: Forecast) -> int:
    assert made.slack is not None
    return made.slack.reserved


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_where_every_size_is_settled_the_bound_is_what_happens_wherever_the_driver_puts_segments(seed: int) -> None:
    draw = random.Random(seed)
    coefficients = [draw.choice([4, 64, 512, 2048, draw.randrange(1, 400_000)]) for _ in range(draw.randrange(1, 7))]
    kinds = [[rows(each, draw.choice([0, 512, 1000])) for each in coefficients]] * draw.randrange(1, 5)
    steps = mixed(kinds, rows(draw.choice([600, 2048, 4096])))
    tape, before, tokens = tape_of(steps), used_before(draw), draw.randrange(SHAPES[0], SHAPES[-1] + 1)
    made = planned(tape, tokens, before)
    assert made.bound is not None and made.status is Status.COVERED
    allocator = run_scattered(steps, {"packed_tokens": tokens}, before, draw)
    assert margin(made) == 0
    assert allocator.peak_reserved == made.bound.reserved
    assert allocator.peak_allocated <= made.bound.allocated


@cache
def tape() -> Tape:
    return tape_of(layered(3, [rows(50_000), rows(9_000)], rows(4096)))


def test_outside_the_probes_a_margin_stays() -> None:
    made = planned(tape(), 301)
    assert made.status is Status.EXTRAPOLATED and margin(made) >= LARGE_SEGMENT


def test_a_large_size_that_the_probes_leave_open_keeps_the_margin_and_a_small_one_does_not() -> None:
    for coefficient, kept in ((50_000, True), (4, False)):
        steps = [*layered(2, [rows(90_000)], rows(4096)), Step("a line", rows(coefficient, 1000))]
        two = fit([record(steps, {"packed_tokens": tokens}) for tokens in (SHAPES[0], SHAPES[-1])])
        assert (margin(planned(two, 150)) >= LARGE_SEGMENT) is kept


def test_what_the_caller_may_hold_is_laid_into_the_replay() -> None:
    beside = margin(planned(tape(), 200, held={0: 30 * MIB}))
    assert beside == 30 * MIB, "nothing free at the end of this pass is as large"
    assert margin(planned(tape(), 200, held={0: 1000})) in (0, SMALL_SEGMENT)


@pytest.mark.parametrize("name", ["h200-reference.jsonl.gz", "h200-megatron-steps.jsonl.gz"])
def test_no_step_on_a_real_card_reserved_more_than_was_expected_without_any_margin(name: str) -> None:
    steps = pairs(lines_of(STEPS / name))
    assert len(steps) >= 46
    assert all(step.observed["reserved"] <= step.forecast["reserved"] for step in steps)


@pytest.mark.parametrize("name", sorted(shipped_tapes()))
def test_the_bound_of_each_shipped_tape_holds_on_each_recording_it_covers(name: str) -> None:
    shipped, tape = shipped_tapes()[name], load_shipped(name)
    compared = [compare(tape, load_trace(RECORDINGS / file)) for file in (*shipped.recordings, *shipped.unseen)]
    assert all(each.bound_holds for each in compared)
