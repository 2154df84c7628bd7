from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.tapes.explain import Grounds, Sample, explain
from trainer_rank.tapes.rules import Rule, Term

ROWS = (512, 1024, 3000, 4096)


def samples(size: Callable[[int], int], rows: Sequence[int] = ROWS) -> list[Sample]:
    return [({"packed_tokens": n, "tokens": 2 * n}, size(n)) for n in rows]


@given(st.integers(1, 50_000), st.integers(0, 100_000))
def test_a_line_is_explained_exactly(slope: int, constant: int) -> None:
    found = explain(samples(lambda n: slope * n + constant))
    assert found.grounds is Grounds.CHECKED
    assert found.rule.size({"packed_tokens": 77_777, "tokens": 155_554}) == slope * 77_777 + constant


@given(st.integers(1, 10_000), st.sampled_from([8, 64, 256]))
def test_whole_blocks_are_explained_exactly(bytes_per_block: int, block: int) -> None:
    found = explain(samples(lambda n: bytes_per_block * -(-n // block), rows=(513, 1001, 3000, 4099)))
    assert found.rule.size({"packed_tokens": 5001, "tokens": 10_002}) == bytes_per_block * -(-5001 // block)


@given(st.integers(16, 10_000), st.integers(1100, 2900))
def test_a_ceiling_is_found_and_kept_beyond(slope: int, at: int) -> None:
    found = explain(samples(lambda n: min(slope * n, slope * at)))
    assert found.rule.ceiling == slope * at
    assert found.rule.size({"packed_tokens": 1_000_000, "tokens": 2_000_000}) == slope * at
    assert found.rule.size({"packed_tokens": 700, "tokens": 1400}) == slope * 700


@given(st.integers(16, 10_000), st.integers(600, 2900))
def test_a_floor_is_found_and_kept_below(slope: int, at: int) -> None:
    found = explain(samples(lambda n: max(slope * n, slope * at)))
    assert found.rule.size({"packed_tokens": 10, "tokens": 20}) == slope * at
    assert found.rule.size({"packed_tokens": 8192, "tokens": 16384}) == slope * 8192


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_two_features_together_are_told_apart(by_rows: int, by_sequences: int) -> None:
    points = [(512, 3), (1024, 1), (3000, 9), (4096, 2), (700, 5)]
    found = explain([({"packed_tokens": n, "sequences": s}, by_rows * n + by_sequences * s) for n, s in points])
    assert found.grounds is Grounds.CHECKED
    assert found.rule.size({"packed_tokens": 100, "sequences": 50}) == by_rows * 100 + by_sequences * 50


def test_features_that_the_probes_never_separate_widen_the_bound() -> None:
    found = explain([({"packed_tokens": n, "longest_sequence": n // 2}, 100 * n) for n in ROWS])
    assert found.rule == Rule((Term("packed_tokens", 1, 100),))
    assert [other.terms[0].feature for other in found.others] == ["longest_sequence"]
    ragged = {"packed_tokens": 1000, "longest_sequence": 990}
    assert found.others[0].size(ragged) == 198_000


def test_one_recording_settles_nothing() -> None:
    found = explain([({"packed_tokens": 4096}, 8 << 20)])
    assert found.grounds is Grounds.ONCE
    assert found.rule.size({"packed_tokens": 8192}) == 16 << 20
    assert Rule(constant=8 << 20) in found.others


def test_what_no_rule_meets_is_bounded_by_its_largest_size() -> None:
    found = explain([({"packed_tokens": n}, size) for n, size in ((1, 70), (2, 1000), (3, 30), (4, 999))])
    assert found.grounds is Grounds.INEXACT
    assert found.rule.size({"packed_tokens": 2}) == 1000


@pytest.mark.parametrize("tokens", [65536, 1 << 62])
def test_a_line_below_zero_or_beyond_an_exbibyte_has_no_size(tokens: int) -> None:
    falling = explain([({"packed_tokens": 4096}, 58720256), ({"packed_tokens": 16384}, 33554432)])
    assert falling.rule.size({"packed_tokens": 65536}) is None
    assert Rule(constant=58720256) in falling.others
    assert Rule((Term("packed_tokens", 1, 1 << 20),)).size({"packed_tokens": tokens}) in (65536 << 20, None)


def test_a_feature_that_nobody_gave_is_unknown_not_zero() -> None:
    assert Rule((Term("packed_tokens", 1, 8),), 100).size({"tokens": 5}) is None


def test_a_size_that_stopped_falling_stays_where_it_stopped() -> None:
    rule = Rule((Term("sequences", 1, 4),), -4, floor=8)
    assert [rule.size({"sequences": count}) for count in (1, 2, 4)] == [8, 8, 12]
    assert Rule((Term("sequences", 1, 4),), -4).size({"sequences": 1}) is None


@given(st.integers(1, 50_000_000), st.integers(2, 50_000_000))
def test_what_was_seen_once_may_grow_in_proportion_but_was_no_more_than_it_was(size: int, value: int) -> None:
    """Four bytes beside adapters of twenty megabytes never stand for twenty megabytes."""
    for name in ("packed_tokens", "adapter_bytes"):
        (rule,) = (each for each in explain([({name: value}, size)]).others if each.terms)
        there, twice = rule.size({name: value}) or 0, rule.size({name: 2 * value}) or 0
        most = size + value if size >= value else size + size // 511 + 1024
        assert size <= there <= most
        assert 2 * size - 512 <= twice <= 2 * most
