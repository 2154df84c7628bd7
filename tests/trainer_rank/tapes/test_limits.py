"""What is known without a replay: every replay, and every recording, lies between its two limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.tapes.programs import Step, layered, record, rows, run_scattered, used_before
from trainer_rank.allocator.rules import MIB
from trainer_rank.allocator.snapshot import ACTIVE, Segment, Snapshot
from trainer_rank.allocator.trace import load_trace
from trainer_rank.features import recorded_features
from trainer_rank.tapes import Tape, fit
from trainer_rank.tapes.compose import PlannedPass, retained, sequential
from trainer_rank.tapes.forecast import forecast_plan
from trainer_rank.tapes.limits import Limits, find_limits
from trainer_rank.tapes.shipped import RECORDINGS, load_shipped, shipped_tapes

SHAPES = (100, 200, 300)


def tape_of(steps: list[Step]) -> Tape:
    return fit([record(steps, {"packed_tokens": tokens}) for tokens in SHAPES])


def between(found: Limits | None, before: Snapshot, allocated: int, reserved: int, bound: int) -> None:
    assert found is not None
    assert before.allocated + found.allocated <= allocated
    assert reserved <= bound <= before.reserved + found.reserved


def random_program(draw: random.Random) -> list[Step]:
    """Allocate and free blocks of a few sizes in any order."""
    coefficients = [draw.choice([4, 900, 9000, 60_000, 400_000, draw.randrange(1, 2_000_000)]) for _ in range(8)]
    sizes = [rows(coefficient, draw.choice([0, 512])) for coefficient in coefficients[: draw.randrange(1, 9)]]
    steps: list[Step] = []
    live: list[str] = []
    most = draw.choice([3, 8, 30])
    for number in range(draw.randrange(2, 150)):
        if live and (len(live) >= most or draw.random() < 0.45):
            steps.append(Step(death=live.pop(draw.randrange(len(live)))))
        else:
            live.append(str(number))
            steps.append(Step(live[-1], draw.choice(sizes)))
    return steps


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_programs_from_random_caches_lie_between_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    steps, before, tokens = random_program(draw), used_before(draw), draw.randrange(60, 900)
    planned = PlannedPass(tape_of(steps), {"packed_tokens": tokens})
    made = forecast_plan([planned], sequential(1), before)
    assert made.expected is not None and made.bound is not None
    found = find_limits([planned])
    between(found, before, made.expected.allocated, made.expected.reserved, made.bound.reserved)
    happened = run_scattered(steps, {"packed_tokens": tokens}, before, draw)
    assert found is not None and happened.peak_reserved <= before.reserved + found.reserved
    assert happened.peak_allocated >= before.allocated + found.allocated


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32))
def test_plans_of_several_passes_lie_between_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    tape = tape_of(layered(draw.randrange(1, 4), [rows(draw.randrange(4, 400_000)), rows(9_000)], rows(4096)))
    passes = [PlannedPass(tape, {"packed_tokens": draw.randrange(60, 500)}) for _ in range(draw.randrange(1, 4))]
    before, held = used_before(draw), draw.choice([0, 3000, 30 * MIB])
    turns = retained(len(passes), ("forward", "backward"))
    made = forecast_plan(passes, turns, before, held={len(passes): held} if held else {})
    assert made.expected is not None and made.bound is not None
    between(find_limits(passes, [held]), before, made.expected.allocated, made.expected.reserved, made.bound.reserved)


def without_free_blocks(snapshot: Snapshot) -> Snapshot:
    """Keep live blocks alone, so that everything must be taken from the driver: the most that a pass can grow by."""
    blocks = ((each, segment) for segment in snapshot.segments for each in segment.blocks if each.state == ACTIVE)
    return Snapshot(
        tuple(Segment(each.address, each.size, segment.pool, segment.stream, (each,)) for each, segment in blocks)
    )


FILES = [(name, file) for name, each in shipped_tapes().items() for file in (*each.recordings, *each.unseen)]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_recordings_from_real_cards_lie_between_the_limits(name: str, file: str) -> None:
    trace, tape = load_trace(RECORDINGS / file), load_shipped(name)
    stated = trace.features or {}
    features = recorded_features(stated)
    planned = PlannedPass(tape, features, stated["context"], stated["layers"])
    found = find_limits([planned])
    assert found is not None and trace.peak_allocated is not None and trace.peak_reserved is not None
    between(found, trace.before, trace.peak_allocated, trace.peak_reserved, trace.peak_reserved)
    assert trace.before.allocated + found.allocated >= 0.99 * trace.peak_allocated, "the lower limit is near"
    bare = without_free_blocks(trace.before)
    made = forecast_plan([planned], sequential(1), bare)
    assert made.expected is not None and made.bound is not None
    between(found, bare, made.expected.allocated, made.expected.reserved, made.bound.reserved)
    assert found.reserved <= 3.5 * (made.expected.reserved - bare.reserved), "the upper limit is of use"


def test_what_no_recording_covers_has_no_limits() -> None:
    tape = tape_of(layered(2, [rows(50_000)], rows(4096)))
    assert find_limits([PlannedPass(tape, {"packed_tokens": 200}, context=2)]) is None
    assert find_limits([PlannedPass(tape, {"sequences": 3})]) is None


def test_outside_the_probes_is_said() -> None:
    tape = tape_of(layered(2, [rows(50_000)], rows(4096)))
    inside, outside = (find_limits([PlannedPass(tape, {"packed_tokens": tokens})]) for tokens in (200, 301))
    assert inside is not None and not inside.extrapolated
    assert outside is not None and outside.extrapolated
