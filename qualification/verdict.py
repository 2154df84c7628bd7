"""Judge one figure against a threshold, and fold judged figures into the verdict of a workload.

Nothing unproved passes: a missing, unreadable or merely claimed figure is INCOMPLETE, an impossible one INCONCLUSIVE,
and no figures at all are INCOMPLETE.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from enum import StrEnum

from qualification.figures import Unreadable, number
from qualification.records import Basis, Criterion, Figure, Record, Verdict

_SEVERITY = (Verdict.FAILED, Verdict.INCOMPLETE, Verdict.INCONCLUSIVE, Verdict.PASSED)


class Direction(StrEnum):
    """On which side of its threshold a figure must lie; the threshold itself passes."""

    AT_MOST = "at_most"
    AT_LEAST = "at_least"
    EQUAL = "equal"


class Threshold(Record, frozen=True):
    """What one figure must satisfy.

    ``shortfall`` is the verdict of a readable figure on the wrong side: FAILED, or INCOMPLETE for a count of work,
    where too little was done to say anything. A figure outside ``plausible_from`` .. ``plausible_to`` is INCONCLUSIVE,
    however good it looks. All figures are in ``unit``.
    """

    name: str
    direction: Direction
    value: int | str
    unit: str
    shortfall: Verdict = Verdict.FAILED
    plausible_from: int | str | None = None
    plausible_to: int | str | None = None

    @property
    def plausible_range(self) -> str:
        """Return the plausible range in words, for example ``at least 0.1, at most 4``."""
        bounds = (("at least", self.plausible_from), ("at most", self.plausible_to))
        return ", ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)

    def holds(self, measured: Decimal) -> bool:
        """Say whether the measured figure lies on the right side of the threshold."""
        value = Decimal(self.value)
        if self.direction is Direction.AT_MOST:
            return measured <= value
        return measured >= value if self.direction is Direction.AT_LEAST else measured == value

    def plausible(self, measured: Decimal) -> bool:
        """Say whether a figure can be what it claims to be."""
        low, high = self.plausible_from, self.plausible_to
        return (low is None or measured >= Decimal(low)) and (high is None or measured <= Decimal(high))


def compare(
    threshold: Threshold, measured: Figure | Unreadable, basis: Basis = Basis.RECOMPUTED, reason: str | None = None
) -> Criterion:
    """Judge one figure; ``reason`` adds to what the comparison itself says."""
    verdict, cause = _judge(threshold, measured)
    words = "; ".join(word for word in (cause, reason) if word)
    return Criterion(
        name=threshold.name,
        verdict=verdict,
        basis=basis,
        measured=None if isinstance(measured, Unreadable) else measured,
        threshold=threshold.value,
        direction=threshold.direction.value,
        unit=threshold.unit,
        reason=words or None,
    )


def _judge(threshold: Threshold, measured: Figure | Unreadable) -> tuple[Verdict, str | None]:
    value = number(measured)
    if isinstance(value, Unreadable):
        return Verdict.INCOMPLETE, f"{threshold.name} {value.reason}"
    stated = f"{threshold.name} is {measured} {threshold.unit}"
    if not threshold.plausible(value):
        return Verdict.INCONCLUSIVE, f"{stated}, which is not plausible ({threshold.plausible_range})"
    if not threshold.holds(value):
        wanted = threshold.direction.value.replace("_", " ")
        return threshold.shortfall, f"{stated}, must be {wanted} {threshold.value}"
    return Verdict.PASSED, None


def proved(criterion: Criterion) -> Verdict:
    """Return what a criterion counts for: a PASSED that rests on a worker's word alone counts as INCOMPLETE."""
    if criterion.verdict is Verdict.PASSED and criterion.basis is Basis.CLAIMED:
        return Verdict.INCOMPLETE
    return criterion.verdict


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the first of FAILED, INCOMPLETE, INCONCLUSIVE, PASSED that occurs; INCOMPLETE when there is none."""
    seen = set(verdicts)
    return next((verdict for verdict in _SEVERITY if verdict in seen), Verdict.INCOMPLETE)


def fold(criteria: Iterable[Criterion]) -> Verdict:
    """Fold the criteria of a workload into its verdict; no criteria, or two of one name, are INCOMPLETE."""
    listed = tuple(criteria)
    verdict = worst(proved(criterion) for criterion in listed)
    twice = len({criterion.name for criterion in listed}) < len(listed)
    return worst((verdict, Verdict.INCOMPLETE)) if twice else verdict
