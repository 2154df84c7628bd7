"""Requests become slot groups, micro-batch units and balanced subforwards. Pure; original indices survive."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from trainer_rank.errors import InvalidInputError
from trainer_rank.prefixes import Layout, Prefixes
from trainer_rank.requests import RequestShape


class GroupKey(NamedTuple):
    """What requests must share to run in one forward."""

    slot: str
    gradients: bool
    hidden: bool


@dataclass(frozen=True)
class Subforward:
    """One model forward over requests of one slot group. With ``prefixes`` what they share is packed once."""

    key: GroupKey
    requests: tuple[RequestShape, ...]
    prefixes: Prefixes | None = field(default=None, repr=False, compare=False)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Original request indices, in the caller's order."""
        return tuple(request.index for request in self.requests)

    @cached_property
    def shares(self) -> bool:
        """Whether any two of its requests begin alike, and what they share is packed once."""
        return self.prefixes is not None and any(self.prefixes.restricted(self.indices).shared)

    @cached_property
    def layout(self) -> Layout | None:
        """Segments of shared prefixes, or None when the requests share nothing and are packed end to end."""
        if self.prefixes is None or not self.shares:
            return None
        return self.prefixes.layout({request.index: request.length for request in self.requests})

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each packed stretch: of each request in order, or of each segment of the layout."""
        if self.layout is None:
            return tuple(request.length for request in self.requests)
        return tuple(segment.length for segment in self.layout.segments)

    @cached_property
    def packed_tokens(self) -> int:
        """Rows that the forward executes."""
        return sum(self.lengths)

    @property
    def logical_tokens(self) -> int:
        """Sum of the requests' lengths."""
        return sum(request.length for request in self.requests)


def slot_groups(shapes: Sequence[RequestShape], prefixes: Prefixes | None = None) -> tuple[Subforward, ...]:
    """Collect requests that may share a forward, groups and members in order of first appearance."""
    groups: dict[GroupKey, list[RequestShape]] = {}
    for shape in shapes:
        groups.setdefault(GroupKey(shape.slot, shape.gradients, shape.hidden), []).append(shape)
    return tuple(Subforward(key, tuple(members), prefixes) for key, members in groups.items())


def sharing_groups(units: Iterable[Iterable[RequestShape]], prefixes: Prefixes | None) -> frozenset[GroupKey]:
    """Return the keys of the slot groups in which some requests begin alike."""
    if prefixes is None or not any(prefixes.shared):
        return frozenset()
    groups = slot_groups([shape for unit in units for shape in unit], prefixes)
    return frozenset(group.key for group in groups if group.shares)


def units(shapes: Sequence[RequestShape]) -> tuple[tuple[RequestShape, ...], ...]:
    """Return what a micro-batch may not divide: the caller's groups, and each request without a group."""
    found: dict[tuple[str, str | int], list[RequestShape]] = {}
    for shape in shapes:
        name = ("request", shape.index) if shape.group is None else ("group", shape.group)
        found.setdefault(name, []).append(shape)
    return tuple(tuple(unit) for unit in found.values())


def balanced(subforward: Subforward, parts: int) -> tuple[Subforward, ...]:
    """Cut a subforward into ``parts`` of nearly equal packed tokens; members keep the caller's order within each part.

    Requests that share nothing go, the longest first, to the least loaded part; others stay beside their relatives.
    Raises InvalidInputError when there are fewer requests.
    """
    if not 1 <= parts <= len(subforward.requests):
        raise InvalidInputError(
            f"{len(subforward.requests)} requests cannot be cut into {parts} subforwards; cut into 1 to as many"
        )
    members = _spread(subforward, parts) if subforward.layout is None else _divided(subforward, parts)
    ordered = sorted(sorted(part) for part in members)
    return tuple(
        Subforward(subforward.key, tuple(subforward.requests[each] for each in part), subforward.prefixes)
        for part in ordered
    )


