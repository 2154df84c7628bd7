"""Where the allocator model gets its segments: a driver protocol, and the modelled memory of a card."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from trainer_rank.allocator.rules import SEGMENT_GRANULE
from trainer_rank.allocator.snapshot import Snapshot
from trainer_rank.errors import InvalidInputError

FIRST_ADDRESS = 0x7F00_0000_0000
"""Invented addresses go down from here when no segment exists yet."""


class DriverFigures(NamedTuple):
    """What the driver says in bytes: the card's free and total, and what this process holds in all."""

    free: int
    total: int
    process: int


class Driver(Protocol):
    """The device's own allocator, as far as the caching allocator uses it."""

    def take(self, size: int) -> int | None:
        """Return the address of a new segment of ``size`` bytes, or None when the driver refuses."""

    def give_back(self, address: int, size: int) -> None:
        """Take the segment of ``size`` bytes at ``address`` back."""

    def figures(self) -> DriverFigures:
        """Return the card's and the process's figures now."""


class ModelledDriver:
    """A card of ``total`` bytes of which ``outside`` are held outside the caching allocator.

    Addresses are invented by one rule: each new segment lies directly below the lowest one so far, as most of those in
    the recordings do, and directly above the highest once nothing is left below. Addresses matter only where two free
    blocks have the same size: the lower one is taken.

    ``outside`` counts the process's own context and libraries, ``elsewhere`` what other processes hold. Both may change
    at any time (a library claims memory, a neighbour starts). ``snapshot`` says which segments are held already.
    """

    def __init__(self, total: int, outside: int = 0, elsewhere: int = 0, snapshot: Snapshot | None = None) -> None:
        if total <= 0 or outside < 0 or elsewhere < 0:
            raise InvalidInputError(
                f"card of {total} B with {outside} B outside and {elsewhere} B elsewhere; give sizes"
            )
        segments = snapshot.segments if snapshot else ()
        self.total = total
        self.outside = outside
        self.elsewhere = elsewhere
        self.held = sum(segment.total for segment in segments)
        self._lowest = min((segment.address for segment in segments), default=FIRST_ADDRESS)
        self._end = max((segment.address + segment.total for segment in segments), default=FIRST_ADDRESS)

    @property
    def free(self) -> int:
        """Physically free bytes; never below zero."""
        return max(0, self.total - self.outside - self.elsewhere - self.held)

    def take(self, size: int) -> int | None:
        """Return the address of a new segment, or None when fewer than ``size`` bytes are free."""
        if size > self.free:
            return None
        self.held += size
        if size <= self._lowest:
            self._lowest = (self._lowest - size) & -SEGMENT_GRANULE
            return self._lowest
        address = (self._end + SEGMENT_GRANULE - 1) & -SEGMENT_GRANULE
        self._end = address + size
        return address

    def give_back(self, address: int, size: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Count ``size`` bytes as free again; the address is never handed out twice."""
        self.held -= size

    def figures(self) -> DriverFigures:
        """Return free, total and this process's bytes."""
        return DriverFigures(self.free, self.total, self.outside + self.held)

    def copy(self, *, upward: bool = False) -> ModelledDriver:
        """Return an independent driver in the same state; ``upward``: its new segments lie above all others."""
        twin = ModelledDriver.__new__(ModelledDriver)
        twin.__dict__.update(self.__dict__)
        if upward:
            twin._lowest = 0
        return twin
