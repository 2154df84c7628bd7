from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.tapes.programs import Step, layered, record, rows
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.errors import TapeError
from trainer_rank.tapes import Status, fit, forecast
from trainer_rank.tapes.fit import one_rule

Size = Callable[[Mapping[str, int]], int]

PROBES = (257, 1030, 5003)


def capped(slope: int, at: int) -> Size:
    return lambda features: min(slope * features["packed_tokens"], slope * at)


def blocked(each: int, block: int) -> Size:
    return lambda features: each * -(-features["packed_tokens"] // block)


sizes = st.one_of(
    st.builds(rows, st.integers(1, 40_000)),
    st.builds(rows, st.integers(1, 9000), st.integers(0, 1 << 20)),
    st.builds(rows, st.just(0), st.integers(1, 30 << 20)),
    st.builds(capped, st.integers(64, 30_000), st.integers(1100, 4000)),
    st.builds(blocked, st.integers(64, 1 << 20), st.sampled_from([64, 256])),
)


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Random births and deaths on two streams; about half of what is born dies."""
    steps: list[Step] = []
    live: list[str] = []
    for number in range(draw(st.integers(3, 40))):
        if live and draw(st.booleans()):
            steps.append(Step(death=live.pop(draw(st.integers(0, len(live) - 1)))))
        else:
            live.append(f"block {number}")
            steps.append(Step(live[-1], draw(sizes), draw(st.sampled_from([0, 0, 0, 1]))))
    return [Step("first", rows(1000)), *steps]


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(257, 80_000))
def test_a_program_of_known_rules_is_forecast_exactly_at_unseen_sizes(program: list[Step], target: int) -> None:
    tape = fit([record(program, {"packed_tokens": n}) for n in PROBES])
    unseen = record(program, {"packed_tokens": target})
    made = forecast(tape, {"packed_tokens": target}, unseen.before)
    assert made.expected is not None and made.bound is not None
    assert made.expected[:2] == (unseen.peak_allocated, unseen.peak_reserved)
    assert made.bound.allocated >= made.expected.allocated and made.bound.reserved >= made.expected.reserved
    assert made.status is (Status.COVERED if target <= 5003 else Status.EXTRAPOLATED)


@settings(max_examples=40, deadline=None)
@given(programs(), st.integers(257, 5003))
def test_a_forecast_starts_from_the_blocks_that_are_live_and_cached(program: list[Step], target: int) -> None:
    tape = fit([record(program, {"packed_tokens": n}) for n in PROBES])
    left: Snapshot = (
        record(
            [Step("cached", rows(20_000)), Step("kept", rows(9000, 7)), Step(death="cached")], {"packed_tokens": 900}
        ).after
        or Snapshot()
    )
    unseen = record(program, {"packed_tokens": target}, left)
    made = forecast(tape, {"packed_tokens": target}, left)
    assert made.expected is not None
    assert made.expected[:2] == (unseen.peak_allocated, unseen.peak_reserved)


SIZES = (rows(8192), rows(64), rows(30000, 4096))


def path_change(layers: int, large: bool) -> list[Step]:
    """A layered pass; on the large path every recomputation needs a workspace more."""
    steps = layered(layers, SIZES, rows(4096))
    if not large:
        return steps
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if step.birth is not None and step.birth.startswith("b ") and step.birth.endswith(" 1"):
            name = f"workspace of {step.birth}"
            found += [Step(name, lambda _: 5 << 20), Step(death=name)]
    return found


def test_paths_are_aligned_so_that_each_teaches_the_other() -> None:
    small = [record(path_change(3, False), {"packed_tokens": n}) for n in (512, 1024)]
    tape = fit([*small, record(path_change(3, True), {"packed_tokens": 8192})])
    assert [len(path.probes) for path in tape.parts[0].paths] == [2, 1]
    for tokens, large in ((700, False), (8192, True), (30_000, True)):
        unseen = record(path_change(3, large), {"packed_tokens": tokens})
        made = forecast(tape, {"packed_tokens": tokens}, unseen.before)
        assert made.expected is not None
        assert made.expected[:2] == (unseen.peak_allocated, unseen.peak_reserved)


def test_between_two_paths_the_bound_covers_both_and_says_so() -> None:
    recorded = [(512, False), (1024, False), (8192, True), (16384, True)]
    tape = fit([record(path_change(3, large), {"packed_tokens": n}) for n, large in recorded])
    made = forecast(tape, {"packed_tokens": 4000}, Snapshot())
    assert any("order of events differs between probes of 512 to 16384" in note for note in made.notes)
    assert made.bound is not None
    for large in (False, True):
        unseen = record(path_change(3, large), {"packed_tokens": 4000})
        assert made.bound.allocated >= (unseen.peak_allocated or 0)
        assert made.bound.reserved >= (unseen.peak_reserved or 0)


def test_where_two_orders_of_events_were_seen_the_bound_covers_both() -> None:
    recorded = [(512, False), (9000, False), (4096, True), (5000, True)]
    tape = fit([record(path_change(3, large), {"packed_tokens": n}) for n, large in recorded])
    for tokens in (4096, 4500):
        made = forecast(tape, {"packed_tokens": tokens}, Snapshot())
        assert made.bound is not None
        for large in (False, True):
            unseen = record(path_change(3, large), {"packed_tokens": tokens})
            assert made.bound.allocated >= (unseen.peak_allocated or 0)
            assert made.bound.reserved >= (unseen.peak_reserved or 0)


def test_a_ceiling_seen_in_one_topology_holds_in_another() -> None:
    def program(share: int) -> list[Step]:
        held = lambda f: min(4096 * f["packed_tokens"], 200 << 20)  # noqa: E731
        return [Step("held", held), Step("rows", rows(10_000 // share)), Step(death="held"), Step("last", rows(77))]

    one = [record(program(1), {"tokens": n, "context": 1, "packed_tokens": n}) for n in (4096, 16384, 32768)]
    two = [record(program(2), {"tokens": n, "context": 2, "packed_tokens": n // 2}) for n in (8192, 65536, 262144)]
    alone, carried = fit(one), fit([*one, *two])
    unseen = record(program(1), {"packed_tokens": 262144})
    wrong = forecast(alone, {"packed_tokens": 262144, "tokens": 262144}, Snapshot())
    right = forecast(carried, {"packed_tokens": 262144, "tokens": 262144}, Snapshot())
    assert wrong.expected is not None and right.expected is not None
    assert wrong.expected.allocated > right.expected.allocated == unseen.peak_allocated


def test_a_shrinking_line_is_unknown_where_it_turns_negative() -> None:
    steps = [Step("rows", rows(4096)), Step("scratch", rows(-2048, 67108864)), Step(death="rows")]
    tape = fit([record(steps, {"packed_tokens": n}) for n in (4096, 16384)])
    made = forecast(tape, {"packed_tokens": 65536}, Snapshot())
    assert made.status is Status.UNKNOWN
    assert made.expected is None and made.bound is None
    assert "-2048 x packed_tokens + 67108864 gives no size here" in made.uncovered[0]


def test_a_shrinking_line_is_bounded_by_its_largest_size() -> None:
    steps = [Step("rows", rows(4096)), Step("scratch", rows(-2048, 67108864)), Step(death="rows")]
    tape = fit([record(steps, {"packed_tokens": n}) for n in (4096, 16384)])
    made = forecast(tape, {"packed_tokens": 20000}, Snapshot())
    assert made.bound is not None
    assert made.bound.allocated >= 4096 * 20000 + 58720256


def test_recordings_that_cannot_be_trusted_are_refused() -> None:
    whole = record([Step("one", rows(9000)), Step("two", rows(5)), Step(death="one")], {"packed_tokens": 4096})
    with pytest.raises(TapeError, match="the snapshot after differs"):
        fit([replace(whole, events=whole.events[:-1])])
    with pytest.raises(TapeError, match="event 1: expected a segment of"):
        events = (whole.events[0]._replace(size=whole.events[0].size * 2), *whole.events[1:])
        fit([replace(whole, events=events)])
    with pytest.raises(TapeError, match="its peaks: expected"):
        fit([replace(whole, peak_allocated=1)])
    with pytest.raises(TapeError, match="no recordings"):
        fit([])


def test_the_order_of_recordings_changes_nothing() -> None:
    traces = [record(path_change(2, n > 2000), {"packed_tokens": n}) for n in (512, 1024, 4096, 8192)]
    assert fit(traces) == fit(list(reversed(traces)))


def test_one_rule_knows_constants_multiples_and_lines() -> None:
    def points(*pairs: tuple[int, int]) -> list[tuple[dict[str, int], int]]:
        return [({"packed_tokens": n}, size) for n, size in pairs]

    assert one_rule(points((1, 8)), points((5, 8)))
    assert one_rule(points((10, 80)), points((25, 200)))
    assert one_rule(points((10, 81), (20, 161)), points((30, 241)))
    assert not one_rule(points((10, 81), (20, 161)), points((30, 242)))
    assert not one_rule(points((10, 80)), points((25, 199)))