def _spread(subforward: Subforward, parts: int) -> list[list[int]]:
    heap = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    lengths = subforward.lengths
    for position in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        load, part = heapq.heappop(heap)
        members[part].append(position)
        heapq.heappush(heap, (load + lengths[position], part))
    return members


def _divided(subforward: Subforward, parts: int) -> list[list[int]]:
    """Cut the canonical order into stretches whose largest packed size is the least possible."""
    assert subforward.prefixes is not None
    some = subforward.prefixes.restricted(subforward.indices)
    positions = {request.index: position for position, request in enumerate(subforward.requests)}
    order = [positions[index] for index in some.order]
    lengths = [subforward.requests[position].length for position in order]
    low, high = 0, subforward.packed_tokens
    while high - low > 1:
        width = (low + high) // 2
        low, high = (low, width) if 0 < len(_stretches(lengths, some.shared, width)) <= parts else (width, high)
    found = [order[first:end] for first, end in _stretches(lengths, some.shared, high)]
    while len(found) < parts:
        widest = max(found, key=len)
        found.remove(widest)
        found += [widest[: len(widest) // 2], widest[len(widest) // 2 :]]
    return found


def _stretches(lengths: Sequence[int], shared: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return stretches of at most ``width`` packed rows, each as long as it can be; none when one request is wider."""
    found, first, load = [], 0, 0
    for place, length in enumerate(lengths):
        if length > width:
            return []
        load += length - (shared[place] if place > first else 0)
        if load > width:
            found.append((first, place))
            first, load = place, length
    return [*found, (first, len(lengths))]


class Work:
    """Every way to cut the same work: undivided first, then ever finer; each is made when it is first asked for.

    The cuts are in 2, 3, 4, 6, 8, 12, ... parts of the widest group, to one request each. Every other group is cut to
    the same width, so that a cut follows slot boundaries before it divides a slot.
    """

    def __init__(self, groups: Sequence[Subforward]) -> None:
        self.groups = tuple(groups)
        self._counts = [[1] * len(self.groups), *_counts(self.groups)]
        self._made: dict[int, tuple[Subforward, ...]] = {0: self.groups}

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, place: int) -> tuple[Subforward, ...]:
        """Return the subforwards of one cut."""
        if place not in self._made:
            pairs = zip(self.groups, self._counts[place], strict=True)
            self._made[place] = tuple(part for group, count in pairs for part in balanced(group, count))
        return self._made[place]

    def __iter__(self) -> Iterator[tuple[Subforward, ...]]:
        return (self[place] for place in range(len(self)))

    @property
    def with_graphs(self) -> range:
        """The cuts that keep a graph: all of them, or none where nothing is trained."""
        return range(len(self) if any(group.key.gradients for group in self.groups) else 0)


def layouts(shapes: Sequence[RequestShape], prefixes: Prefixes | None = None) -> tuple[tuple[Subforward, ...], ...]:
    """Return the slot groups in every layout that differs, that of the fewest rows first.

    Packed once, what requests share takes the least memory; packed end to end, sequences need no rows of others.
    """
    shared = slot_groups(shapes, prefixes)
    return (shared, slot_groups(shapes)) if any(group.shares for group in shared) else (shared,)


def _counts(groups: Sequence[Subforward]) -> Iterator[list[int]]:
    """Yield how many parts of each group make ever finer cuts, beyond the undivided one."""
    widest = max(group.packed_tokens for group in groups)
    most = sum(len(group.requests) for group in groups)
    before = len(groups)
    for divisor in _divisors():
        width = -(-widest // divisor)
        counts = [min(len(group.requests), -(-group.packed_tokens // width)) for group in groups]
        if width == 1:
            counts = [len(group.requests) for group in groups]
        if sum(counts) > before:
            before = sum(counts)
            yield counts
        if before == most or width == 1:
            return


def _divisors() -> Iterator[int]:
    power = 2
    while True:
        yield power
        yield power * 3 // 2
        power *= 2
