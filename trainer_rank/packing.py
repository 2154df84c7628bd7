"""Requests become slot groups, micro-batch units and balanced subforwards. Pure; original indices survive."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainer_rank.errors import InvalidInputError
from trainer_rank.requests import RequestShape


class GroupKey(NamedTuple):
    """What requests must share to run in one forward."""

    slot: str
    gradients: bool
    hidden: bool


@dataclass(frozen=True)
class Subforward:
    """One model forward: requests of one slot group, packed end to end in this order."""

    key: GroupKey
    requests: tuple[RequestShape, ...]

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Original request indices, in packed order."""
        return tuple(request.index for request in self.requests)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request, in packed order."""
        return tuple(request.length for request in self.requests)

    @cached_property
    def packed_tokens(self) -> int:
        """Rows that the forward executes."""
        return sum(self.lengths)


def slot_groups(shapes: Sequence[RequestShape]) -> tuple[Subforward, ...]:
    """Collect requests that may share a forward, groups and members in order of first appearance."""
    groups: dict[GroupKey, list[RequestShape]] = {}
    for shape in shapes:
        groups.setdefault(GroupKey(shape.slot, shape.gradients, shape.hidden), []).append(shape)
    return tuple(Subforward(key, tuple(members)) for key, members in groups.items())


def units(shapes: Sequence[RequestShape]) -> tuple[tuple[RequestShape, ...], ...]:
    """Return what a micro-batch may not divide: the caller's groups, and each request without a group."""
    found: dict[tuple[str, str | int], list[RequestShape]] = {}
    for shape in shapes:
        name = ("request", shape.index) if shape.group is None else ("group", shape.group)
        found.setdefault(name, []).append(shape)
    return tuple(tuple(unit) for unit in found.values())


def balanced(subforward: Subforward, parts: int) -> tuple[Subforward, ...]:
    """Cut a subforward into ``parts`` of nearly equal packed tokens (longest first into the least loaded).

    Members keep the caller's order within each part. Raises InvalidInputError when there are fewer requests.
    """
    if not 1 <= parts <= len(subforward.requests):
        raise InvalidInputError(
            f"{len(subforward.requests)} requests cannot be cut into {parts} subforwards; cut into 1 to as many"
        )
    heap = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    lengths = subforward.lengths
    for position in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        load, part = heapq.heappop(heap)
        members[part].append(position)
        heapq.heappush(heap, (load + lengths[position], part))
    ordered = sorted(sorted(part) for part in members)
    return tuple(Subforward(subforward.key, tuple(subforward.requests[each] for each in part)) for part in ordered)


def cuts(groups: Sequence[Subforward]) -> Iterator[tuple[Subforward, ...]]:
    """Yield ever finer plans of the same work: 2, 3, 4, 6, 8, 12, ... parts of the widest group, to one request each.

    Every other group is cut to the same width, so that a cut follows slot boundaries before it divides a slot.
    """
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
            yield tuple(part for group, count in zip(groups, counts, strict=True) for part in balanced(group, count))
        if before == most or width == 1:
            return


def _divisors() -> Iterator[int]:
    power = 2
    while True:
        yield power
        yield power * 3 // 2
        power *= 2
