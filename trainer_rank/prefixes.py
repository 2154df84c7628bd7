"""Shared prefixes stored once: a canonical order of requests, and the tree that any subset packs into. Pure.

What two requests share is a stretch of equal tokens *and* equal targets from the start, so that one row serves both.
In canonical (sorted) order the stretch that two requests share is the least of those between neighbours on the way, so
neighbours are all that must be kept: numbers, no tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class Segment(NamedTuple):
    """A stretch of rows: ``length`` rows of request ``owner`` from its position ``start``, after segment ``parent``.

    ``parent`` is -1 for a segment that begins a sequence.
    """

    parent: int
    start: int
    length: int
    owner: int


@dataclass(frozen=True)
class Layout:
    """Segments in packed order, parents first, and the segment on which each request (by original index) ends."""

    segments: tuple[Segment, ...]
    tails: Mapping[int, int]

    @property
    def packed_tokens(self) -> int:
        """Rows that are executed."""
        return sum(segment.length for segment in self.segments)

    @property
    def attended_rows(self) -> int:
        """Rows that all segments attend to: their own, and those of the segments that they continue."""
        return sum(segment.start + segment.length for segment in self.segments)

    def path(self, index: int) -> tuple[int, ...]:
        """Return the segments of a request, from its beginning to its end."""
        found = []
        at = self.tails[index]
        while at >= 0:
            found.append(at)
            at = self.segments[at].parent
        return tuple(reversed(found))


@dataclass(frozen=True)
class Prefixes:
    """Original request indices in canonical order, and what neighbours share.

    ``order[i]`` and ``order[i - 1]`` share their first ``shared[i]`` positions; ``shared[0]`` is 0.
    """

    order: tuple[int, ...]
    shared: tuple[int, ...]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Place of each request in the canonical order."""
        return {index: place for place, index in enumerate(self.order)}

    def restricted(self, indices: Collection[int]) -> Prefixes:
        """Return the prefixes among some of the requests."""
        places = sorted(self.places[index] for index in indices)
        gaps = [min(self.shared[a + 1 : b + 1]) for a, b in pairwise(places)]
        return Prefixes(tuple(self.order[place] for place in places), (0, *gaps) if places else ())

    def packed_tokens(self, lengths: Mapping[int, int]) -> int:
        """Return the rows that the requests with these lengths pack into."""
        return sum(lengths.values()) - sum(self.restricted(lengths).shared)

    def layout(self, lengths: Mapping[int, int]) -> Layout:
        """Return the segments that the requests with these lengths (by original index) pack into."""
        some = self.restricted(lengths)
        tree = _Tree()
        for index, shared in zip(some.order, some.shared, strict=True):
            tree.add(index, lengths[index], shared)
        return tree.layout()


LEAST_SHARED = 8
"""Positions from which a shared prefix is packed once: a shorter one saves less than a sequence of its own costs."""


def find_prefixes(keys: Mapping[int, bytes], width: int, least: int = LEAST_SHARED) -> Prefixes:
    """Order requests by their ``keys``: ``width`` bytes for each position, equal where one row may serve both.

    What neighbours share of fewer than ``least`` positions counts as nothing.
    """
    order = sorted(keys, key=lambda index: (keys[index], index))
    shared = [0] * len(order)
    for place in range(1, len(order)):
        common = _common(keys[order[place - 1]], keys[order[place]]) // width
        shared[place] = common if common >= least else 0
    return Prefixes(tuple(order), tuple(shared))


def _common(left: bytes, right: bytes) -> int:
    """Return how many leading bytes are equal: by doubling, then by halving."""
    most = min(len(left), len(right))
    low, high = 0, min(64, most)
    while left[low:high] == right[low:high]:
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low


class _Tree:
    """Grows by one request at a time, in canonical order; only the path of the latest request can still branch."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[int] = []
        self._firsts: list[int] = []
        self._tails: dict[int, int] = {}
        self._open: list[int] = []

    def add(self, index: int, length: int, shared: int) -> None:
        """Add a request that shares ``shared`` positions with the one before."""
        while self._open and self._starts[self._open[-1]] >= shared:
            self._open.pop()
        if self._open and self._ends[self._open[-1]] > shared:
            self._cut(self._open.pop(), shared)
        if length > shared:
            self._open.append(self._node(self._open[-1] if self._open else -1, shared, length, index, len(self._tails)))
        self._tails[index] = self._open[-1]

    def _cut(self, node: int, at: int) -> None:
        """Put what lies before ``at`` into a node of its own above ``node``, and make that the open one."""
        upper = self._node(self._parents[node], self._starts[node], at, self._owners[node], self._firsts[node])
        self._parents[node], self._starts[node] = upper, at
        self._open.append(upper)

    def _node(self, parent: int, start: int, end: int, owner: int, first: int) -> int:
        self._parents.append(parent)
        self._starts.append(start)
        self._ends.append(end)
        self._owners.append(owner)
        self._firsts.append(first)
        return len(self._parents) - 1

    def layout(self) -> Layout:
        """Return the tree with parents before children, in canonical order."""
        order = sorted(range(len(self._parents)), key=lambda node: (self._firsts[node], self._starts[node]))
        numbers = {node: number for number, node in enumerate(order)} | {-1: -1}
        segments = tuple(
            Segment(
                numbers[self._parents[node]],
                self._starts[node],
                self._ends[node] - self._starts[node],
                self._owners[node],
            )
            for node in order
        )
        return Layout(segments, {index: numbers[node] for index, node in self._tails.items()})


def spans(layout: Layout) -> Sequence[tuple[int, int]]:
    """Return the packed rows of each segment as (first, end)."""
    found, at = [], 0
    for segment in layout.segments:
        found.append((at, at + segment.length))
        at += segment.length
    return found
