"""Paired, interleaved comparison of two arms: the median ratio with an exact bootstrap interval.

Arms are measured in the order A B B A A B B A ..., so that a drift of the machine falls on both alike, and compared
pair by pair. The interval is the percentile bootstrap of the median, computed from its exact distribution (resampling n
values with replacement makes the rank of the median binomial), so that it needs no random numbers and never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb

import msgspec

from qualification.figures import Unreadable
from qualification.records import Basis, Criterion, Record, Verdict
from qualification.verdict import Direction, Threshold

MINIMUM_PAIRS = 5
_PLACES = 10**6


class Measurement(Record, frozen=True):
    """One measured arm: ``arm`` is ``A`` (baseline) or ``B`` (candidate), ``value`` a positive integer in its unit."""

    arm: str
    value: int


class Interval(msgspec.Struct, frozen=True):
    """The median of B / A over pairs, and the bounds between which it lies with the stated confidence."""

    pairs: int
    median: Fraction
    low: Fraction
    high: Fraction


def interleaved(pairs: int) -> str:
    """Return the order in which to measure, for example ``ABBAABBAAB`` for five pairs."""
    return "".join("AB" if pair % 2 == 0 else "BA" for pair in range(pairs))


def paired_ratio(
    measurements: Sequence[Measurement], confidence: Fraction = Fraction(95, 100)
) -> Interval | Unreadable:
    """Compare B with A; ``Unreadable`` says why the measurements cannot be compared."""
    order = "".join(measurement.arm for measurement in measurements)
    pairs = len(order) // 2
    if pairs < MINIMUM_PAIRS:
        return Unreadable(f"rests on {pairs} pairs, at least {MINIMUM_PAIRS} are needed")
    if order != interleaved(pairs):
        return Unreadable(f"was measured in the order {order}, not {interleaved(pairs)}")
    if any(measurement.value <= 0 for measurement in measurements):
        return Unreadable("rests on a measurement that is not above zero")
    ratios = sorted(_ratio(*measurements[2 * pair : 2 * pair + 2]) for pair in range(pairs))
    tail = (1 - confidence) / 2
    return Interval(pairs, _median(ratios), _quantile(ratios, tail), _quantile(ratios, 1 - tail))


def _ratio(first: Measurement, second: Measurement) -> Fraction:
    baseline, candidate = (first, second) if first.arm == "A" else (second, first)
    return Fraction(candidate.value, baseline.value)


def _median(ordered: Sequence[Fraction]) -> Fraction:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _quantile(ordered: Sequence[Fraction], probability: Fraction) -> Fraction:
    """Return the smallest value that the resampled median does not exceed with at least this probability."""
    upper_half = probability > Fraction(1, 2)
    needed = len(ordered) // 2 + 1 if upper_half else (len(ordered) + 1) // 2  # an even count takes the outer middle
    for rank, value in enumerate(ordered, 1):
        if _at_least(len(ordered), Fraction(rank, len(ordered)), needed) >= probability:
            return value
    return ordered[-1]


def _at_least(count: int, chance: Fraction, needed: int) -> Fraction:
    """Return the probability of at least ``needed`` successes out of ``count``."""
    terms = (comb(count, hits) * chance**hits * (1 - chance) ** (count - hits) for hits in range(needed, count + 1))
    return sum(terms, Fraction(0))


def compare_arms(threshold: Threshold, measurements: Sequence[Measurement]) -> Criterion:
    """Judge a ratio by its interval: PASSED or FAILED only when all of it lies on one side of the threshold."""
    interval = paired_ratio(measurements)
    if isinstance(interval, Unreadable):
        return _criterion(threshold, Verdict.INCOMPLETE, None, f"{threshold.name} {interval.reason}")
    median, low, high = _text(interval.median), _text(interval.low), _text(interval.high)
    bounds = f"median {median} in {low} .. {high}, {interval.pairs} pairs"
    return _criterion(threshold, _side(threshold, interval), median, bounds)


def _side(threshold: Threshold, interval: Interval) -> Verdict:
    value = Fraction(threshold.value)
    low, high = threshold.plausible_from, threshold.plausible_to
    impossible = (low is not None and interval.median < Fraction(low)) or (
        high is not None and interval.median > Fraction(high)
    )
    if impossible or threshold.direction is Direction.EQUAL:
        return Verdict.INCONCLUSIVE
    at_least = threshold.direction is Direction.AT_LEAST
    if interval.low >= value if at_least else interval.high <= value:
        return Verdict.PASSED
    apart = interval.high < value if at_least else interval.low > value
    return threshold.shortfall if apart else Verdict.INCONCLUSIVE


def _criterion(threshold: Threshold, verdict: Verdict, measured: str | None, reason: str) -> Criterion:
    return Criterion(
        name=threshold.name,
        verdict=verdict,
        basis=Basis.MEASURED,
        measured=measured,
        threshold=threshold.value,
        direction=threshold.direction.value,
        unit=threshold.unit,
        reason=reason,
    )


def _text(value: Fraction) -> str:
    scaled = round(value * _PLACES)
    return f"{scaled // _PLACES}.{scaled % _PLACES:06d}"
