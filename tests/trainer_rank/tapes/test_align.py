from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trainer_rank.tapes.align import align, common_subsequence

letters = st.lists(st.integers(0, 3), max_size=14)


def longest(left: list[int], right: list[int]) -> int:
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, one in enumerate(left):
        for j, other in enumerate(right):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@given(letters, letters)
def test_a_longest_common_subsequence_is_found(left: list[int], right: list[int]) -> None:
    matches = common_subsequence(len(left), len(right), lambda i, j: left[i] == right[j])
    assert all(left[i] == right[j] for i, j in matches)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(matches))
    assert len(matches) == longest(left, right)


@given(letters, letters)
def test_alignment_keeps_order_and_uses_nothing_twice(left: list[int], right: list[int]) -> None:
    both = (left, right)
    pairs = sorted(
        align(len(left), len(right), lambda i, j: left[i] == right[j], lambda is_right, at: both[is_right][at] % 2)
    )
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    assert {each for each in common_subsequence(len(left), len(right), lambda i, j: left[i] == right[j])} <= set(pairs)


def test_leftovers_of_one_kind_are_paired_only_when_both_sides_have_as_many() -> None:
    left, right = ["x", "a1", "a2", "y"], ["x", "a3", "a4", "y"]
    same = lambda i, j: left[i] == right[j]  # noqa: E731
    assert list(align(4, 4, same, lambda is_right, at: (right if is_right else left)[at][0])) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    shorter = ["x", "a3", "y"]
    same_shorter = lambda i, j: left[i] == shorter[j]  # noqa: E731
    kind = lambda is_right, at: (shorter if is_right else left)[at][0]  # noqa: E731
    assert list(align(4, 3, same_shorter, kind)) == [(0, 0), (3, 2)]
