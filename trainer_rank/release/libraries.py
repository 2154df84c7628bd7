"""What libraries take outside PyTorch's allocator, phase by phase, and what of it is due again. Pure; bytes.

Only one figure is given: what lies outside the allocator now (physical minus reserved, other processes included). A
phase's size is the largest growth seen while it ran. When the reading falls between two looks, some library gave memory
back (a communicator torn down, a handle destroyed) and will want it again: that is due until it is back, or until every
known phase has run without taking anything, which shows that it was somebody else's. What grew while no phase ran is
somebody else's too, a neighbour's on the card: a fall up to as much is the neighbour leaving. A fall of libraries that
a neighbour's growth hides, between the same two looks or because that came before, is not seen: whoever tears libraries
down can say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer_rank.admission.budget import Status, Term

FORWARD, BACKWARD, COLLECTIVE = "forward", "backward", "collective"


class Libraries:
    """Sizes by phase. ``expected`` are phases that have not run here yet, with what they will take."""

    def __init__(self, expected: Mapping[str, Term]) -> None:
        self._expected = dict(expected)
        self._sizes: dict[str, int] = {}
        self._outside: int | None = None
        self._neighbours = 0
        self._returned = 0
        self._quiet: set[str] = set()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Largest growth that each phase was measured to cause."""
        return self._sizes

    @property
    def unknown(self) -> bool:
        """Whether a phase has not run yet of which nobody knows what it will take."""
        return any(term.size is None for term in self._expected.values())

    def due(self, outside: int) -> tuple[Term, ...]:
        """Return what libraries will still take, given the present reading."""
        self._look(outside)
        again = Term("libraries again", self._returned, Status.MEASURED, "taken outside the allocator and given back")
        return (*self._expected.values(), again) if self._returned else tuple(self._expected.values())

    def ran(self, phase: str, before: int, after: int) -> None:
        """Learn from a phase that has run to its end: the readings before and after it."""
        self._look(before)
        grown = max(0, after - before)
        self._outside = after
        self._returned = max(0, self._returned - grown)
        self._sizes[phase] = max(grown, self._sizes.get(phase, 0))
        self._expected.pop(phase, None)
        if phase == BACKWARD:
            self._expected.pop(FORWARD, None)  # it cannot have run without
        self._quiet = set() if grown else self._quiet | {phase}
        if self._quiet >= self._sizes.keys():
            self._returned, self._quiet = 0, set()

    def torn_down(self) -> None:
        """Count on libraries taking again everything that they were measured to take."""
        self._returned, self._quiet = sum(self._sizes.values()), set()

    def _look(self, outside: int) -> None:
        change = 0 if self._outside is None else outside - self._outside
        if change < 0:
            self._quiet = set()
            fallen = max(0, -change - self._neighbours)
            self._returned = min(sum(self._sizes.values()), self._returned + fallen)
        self._neighbours = max(0, self._neighbours + change)
        self._outside = outside
