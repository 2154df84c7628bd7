from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_rank.allocator.oracle import Oracle
from trainer_rank.allocator.driver import ModelledDriver
from trainer_rank.allocator.model import CachingAllocator
from trainer_rank.allocator.outofmemory import OutOfMemory
from trainer_rank.allocator.rules import EIB, MIB
from trainer_rank.allocator.snapshot import ACTIVE, INACTIVE, PENDING, Snapshot
from trainer_rank.errors import InvalidInputError

CAPACITY = 96 * MIB
SIZES = st.one_of(
    st.integers(1, 4096),
    st.sampled_from(
        [512, 513, MIB - 511, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]
    ),
    st.integers(MIB, 40 * MIB),
)
STREAMS = st.sampled_from([0, 7])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("free"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("request"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("complete"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    min_size=15,
    max_size=60,
)


class Pair:
    """The model and the slow oracle, driven by the same steps."""

    def __init__(self, cap: int | None = None) -> None:
        self.model = CachingAllocator(ModelledDriver(CAPACITY), cap=cap)
        self.oracle = Oracle(CAPACITY, cap)
        self.live: dict[int, int] = {}
        self.pending: dict[int, int] = {}
        self.names = 0

    def step(self, action: str, number: int, stream: int) -> None:
        if action == "malloc":
            self.malloc(number, stream)
        elif action == "empty":
            self.model.empty_cache()
            self.oracle.empty_cache()
            self.pending.clear()
        elif action == "complete":
            if self.pending:
                self.complete(sorted(self.pending)[number % len(self.pending)])
        elif self.live:
            name = sorted(self.live)[number % len(self.live)]
            self.pending[name] = self.live.pop(name)
            self.model.request_free(self.pending[name])
            self.oracle.request_free(name)
            if action == "free":
                self.complete(name)

    def malloc(self, size: int, stream: int) -> None:
        self.names += 1
        retries = self.oracle.retries
        address = self.oracle.malloc(self.names, size, stream)
        if self.oracle.retries > retries:
            self.pending.clear()
        if address is None:
            with pytest.raises(OutOfMemory):
                self.model.malloc(size, stream)
            return
        handle = self.model.malloc(size, stream)
        assert self.model.address(handle) == address
        self.live[self.names] = handle

    def complete(self, name: int) -> None:
        self.model.complete_free(self.pending.pop(name))
        self.oracle.complete_free(name)

    def compare(self) -> None:
        model, oracle = self.model, self.oracle
        assert (model.allocated, model.reserved) == (oracle.allocated, oracle.reserved)
        assert (model.peak_allocated, model.peak_reserved) == (oracle.peak_allocated, oracle.peak_reserved)
        assert (model.num_alloc_retries, model.num_ooms) == (oracle.retries, oracle.ooms)
        assert as_plain(model.snapshot()) == as_plain_oracle(oracle)


def as_plain(snapshot: Snapshot) -> list[object]:
    return [
        (s.address, s.pool, s.stream, [(b.size, b.requested, b.state) for b in s.blocks]) for s in snapshot.segments
    ]


def as_plain_oracle(oracle: Oracle) -> list[object]:
    def state(piece: object) -> str:
        return INACTIVE if piece.free else PENDING if piece.pending else ACTIVE  # type: ignore[attr-defined]

    return [
        (s.address, s.pool, s.stream, [(p.size, p.requested, state(p)) for p in s.pieces])
        for s in sorted(oracle.strips, key=lambda strip: strip.address)
    ]


def check_structure(model: CachingAllocator) -> None:
    snapshot = model.snapshot()
    assert snapshot.reserved == model.reserved
    assert snapshot.allocated == model.allocated
    end = 0
    for segment in snapshot.segments:
        assert segment.address >= end, "segments overlap"
        end = segment.address
        last = None
        for block in segment.blocks:
            assert block.address == end, "blocks overlap or leave a hole"
            end += block.size
            assert not (last == block.state == INACTIVE), "two free neighbours were not merged"
            assert block.requested <= block.size
            last = block.state
        assert end == segment.address + segment.total


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_the_model_agrees_with_the_slow_oracle_after_every_step(steps: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    for step in steps:
        pair.step(*step)
        pair.compare()
        check_structure(pair.model)


@given(STEPS, st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_cap_is_never_passed(steps: list[tuple[str, int, int]], cap_mib: int) -> None:
    pair = Pair(cap=cap_mib * MIB)
    for step in steps:
        pair.step(*step)
        pair.compare()
        assert pair.model.reserved <= cap_mib * MIB
        assert pair.model.peak_reserved <= cap_mib * MIB


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_no_block_of_one_stream_serves_another(steps: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    for step in steps:
        pair.step(*step)
    streams = {
        address: segment.stream
        for segment in pair.model.snapshot().segments
        for address in range(segment.address, segment.address + segment.total, 2 * MIB)
    }
    for address, (_, _, stream) in pair.model.live().items():
        assert streams[address & -(2 * MIB)] == stream


@given(STEPS, STEPS)
@settings(max_examples=100, deadline=None)
def test_a_snapshot_holds_the_whole_state(
    first: list[tuple[str, int, int]], second: list[tuple[str, int, int]]
) -> None:
    pair = Pair()
    for step in first:
        pair.step(*step)
    before = pair.model.snapshot()
    copied = pair.model.copy(pair.model.driver.copy())  # type: ignore[attr-defined]
    driver = ModelledDriver(CAPACITY, snapshot=before)
    driver._lowest = pair.model.driver._lowest  # type: ignore[attr-defined]
    restored = CachingAllocator(driver, before)
    assert restored.snapshot() == before
    assert copied.snapshot() == before
    handles = {name: restored.live()[pair.model.address(handle)][0] for name, handle in pair.live.items()}
    twins = [(copied, dict(pair.live)), (restored, handles), (pair.model, dict(pair.live))]
    outcomes = [play(model, live, second) for model, live in twins]
    assert outcomes[0] == outcomes[1] == outcomes[2]


def play(model: CachingAllocator, live: dict[int, int], steps: list[tuple[str, int, int]]) -> tuple[object, ...]:
    model.reset_peaks()
    name = 1_000
    for action, number, stream in steps:
        if action == "malloc":
            try:
                live[name] = model.malloc(number, stream)
            except OutOfMemory:
                continue
            name += 1
        elif action == "empty":
            model.empty_cache()
        elif action == "free" and live:
            model.free(live.pop(sorted(live)[number % len(live)]))
    return model.snapshot(), model.allocated, model.peak_allocated, model.peak_reserved


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_everything_freed_merges_back_and_leaves_nothing_behind(steps: list[tuple[str, int, int]]) -> None:
    pair = Pair()
    for step in steps:
        pair.step(*step)
    for handle in list(pair.live.values()):
        pair.model.free(handle)
    for name in list(pair.pending):
        pair.complete(name)
    assert all(len(segment.blocks) == 1 for segment in pair.model.snapshot().segments)
    reserved = pair.model.reserved
    assert pair.model.empty_cache() == reserved
    assert (pair.model.allocated, pair.model.reserved) == (0, 0)
    assert pair.model.snapshot() == Snapshot()
    assert pair.model.driver.free == CAPACITY  # type: ignore[attr-defined]


def allocator(total: int = 1024 * MIB, cap: int | None = None) -> CachingAllocator:
    return CachingAllocator(ModelledDriver(total), cap=cap)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),  # a remainder of 1 MiB or less stays with the block
        (25 * MIB, 26 * MIB, 26 * MIB),
    ],
)
def test_rounding_segments_and_splits(requested: int, block: int, segment: int) -> None:
    model = allocator()
    handle = model.malloc(requested)
    assert (model.size(handle), model.requested(handle), model.reserved) == (block, requested, segment)
    assert model.allocated == block


def test_best_fit_takes_the_smallest_and_among_equals_the_lowest() -> None:
    model = allocator()
    sizes = [40, 30, 30, 50]
    handles = [model.malloc(size * MIB) for size in sizes]
    addresses = [model.address(handle) for handle in handles]
    for handle in handles:
        model.free(handle)
    assert model.address(model.malloc(29 * MIB + 1)) == min(addresses[1], addresses[2])
    assert model.best_fit(30 * MIB) == max(addresses[1], addresses[2])
    assert model.best_fit(45 * MIB) == addresses[3]
    assert model.best_fit(60 * MIB) is None
    assert model.best_fit(30 * MIB, stream=9) is None


def test_the_driver_refusing_frees_the_cache_and_asks_once_more() -> None:
    model = allocator(total=64 * MIB)
    first, second = model.malloc(20 * MIB), model.malloc(20 * MIB)
    model.free(first)
    model.request_free(second)
    model.malloc(60 * MIB)
    assert (model.num_alloc_retries, model.num_ooms, model.reserved) == (1, 0, 60 * MIB)


def test_a_segment_in_part_use_is_never_given_back() -> None:
    model = allocator(total=64 * MIB)
    kept = model.malloc(5 * MIB)
    model.free(model.malloc(5 * MIB))
    assert model.empty_cache() == 0
    with pytest.raises(OutOfMemory) as caught:
        model.malloc(60 * MIB, stream=3)
    assert (caught.value.asked, caught.value.requested, caught.value.stream) == (60 * MIB, 60 * MIB, 3)
    assert (model.num_alloc_retries, model.num_ooms, model.allocated) == (1, 1, 5 * MIB)
    model.free(kept)
    assert model.malloc(60 * MIB, stream=3) >= 0


def test_a_library_that_claims_memory_is_felt_by_the_next_segment() -> None:
    driver = ModelledDriver(100 * MIB)
    model = CachingAllocator(driver)
    model.malloc(40 * MIB)
    driver.outside = 30 * MIB
    with pytest.raises(OutOfMemory):
        model.malloc(40 * MIB)
    assert model.malloc(30 * MIB) >= 0
    assert driver.figures() == (0, 100 * MIB, 100 * MIB)


@pytest.mark.parametrize("size", [0, -1, EIB + 1, 2**64 - 1024])
def test_sizes_that_are_broken_numbers_are_refused_by_name(size: int) -> None:
    with pytest.raises(InvalidInputError, match=str(size)):
        allocator().malloc(size)


def test_a_block_is_freed_once() -> None:
    model = allocator()
    handle = model.malloc(1)
    with pytest.raises(InvalidInputError, match="not pending"):
        model.complete_free(handle)
    model.request_free(handle)
    with pytest.raises(InvalidInputError, match="not allocated"):
        model.request_free(handle)
    model.complete_free(handle)
    with pytest.raises(InvalidInputError):
        model.free(handle)


@pytest.mark.parametrize("figures", [(0, 0, 0), (-5, 0, 0), (100, -1, 0), (100, 0, -1)])
def test_a_card_without_memory_is_refused(figures: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInputError):
        ModelledDriver(*figures)


def test_invented_addresses_never_leave_the_address_space() -> None:
    driver = ModelledDriver(8 * EIB)
    model = CachingAllocator(driver)
    handles = [model.malloc(size) for size in (4 * MIB, EIB // 2, 3, EIB, 30 * MIB, EIB)]
    check_structure(model)
    assert all(0 <= segment.address < segment.address + segment.total < 2**64 for segment in model.snapshot().segments)
    for handle in handles:
        model.free(handle)
    held = driver.held
    assert model.empty_cache() == held
    assert driver.free == driver.total


def test_a_full_segment_that_is_only_counted_becomes_the_same_when_it_is_taken_in() -> None:
    whole = CachingAllocator(ModelledDriver(CAPACITY))
    for size in (12 * MIB, 2 * MIB, 3 * MIB):
        whole.malloc(size)
    before = whole.snapshot()
    full = [segment for segment in before.segments if all(block.state == ACTIVE for block in segment.blocks)]
    others = tuple(segment for segment in before.segments if segment not in full)
    assert full and others
    counted = CachingAllocator(ModelledDriver(CAPACITY, snapshot=before), Snapshot(others))
    for segment in full:
        counted.count(segment)
    assert (counted.allocated, counted.reserved) == (before.allocated, before.reserved)
    handles = counted.take_in(full[0])
    assert list(handles) == [block.address for block in full[0].blocks]
    counted.free(handles[full[0].address])
    assert counted.allocated == before.allocated - full[0].blocks[0].size
    assert counted.reserved == before.reserved
    assert counted.address(counted.malloc(full[0].blocks[0].requested)) == full[0].address
