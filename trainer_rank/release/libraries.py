"""What libraries take outside PyTorch's allocator, phase by phase, and what of it is due again. Pure; bytes.

Only one figure is given: what lies outside the allocator now (physical minus reserved, other processes included).
A phase's size is the largest growth seen while it ran. When the reading falls, some library gave memory back (a
communicator torn down, a handle destroyed) and will want it again: that is due until it is back, or until every known
phase has run without taking anything, which shows that it was somebody else's.
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
        self._level = 0
        self._quiet: set[str] = set()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes that each phase was measured to take when it first ran, or again."""
        return self._sizes

    def due(self, outside: int) -> tuple[Term, ...]:
        """Return what libraries will still take, given the present reading."""
        returned = self._returned(outside)
        again = Term("libraries again", returned, Status.MEASURED, "what was outside the allocator and is no longer")
        return (*self._expected.values(), again) if returned else tuple(self._expected.values())

    def ran(self, phase: str, before: int, after: int) -> None:
        """Learn from a phase that has run to its end: the readings before and after it."""
        grown = max(0, after - before)
        new = max(0, grown - self._returned(before))
        self._expected.pop(phase, None)
        if phase == BACKWARD:
            self._expected.pop(FORWARD, None)  # it cannot have run without
        self._level = after if not self._sizes else self._level + new
        self._sizes[phase] = max(grown, self._sizes.get(phase, 0))
        self._quiet = set() if grown else self._quiet | {phase}
        if self._quiet >= self._sizes.keys():
            self._level = after
            self._quiet = set()

    def _returned(self, outside: int) -> int:
        return min(sum(self._sizes.values()), max(0, self._level - outside))
