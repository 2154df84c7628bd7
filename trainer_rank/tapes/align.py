"""Alignment of two event sequences: which operation of one is which of the other.

A longest common subsequence keeps what both have, by structure and size; between two of its anchors, leftovers of
the same kind are paired in order when both sides have as many. What stays unpaired exists on one path only.
The search is the greedy one of Myers, An O(ND) Difference Algorithm and Its Variations (1986).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator

Match = tuple[int, int]


def align(
    left: int, right: int, same: Callable[[int, int], bool], kind: Callable[[bool, int], Hashable]
) -> Iterator[Match]:
    """Yield pairs (i, j) of operations that are one and the same, for sequences of ``left`` and ``right`` items.

    ``same(i, j)`` tells whether structure and size allow it. ``kind(is_right, index)`` names the structure alone, by
    which leftovers between anchors are paired.
    """
    anchors = common_subsequence(left, right, same)
    i = j = 0
    for anchor in [*anchors, (left, right)]:
        yield from _leftovers(range(i, anchor[0]), range(j, anchor[1]), kind)
        if anchor != (left, right):
            yield anchor
        i, j = anchor[0] + 1, anchor[1] + 1


def _leftovers(left: range, right: range, kind: Callable[[bool, int], Hashable]) -> Iterator[Match]:
    ours: dict[Hashable, list[int]] = {}
    theirs: dict[Hashable, list[int]] = {}
    for i in left:
        ours.setdefault(kind(False, i), []).append(i)
    for j in right:
        theirs.setdefault(kind(True, j), []).append(j)
    for name, items in ours.items():
        if len(items) == len(theirs.get(name, ())):
            yield from zip(items, theirs[name], strict=True)


def common_subsequence(left: int, right: int, same: Callable[[int, int], bool]) -> list[Match]:
    """Return pairs (i, j), both ascending, of a longest common subsequence of sequences with these lengths."""
    offset = right + 1
    furthest = array("q", bytes(8 * (left + right + 3)))
    history: list[array[int]] = []
    for edits in range(left + right + 1):
        low, high = max(-edits, -right), min(edits, left)
        history.append(furthest[offset + low - 1 : offset + high + 2])
        for diagonal in range(low + (low + edits) % 2, high + 1, 2):
            down = _moves_down(furthest, offset + diagonal, diagonal, edits)
            i = furthest[offset + diagonal + 1] if down else furthest[offset + diagonal - 1] + 1
            j = i - diagonal
            while i < left and j < right and same(i, j):
                i += 1
                j += 1
            furthest[offset + diagonal] = i
            if i >= left and j >= right:
                return _backtrack(history, left, right)
    raise AssertionError("two finite sequences always have an edit path")


def _moves_down(furthest: array[int], at: int, diagonal: int, edits: int) -> bool:
    return diagonal == -edits or (diagonal != edits and furthest[at - 1] < furthest[at + 1])


def _backtrack(history: list[array[int]], left: int, right: int) -> list[Match]:
    matches: list[Match] = []
    i, j = left, right
    for edits in range(len(history) - 1, 0, -1):
        low = max(-edits, -right)
        at = i - j - low + 1
        down = _moves_down(history[edits], at, i - j, edits)
        before = history[edits][at + 1] if down else history[edits][at - 1]
        diagonal = i - j + (1 if down else -1)
        while i > before and j > before - diagonal:
            i -= 1
            j -= 1
            matches.append((i, j))
        i, j = before, before - diagonal
    matches.extend((each, each) for each in range(min(i, j) - 1, -1, -1))
    matches.reverse()
    return matches
