"""The prefix tree stores every shared position once, whatever subset of the requests is packed."""

from __future__ import annotations

import time
from array import array

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.prefixes import Layout, Prefixes, find_prefixes

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def _keys(sequences: list[list[int]]) -> dict[int, bytes]:
    return {index: array("q", each).tobytes() for index, each in enumerate(sequences)}


def _trie(sequences: list[list[int]]) -> int:
    """The slow truth: how many distinct prefixes there are."""
    return len({tuple(each[:length]) for each in sequences for length in range(1, len(each) + 1)})


def _spelled(layout: Layout, index: int, sequences: list[list[int]]) -> list[int]:
    found: list[int] = []
    for number in layout.path(index):
        segment = layout.segments[number]
        assert segment.start == len(found)
        found += sequences[segment.owner][segment.start : segment.start + segment.length]
    return found


@given(st.lists(tokens, min_size=1, max_size=14), st.data())
def test_any_subset_packs_into_its_distinct_prefixes_and_spells_every_request(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    prefixes = find_prefixes(_keys(sequences), 8, 1)
    some = sorted(data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1)))
    lengths = {index: len(sequences[index]) for index in some}
    layout = prefixes.layout(lengths)
    assert layout.packed_tokens == _trie([sequences[index] for index in some]) == prefixes.packed_tokens(lengths)
    assert all(segment.parent < number for number, segment in enumerate(layout.segments))
    assert all(segment.owner in lengths and segment.length > 0 for segment in layout.segments)
    for index in some:
        assert _spelled(layout, index, sequences) == sequences[index]


@given(st.lists(tokens, min_size=2, max_size=10), st.data())
def test_a_subset_never_packs_into_more_than_its_superset(sequences: list[list[int]], data: st.DataObject) -> None:
    prefixes = find_prefixes(_keys(sequences), 8, 1)
    some = data.draw(st.sets(st.integers(0, len(sequences) - 1), min_size=1))
    lengths = {index: len(sequences[index]) for index in range(len(sequences))}
    assert prefixes.packed_tokens({index: lengths[index] for index in some}) <= prefixes.packed_tokens(lengths)


def test_the_canonical_order_does_not_depend_on_the_callers() -> None:
    sequences = [[1, 2, 3], [1, 2], [9], [1, 2, 4], [1, 2, 3]]
    forward = find_prefixes(_keys(sequences), 8, 1)
    assert [sequences[index] for index in forward.order] == sorted(sequences)
    assert forward.shared == (0, 2, 3, 2, 0)


def test_long_histories_that_grow_turn_by_turn_share_everything_but_their_last_turn() -> None:
    history = list(range(5000))
    prefixes = find_prefixes(_keys([history[:length] for length in range(500, 5001, 500)]), 8, 1)
    lengths = {index: 500 * (index + 1) for index in range(10)}
    assert prefixes.packed_tokens(lengths) == 5000
    assert len(prefixes.layout(lengths).segments) == 10


def test_ten_thousand_requests_are_ordered_and_laid_out_in_a_tenth_of_a_second() -> None:
    prompts = [array("q", [prompt * 7919 % 5000 for _ in range(64)]).tobytes() for prompt in range(625)]
    keys = {index: prompts[index // 16] + array("q", [index * 31 % 997] * 64).tobytes() for index in range(10_000)}
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        prefixes: Prefixes = find_prefixes(keys, 8, 1)
        layout = prefixes.layout(dict.fromkeys(keys, 128))
        seconds.append(time.process_time() - begun)
    assert layout.packed_tokens < 10_000 * 128 - 9_375 * 64 + 1
    assert min(seconds) < 0.1
