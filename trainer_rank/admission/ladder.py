"""The ordered ways to do the same work with less memory, each rung a small class. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from trainer_rank.errors import UnsupportedError
from trainer_rank.packing import Subforward, cuts


class Retention(StrEnum):
    """What keeps a subforward's graph from its forward to its backward."""

    DEVICE = "device"
    HOST = "host"
    RERUN = "rerun"


@dataclass(frozen=True)
class Plan:
    """One way to run a micro-batch: its subforwards in order, and where their graphs wait for the backward."""

    rung: str
    subforwards: tuple[Subforward, ...]
    retention: Retention = Retention.DEVICE

    @property
    def packed_tokens(self) -> tuple[int, ...]:
        """Packed tokens of each subforward, in order of execution."""
        return tuple(subforward.packed_tokens for subforward in self.subforwards)

    @property
    def indices(self) -> tuple[tuple[int, ...], ...]:
        """Original request indices of each subforward."""
        return tuple(subforward.indices for subforward in self.subforwards)


class Rung(Protocol):
    """One step of the ladder."""

    @property
    def name(self) -> str:
        """Its name in policies, decisions and reports."""

    @property
    def retention(self) -> Retention:
        """What keeps the graphs of its plans."""

    def plans(self, groups: Sequence[Subforward]) -> Iterator[Plan]:
        """Yield the ways this rung can run the slot groups, the cheapest first; each does all of the work."""


class Whole:
    """One subforward per slot group."""

    name = "whole"
    retention = Retention.DEVICE

    def plans(self, groups: Sequence[Subforward]) -> Iterator[Plan]:
        """Yield the undivided plan."""
        yield Plan(self.name, tuple(groups))


class Split:
    """Balanced, slot-aware cuts: the working set shrinks, every graph stays on the device until backward."""

    name = "split"
    retention = Retention.DEVICE

    def plans(self, groups: Sequence[Subforward]) -> Iterator[Plan]:
        """Yield ever finer cuts."""
        for parts in cuts(groups):
            yield Plan(self.name, parts)


class HostHeld:
    """What graphs save waits in host memory: only one subforward's working set is on the device at a time."""

    name = "host-held"
    retention = Retention.HOST

    def plans(self, groups: Sequence[Subforward]) -> Iterator[Plan]:
        """Yield the undivided plan and ever finer cuts, as long as there is a graph to hold."""
        yield from _graphs_elsewhere(self.name, groups, self.retention)


class Rerun:
    """Outputs first, without graph; at backward each subforward runs again, so that one graph lives at a time."""

    name = "rerun"
    retention = Retention.RERUN

    def plans(self, groups: Sequence[Subforward]) -> Iterator[Plan]:
        """Yield the undivided plan and ever finer cuts, as long as there is a graph to save."""
        yield from _graphs_elsewhere(self.name, groups, self.retention)


def _graphs_elsewhere(name: str, groups: Sequence[Subforward], retention: Retention) -> Iterator[Plan]:
    if any(group.key.gradients for group in groups):
        for subforwards in ((tuple(groups),), cuts(groups)):
            for parts in subforwards:
                yield Plan(name, parts, retention)


LADDER: tuple[Rung, ...] = (Whole(), Split(), HostHeld(), Rerun())
"""Every rung, in order of what it costs in time."""


def ladder(names: Sequence[str]) -> tuple[Rung, ...]:
    """Return the rungs of these names in the ladder's own order. Raises UnsupportedError for an unknown name."""
    known = {rung.name: rung for rung in LADDER}
    for name in names:
        if name not in known:
            raise UnsupportedError(f"rung {name!r} does not exist; choose of {', '.join(known)}")
    return tuple(rung for rung in LADDER if rung.name in names)
