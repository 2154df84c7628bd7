"""The ordered ways to do the same work with less memory, each rung a small class. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from trainer_rank.errors import UnsupportedError
from trainer_rank.packing import Subforward, Work


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

    def places(self, work: Work) -> range:
        """Return which cuts of the work this rung runs, the coarsest and so the cheapest first; each is all of it."""


class Whole:
    """One subforward per slot group."""

    name = "whole"
    retention = Retention.DEVICE

    def places(self, work: Work) -> range:  # noqa: ARG002 - as of every rung
        """Return the undivided work."""
        return range(1)


class Split:
    """Balanced, slot-aware cuts: the working set shrinks, every graph stays on the device until backward."""

    name = "split"
    retention = Retention.DEVICE

    def places(self, work: Work) -> range:
        """Return ever finer cuts."""
        return range(1, len(work))


class HostHeld:
    """What graphs save waits in host memory: only one subforward's working set is on the device at a time."""

    name = "host-held"
    retention = Retention.HOST

    def places(self, work: Work) -> range:
        """Return the undivided work and ever finer cuts, as long as there is a graph to hold."""
        return work.with_graphs


class Rerun:
    """Outputs first, without graph; at backward each subforward runs again, so that one graph lives at a time."""

    name = "rerun"
    retention = Retention.RERUN

    def places(self, work: Work) -> range:
        """Return the undivided work and ever finer cuts, as long as there is a graph to save."""
        return work.with_graphs


def plans(rung: Rung, work: Work) -> Iterator[Plan]:
    """Yield the plans of a rung, the coarsest first."""
    return (Plan(rung.name, work[place], rung.retention) for place in rung.places(work))


LADDER: tuple[Rung, ...] = (Whole(), Split(), HostHeld(), Rerun())
"""Every rung, in order of what it costs in time."""


def ladder(names: Sequence[str]) -> tuple[Rung, ...]:
    """Return the rungs of these names in the ladder's own order. Raises UnsupportedError for an unknown name."""
    known = {rung.name: rung for rung in LADDER}
    for name in names:
        if name not in known:
            raise UnsupportedError(f"rung {name!r} does not exist; choose of {', '.join(known)}")
    return tuple(rung for rung in LADDER if rung.name in names)
